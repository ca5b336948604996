import io
import json
import shutil

import pytest

from preloadd.admin.__main__ import main
from preloadd.admin.world import World
from preloadd.warmup.bundles.index import Entry, remember
from preloadd.warmup.bundles.pack import pack
from tests.bundles import AOT, FILES, IDENTITY, PLAIN, write


@pytest.fixture
def root(tmp_path):
    """Where vLLM has its caches, with two bundles of which one is there."""
    root = tmp_path / "root"
    write(root)
    bundle = pack(root, [AOT, PLAIN], IDENTITY, io.BytesIO())
    old = pack(root, [PLAIN], IDENTITY, io.BytesIO())
    remember(root, Entry.of(old, made=True, now=0.0))
    remember(root, Entry.of(bundle, made=False, now=1_764_511_632.0))
    return root


@pytest.fixture
def ask(tmp_path, capsys):
    """A function: run the command; its status and standard output."""

    def run(*arguments, **environ):
        world = World({"HOME": str(tmp_path), **environ}, tmp_path)
        status = main(["cache", "bundles", *map(str, arguments)], world)
        return status, capsys.readouterr().out

    return run


def test_bundles_are_listed(ask, root):
    shutil.rmtree(root / AOT)
    status, out = ask(VLLM_CACHE_ROOT=str(root))
    where, heads, new, old = out.splitlines()
    assert (status, where, heads.split()[0]) == (0, f"{root}:", "BUNDLE")
    assert new.split()[1:4] == ["a", "source", str(len(FILES))]
    assert new.endswith("2025-11-30T14:07:12Z  removed")
    assert "this host" in old
    assert old.endswith("1970-01-01T00:00:00Z  there")


def test_json_has_all_of_it(ask, root):
    told = json.loads(ask("--json", "--root", root)[1])
    assert told["root"] == str(root)
    new, old = told["bundles"]
    assert new["folders"] == [PLAIN, AOT]
    assert (new["there"], new["made"], old["made"], old["files"]) == (True, False, True, 2)
    assert len(new["sha256"]) == 64


def test_where_nothing_is_there_is_nothing(ask):
    assert ask() == (0, "no bundles\n")
    assert json.loads(ask("--json")[1])["bundles"] == []
