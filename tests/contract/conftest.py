"""The backends of memory, so that the same tests run on each.

Drivers of GPUs are real where a GPU is there and asked for (marker gpu); elsewhere ours stand in.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from bench.gpu.meter import NOTHING, Meter
from preloadd.errors import DamagedManifest
from preloadd.memory.api import Filler, Keeper, Mapper, Rows
from preloadd.memory.cuda.driver import open_ordinal
from preloadd.memory.cuda.keeper import CONTROL, DeviceKeeper
from preloadd.memory.hip import driver as hip
from preloadd.memory.host import HostFiller, HostKeeper, HostMapper
from preloadd.memory.vmm import Driver, VmmFiller, VmmMapper
from tests.driver_stand_in import build


class StandInKeeper:
    """What `DeviceKeeper` is to the driver's descriptors, to those of the drivers that stand in."""

    def seal(self, fd: int, nbytes: int) -> None:
        self.verify(fd, nbytes)

    def verify(self, fd: int, nbytes: int) -> None:
        target = str(Path(f"/proc/self/fd/{fd}").readlink())
        if not target.startswith("/memfd:stand-in:"):
            raise DamagedManifest("a chunk came as something else than GPU memory")
        if os.fstat(fd).st_size != nbytes:
            raise DamagedManifest(f"a chunk of another size than {nbytes}")


@dataclass
class Backend:
    """What loader, rank and engine use of one backend, and how another process gets the same."""

    filler: Filler
    keeper: Keeper
    mapper: Mapper
    imports: str
    close: list[Callable[[], object]] = field(default_factory=list)


def host(_: Path, __: pytest.MonkeyPatch) -> Backend:
    imports = "from preloadd.memory.host import HostFiller as Filler, HostMapper as Mapper"
    return Backend(HostFiller(), HostKeeper(), HostMapper(), imports)


def host_private(_: Path, __: pytest.MonkeyPatch) -> Backend:
    imports = """
from functools import partial
from preloadd.memory.host import HostFiller as Filler, HostMapper
Mapper = partial(HostMapper, private=True)
"""
    return Backend(HostFiller(), HostKeeper(), HostMapper(private=True), imports)


def on_device(keeper: Keeper, opened: Callable[[], Driver], imports: str) -> Backend:
    """A filler and a mapper of the same device, as processes of their own would have them."""
    mine = opened()
    filler = VmmFiller(opened(), threads=2)
    imports += """
from preloadd.memory.vmm import VmmFiller, VmmMapper
def Filler():
    return VmmFiller(device(), threads=2)
def Mapper():
    return VmmMapper(device())
"""
    return Backend(filler, keeper, VmmMapper(mine), imports, [filler.close, mine.close])


CUDA = """
from preloadd.memory.cuda.driver import open_ordinal
def device():
    return open_ordinal(0)
"""
HIP = """
from pathlib import Path
from preloadd.memory.hip.driver import open_ordinal
def device():
    return open_ordinal(0, Path({library!r}))
"""


def cuda(_: Path, __: pytest.MonkeyPatch) -> Backend:
    if not Path(CONTROL).exists():
        pytest.skip("there is no GPU")
    before = meter().used()
    backend = on_device(DeviceKeeper(), lambda: open_ordinal(0), CUDA)
    backend.close.append(lambda: given_back(before))
    return backend


@cache
def meter() -> Meter:
    """What counts the real device's memory. It keeps descriptors open."""
    return Meter()


def given_back(before: int) -> None:
    more = meter().back_to(before) - before
    assert abs(more) <= NOTHING, f"{more:+,} bytes of the device's memory are in use afterwards"


def cuda_stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
    if Path(CONTROL).exists():
        pytest.skip("a process finds one driver, and the real one is here")
    library = build.cuda_here(folder)
    play(monkeypatch, "GPU-0a1b2c3d-0000-4000-8000-00000000c0da")
    for name, text in build.cuda(folder).items():
        monkeypatch.setenv(name, text)  # for the children
    backend = on_device(StandInKeeper(), lambda: open_ordinal(0), CUDA)
    backend.close.append(lambda: nothing_left(library))
    return backend


def hip_stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
    library = build.hip(folder)
    play(monkeypatch, "GPU-0a1b2c3d4e5f6071")
    source = HIP.format(library=str(library))
    backend = on_device(StandInKeeper(), lambda: hip.open_ordinal(0, library), source)
    backend.close.append(lambda: nothing_left(ctypes.CDLL(str(library))))
    return backend


def nothing_left(library: ctypes.CDLL) -> None:
    assert library.stand_in_alive() == 0, "something of the device was not given back"


def play(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Have the drivers play one device, of chunks as small as those of a host."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "STAND_IN_FAIL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("STAND_IN_DEVICES", device)
    monkeypatch.setenv("STAND_IN_GRANULARITY", "4096")


BACKENDS: dict[str, Callable[[Path, pytest.MonkeyPatch], Backend]] = {
    "host": host,
    "host-private": host_private,
    "cuda": cuda,
    "cuda-stand-in": cuda_stand_in,
    "hip-stand-in": hip_stand_in,
}


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the drivers that stand in are built, once."""
    return tmp_path_factory.mktemp("drivers")


@pytest.fixture(scope="session", autouse=True)
def real_context() -> Iterator[None]:
    """A real driver's context, held throughout: its descriptors are nothing that a test left."""
    if not Path(CONTROL).exists():
        yield
        return
    driver = open_ordinal(0)
    meter()
    with VmmFiller(open_ordinal(0), threads=2) as filler:
        # What the driver takes for itself at the first use stays with the context.
        with filler.create(filler.granularity) as chunk:
            chunk.write(0, 512, Rows(0, 512), lambda _: None)
            chunk.finish()
    yield
    driver.close()


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.gpu if name == "cuda" else ()) for name in BACKENDS
    ]
)
def backend(
    request: pytest.FixtureRequest, drivers: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Backend]:
    backend = BACKENDS[request.param](drivers, monkeypatch)
    yield backend
    for close in backend.close:
        close()


@pytest.fixture
def filler(backend: Backend) -> Filler:
    return backend.filler


@pytest.fixture
def keeper(backend: Backend) -> Keeper:
    return backend.keeper


@pytest.fixture
def mapper(backend: Backend) -> Mapper:
    return backend.mapper


@pytest.fixture
def imports(backend: Backend) -> str:
    """Source text that makes the backend's `Filler` and `Mapper` known."""
    return backend.imports
