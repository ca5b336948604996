"""What a rank does for its GPU: the driver is told by stand-ins for loaders, nodes are devices that
every Linux has."""

import os
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import anyio
import msgspec
import pytest

from preloadd.domain.devices import Device, Probe
from preloadd.domain.settings import Memory
from preloadd.linux.fds import OwnedFd
from preloadd.linux.memfd import sealed_bytes
from preloadd.linux.notify import Notifier
from preloadd.rank.device import PARKED, UNTESTED, Gpu, alone_with, with_all
from preloadd.rank.parking import Parking
from preloadd.transport.probe import ask_probe

pytestmark = pytest.mark.anyio

A = "GPU-53b1d48b-de77-970d-5f91-576155feee6c"
KEPT = Device(A, "NVIDIA H200", minor=2, persistence=True)


@pytest.fixture
def nodes(tmp_path) -> Path:
    """A /dev with nvidia2; opening it is opening /dev/null."""
    (tmp_path / "nvidia2").symlink_to("/dev/null")
    return tmp_path


@pytest.fixture
def look_after(nodes, notifier, told):
    """Looks after the GPU in `probe`; the warnings, and what was kept or dropped."""

    async def look_after(probe: Probe, *, memory=Memory.CUDA, left=(), manager=notifier):
        line = msgspec.json.encode(probe).decode()
        argv = [sys.executable, "-I", "-S", "-c", f"print({line!r})"]
        gpu = Gpu(A, memory, partial(ask_probe, argv, os.environ), nodes=nodes)
        warnings: list[str] = []
        said: list[tuple[str, str, int]] = []
        parking = Parking(manager)
        with gpu:
            gpu.resume(left)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(parking.work)
                tasks.start_soon(_read, told, said)
                await gpu.look_after(parking, warnings.append)
                await parking.settle()
                tasks.cancel_scope.cancel()
            assert gpu.parked == (1 if gpu._node else 0)
        return warnings, [each for each in said + told() if each[0] != "BARRIER"]

    return look_after


async def _read(told, said: list[tuple[str, str, int]]) -> None:
    while True:
        said += told()
        await anyio.sleep(0.002)


async def test_the_node_is_opened_and_parked(look_after):
    warnings, said = await look_after(Probe((KEPT,)))
    assert warnings == []
    assert said == [("FDSTORE", PARKED, 1)]


async def test_without_a_manager_it_is_held_all_the_same(look_after):
    with closing(Notifier({})) as nobody:
        assert await look_after(Probe((KEPT,)), manager=nobody) == ([], [])


async def test_a_parked_node_is_kept_as_it_is(look_after):
    null = [OwnedFd(os.open("/dev/null", os.O_RDWR)) for _ in range(2)]
    assert await look_after(Probe((KEPT,)), left=null) == ([], [])
    assert all(fd.closed for fd in null)


@pytest.mark.parametrize("other", ["/dev/zero", None])
async def test_a_parked_node_of_another_gpu_is_replaced(look_after, other):
    fd = OwnedFd(os.open(other, os.O_RDONLY)) if other else sealed_bytes("x", b"x")
    warnings, said = await look_after(Probe((KEPT,)), left=[fd])
    assert warnings == []
    assert said == [("FDSTOREREMOVE", PARKED, 0), ("FDSTORE", PARKED, 1)]


async def test_persistence_mode_that_is_off_is_warned_of_with_the_remedy(look_after):
    device = Device(A, "NVIDIA H200", minor=2, persistence=False)
    (warning,), said = await look_after(Probe((device,)))
    assert "persistence mode was off" in warning
    assert "`nvidia-smi -pm 1`" in warning
    assert "nvidia-persistenced.service" in warning
    assert said == [("FDSTORE", PARKED, 1)]


async def test_where_nobody_tells_of_persistence_mode_nothing_is_said(look_after):
    assert (await look_after(Probe((Device(A, "x", minor=2),))))[0] == []


