"""Blocking work that may hang; what hangs here is a FIFO that nobody opens for writing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from preloadd.linux.fds import OwnedFd
from preloadd.transport.threads import MOST, Threads, settle
from tests.threads import threads_left

pytestmark = pytest.mark.anyio

ENDING = """
import sys
import anyio
from preloadd.transport.threads import Threads

async def main():
    with anyio.move_on_after(0.05):
        await Threads("the disk").run(lambda: open(sys.argv[1]).read())
    print("went on")

anyio.run(main)
sys.exit(3)
"""


class Hung:
    """Opens the FIFO, which hangs until it is let go."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self.called = 0
        self._writers: list[OwnedFd] = []

    def __call__(self) -> None:
        self.called += 1
        os.close(os.open(self.path, os.O_RDONLY))

    def let_go(self) -> None:
        self._writers.append(OwnedFd(os.open(self.path, os.O_RDWR)))

    def close(self) -> None:
        self.let_go()
        for thread in threading.enumerate():
            if thread.name.startswith("asking"):
                thread.join(5)
        for writer in self._writers:
            writer.close()


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Hung]:
    with closing(Hung(tmp_path / "hung")) as disk:
        yield disk


async def given_up(threads: Threads, work: Callable[[], object], after: float = 0.02) -> None:
    with anyio.move_on_after(after) as scope:
        await threads.run(work)
    assert scope.cancelled_caught


async def test_work_is_done_beside_the_loop() -> None:
    assert await Threads("the disk").run(threading.get_ident) != threading.get_ident()


@pytest.mark.parametrize("error", [KeyError("why"), TimeoutError("why"), SystemExit(3)])
async def test_what_work_raises_is_raised(error: BaseException) -> None:
    def work() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await Threads("the disk").run(work)
    assert caught.value is error


async def test_a_deadline_is_kept(hung: Hung) -> None:
    since = time.monotonic()
    with pytest.raises(TimeoutError, match=r"^the disk did not answer within 0\.05 s$") as caught:
        await Threads("the disk").run(hung, within=0.05)
    assert caught.value.errno is None
    assert time.monotonic() - since < 1


async def test_who_is_cancelled_goes_at_once(hung: Hung) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Threads("the disk").run, hung)
        with anyio.fail_after(5):
            while not hung.called:  # noqa: ASYNC110
                await anyio.sleep(0.005)
        tasks.cancel_scope.cancel()


async def test_nothing_is_begun_for_who_is_cancelled_already() -> None:
    begun = threading.Event()
    await given_up(Threads("the disk"), begun.set, after=0)
    assert not begun.is_set()


async def test_what_hangs_is_asked_no_more_until_it_answers(hung: Hung) -> None:
    threads, other = Threads("the disk"), Threads("another disk")
    for _ in range(MOST):
        await given_up(threads, hung)
    for _ in range(20):
        with pytest.raises(OSError, match=f"the disk still does not answer {MOST} earlier calls"):
            await threads.run(hung)
    assert hung.called == MOST
    assert await other.run(lambda: "answered") == "answered"
    assert await to_thread.run_sync(lambda: "answered") == "answered"
    hung.let_go()
    with anyio.fail_after(5):
        while True:
            try:
                assert await threads.run(lambda: "answered") == "answered"
                break
            except OSError:
                await anyio.sleep(0.005)


async def test_what_is_only_slow_is_asked_by_many_at_once() -> None:
    threads, told = Threads("the disk"), []
    together = threading.Barrier(3 * MOST)

    async def ask() -> None:
        told.append(await threads.run(lambda: together.wait(5)))

    async with anyio.create_task_group() as tasks:
        for _ in range(together.parties):
            tasks.start_soon(ask)
    assert sorted(told) == list(range(together.parties))


async def test_a_thread_that_is_refused_is_told_with_the_limits() -> None:
    with threads_left(0), pytest.raises(OSError, match=r"asking the disk: .*TasksMax="):
        await Threads("the disk").run(print)


def test_an_answer_after_the_end_of_the_loop_is_for_nobody(hung: Hung) -> None:
    before = threading.enumerate()
    anyio.run(given_up, Threads("the disk"), hung)
    (left,) = set(threading.enumerate()) - set(before)
    hung.let_go()
    left.join(5)
    assert not left.is_alive()


def test_a_process_ends_with_its_own_status_while_a_call_hangs(hung: Hung) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDING, os.fspath(hung.path)],
        capture_output=True,
        timeout=20,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, b"went on\n", b"")


async def test_what_is_given_up_comes_to_its_end_where_it_can(tmp_path: Path) -> None:
    written = tmp_path / "written"

    def write() -> None:
        time.sleep(0.3)
        written.write_text("all")

    with anyio.move_on_after(0.05):
        await Threads("the disk").run(write)
    settle(5)
    assert written.read_text() == "all"


async def test_one_that_hangs_is_waited_for_no_longer_than_is_said(hung: Hung) -> None:
    with anyio.move_on_after(0.05):
        await Threads("the disk").run(hung)
    began = time.monotonic()
    settle(0.2)
    assert 0.2 <= time.monotonic() - began < 1
