"""Settings of a rank with a real checkpoint, and the rank's end of a loader's link."""

from __future__ import annotations

import ctypes
import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from preloadd.domain.settings import ModelSettings, RankSettings, Warmup
from preloadd.linux import seqpacket
from preloadd.linux.fds import OwnedFd
from preloadd.loader.source import OpenFile, opened_direct
from preloadd.memory.hip.driver import open_ordinal
from preloadd.memory.vmm import VmmFiller
from preloadd.protocol import codec
from preloadd.protocol import messages as m
from preloadd.transport.blocking import Link
from preloadd.weights.checkpoint.reading import opened
from tests.checkpoints import llama
from tests.driver_stand_in import build


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return llama(tmp_path / "model")


@pytest.fixture
def settings_of(tmp_path: Path) -> Callable[..., RankSettings]:
    """Settings of a rank that tunes nothing; further ones of its model are keywords."""

    def settings_of(model: Path, *, instance: str = "CPU-0", **more) -> RankSettings:
        return RankSettings(
            group="tests",
            instance=instance,
            socket_dir=str(tmp_path),
            derived=False,
            model=ModelSettings(path=str(model), name=model.name, **more),
            warmup=Warmup(autotune=False),
        )

    return settings_of


@pytest.fixture
def settings(settings_of: Callable[..., RankSettings], model: Path) -> RankSettings:
    return settings_of(model, chunk_bytes=1 << 16)


class Rank:
    """A rank that takes down what its loader says. Owns the descriptors that came with it."""

    def __init__(self, sock: socket.socket) -> None:
        self.link = Link(sock)
        self.fds: list[OwnedFd] = []

    def order(self, settings: RankSettings) -> None:
        self.link.send(codec.encode(m.Order(settings=settings)))

    def heard(self) -> list[m.LoaderReport]:
        """All reports until the loader hangs up."""
        found = []
        while not (packet := self.link.receive()).eof:
            self.fds += packet.fds
            found.append(codec.decode_report(packet.data))
        return found

    def close(self) -> None:
        self.link.close()
        for fd in self.fds:
            fd.close()


@pytest.fixture
def ends() -> Iterator[tuple[Rank, socket.socket]]:
    """A rank, and the loader's end of the link to it."""
    ours, theirs = seqpacket.pair()
    with ExitStack() as undo:
        rank = Rank(ours)
        undo.callback(rank.close)
        undo.callback(theirs.close)
        yield rank, theirs


@pytest.fixture(scope="session")
def hip_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A driver that stands in for that of AMD's GPUs; it can be beside any other."""
    return build.hip(tmp_path_factory.mktemp("hip"))


@pytest.fixture
def on_device(hip_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VmmFiller]:
    """A filler of memory of a device, which nothing is left of at the end."""
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("STAND_IN_DEVICES", "GPU-5a1b2c3d4e5f6071")
    monkeypatch.setenv("STAND_IN_GRANULARITY", "4096")
    with VmmFiller(open_ordinal(0, hip_library), threads=2) as filler:
        yield filler
    assert ctypes.CDLL(str(hip_library)).stand_in_alive() == 0


class Shard(NamedTuple):
    """A file on the disk, opened both ways, and what it holds."""

    path: Path
    content: bytes
    fd: int
    direct: int

    def opened(self, *, direct: bool = True) -> OpenFile:
        return OpenFile(self.path, self.fd, self.direct if direct else None)

    def drop(self) -> None:
        """Have the page cache forget it; skips where the kernel does not tell what that holds."""
        os.fsync(self.fd)
        if self.opened().cached(0, 1) is None:
            pytest.skip(f"the file system of {self.path} does not have RWF_NOWAIT")
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    """A shard of 6 MiB and a bit, so that its last block is not whole."""
    path = tmp_path / "model.safetensors"
    content = random.Random(7).randbytes((6 << 20) + 1234)
    path.write_bytes(content)
    with opened(path) as fd, opened_direct(fd) as direct:
        if direct is None:
            pytest.skip(f"the file system of {tmp_path} does not have O_DIRECT")
        yield Shard(path, content, fd, direct)
