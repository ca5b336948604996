"""What hostile or odd peers do with the memory of a GPU, below the engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from preloadd.domain import dtypes
from preloadd.domain.manifest import Manifest, Storages, Tensors
from preloadd.domain.recipe import LAYOUT, Recipe
from preloadd.errors import PreloadError
from preloadd.frameworks.torch import views, whole_chunk
from preloadd.linux.fds import OwnedFd
from preloadd.memory.api import Rows
from preloadd.memory.cuda.driver import open_ordinal
from preloadd.memory.vmm import VmmFiller, VmmMapper
from preloadd.protocol import messages as m
from preloadd.transport.blocking import connect
from preloadd.transport.status import ask_status

TIMEOUT_S = 10.0


def odd_views() -> list[str]:
    """Tensors with strides, offsets and aliases over a chunk of our own: those that are wrong."""
    values = torch.arange(4096, dtype=torch.int32)
    data = values.numpy().tobytes()
    filler = VmmFiller(open_ordinal(0))
    nbytes = filler.granularity
    with filler.create(nbytes) as chunk:
        chunk.write(0, len(data), Rows(0, len(data)), lambda buffer: _put(buffer, data))
        chunk.finish()
        fd = chunk.fd.duplicate()
    filler.close()
    mapping = VmmMapper(open_ordinal(0)).map([(fd, nbytes)])
    manifest = _manifest(nbytes, len(data))
    found = views(manifest, [whole_chunk(mapping.chunk(0), "cuda:0")])
    expected = {
        "plain": values.view(64, 64),
        "turned": values.view(64, 64).t(),
        "every third": values[5 : 5 + 3 * 100 : 3],
        "repeated": values[7].expand(10),
    }
    wrong = [name for name, each in expected.items() if not torch.equal(each, found[name].cpu())]
    wrong += [name for name, each in expected.items() if each.shape != found[name].shape]
    if found["tied"] is not found["plain"]:
        wrong.append("tied")
    if found["turned"].data_ptr() != found["plain"].data_ptr():
        wrong.append("turned lies elsewhere")
    found.clear()
    mapping.close()
    return wrong


def _put(buffer: memoryview, data: bytes) -> None:
    buffer[:] = data


def _manifest(chunk: int, nbytes: int) -> Manifest:
    rows = 4
    return Manifest(
        generation="0" * 32,
        layout=LAYOUT,
        backend="cuda",
        chunks=(chunk,),
        storages=Storages([0], [0], [nbytes]),
        tensors=Tensors(
            name=["plain", "turned", "every third", "repeated"],
            kind=[0] * rows,
            dtype=[dtypes.CODES["I32"]] * rows,
            shape=[(64, 64), (64, 64), (100,), (10,)],
            strides=[None, (1, 64), (3,), (0,)],
            storage=[0] * rows,
            skip=[0, 0, 5, 7],
        ),
        key={},
        recipe=Recipe({}, ()),
        aliases={"tied": "plain"},
    )


def misuse(socket: str, other: str) -> dict[str, list[str]]:
    """Map what is no chunk, or another one than is told: the class and text of each refusal.

    `other` is the socket of a rank with larger chunks. A good one is mapped last.
    """
    (ours, nbytes), (theirs, _) = _chunk(Path(socket)), _chunk(Path(other))
    mapper = VmmMapper(open_ordinal(0))
    memory = OwnedFd(os.memfd_create("weights"))
    os.ftruncate(memory.fileno(), nbytes)

    def opened(path: str) -> OwnedFd:
        return OwnedFd(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    offered: dict[str, Callable[[], tuple[OwnedFd, int]]] = {
        "memfd": lambda: (memory.duplicate(), nbytes),
        "null": lambda: (opened("/dev/null"), nbytes),
        "zero": lambda: (opened("/dev/zero"), nbytes),
        "control": lambda: (opened("/dev/nvidiactl"), nbytes),
        "node": lambda: (opened(_node()), nbytes),
        "too large": lambda: (ours.duplicate(), 2 * nbytes),
        "odd": lambda: (ours.duplicate(), nbytes + 4096),
        "nothing": lambda: (ours.duplicate(), 0),
        "another's told larger": lambda: (theirs.duplicate(), 64 * nbytes),
    }
    told = {}
    for name, offer in offered.items():
        fd, size = offer()
        try:
            mapper.map([(ours.duplicate(), nbytes), (fd, size)]).close()
            told[name] = ["mapped", ""]
        except PreloadError as error:
            told[name] = [error.code.value, str(error)]
        if not fd.closed:
            told[name] = ["left open", ""]
    good = mapper.map([(ours, nbytes)])
    told["good"] = ["mapped" if good.read(0, 0, 16) else "", ""]
    good.close()
    for fd in (theirs, memory):
        fd.close()
    return told


def _node() -> str:
    return next(str(path) for path in sorted(Path("/dev").glob("nvidia[0-9]*")))


def _chunk(socket: Path) -> tuple[OwnedFd, int]:
    """A rank's first chunk and its size, without mapping it."""
    told = ask_status(socket, timeout=TIMEOUT_S)
    with connect(socket, timeout=TIMEOUT_S) as client:
        ask = m.Attach(key=told.key, device=told.device, client="test")
        granted, fds = client.call(ask, timeout=TIMEOUT_S)
        assert isinstance(granted, m.Granted), granted
        for fd in (fds[0], *fds[2:]):
            fd.close()
        return fds[1], granted.chunks[0]
