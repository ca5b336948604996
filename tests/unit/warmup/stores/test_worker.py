"""A store that does anything, in a thread."""

import threading
import time

import pytest

from preloadd.errors import ConfigError, PreloadError
from preloadd.warmup.stores.api import StoreFault
from preloadd.warmup.stores.worker import Worker

DEADLINE_S = 0.15


class Held:
    """A store whose calls wait until it is let go."""

    name = "held"

    def __init__(self):
        self.go = threading.Event()
        self.asked = []
        self.closed = threading.Event()

    def find(self, key, limit):
        self.asked.append(key)
        self.go.wait(10)
        return key.encode()

    def keep(self, key, value):
        raise NotImplementedError

    def close(self):
        self.closed.set()


def ask(worker, key="k"):
    return worker.answer(worker.ask(lambda store: store.find(key, 9)))


def test_asked_and_closed():
    store = Held()
    store.go.set()
    with Worker("held", lambda: store, DEADLINE_S) as worker:
        worker.opened()
        assert ask(worker) == b"k"
    assert store.closed.is_set()


def test_what_hangs_costs_one_call_its_deadline_and_the_next_ones_nothing():
    store = Held()
    with Worker("held", lambda: store, DEADLINE_S) as worker:
        for least, most in ((DEADLINE_S, 1), (0, 0.05), (0, 0.05)):
            begun = time.monotonic()
            with pytest.raises(StoreFault, match=r"not answered for 0\.15 s"):
                ask(worker)
            assert least <= time.monotonic() - begun + 0.001 < most + 0.001
        store.go.set()
        time.sleep(0.05)
        assert ask(worker, "later") == b"later"
    assert store.asked == ["k", "later"]


def test_whoever_waits_behind_what_hangs_is_not_done_afterwards():
    store = Held()
    with Worker("held", lambda: store, DEADLINE_S) as worker:
        first = worker.ask(lambda store: store.find("first", 9))
        second = worker.ask(lambda store: store.find("second", 9))
        for asked in (first, second):
            with pytest.raises(StoreFault):
                worker.answer(asked)
        store.go.set()
    assert store.asked == ["first"]


def test_one_that_hangs_for_good_is_left_behind(caplog):
    store = Held()
    worker = Worker("held", lambda: store, DEADLINE_S)
    with pytest.raises(StoreFault):
        ask(worker)
    begun = time.monotonic()
    worker.close()
    assert time.monotonic() - begun < 1
    assert "held hangs" in caplog.text
    store.go.set()
    assert store.closed.wait(5)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (StoreFault("why"), StoreFault, "why"),
        (OSError(28, "No space"), OSError, "No space"),
        (TimeoutError("late"), StoreFault, "in vain: late"),
        (ZeroDivisionError("a\nb"), StoreFault, r"ZeroDivisionError: a\\nb"),
    ],
)
def test_errors(error, kind, text):
    def fail(_):
        raise error

    with Worker("x", Held, DEADLINE_S) as worker:
        with pytest.raises(kind, match=text):
            worker.answer(worker.ask(fail))
        assert worker.answer(worker.ask(lambda store: store.name)) == "held"


def test_one_that_cannot_be_made_says_so_at_once_and_ever_after():
    def make():
        raise ConfigError("no such thing")

    with Worker("x", make, DEADLINE_S) as worker:
        for call in (worker.opened, lambda: ask(worker), lambda: ask(worker)):
            with pytest.raises(PreloadError, match="no such thing"):
                call()


def test_one_whose_making_hangs_is_asked_once_it_is_there():
    go, store = threading.Event(), Held()
    store.go.set()

    def make():
        go.wait(10)
        return store

    with Worker("x", make, DEADLINE_S) as worker:
        worker.opened()
        time.sleep(0.01)
        with pytest.raises(StoreFault, match="not answered"):
            ask(worker)
        go.set()
        time.sleep(0.05)
        assert ask(worker) == b"k"


def test_a_close_that_fails_is_told(caplog):
    store = Held()
    store.close = lambda: 1 / 0
    Worker("x", lambda: store, DEADLINE_S).close()
    assert "could not be closed: division" in caplog.text
