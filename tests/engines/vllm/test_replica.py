"""A replica on another host: it warms up with what its source compiled, and says how long it took.

Both hosts have the same paths and different files, as hosts do.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from preloadd.transport.status import ask_status
from tests.engines.vllm import harness
from tests.needs import impossible
from tests.nodes.hosts import Network, NoHosts

TOKEN = "plt_" + "x" * 40
PORT = 29700
PATIENCE_S = 240.0


@pytest.fixture
def network(socket_dir):
    try:
        with Network(2, socket_dir) as made:  # vLLM's own sockets want short paths as well
            yield made
    except NoHosts as missing:
        impossible(str(missing))


@pytest.fixture
def start(network, vllm_python, tmp_path):
    """`start(host, model, *flags)`: `preloadd run` with vLLM on a host with a cache of its own."""
    root, shared = tmp_path / "root", tmp_path / "shared"
    root.mkdir()
    shared.mkdir()
    known = vllm_python.parents[1] / "cache/modelinfos"
    with ExitStack() as owned:

        def start(host, model, *flags):
            own = host.folder / f"compiled-{time.monotonic_ns()}"
            own.mkdir(mode=0o700)
            shutil.copytree(known, own / "modelinfos")
            mounting = ["nsenter", f"--target={host.first}", "--mount"]
            subprocess.run([*mounting, "mount", "--bind", own, root], check=True)
            environ = harness.environ(
                vllm_python, VLLM_CACHE_ROOT=str(root), PRELOADD_SEED_TOKEN=TOKEN
            )
            for name in ("TORCH_COMPILE_DISABLE", "VLLM_ENABLE_V1_MULTIPROCESSING"):
                del environ[name]
            argv = [sys.executable, "-m", "preloadd", "run", str(model), "--builder", "vllm"]
            argv += ["--python", str(vllm_python), "--memory", "host"]
            argv += ["--weight-cache-socket-dir", str(host.sockets)]
            argv += ["--trust-bundles", "--warmup-cache-stores", f"file:{shared}", *flags]
            argv += ["--max-model-len=64", "--max-num-seqs=2", "--max-num-batched-tokens=64"]
            argv += ["--kv-cache-memory-bytes=16777216"]
            process = host.start(argv, host.folder / "told", environ)
            owned.callback(process.wait)
            owned.callback(host.power_off)
            return Replica(host, process)

        yield start


class Replica:
    """A group of one rank on its host."""

    def __init__(self, host, process):
        self._host, self._process = host, process

    @property
    def told(self):
        return (self._host.folder / "told").read_text(errors="replace")

    def status(self):
        return ask_status(self._host.sockets / "CPU-0/rank.sock", timeout=5.0)

    def stop(self):
        """As an operator does; what it told is gone then."""
        for pid in self._host.running("preloadd.launcher"):
            os.kill(pid, signal.SIGTERM)
        assert self._process.wait(60) == 143, self.told
        (self._host.folder / "told").unlink()

    def until(self, word):
        """Its status once it is ready and `word` is in what it tells of its warm-up."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert self._process.poll() is None, self.told
            assert time.monotonic() < deadline, f"{word}: {self.told}"
            if "ready" in self.told:
                status = self.status()
                if any(word in line for line in status.warmup):
                    return status
            time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_replica_is_warm_with_what_its_source_compiled(network, start, zoo):
    model = zoo("llama")
    source, target = network.hosts
    listening = ("--seed-listen-host", source.address, "--seed-listen-port", str(PORT))
    asking = ("--seed-source-host", source.address, "--seed-source-port", str(PORT))
    first = start(source, model, *listening)
    # Both at once: a target waits for a source that is not warm yet.
    waiting = start(target, model, *asking, "--seed-timeout", str(PATIENCE_S))
    given = first.until("given to others")
    print(given.warmup, given.counters)
    assert any("warmed up in" in line for line in given.warmup), given.warmup
    had = waiting.until("installed from the source")
    assert not any("warmed up in" in line for line in had.warmup), had.warmup

    # One that comes later is warm in a fifth of what its source took, at most.
    waiting.stop()
    warm = start(target, model, *asking).until("installed from the source")
    print(warm.warmup, warm.counters)
    assert not any("warmed up in" in line for line in warm.warmup), warm.warmup
    assert warm.counters["warmup_ms"] <= given.counters["warmup_ms"] / 5
    assert TOKEN not in waiting.told
