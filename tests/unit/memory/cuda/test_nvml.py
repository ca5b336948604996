"""What the management library tells, asked of one that stands in; and what is left without it.

In processes of their own, since a process finds one library of that name for good.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.driver_stand_in import build

GPU = "GPU-1a1b2c3d-0000-4000-8000-0000000000da"
MIG = "MIG-1a1b2c3d-0000-4000-8000-0000000000db"
GIB = 1 << 30

ASKING = """
import json, os, sys
from preloadd.memory.cuda import nvml
device, used = sys.argv[1], int(sys.argv[2])
print(json.dumps([
    nvml.holders(device), nvml.persistence(device), nvml.minor(device),
    nvml.shares(device, used),
]))
"""


def asked(
    device: str, environ: dict[str, str], used: int = 0, **told: str
) -> tuple[list[tuple[int, str, int]] | None, bool | None, int, str]:
    given = {name: text for name, text in os.environ.items() if "STAND_IN" not in name}
    command = [sys.executable, "-c", ASKING, device, str(used)]
    environ = {**given, **environ, **told}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    holders, *rest = json.loads(done.stdout)
    return (holders and [tuple(holder) for holder in holders], *rest)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return build.cuda(tmp_path_factory.mktemp("drivers"))


@pytest.mark.parametrize("device", [GPU, MIG])
def test_a_gpu_and_a_part_of_one_are_told(library: dict[str, str], device: str) -> None:
    ours, name = os.getpid(), Path("/proc/self/comm").read_text().strip()
    told = asked(
        device,
        library,
        STAND_IN_DEVICES=f"{GPU},{MIG}",
        STAND_IN_PERSISTENCE="1",
        STAND_IN_PROCESSES=f"{ours}:5,{2**22}:7",
        STAND_IN_GRAPHICS=f"{2**22 + 1}:6,{ours}:-",
    )
    gone = "of another container or gone"
    holders = [(2**22, gone, 7), (2**22 + 1, gone, 6), (ours, name, 5)]
    assert told == (holders, True, 5, "")


def test_the_end_of_the_sentence_names_who_holds_how_much(library: dict[str, str]) -> None:
    many = ",".join(f"{2**22 + n}:{GIB}" for n in range(1, 9))
    ours, name = os.getpid(), Path("/proc/self/comm").read_text().strip()
    *_, told = asked(
        GPU,
        library,
        used=28 * GIB,
        STAND_IN_DEVICES=GPU,
        STAND_IN_PROCESSES=f"{many},{ours}:{4 * GIB}",
    )
    assert told.startswith(f", where pid {ours} ({name}) holds 4.0 GiB, pid {2**22 + 1} (of ")
    assert told.count(" holds ") == 5
    assert told.endswith(
        ", 16.0 GiB are of no process that is seen here (weights that a daemon keeps, or another "
        "container's),"
    )


def test_what_no_process_holds_is_told_though_none_is_seen(library: dict[str, str]) -> None:
    *_, told = asked(GPU, library, used=8 * GIB, STAND_IN_DEVICES=GPU)
    assert told.startswith(", where 8.0 GiB are of no process that is seen here (weights")


def test_where_a_process_hides_what_it_holds_the_rest_is_nobodys_business(
    library: dict[str, str],
) -> None:
    ours, name = os.getpid(), Path("/proc/self/comm").read_text().strip()
    told = asked(GPU, library, 8 * GIB, STAND_IN_DEVICES=GPU, STAND_IN_PROCESSES=f"{ours}:-")
    assert told[-1] == f", where pid {ours} ({name}) holds an unknown amount,"


def test_who_draws_holds_memory_as_well(library: dict[str, str]) -> None:
    ours, name = os.getpid(), Path("/proc/self/comm").read_text().strip()
    drawing = f"{ours}:{4 * GIB}"
    *_, told = asked(GPU, library, 4 * GIB, STAND_IN_DEVICES=GPU, STAND_IN_GRAPHICS=drawing)
    assert told == f", where pid {ours} ({name}) holds 4.0 GiB,"


def test_of_little_in_use_nothing_is_said(library: dict[str, str]) -> None:
    told = asked(GPU, library, GIB, STAND_IN_DEVICES=GPU, STAND_IN_PROCESSES=f"1:{GIB}")
    assert told[-1] == ""


NOTHING = (None, None, -1, "")


def test_without_a_driver_nothing_is_told(library: dict[str, str]) -> None:
    assert asked(GPU, library, used=8 * GIB) == NOTHING


def test_an_unknown_gpu_is_told_nothing_of(library: dict[str, str]) -> None:
    assert asked(GPU, library, used=8 * GIB, STAND_IN_DEVICES=MIG) == NOTHING


OLDER = """
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlShutdown(): pass
"""


@pytest.mark.parametrize(
    "source",
    [
        "raise ModuleNotFoundError('No module named pynvml')",
        "raise RuntimeError('broken')",
        "",
        "def nvmlInit(): raise OSError('no library')",
        "def nvmlInit(): pass",
        OLDER,
        OLDER + "def nvmlDeviceGetHandleByUUID(uuid): raise TypeError('bytes')",
    ],
)
def test_without_a_package_that_works_nothing_is_told(
    library: dict[str, str], tmp_path: Path, source: str
) -> None:
    (tmp_path / "pynvml.py").write_text(source)
    hidden = {**library, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    assert asked(GPU, hidden, used=8 * GIB, STAND_IN_DEVICES=GPU) == NOTHING


COMPUTING = """
from types import SimpleNamespace
def nvmlDeviceGetHandleByUUID(uuid): return 1
def nvmlDeviceGetComputeRunningProcesses(handle):
    return [SimpleNamespace(pid=2**22, usedGpuMemory=7)]
"""


def test_an_older_package_tells_what_it_can(library: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text(OLDER + COMPUTING)
    older = {**library, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    holders = [(2**22, "of another container or gone", 7)]
    assert asked(GPU, older) == (holders, None, -1, "")
