"""Weights from a peer over loopback against the bare copy of as many bytes, all in one run.

Claim: filling an arena from a peer, checked piece by piece, is nearly as fast as receiving the same
bytes from as many sockets. Bare: a process sends from mapped memory, this one receives into chunks.
From a peer: the same, from a real sender over the streams that a rank was admitted to. Either into
chunks that were made before, and into fresh ones, of which the pages have to be cleared first.
Prints one table, and JSON with `--json`.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Self

import anyio
from anyio.from_thread import start_blocking_portal
from rich.console import Console
from rich.table import Table

import preloadd
from preloadd.domain.endpoint import Endpoint
from preloadd.domain.key import Key
from preloadd.domain.manifest import Manifest, Storages, Tensors
from preloadd.domain.recipe import LAYOUT, recipe_of
from preloadd.domain.settings import ModelSettings, RankSettings
from preloadd.linux import seqpacket
from preloadd.linux.memfd import sealed_bytes
from preloadd.linux.process import spawn
from preloadd.loader.peer import Peer, Want, fill
from preloadd.loader.report import Reporter
from preloadd.memory.api import PIECE, Rows
from preloadd.memory.host import HostChunk, HostFiller, HostKeeper
from preloadd.protocol import payload
from preloadd.rank.generation import Generation
from preloadd.rank.seeding import taking
from preloadd.rank.seeding.giving import Giving
from preloadd.rank.seeding.listener import Listener
from preloadd.transport import aio
from preloadd.transport.blocking import Link

HERE = "127.0.0.1"
TOKEN = "bench"
KEY = Key({"checkpoint": "bench:00"})
CHUNK = 256 << 20
STREAMS = 4
BARE = "bare copy, memory allocated before, GB/s"
BARE_FRESH = "bare copy, fresh memory, GB/s"
PEER = "from a peer, memory allocated before, GB/s"
PEER_FRESH = "from a peer, fresh memory, GB/s"
SETTINGS = RankSettings(
    group="bench",
    instance="CPU-0",
    socket_dir="/nonexistent",
    derived=False,
    model=ModelSettings(path="/nonexistent", name="bench"),
)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--mib", type=int, default=1024, help="size of the arena")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--part", choices=["bare", "peer"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    nbytes = max(CHUNK, arguments.mib << 20) // CHUNK * CHUNK
    if arguments.part:
        return _play(arguments.part, nbytes)
    measured = measure(nbytes, arguments.runs)
    if arguments.json:
        sys.stdout.write(json.dumps(measured, indent=1) + "\n")
        return 0
    table = Table(
        title=f"{nbytes / 2**30:g} GiB, {STREAMS} connections, {arguments.runs} runs each"
    )
    table.add_column("what")
    table.add_column("figure", justify="right")
    for name, value in measured.items():
        table.add_row(name, f"{value:,.2f}")
    Console(highlight=False).print(table)
    return 0


def measure(nbytes: int, runs: int) -> dict[str, float]:
    """Medians of GB/s. All alternate, since others use this machine as well."""
    figures: dict[str, list[float]] = {name: [] for name in (BARE, BARE_FRESH, PEER, PEER_FRESH)}
    with playing("bare", nbytes) as sender, playing("peer", nbytes) as source:
        begun = time.perf_counter()
        first = nbytes / seeded(source, HostFiller()) / 1e9
        first_s = time.perf_counter() - begun
        for _ in range(runs):
            with Prepared(nbytes) as filler:
                figures[BARE].append(nbytes / copied(sender, nbytes, filler) / 1e9)
            figures[BARE_FRESH].append(nbytes / copied(sender, nbytes, HostFiller()) / 1e9)
            with Prepared(nbytes) as filler:
                figures[PEER].append(nbytes / seeded(source, filler) / 1e9)
            figures[PEER_FRESH].append(nbytes / seeded(source, HostFiller()) / 1e9)
    medians = {name: statistics.median(found) for name, found in figures.items()}
    return {
        **medians,
        "ratio, memory allocated before (median of pairs)": _ratio(figures[PEER], figures[BARE]),
        "ratio, fresh memory (median of pairs)": _ratio(figures[PEER_FRESH], figures[BARE_FRESH]),
        "the first time, when digests are made, GB/s": first,
        "the first time with asking and the sender's start, s": first_s,
    }


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


class Prepared(HostFiller):
    """Chunks that were made before anybody looked at the clock. They stay mapped until the end."""

    def __init__(self, nbytes: int) -> None:
        self._undo = ExitStack()
        self._made = [
            self._undo.enter_context(super(Prepared, self).create(CHUNK))
            for _ in range(nbytes // CHUNK)
        ]

    def create(self, nbytes: int) -> HostChunk:
        """The next one, which its user cannot close."""
        made = self._made.pop()
        area = mmap.mmap(made.fd.fileno(), nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        return HostChunk(made.fd.duplicate(), area)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()


def copied(port: int, nbytes: int, filler: HostFiller) -> float:
    """Seconds in which chunks of `filler` received so much."""
    socks = [socket.create_connection((HERE, port)) for _ in range(STREAMS)]
    with ExitStack() as undo:
        for sock in socks:
            undo.enter_context(sock)
        begun = time.perf_counter()
        made = range(nbytes // CHUNK)
        chunks = [undo.enter_context(filler.create(CHUNK)) for _ in made]
        _each(socks, lambda number, sock: _receive(number, sock, chunks))
        return time.perf_counter() - begun


def _receive(number: int, sock: socket.socket, chunks: list[HostChunk]) -> None:
    for start in range(number * PIECE, len(chunks) * CHUNK, STREAMS * PIECE):
        sock.sendall(start.to_bytes(8, "big"))
        index, offset = divmod(start, CHUNK)
        chunks[index].write(offset, PIECE, Rows(0, PIECE), lambda buf: _receive_piece(sock, buf))


def _receive_piece(sock: socket.socket, buffer: memoryview) -> None:
    if sock.recv_into(buffer, 0, socket.MSG_WAITALL) != PIECE:
        raise SystemExit("the bare sender hung up")


def seeded(port: int, filler: HostFiller) -> float:
    """Seconds in which an arena was filled from the source, and is freed again."""
    ours, theirs = seqpacket.pair()
    told, heard = seqpacket.pair()
    with start_blocking_portal() as portal, told, heard, closing(Link(theirs)) as link:
        portal.start_task_soon(_take, ours, port)
        listening = threading.Thread(target=_hear, args=(heard,))
        listening.start()
        reporter = Reporter(Link(told), clock=time.monotonic)
        wanted = Want(KEY, CHUNK, 0.0, lambda _: None)
        found = fill(Peer(link), wanted, filler, reporter)
        told.shutdown(socket.SHUT_RDWR)
        listening.join()
    if found is None:
        raise SystemExit("the peer sent nothing")
    return found[1].seconds


async def _take(ours: socket.socket, port: int) -> None:
    link = aio.Link(ours)
    with closing(link):
        await taking.serve(link, Endpoint(HERE, port), TOKEN)


def _hear(heard: socket.socket) -> None:
    link = Link(heard)
    while not (packet := link.receive()).eof:
        packet.close()


@contextmanager
def playing(part: str, nbytes: int) -> Iterator[int]:
    """A process that plays the other end; its port."""
    reading, writing = os.pipe()
    argv = [sys.executable, "-m", "bench.seeding_weights", "--part", part]
    root = Path(preloadd.__file__).parents[1]
    environ = {**os.environ, "PYTHONPATH": str(root)}
    with os.fdopen(reading) as told:
        child = spawn(
            [*argv, "--mib", str(nbytes >> 20)],
            environ=environ,
            stdout=writing,
            parent_death_signal=signal.SIGKILL,
        )
        os.close(writing)
        with child:
            yield int(told.readline())


def _play(part: str, nbytes: int) -> int:
    if part == "bare":
        _send_bare(nbytes)
    else:
        anyio.run(_give, nbytes)
    return 0


def _send_bare(nbytes: int) -> None:
    area = mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    with socket.create_server((HERE, 0)) as listener:
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        while True:
            socks = [listener.accept()[0] for _ in range(STREAMS)]
            _each(socks, lambda _, sock: _answer_bare(sock, area))


def _answer_bare(sock: socket.socket, area: mmap.mmap) -> None:
    with sock, memoryview(area) as whole:
        while asked := sock.recv(8, socket.MSG_WAITALL):
            start = int.from_bytes(asked, "big")
            with whole[start : start + PIECE] as window:
                sock.sendall(window)


async def _anybody(_token: bytes) -> bool:
    return True


async def _give(nbytes: int) -> None:
    argv = (sys.executable, "-m", "preloadd.loader")
    giving = Giving(SETTINGS, argv, os.environ, clock=time.monotonic)
    with socket.socket() as free:
        free.bind((HERE, 0))
        port = free.getsockname()[1]
    listener = Listener(HERE, port, [giving.kind], _anybody, streams=[giving])
    giving.offer(_generation(nbytes))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(giving.work)
        tasks.start_soon(listener.serve)
        await listener.tried.wait()
        sys.stdout.write(f"{port}\n")
        sys.stdout.flush()


def _generation(nbytes: int) -> Generation:
    """An arena of random bytes with one tensor for each chunk."""
    count = nbytes // CHUNK
    chunks = []
    for _ in range(count):
        with HostFiller().create(CHUNK) as chunk:
            for start in range(0, CHUNK, PIECE):
                data = os.urandom(PIECE)
                chunk.write(start, PIECE, Rows(0, PIECE), lambda view, data=data: _put(view, data))
            chunks.append(chunk.fd.duplicate())
    for fd in chunks:
        HostKeeper().seal(fd.fileno(), CHUNK)
    numbers = list(range(count))
    manifest = Manifest(
        generation="00" * 16,
        layout=LAYOUT,
        backend="host",
        chunks=(CHUNK,) * count,
        storages=Storages(numbers, [0] * count, [CHUNK] * count),
        tensors=Tensors(
            name=[f"t{number}" for number in numbers],
            kind=[0] * count,
            dtype=[0] * count,
            shape=[(1,)] * count,
            strides=[None] * count,
            storage=numbers,
            skip=[0] * count,
        ),
        key=KEY,
        recipe=recipe_of(SETTINGS, ()),
    )
    return Generation(manifest, sealed_bytes("manifest", payload.encode(manifest)), chunks)


def _put(view: memoryview, data: bytes) -> None:
    view[:] = data


def _each(socks: list[socket.socket], act: object) -> None:
    threads = [
        threading.Thread(target=act, args=(number, sock)) for number, sock in enumerate(socks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