@pytest.mark.parametrize(
    ("minor", "why"),
    [(7, "nvidia7: No such file"), (-1, "the driver does not tell which /dev/nvidiaN")],
)
async def test_a_node_that_cannot_be_opened(look_after, caplog, minor, why):
    (warning,), said = await look_after(Probe((Device(A, "x", minor=minor),)))
    assert why in warning
    assert warning.startswith("the GPU cannot be kept open: ")
    assert "let this process have that device, or enable persistence mode" in warning
    assert said == []
    caplog.set_level("INFO")
    device = Device(A, "x", minor=minor, persistence=True)
    assert await look_after(Probe((device,))) == ([], [])
    assert why in caplog.text


@pytest.mark.parametrize("persistence", [None, True])
async def test_a_node_that_is_open_but_cannot_be_parked(
    nodes, notifier, manager, caplog, persistence
):
    manager.close()
    caplog.set_level("INFO")
    warnings: list[str] = []
    probe = Probe((Device(A, "x", minor=2, persistence=persistence),))

    async def ask() -> Probe:
        return probe

    with Gpu(A, Memory.CUDA, ask, nodes=nodes) as gpu:
        async with anyio.create_task_group() as tasks:
            parking = Parking(notifier)
            tasks.start_soon(parking.work)
            await gpu.look_after(parking, warnings.append)
            tasks.cancel_scope.cancel()
        assert gpu.parked == 0
        assert gpu._node is not None
        assert not gpu._node.closed
    told = "kept open by this process only: the service manager could not be told to: "
    assert "cannot be kept open" not in caplog.text
    if persistence:
        assert warnings == []
        assert told in caplog.text
    else:
        (warning,) = warnings
        assert told in warning
        assert "restart this rank once the manager answers, or enable persistence" in warning


async def test_what_is_no_device_is_not_opened(look_after, nodes):
    (nodes / "nvidia5").write_text("")
    (warning,), _ = await look_after(Probe((Device(A, "x", minor=5),)))
    assert "nvidia5 is no device" in warning


async def test_a_gpu_that_the_loader_does_not_see(look_after):
    other = Device("GPU-1", "x")
    for probe, why in (
        (Probe((other,), hint="CUDA_VISIBLE_DEVICES=1"), "it sees GPU-1 (CUDA_VISIBLE_DEVICES=1)"),
        (Probe(problem="the driver is too old"), "the driver is too old"),
        (Probe(), "it sees none"),
    ):
        (warning,), said = await look_after(probe)
        assert warning.startswith(f"the loader's Python does not see {A}: {why}: ")
        assert said == []


async def test_memory_that_cannot_be_shared_is_warned_of(look_after):
    device = Device(A, "x", minor=2, persistence=True, problem="no descriptors")
    (warning,), _ = await look_after(Probe((device,)))
    assert warning == "its memory cannot be shared: no descriptors"


async def test_memory_of_amd_gpus_is_said_to_be_untested(look_after):
    device = Device(A, "MI300X", Memory.HIP)
    assert await look_after(Probe((device,)), memory=Memory.HIP) == ([UNTESTED], [])


async def test_cancelling_ends_the_look(nodes, notifier):
    argv = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]
    gpu = Gpu(A, Memory.CUDA, partial(ask_probe, argv, os.environ), nodes=nodes)
    with anyio.move_on_after(0.1) as scope:
        await gpu.look_after(Parking(notifier), lambda _: None)
    assert scope.cancelled_caught


def test_a_loader_sees_its_gpu_alone():
    environ = {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "2", "PATH": "/bin"}
    assert alone_with("CPU-0", Memory.HOST, environ) == environ
    assert alone_with(A, Memory.CUDA, environ) == {"CUDA_VISIBLE_DEVICES": A, "PATH": "/bin"}
    assert alone_with(A, Memory.HIP, environ) == {"ROCR_VISIBLE_DEVICES": A, "PATH": "/bin"}


def test_an_engine_is_shown_all_devices_of_its_group_in_order():
    environ = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "3"}
    assert with_all([A, "GPU-b"], Memory.CUDA, environ) == {
        "CUDA_VISIBLE_DEVICES": f"{A},GPU-b",
        "PATH": "/bin",
    }
    assert with_all(["CPU-1", "CPU-0"], Memory.HOST, {}) == {"PRELOADD_DEVICES": "CPU-1,CPU-0"}
