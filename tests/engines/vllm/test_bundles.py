"""A compile cache of a real vLLM, taken to a root that has none, and used there."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from preloadd.warmup.bundles.exchange import obtain, publish
from preloadd.warmup.bundles.identity import apart
from preloadd.warmup.bundles.index import listing, recalled
from preloadd.warmup.bundles.usage import Use, compiled, judge
from preloadd.warmup.stores.opening import open_stores
from tests.engines.vllm import harness
from tests.needs import impossible


@pytest.fixture
def compiler() -> None:
    """What torch compiles with. Where there is none, tests are skipped; under CI they fail."""
    if shutil.which("g++") is None:
        impossible("there is no g++")


class Run(NamedTuple):
    start_s: float
    tokens: list[int]
    identity: dict[str, str]
    told: str


def run(python: Path, model: Path, root: Path, size: int) -> Run:
    """An engine, from start to end, with its caches below `root`."""
    done = subprocess.run(
        [python, "-m", "tests.engines.vllm.compiled", model, str(size)],
        cwd=harness.ROOT,
        env=harness.environ(python, TORCH_COMPILE_DISABLE="0", VLLM_CACHE_ROOT=str(root)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return Run(**json.loads(done.stdout.splitlines()[-1]), told=done.stderr)


def know_models(python: Path, root: Path) -> None:
    """Have engines find in `root` what vLLM has seen of classes of models: looking takes long."""
    shutil.copytree(python.parents[1] / "cache/modelinfos", root / "modelinfos")


@pytest.mark.slow
def test_an_engine_uses_what_another_compiled(compiler, vllm_python, zoo, tmp_path):
    model, root, shared = zoo("llama"), tmp_path / "root", tmp_path / "shared"
    shared.mkdir()
    know_models(vllm_python, root)

    first = run(vllm_python, model, root, 64)
    assert "saved AOT compiled function" in first.told
    folders = compiled({}, listing(root))
    with open_stores([f"file:{shared}"], {}) as stores:
        bundle = publish(root, folders, first.identity, stores, now=0.0)
        assert bundle.manifest.folders == folders
        # The same path, as on another host: what was compiled names files by it.
        root.rename(tmp_path / "elsewhere")
        installed = obtain(root, bundle, stores, trusted=True, now=0.0)
    assert installed.new == folders == recalled(root, first.identity)

    know_models(vllm_python, root)
    before = listing(root)
    second = run(vllm_python, model, root, 64)
    print(f"from nothing {first.start_s:.1f} s, with the bundle {second.start_s:.1f} s")
    assert "Directly load AOT compilation" in second.told
    assert "saved AOT compiled function" not in second.told
    assert second.tokens == first.tokens
    assert not apart(first.identity, second.identity)
    assert second.start_s < first.start_s
    assert judge(installed.folders, before, listing(root)).use in (Use.UNTOUCHED, Use.USED)

    # Another configuration looks elsewhere, and that is seen.
    before = listing(root)
    third = run(vllm_python, model, root, 32)
    assert "saved AOT compiled function" in third.told
    assert apart(first.identity, third.identity) == (
        "engine_args: there '[\"--max-model-len=64\"]', here '[\"--max-model-len=32\"]'"
    )
    assert judge(installed.folders, before, listing(root)).use is Use.BYPASSED
