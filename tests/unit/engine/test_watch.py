"""What the log is told of a daemon that goes and comes, by a thread that ends when told to."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from preloadd.domain.lifecycle import State
from preloadd.engine.watch import Account, Line, Watcher, pauses
from preloadd.errors import OutOfDescriptors, PreloadError
from preloadd.protocol import messages as m
from preloadd.transport.blocking import Client, connect
from tests.rank_stand_in import GENERATION, RankStandIn
from tests.threads import threads_left
from tests.waiting import eventually

OTHER = "0f" * 16
GONE = "the daemon of CPU-0 is gone; the weights stay mapped, this engine goes on"
BACK = "the daemon of CPU-0 is back with the same weights: nothing to do"
CHANGED = "the daemon of CPU-0 has other weights now: this engine keeps the old ones until it"


def test_pauses_grow_up_to_half_a_minute():
    assert list(itertools.islice(pauses(), 7)) == [1, 2, 4, 8, 16, 30, 30]


@pytest.fixture
def said(caplog):
    """What was said to people so far: level and text of each line."""
    caplog.set_level("INFO", "preloadd.engine.watch")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


# -- what is worth a word --


class Told(Account):
    def tell(self, *steps) -> None:
        for step in steps:
            self.gone() if step is None else self.told(*step)


SERVES, LOADS, STOPS = (State.SERVING, GENERATION), (State.LOADING, ""), (State.STOPPING, "")


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([SERVES, SERVES], []),
        ([SERVES, STOPS, None, None, None], [GONE]),
        ([SERVES, None, LOADS, SERVES, SERVES], [GONE, BACK]),
        ([None, SERVES, None, SERVES], [GONE, BACK, GONE, BACK]),
        ([None, LOADS, (State.SERVING, OTHER), (State.SERVING, OTHER)], [GONE, CHANGED]),
        ([None, (State.SERVING, OTHER), None, (State.SERVING, OTHER)], [GONE, CHANGED] * 2),
        ([SERVES, (State.RELEASED, ""), LOADS, (State.SERVING, OTHER)], [CHANGED]),
        ([(State.SERVING, OTHER)], [CHANGED]),
    ],
)
def test_each_thing_is_said_once(said, steps, expected):
    Told("CPU-0", GENERATION).tell(*steps)
    assert [text[: len(end)] for (_, text), end in zip(said(), expected, strict=True)] == expected
    assert all(level == ("INFO" if text == BACK else "WARNING") for level, text in said())


# -- the thread --


class Watched(RankStandIn):
    """Answers everything with the one thing it was told to, or keeps silent."""

    def _hear(self, client: socket.socket, clients: list[socket.socket]) -> None:
        with suppress(ConnectionError):  # a watcher that ends does not wait for its answer
            super()._hear(client, clients)

    def _answer(self, request: m.Request) -> m.Reply:
        return self.told


class Daemon:
    """A rank that can be watched, go and come back; `connect` is how an engine reaches it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tries = 0
        self.rank: RankStandIn | None = None
        self.fails: PreloadError | None = None

    def come(self, reply: m.Reply | None) -> None:
        self.rank = Watched(self.folder, reply, locked=False)

    def go(self) -> None:
        if self.rank is not None:
            self.rank.close()
            self.rank = None

    def connect(self) -> Client:
        self.tries += 1
        if self.fails is not None:
            raise self.fails
        return connect(self.folder / "rank.sock", timeout=5)

    def heard(self, number: int = 1) -> None:
        """Wait until it was asked so often."""
        eventually(lambda: len(self.rank.asked) >= number, lambda: "a watch")

    def tried(self, more: int) -> None:
        """Wait until it was tried to reach so much more often."""
        goal = self.tries + more
        eventually(lambda: self.tries >= goal, lambda: "another try")


STATE = m.StateChanged(state=State.SERVING, generation=GENERATION)


@pytest.fixture
def daemon(socket_dir) -> Iterator[Daemon]:
    with ExitStack() as undo:
        made = Daemon(socket_dir / "CPU-0")
        undo.callback(made.go)
        yield made


def quickly() -> Iterator[float]:
    return itertools.repeat(0.01)


@pytest.fixture
def watch(daemon) -> Iterator:
    with ExitStack() as undo:

        def watch(*, between=quickly, timeout=5.0) -> Watcher:
            line = Line("CPU-0", daemon.connect, timeout)
            watcher = Watcher(line, GENERATION, between=between)
            undo.callback(watcher.stop)
            return watcher

        yield watch


@pytest.fixture
def watching(daemon, watch):
    """A watcher of a daemon that serves the weights which the engine has."""
    daemon.come(STATE)

    def start(**more) -> Watcher:
        watcher = watch(**more)
        daemon.heard()
        return watcher

    return start


