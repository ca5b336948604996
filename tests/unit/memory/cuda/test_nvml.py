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
    nvml.holders(device), nvml.persistence(device), nvml.minor(device), nvml.free_total(device),
    nvml.shares(device, used),
]))
"""


def asked(
    device: str, environ: dict[str, str], used: int = 0, **told: str
) -> tuple[list[tuple[int, str, int]], bool | None, int, tuple[int, int] | None, str]:
    given = {name: text for name, text in os.environ.items() if "STAND_IN" not in name}
    command = [sys.executable, "-c", ASKING, device, str(used)]
    environ = {**given, **environ, **told}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    holders, *rest = json.loads(done.stdout)
    return ([tuple(holder) for holder in holders], *rest)


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
        STAND_IN_MEMORY=str(8 * GIB),
        STAND_IN_USED=str(2 * GIB),
        STAND_IN_PERSISTENCE="1",
        STAND_IN_PROCESSES=f"{ours}:5,{2**22}:7,{ours}:-",
    )
    holders = [(2**22, "of another container or gone", 7), (ours, name, 5), (ours, name, 0)]
    assert told == (holders, True, 5, [6 * GIB, 8 * GIB], "")


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
    assert told.endswith(", 16.0 GiB are no process's (weights that a daemon keeps, mostly),")


@pytest.mark.parametrize(
    ("used", "processes"), [(GIB, f"1:{GIB}"), (8 * GIB, ""), (8 * GIB, "1:-")]
)
def test_where_nothing_is_known_nothing_is_said(
    library: dict[str, str], used: int, processes: str
) -> None:
    told = asked(GPU, library, used=used, STAND_IN_DEVICES=GPU, STAND_IN_PROCESSES=processes)
    assert told[-1] == ""


NOTHING = ([], None, -1, None, "")


def test_without_a_driver_nothing_is_told(library: dict[str, str]) -> None:
    assert asked(GPU, library, used=8 * GIB) == NOTHING


def test_an_unknown_gpu_is_told_nothing_of(library: dict[str, str]) -> None:
    assert asked(GPU, library, used=8 * GIB, STAND_IN_DEVICES=MIG) == NOTHING


def test_without_the_package_nothing_is_told(library: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("raise ModuleNotFoundError('No module named pynvml')")
    hidden = {**library, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    assert asked(GPU, hidden, used=8 * GIB, STAND_IN_DEVICES=GPU) == NOTHING
