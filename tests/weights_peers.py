"""A rank that gives its weights away, one that takes them for its loader, and what is between."""

from __future__ import annotations

import os
import random
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from preloadd.domain.endpoint import Endpoint
from preloadd.domain.key import Key
from preloadd.domain.settings import RankSettings
from preloadd.linux import seqpacket
from preloadd.linux.fds import OwnedFd
from preloadd.linux.memfd import read_sealed
from preloadd.loader.native import Native
from preloadd.loader.peer import Peer
from preloadd.loader.pipeline import load
from preloadd.loader.race import Rule
from preloadd.loader.report import Reporter
from preloadd.memory.host import HostFiller, HostKeeper, HostMapper
from preloadd.protocol import codec, payload
from preloadd.protocol import messages as m
from preloadd.rank.generation import Generation
from preloadd.rank.seeding import taking
from preloadd.rank.seeding.giving import Giving
from preloadd.rank.seeding.listener import Listener
from preloadd.transport import aio
from preloadd.transport.blocking import Link
from tests.checkout import ROOT
from tests.checkpoints import sparse
from tests.ports import free_port

HERE = "127.0.0.1"
TOKEN = "a-token-that-no-loader-may-see"
LOADER = (sys.executable, "-m", "preloadd.loader")
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT)}

_SLOW = """
import os, runpy, time
read = os.preadv
def slowly(fd, buffers, *more):
    # Only for the pieces of a load, and what is read to measure the disk.
    if sum(map(len, buffers)) > 1 << 16:
        time.sleep({seconds})
    return read(fd, buffers, *more)
os.preadv = slowly
runpy.run_module("preloadd.loader", run_name="__main__", alter_sys=True)
"""

ALWAYS = Rule(enough_s=0.0, ahead=0.0, least_s=30.0)
"""However fast the disk is, and whatever the peer takes."""


def slow_disk(folder: Path, python: str | Path = sys.executable, *, seconds: float = 1.0) -> str:
    """An interpreter whose loaders read as from a disk that takes `seconds` for every piece."""
    slow, path = folder / "slow.py", folder / "python"
    slow.write_text(_SLOW.format(seconds=seconds))
    path.write_text(
        f"""#!/bin/sh
if [ "$1 $2" = "-m preloadd.loader" ] && [ $# = 2 ]; then
    exec {python} {slow}
fi
exec {python} "$@"
"""
    )
    path.chmod(0o755)
    return str(path)


def free_place() -> Endpoint:
    """Where nobody listens on this host."""
    return Endpoint(HERE, free_port())


def token_file(folder: Path) -> str:
    """A file with a token for whoever seeds and whoever is seeded."""
    path = folder / "token"
    path.write_text(f"plt_{TOKEN}")
    path.chmod(0o600)
    return str(path)


