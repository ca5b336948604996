"""Generations of real memfds that need no checkpoint."""

from __future__ import annotations

from preloadd.domain.files import FileIdentity
from preloadd.domain.manifest import Manifest, Storages, Tensors
from preloadd.domain.recipe import LAYOUT, Recipe
from preloadd.linux.fds import OwnedFd
from preloadd.memory.api import Rows
from preloadd.memory.host import HostFiller, HostKeeper

PAGE = 4096
FILES = (FileIdentity(1, 2, 3, 4, 5),)
KEY = {"checkpoint": "sampled-1:00ff", "tp_size": "1"}
ID = "0a" * 16


def manifest_of(generation: str, recipe: Recipe, changes: dict[str, object]) -> Manifest:
    """Two chunks with one tensor each, all of it as given in `changes`."""
    values: dict[str, object] = {
        "generation": generation,
        "layout": LAYOUT,
        "backend": "host",
        "chunks": (PAGE, 2 * PAGE),
        "storages": Storages([0, 1], [0, 0], [PAGE, PAGE + 8]),
        "tensors": Tensors(
            name=["first", "second"],
            kind=[0, 0],
            dtype=[1, 1],
            shape=[(PAGE,), (PAGE + 8,)],
            strides=[None, None],
            storage=[0, 1],
            skip=[0, 0],
        ),
        "key": KEY,
        "recipe": recipe,
        "shards": FILES,
        "counters": {"bytes_read": 2 * PAGE + 8, "files": 1, "load_ms": 5},
    }
    return Manifest(**(values | changes))


def filled(nbytes: int, index: int) -> OwnedFd:
    """A sealed chunk full of `index` + 1; the caller's to close."""
    with HostFiller().create(nbytes) as chunk:
        content = bytes([index + 1]) * nbytes

        def read(buffer: memoryview) -> None:
            buffer[:] = content

        chunk.write(0, nbytes, Rows(0, nbytes), read)
        chunk.finish()
        fd = chunk.fd.duplicate()
    HostKeeper().seal(fd.fileno(), nbytes)
    return fd
