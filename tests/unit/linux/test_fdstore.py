from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from preloadd.errors import OutOfDescriptors
from preloadd.linux import memfd, seqpacket
from preloadd.linux.fds import OwnedFd
from preloadd.linux.fdstore import FdStore


@pytest.fixture
def store() -> Iterator[FdStore]:
    with FdStore(limit=8) as store:
        yield store


def null() -> OwnedFd:
    return OwnedFd(os.open("/dev/null", os.O_RDONLY))


def parked(store: FdStore, name: str, *, poll: bool) -> tuple[socket.socket, socket.socket]:
    """A connection whose daemon's end is stored, as its daemon would do it: a copy of its own."""
    engine, daemon = seqpacket.pair()
    store.add(name, [OwnedFd(os.dup(daemon.fileno()))], poll=poll)
    return engine, daemon


def wakes(store: FdStore) -> bool:
    return bool(select.select([store], [], [], 0)[0])


def names(store: FdStore) -> list[str]:
    return [name for name, _ in store.items()]


def test_keeps_several_per_name_and_lends_them(store: FdStore) -> None:
    store.add("a", [null(), null()], poll=False)
    store.add("b", [null()], poll=False)
    store.add("a", [null()], poll=False)
    assert names(store) == ["a", "a", "b", "a"]
    assert len({os.fstat(fd).st_ino for _, fd in store.items()}) == 1
    assert len(store) == 4


def test_removes_by_name_and_closes(store: FdStore) -> None:
    store.add("a", [null(), null()], poll=True)
    store.add("b", [null()], poll=False)
    gone = [fd for name, fd in store.items() if name == "a"]
    store.remove("a")
    store.remove("never stored")
    assert names(store) == ["b"]
    for fd in gone:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_a_polled_connection_goes_with_its_peer_although_others_hold_it(store: FdStore) -> None:
    engine, daemon = parked(store, "lease", poll=True)
    with daemon:
        store.add("chunk", [memfd.create("chunk")], poll=True)
        assert not wakes(store)
        assert store.expire() == []
        engine.close()
        assert wakes(store)
        assert store.expire() == ["lease"]
        assert names(store) == ["chunk"]
        # And is forgotten by epoll, though the daemon's copy is still open.
        assert not wakes(store)


def test_unread_data_does_not_wake_the_loop(store: FdStore) -> None:
    engine, daemon = parked(store, "lease", poll=True)
    with engine, daemon:
        engine.send(b"request")
        assert not wakes(store)
        assert store.expire() == []


def test_without_polling_a_hang_up_means_nothing(store: FdStore) -> None:
    engine, daemon = parked(store, "listen", poll=False)
    engine.close()
    daemon.close()
    assert not wakes(store)
    assert store.expire() == []
    assert names(store) == ["listen"]


def test_many_hang_ups_are_found_at_once(store: FdStore) -> None:
    with ExitStack() as daemons:
        for number in range(6):
            engine, daemon = parked(store, f"lease-{number}", poll=True)
            daemons.enter_context(daemon)
            engine.close()
        assert sorted(store.expire()) == [f"lease-{number}" for number in range(6)]
    assert len(store) == 0


def test_what_does_not_fit_is_closed_and_told(store: FdStore) -> None:
    store.add("a", [null() for _ in range(7)], poll=False)
    more = [null(), null()]
    with pytest.raises(OutOfDescriptors, match=r"2 more .*\(b\).* store of 8 that holds 7"):
        store.add("b", more, poll=False)
    assert all(fd.closed for fd in more)
    store.add("b", [null()], poll=False)
    assert len(store) == 8
