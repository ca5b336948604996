"""GPUs of groups, as a stand-in for a group's Python sees them."""

import json
import os

import pytest

from preloadd.admin.devices import faults
from preloadd.admin.service import service
from preloadd.config.files import Document, parse
from preloadd.config.group import judge
from tests.unit.admin.host import ME

A, B = (f"GPU-{start}-de77-970d-5f91-576155feee6c" for start in ("53b1d48b", "53b2aaaa"))
PARTS = [uuid.replace("GPU", "MIG") for uuid in (A, B)]


@pytest.fixture
def look(tmp_path):
    """The faults of a group on `gpus` where a loader sees what `seen` says by what is visible."""

    def look(gpus, seen, more=""):
        python = tmp_path / "python"
        lines = [f"  {visible!r}) echo '{json.dumps(probe)}' ;;" for visible, probe in seen.items()]
        python.write_text(
            "\n".join(
                [
                    "#!/bin/sh",
                    '[ "$*" = "-P -m preloadd.loader --probe" ] || exit 3',
                    'case "$CUDA_VISIBLE_DEVICES" in',
                    *lines,
                    "esac",
                    more,
                ]
            )
        )
        python.chmod(0o755)
        text = f'model = "/m"\ngpus = {json.dumps(gpus)}\n[parallel]\n'
        text += f"tensor_parallel_size = {len(gpus)}"
        group, wrong = judge(Document(tmp_path / "a.toml", parse(text.encode(), "a.toml")))
        assert not wrong, wrong
        trial = service(ME, {"PATH": os.environ["PATH"]})
        return [str(fault) for fault in faults(group, "a.toml", trial, str(python))]

    return look


def device(uuid: str, **more: object) -> dict[str, object]:
    return {"id": uuid, "name": "NVIDIA H200", **more}


def test_gpus_that_are_there_are_no_fault(look):
    assert look([B, A], {"": {"devices": [device(A), device(B)]}}) == []


def test_a_gpu_that_is_not_there_is_told_with_those_that_are(look):
    (fault,) = look([A, B], {"": {"devices": [device(A)], "hint": "CUDA_VISIBLE_DEVICES=0"}})
    assert fault.startswith(f"a.toml: gpus[1]: {B} is not seen by a loader: seen are {A}, CUDA_")
    assert "`nvidia-smi -L`" in fault
    (fault,) = look([A], {"": {"problem": "libcuda.so.1 is missing"}})
    assert "libcuda.so.1 is missing" in fault


def test_memory_that_cannot_be_shared(look):
    (fault,) = look([A], {"": {"devices": [device(A, problem="no descriptors")]}})
    assert f"{A} cannot share its memory: no descriptors (" in fault


def test_parts_of_gpus_are_looked_for_one_by_one(look):
    seen = {"": {"devices": [device(PARTS[0])]}, PARTS[1]: {"devices": [device(PARTS[1])]}}
    assert look(PARTS, seen) == []


def test_a_loader_that_fails_is_told(look):
    (fault,) = look([A], {}, "echo boom >&2; exit 7")
    assert f"{A} is not seen by a loader: boom (" in fault


def test_host_memory_needs_none(look):
    assert look(["CPU-0"], {}, "exit 7") == []
