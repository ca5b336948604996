import logging
import threading
import time

import pytest

from preloadd.warmup.stores.api import MAX_NBYTES, StoreFault
from preloadd.warmup.stores.chain import Stores
from preloadd.warmup.stores.worker import Worker

DEADLINE_S = 0.2


class Shelf:
    """A store in memory, which can be told to fail."""

    def __init__(self, name="shelf", **values):
        self.name = name
        self.values = {key: value.encode() for key, value in values.items()}
        self.error = None
        self.go = threading.Event()
        self.go.set()

    def find(self, key, limit):
        self._work()
        return self.values.get(key)

    def keep(self, key, value):
        self._work()
        self.values.setdefault(key, value)

    def replace(self, key, value):
        self._work()
        self.values[key] = value

    def close(self):
        self.go.set()

    def _work(self):
        self.go.wait(10)
        if self.error:
            raise self.error


@pytest.fixture
def chain():
    """A function: stores as one."""
    opened = []

    def make(*shelves):
        workers = [Worker(shelf.name, lambda shelf=shelf: shelf, DEADLINE_S) for shelf in shelves]
        opened.append(Stores(workers))
        return opened[-1]

    yield make
    for stores in opened:
        stores.close()


def test_none():
    with Stores() as stores:
        assert stores.find("k") is None
        stores.keep("k", b"v")
        assert stores.names == stores.faults == ()


def test_the_first_that_has_it_wins(chain):
    stores = chain(Shelf("a"), Shelf("b", k="of b"), Shelf("c", k="of c", x="x"))
    assert stores.names == ("a", "b", "c")
    assert stores.find("k") == b"of b"
    assert stores.find("x") == b"x"
    assert stores.find("y") is None
    assert stores.faults == ()


def test_all_are_given_what_is_made(chain):
    shelves = [Shelf("a"), Shelf("b", k="old")]
    chain(*shelves).keep("k", b"new")
    assert [shelf.values["k"] for shelf in shelves] == [b"new", b"old"]


@pytest.mark.parametrize("error", [StoreFault("away"), OSError(5, "away"), KeyError("away")])
def test_one_that_fails_is_passed_over(chain, caplog, error):
    caplog.set_level(logging.INFO)
    bad, good = Shelf("bad"), Shelf("good", k="v")
    bad.error = error
    stores = chain(bad, good)
    for _ in range(3):
        assert stores.find("k") == b"v"
        stores.keep("l", b"w")
    assert good.values["l"] == b"w"
    (fault,) = stores.faults
    assert fault.startswith("bad: ")
    assert "away" in fault
    assert caplog.text.count("the store bad is passed over") == 1
    bad.error = None
    assert stores.find("k") == b"v"
    assert stores.faults == ()
    assert caplog.text.count("the store bad is of use again") == 1


def test_one_that_hangs_costs_its_deadline_once(chain):
    hung, good = Shelf("hung"), Shelf("good", k="v")
    hung.go.clear()
    stores = chain(hung, good)
    begun = time.monotonic()
    for _ in range(20):
        assert stores.find("k") == b"v"
        stores.keep("l", b"w")
    assert time.monotonic() - begun < DEADLINE_S * 2
    hung.go.set()


def test_all_are_given_it_at_once(chain):
    shelves = [Shelf(str(number)) for number in range(5)]
    for shelf in shelves:
        shelf.go.clear()
    begun = time.monotonic()
    chain(*shelves).keep("k", b"v")
    assert time.monotonic() - begun < DEADLINE_S * 2
    for shelf in shelves:
        shelf.go.set()


def test_more_than_was_asked_for_is_not_believed(chain):
    stores = chain(Shelf("a", k="1234"), Shelf("b", k="12"))
    assert stores.find("k", 3) == b"12"
    assert stores.faults == ("a: a value has 4 bytes, and 3 are the most that is taken",)


def test_nothing_and_too_much_are_kept_nowhere(chain):
    shelf = Shelf()
    stores = chain(shelf)
    for value in (b"", bytes(MAX_NBYTES + 1)):
        stores.keep("k", value)
        assert len(stores.faults) == 1
    assert not shelf.values


def test_what_is_no_key_is_a_mistake_of_whoever_asks(chain):
    stores = chain(Shelf())
    for call in (lambda: stores.find("../k"), lambda: stores.keep("../k", b"v")):
        with pytest.raises(ValueError, match="no key"):
            call()


def test_from_several_threads(chain):
    stores = chain(Shelf("a", k="v"))
    found = []
    threads = [threading.Thread(target=lambda: found.append(stores.find("k"))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"v"] * 20


def test_what_is_not_fit_hides_no_store_and_is_told_once(chain, caplog):
    stores = chain(Shelf("a", k="bad"), Shelf("b", k="good"))
    for _ in range(3):
        assert stores.find("k", fit=lambda value: value == b"good") == b"good"
    (line,) = caplog.messages
    assert "the store a has under k" in line
    assert "remove it" in line
    assert stores.find("k", fit=lambda _: False) is None
    assert stores.find("k") == b"bad"
    assert stores.faults == ()


def test_what_is_not_fit_is_replaced_and_all_else_stays(chain, caplog):
    shelves = [Shelf("a", k="damaged"), Shelf("b", k="good one"), Shelf("c")]
    stores = chain(*shelves)
    stores.keep("k", b"good two", lambda value: value.startswith(b"good"))
    assert [shelf.values["k"] for shelf in shelves] == [b"good two", b"good one", b"good two"]
    assert caplog.messages == ["what the store a had under k was damaged: replaced"]
    assert stores.faults == ()


def test_where_it_cannot_be_seen_what_is_there_nothing_is_replaced(chain):
    shelf = Shelf("a", k="damaged")
    shelf.error = OSError(5, "away")
    stores = chain(shelf)
    stores.keep("k", b"good", lambda _: False)
    assert shelf.values["k"] == b"damaged"
    assert "away" in stores.faults[0]
