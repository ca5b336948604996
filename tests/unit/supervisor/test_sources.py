import logging
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from preloadd.errors import ConfigError
from preloadd.supervisor.sources import Source
from tests.threads import threads_left

pytestmark = pytest.mark.anyio

HANGS = """
import threading, anyio
from preloadd.supervisor.sources import Source

async def main():
    async with anyio.create_task_group() as tasks:
        source = Source("a driver", threading.Event().wait, False)
        tasks.start_soon(lambda: source.watch(None, pause=1, overdue=0.05))
        await source.known.wait()
        assert "not answering since" in source.trouble
        tasks.cancel_scope.cancel()

anyio.run(main)
"""


@asynccontextmanager
async def watching(source: Source, heard=None, *, overdue=10.0) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: source.watch(heard, pause=0.01, overdue=overdue))
        with anyio.fail_after(5):
            yield
        tasks.cancel_scope.cancel()


async def until(condition: Callable[[], object]) -> None:
    # A source tells nobody but the one that watches.
    while not condition():  # noqa: ASYNC110
        await anyio.sleep(0.005)


async def test_the_last_answer_is_kept_and_each_is_told_of():
    answers = iter(range(10**6))
    told = []

    async def heard() -> None:
        told.append(source.value)

    source = Source("counter", lambda: next(answers), -1)
    assert source.value == -1
    async with watching(source, heard):
        await source.known.wait()
        assert told[0] == 0
        await until(lambda: len(told) >= 3)
    assert told[:3] == [0, 1, 2]
    assert source.trouble == ""


async def test_one_that_hangs_is_told_as_such_and_asked_no_second_time(caplog):
    caplog.set_level(logging.INFO)
    asked, answer = [], threading.Event()

    def ask() -> str:
        asked.append(1)
        answer.wait(10)
        return "new"

    source = Source("a driver", ask, "old")
    async with watching(source, overdue=0.05):
        await source.known.wait()
        assert source.trouble.startswith("a driver: not answering since 2")
        assert source.trouble.endswith(" UTC")
        assert source.value == "old"
        await anyio.sleep(0.1)
        assert len(asked) == 1
        answer.set()
        await until(lambda: source.value == "new")
        assert source.trouble == ""
    assert "a driver: answers again" in caplog.text


async def test_an_error_is_trouble_and_what_was_known_still_holds(caplog):
    outcomes = iter([ConfigError("no such file")] * 3)

    def ask() -> str:
        for outcome in outcomes:
            raise outcome
        return "there"

    source = Source("the list", ask, "")
    async with watching(source):
        await source.known.wait()
        assert (source.value, source.trouble) == ("", "the list: no such file")
        await until(lambda: source.value)
        assert source.trouble == ""
    assert caplog.text.count("no such file") == 1


async def test_any_other_fault_is_trouble_and_its_traceback_is_logged_once(caplog):
    faults = [OSError(5, "Input/output error")] * 3

    def ask() -> str:
        if faults:
            raise faults.pop()
        return "there"

    source = Source("the list", ask, "")
    async with watching(source):
        await source.known.wait()
        assert source.trouble == "the list: this supervisor failed to ask it: its log says why"
        await until(lambda: source.value)
        assert source.trouble == ""
    assert caplog.text.count("Traceback") == 1
    assert "Input/output error" in caplog.text


async def test_what_an_error_names_can_be_told():
    def ask() -> str:
        raise ConfigError("no file b\udcff")

    source = Source("the list", ask, "")
    async with watching(source):
        await source.known.wait()
        assert source.trouble == "the list: no file b\\udcff"


@pytest.mark.slow
async def test_the_process_ends_though_one_hangs():
    with anyio.fail_after(10):
        await anyio.run_process([sys.executable, "-c", HANGS], stderr=None)


async def test_without_a_thread_it_is_in_trouble_and_asks_again():
    source = Source("counter", lambda: 1, 0)
    with threads_left(0):
        async with watching(source):
            await until(lambda: "ulimit" in source.trouble)
    async with watching(source):
        await until(lambda: source.value)
    assert source.trouble == ""
