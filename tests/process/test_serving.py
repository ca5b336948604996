"""A load and what comes of it: what is told, what is served, what the daemon costs."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from preloadd.domain.lifecycle import State
from tests.checkpoints import SHARDS, sparse, stored
from tests.leases import content
from tests.manager import Manage, Manager

HEAVY = {"torch", "numpy", "fastapi", "pydantic", "uvicorn", "transformers", "rich", "typer"}
MAX_RSS_KIB = 60 << 10


def test_a_load_is_served_byte_for_byte_and_told_in_numbers(manager, model):
    told = manager.status()
    files = stored(model)
    nbytes = sum(map(len, files.values()))
    assert (told.state, told.adopted, told.tensors) == (State.SERVING, False, len(files))
    assert (told.tensor_bytes, told.counters["generation_files"]) == (nbytes, len(SHARDS))
    assert told.counters["loads"] == 1
    assert told.counters["bytes_read"] == told.counters["generation_bytes_read"] == nbytes
    assert told.chunks == len([name for name in manager.parked if name.startswith("chunk.")]) > 3
    assert told.generation == manager.generation
    assert 0 < told.ready_s < told.uptime_s
    lease = manager.attach()
    assert content(lease) == files
    lease.close()


def test_weights_are_parked_before_the_rank_is_ready_and_their_manifest_last(manager):
    names = [fields["FDNAME"] for fields in manager.told if "FDSTORE" in fields]
    generation = manager.generation
    chunks = [f"chunk.{generation}.{n}" for n in range(len(names) - 2)]
    assert names == [*chunks, f"manifest.{generation}", "listen"]
    assert "READY" in manager.told[-1]
    assert manager.phases == ["opening", "loading", "identifying"]
    first = next(n for n, fields in enumerate(manager.told) if "EXTEND_TIMEOUT_USEC" in fields)
    assert not any("opening" in fields.get("STATUS", "") for fields in manager.told[:first])
    # The silence a loader may keep and the time it takes to end it: 300 and 10 seconds.
    assert manager.told[first]["EXTEND_TIMEOUT_USEC"] == "310000000"
    statuses = [fields["STATUS"] for fields in manager.told if "STATUS" in fields]
    assert any(re.fullmatch(r"loading (.+) of \1 \(100%\)", status) for status in statuses)
    assert statuses[-1] == "serving model"


def test_the_daemon_stays_small_whatever_the_model(manage: Manage, tmp_path: Path):
    manager = manage(sparse(tmp_path / "large", 300 << 20, tensors=300), chunk_bytes=16 << 20)
    manager.start()
    manager.ready()
    leases = [manager.attach() for _ in range(3)]
    manager.restart()
    assert manager.status().lease_count == len(leases)
    status = Path(f"/proc/{manager.pid}/status").read_text()
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak
    assert int(peak[1]) <= MAX_RSS_KIB
    for lease in leases:
        lease.close()


def imported(report: str) -> set[str]:
    """Top-level packages in what `-X importtime` writes."""
    return {
        line.rpartition("|")[2].strip().partition(".")[0]
        for line in report.splitlines()
        if line.startswith("import time:")
    }


def test_a_whole_life_imports_nothing_heavy(manage: Manage, model: Path):
    manager = manage(model)
    manager.interpreter = [sys.executable, "-X", "importtime"]
    manager.environ["PYTHONPROFILEIMPORTTIME"] = ""
    manager.start()
    manager.ready()
    lease = manager.attach()
    manager.status()
    lease.close()
    manager.signal(signal.SIGTERM)
    assert manager.ended() == 0
    found = imported(manager.log)
    assert {"preloadd", "anyio", "msgspec"} <= found
    assert not found & HEAVY


def rank(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A rank that no manager has started."""
    return subprocess.run(
        [sys.executable, "-m", "preloadd.rank", *arguments],
        env=environ,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=20,
    )


def test_a_rank_is_told_which_instance_it_is():
    done = rank()
    assert (done.returncode, "usage: preloadd rank INSTANCE" in done.stderr) == (78, True), done
    done = rank("CPU")
    assert (done.returncode, "'CPU' is no device" in done.stderr) == (78, True), done


def test_the_settings_must_be_this_ranks(manage: Manage, model: Path):
    manager = manage(model)
    manager.interpreter = ["/bin/sh", "-c", f'exec {sys.executable} "$1" "$2" CPU-1', "sh"]
    manager.start()
    assert manager.ended() == 78
    assert "the settings passed to CPU-1 are those of CPU-0" in manager.log


def test_without_a_manager_it_serves_and_takes_its_socket_along(manage: Manage, model: Path):
    manager = manage(model)
    del manager.environ["NOTIFY_SOCKET"]
    manager.start()
    manager.until(manager.socket.is_socket, "socket")
    manager.attach(parked=False).close()
    manager.signal(signal.SIGTERM)
    assert manager.ended() == 0
    assert not manager.socket.exists()


@pytest.mark.parametrize("instance", ["CPU-3", "CPU-0.draft"])
def test_other_instances_have_sockets_of_their_own(manage: Manage, model: Path, instance: str):
    manager: Manager = manage(model, rank={"instance": instance})
    manager.start()
    manager.ready()
    told = manager.status()
    assert (told.instance, told.device, told.role) == (
        instance,
        instance.partition(".")[0],
        "draft" if instance.endswith("draft") else "target",
    )
    lease = manager.attach()
    assert lease.manifest.key["role"] == told.role
    lease.close()