def checkpoint(folder: Path, nbytes: int = 20 << 20, tensors: int = 5) -> Path:
    """A checkpoint of random bytes."""
    sparse(folder, nbytes, tensors)
    path = folder / "model.safetensors"
    start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    with path.open("r+b") as file:
        file.seek(start)
        file.write(random.Random(nbytes).randbytes(nbytes // tensors * tensors))
    return folder


def loaded(settings: RankSettings, cache: Path) -> Generation:
    """What a loader makes of it and a rank keeps."""
    ours, theirs = seqpacket.pair()
    with ExitStack() as undo:
        link = Link(theirs)
        reporter = Reporter(link, clock=time.monotonic)
        with closing(link):
            load(settings, HostFiller(), reporter, digest_cache=cache)
        with closing(Link(ours)) as rank:
            chunks, sealed = heard(rank, undo)
        undo.pop_all()
    for fd in chunks:
        HostKeeper().seal(fd.fileno(), os.fstat(fd.fileno()).st_size)
    manifest = payload.decode(read_sealed(sealed.fileno(), payload.MAX_NBYTES))
    return Generation(manifest, sealed, chunks)


def heard(rank: Link, undo: ExitStack) -> tuple[list[OwnedFd], OwnedFd]:
    """The chunks and the manifest that a loader has handed over."""
    chunks: list[OwnedFd] = []
    while not (packet := rank.receive()).eof:
        for fd in packet.fds:
            undo.callback(fd.close)
        report = codec.decode_report(packet.data)
        if isinstance(report, m.ChunkFilled):
            chunks += packet.fds
        if isinstance(report, m.ManifestWritten):
            return chunks, packet.fds[0]
    raise AssertionError("no manifest")


def content(fds: list[OwnedFd]) -> list[bytes]:
    """The bytes of sealed chunks."""
    sizes = [os.fstat(fd.fileno()).st_size for fd in fds]
    copies = [(fd.duplicate(), nbytes) for fd, nbytes in zip(fds, sizes, strict=True)]
    mapping = HostMapper().map(copies)
    with closing(mapping):
        return [mapping.read(index, 0, nbytes) for index, nbytes in enumerate(sizes)]


async def _admits(shown: bytes) -> bool:
    return shown.endswith(TOKEN.encode())


class Source:
    """A rank that gives `generation`, in a thread of its own."""

    def __init__(self, settings: RankSettings, portal: BlockingPortal, port: int) -> None:
        self.where = Endpoint(HERE, port)
        self.portal = portal
        self.late = 0.0
        self.giving = portal.call(
            lambda: Giving(settings, LOADER, ENVIRON, clock=lambda: time.monotonic() + self.late)
        )
        self.listener = Listener(
            HERE,
            port,
            [self.giving.kind],
            _admits,
            streams=[self.giving],
        )

    @property
    def sender(self) -> int:
        """The sender's process, once there is one."""
        while (sender := self.giving._sender) is None:
            time.sleep(0.01)
        return sender.child.pid

    async def work(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.listener.serve)
            tasks.start_soon(self.giving.work)


@contextmanager
def serving(settings: RankSettings, generation: Generation, port: int) -> Iterator[Source]:
    """A source, until the end of the block."""
    with start_blocking_portal() as portal:
        source = Source(settings, portal, port)
        portal.call(source.giving.offer, generation)
        working = portal.start_task_soon(source.work)
        try:
            portal.call(source.listener.port.tried.wait)
            yield source
        finally:
            working.cancel()
            with suppress(BaseException):
                working.result()
            portal.call(source.giving.withdraw)


@contextmanager
def asking(source: Endpoint, rule: Rule = ALWAYS, token: str = TOKEN) -> Iterator[Peer]:
    """A loader's way to `source`, with its rank in a thread of its own."""
    ours, theirs = seqpacket.pair()
    with start_blocking_portal() as portal, closing(Link(theirs)) as link:
        work = portal.start_task_soon(_rank, ours, source, token)
        try:
            yield Peer(link, rule)
        finally:
            link.close()
            work.cancel()
            with suppress(BaseException):
                work.result()


async def _rank(ours: socket.socket, source: Endpoint, token: str) -> None:
    link = aio.Link(ours)
    with closing(link):
        await taking.serve(link, source, token)


class Target:
    """A loader that is to fill the same arena, and its rank."""

    def __init__(self, settings: RankSettings, generation: Generation) -> None:
        self.native = Native(settings, HostFiller().granularity)
        self.key = Key(dict(generation.manifest.key))
        self.reports: list[m.LoaderReport] = []
        self.fds: list[OwnedFd] = []

    @contextmanager
    def reporting(self) -> Iterator[Reporter]:
        """A line to a rank that takes down what is said."""
        ours, theirs = seqpacket.pair()
        with closing(Link(ours)) as rank:
            listening = threading.Thread(target=self._listen, args=(rank,))
            listening.start()
            try:
                with closing(Link(theirs)) as link:
                    yield Reporter(link, clock=time.monotonic)
            finally:
                listening.join()

    def _listen(self, rank: Link) -> None:
        while not (packet := rank.receive()).eof:
            self.fds += packet.fds
            self.reports.append(codec.decode_report(packet.data))

    def content(self) -> list[bytes]:
        """The bytes of the chunks that were handed over."""
        for fd in self.fds:
            HostKeeper().seal(fd.fileno(), os.fstat(fd.fileno()).st_size)
        return content(self.fds)

    def close(self) -> None:
        for fd in self.fds:
            fd.close()


class Proxy:
    """Passes connections on to a port, with what `harm` makes of each part that comes back.

    It is given the number of the connection, how much has come before, and the part; None hangs up.
    """

    def __init__(self, port: int, harm: Callable[[int, int, bytes], bytes | None]) -> None:
        self.connections = 0
        self._to = port
        self._harm = harm
        self._listener = socket.create_server((HERE, 0), backlog=128)
        self.where = Endpoint(HERE, self._listener.getsockname()[1])
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((HERE, self._to))
                thread = threading.Thread(target=self._pass, args=(self.connections, near, far))
                self.connections += 1
                self._threads.append(thread)
                thread.start()

    def _pass(self, number: int, near: socket.socket, far: socket.socket) -> None:
        came = 0
        with near, far, suppress(OSError):
            while not self._closing.is_set():
                for sock in select.select([near, far], [], [], 0.05)[0]:
                    data = sock.recv(1 << 16)
                    if not data:
                        return
                    if sock is near:
                        far.sendall(data)
                        continue
                    harmed = self._harm(number, came, data)
                    came += len(data)
                    if harmed is None:
                        return
                    near.sendall(harmed)


def fill(peer: Peer, target: Target, **more: Any):
    """What `fill_native` says, with the target's rank listening."""
    from preloadd.loader.peer import fill_native

    with target.reporting() as reporter:
        return fill_native(peer, target.native, target.key, HostFiller(), reporter, **more)
