"""For every test: a short folder for sockets, and a check that it leaves the process as it was."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import hypothesis
import pytest

from tests.descriptors import targets

# Tests share their machine, so how long one example takes says nothing.
hypothesis.settings.register_profile("preloadd", deadline=None)
hypothesis.settings.load_profile("preloadd")

GRACE_S = 2.0
"""How long threads and children may take to end after their owner let go of them."""

LASTING_THREADS = ("tqdm_monitor", "pt_", "OMP")
"""Beginnings of the names of threads that libraries start once and keep."""

LASTING_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Parts of the command lines of processes that the standard library starts once and keeps."""


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A private folder whose path is short enough for any socket, unlike that of `tmp_path`."""
    folder = Path(tempfile.mkdtemp(prefix="pl-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def descriptors_left() -> Callable[[int], AbstractContextManager[None]]:
    """A context in which this process may open so many descriptors more, and then none."""
    return _descriptors_left


@contextmanager
def _descriptors_left(more: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd.name) for fd in Path("/proc/self/fd").iterdir())
    with ExitStack() as undo:
        while (fd := os.dup(2)) <= highest:  # the numbers in use may have gaps
            undo.callback(os.close, fd)
        os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (fd + more, hard))
        undo.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        yield


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fails a test that leaves a descriptor, a child (zombies included) or a thread."""
    before = Held.now()
    yield
    left = Held.now() - before
    until = time.monotonic() + GRACE_S
    while left and time.monotonic() < until:
        # What only a cycle keeps alive, such as the frames of an expected error, is no leak.
        gc.collect()
        time.sleep(0.01)
        left = Held.now() - before
    if left:
        pytest.fail(f"the test left {', '.join(left)}", pytrace=False)


class Held(NamedTuple):
    """What a process holds. Descriptors and children are told with what they are."""

    fds: set[str]
    children: set[int]
    threads: set[threading.Thread]

    @classmethod
    def now(cls) -> Held:
        """What this process holds now, without what libraries keep on purpose."""
        return cls(set(_descriptors()), set(_children()), set(_threads()))

    def __sub__(self, before: Held) -> list[str]:
        """What is new since `before`, for people."""
        return [
            *(f"descriptor {fd}" for fd in sorted(self.fds - before.fds)),
            *(f"child {pid} {_command(pid)}" for pid in self.children - before.children),
            *(f"{thread}" for thread in self.threads - before.threads),
        ]


def _descriptors() -> Iterator[str]:
    tracker = getattr(
        sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None
    )
    lasting = {str(getattr(tracker, "_fd", None))}
    for number, target in targets().items():
        if number not in lasting:
            yield f"{number} -> {target}"


def _children() -> Iterator[int]:
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            for pid in map(int, (task / "children").read_text().split()):
                if not any(name in _command(pid) for name in LASTING_CHILDREN):
                    yield pid


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() or "(zombie)"
    except (FileNotFoundError, ProcessLookupError):
        return "(gone)"


def _threads() -> Iterator[threading.Thread]:
    return (t for t in threading.enumerate() if not t.name.startswith(LASTING_THREADS))