def until_said(said, *lines) -> None:
    def texts() -> list[str]:
        return [text for _, text in said()]

    eventually(
        lambda: [t[: len(line)] for t, line in zip(texts(), lines, strict=False)] == list(lines),
        lambda: f"{lines}, but {texts()}",
    )
    assert len(said()) == len(lines)


def test_a_daemon_that_goes_is_told_once_and_that_it_is_back(daemon, watching, said):
    watching()
    assert said() == []
    daemon.go()
    until_said(said, GONE)
    daemon.tried(5)
    assert len(said()) == 1
    daemon.come(STATE)
    until_said(said, GONE, BACK)
    daemon.go()
    until_said(said, GONE, BACK, GONE)


def test_a_daemon_that_comes_back_with_other_weights_is_a_warning(daemon, watching, said):
    watching()
    daemon.go()
    until_said(said, GONE)
    daemon.come(m.StateChanged(state=State.SERVING, generation=OTHER))
    until_said(said, GONE, CHANGED)
    assert said()[1][0] == "WARNING"


def test_pauses_begin_anew_once_it_was_there(daemon, watching, said):
    begun = []

    def between() -> Iterator[float]:
        begun.append(None)
        return quickly()

    watching(between=between)
    daemon.go()
    until_said(said, GONE)
    daemon.tried(3)
    before = len(begun)
    daemon.come(STATE)
    until_said(said, GONE, BACK)
    daemon.go()
    until_said(said, GONE, BACK, GONE)
    daemon.tried(3)
    assert len(begun) == before + 1


@pytest.mark.parametrize(
    "reply",
    [m.NotAvailable(reason=m.Reason.BUSY, detail="256 clients"), None],
    ids=["busy", "silent"],
)
def test_a_daemon_that_has_no_ear_for_it(daemon, watch, said, reply):
    """One that is busy is there. One that says nothing may as well not be."""
    daemon.come(reply)
    watch(timeout=0.02)
    daemon.heard(3)
    if reply is None:
        until_said(said, GONE)
    else:
        assert said() == []


def test_without_descriptors_nothing_is_known(daemon, watch, said):
    daemon.fails = OutOfDescriptors("no more")
    watch()
    daemon.tried(3)
    assert said() == []
    daemon.fails = PreloadError("it is somebody else's")
    until_said(said, GONE)


# -- its end --


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "preloadd watch CPU-0"]


def never() -> Iterator[float]:
    return itertools.repeat(3600.0)


@pytest.mark.parametrize("daemon_is", ["serving", "gone", "silent"])
def test_it_ends_at_once(daemon, watch, said, daemon_is):
    if daemon_is != "gone":
        daemon.come(STATE if daemon_is == "serving" else None)
    watcher = watch(between=never)
    if daemon_is == "gone":
        until_said(said, GONE)
    else:
        daemon.heard()
    before = said()
    (thread,) = threads()
    assert thread.daemon
    since = time.monotonic()
    watcher.stop()
    thread.join(5)
    assert not thread.is_alive()
    assert time.monotonic() - since < 1
    assert said() == before


def test_stopping_twice_is_stopping_once(watching):
    watcher = watching()
    watcher.stop()
    watcher.stop()


def test_one_that_is_dropped_ends_too(daemon):
    daemon.come(STATE)
    watcher = Watcher(Line("CPU-0", daemon.connect, 5.0), GENERATION)
    daemon.heard()
    with pytest.warns(ResourceWarning):
        del watcher
    eventually(lambda: not threads(), lambda: "end of the thread")


def test_a_child_that_was_forked_does_not_end_it(daemon, said):
    daemon.come(STATE)
    watcher = Watcher(Line("CPU-0", daemon.connect, 5.0), GENERATION, between=quickly)
    daemon.heard()
    child = os.fork()
    if child == 0:
        watcher.stop()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    daemon.go()
    until_said(said, GONE)
    watcher.stop()


def test_it_ends_though_a_child_that_was_forked_lives_on(daemon):
    daemon.come(STATE)
    watcher = Watcher(Line("CPU-0", daemon.connect, 5.0), GENERATION)
    daemon.heard()
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        watcher.stop()
        eventually(lambda: not threads(), lambda: "end of the thread")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_without_threads_or_descriptors_there_is_none(descriptors_left):
    line = Line("CPU-0", pytest.fail, 5.0)
    with threads_left(0), pytest.raises(PreloadError, match="watching the daemon of CPU-0"):
        Watcher(line, GENERATION)
    with descriptors_left(1), pytest.raises(OutOfDescriptors, match="watching the daemon of CPU-0"):
        Watcher(line, GENERATION)


def test_what_was_not_foreseen_ends_it_with_a_trace(said, caplog):
    def fail() -> Client:
        raise ZeroDivisionError

    watcher = Watcher(Line("CPU-0", fail, 5.0), GENERATION)
    eventually(lambda: not threads(), lambda: "end of the thread")
    assert "is not watched any more" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    watcher.stop()
