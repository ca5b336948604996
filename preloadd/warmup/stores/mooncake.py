"""Run as a process of its own: the client of a Mooncake store, and nothing else.

The library is to be kept out of daemons: calls before its setup or after its close crash, some hang
for half a minute, some do so with the interpreter's lock held. So every call here is made under an
alarm of the kernel's, and this process ends with whoever started it, whatever it is doing.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from preloadd.domain.lines import one_line
from preloadd.linux.passed import inherited
from preloadd.warmup.stores.mooncake_config import Config, decoded
from preloadd.warmup.stores.wire import (
    Outcome,
    Reply,
    Request,
    Verb,
    receive_request,
    send_reply,
)

CALLS = "calls"
LIFE = "life"
"""Names of the descriptors that are passed: where requests come from, and a pipe whose other end is
closed when whoever holds it ends."""

ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_RPC_CONNECT_TIMEOUT_MS": "2000",
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
}
"""What the library must find when it is loaded; without these it retries for minutes."""

_LEAVE_S = 5.0
_ALARM_S = 1.0
"""More seconds than a request has: those who wait for it should be the first to know."""

_CONNECT_S = 1.0
_AGAIN_S = 0.02
_TRIES = 3
_ROOM_S = 1.0
"""How long eviction may take to make room, and a writer who was first to complete the value."""

_NO_ROOM, _NOT_READY, _MISSING, _EXISTS = -200, -703, -704, -705
_CODES = {
    -1: "internal error",
    _NO_ROOM: "no room in the pool",
    -600: "parameters are refused",
    -800: "the transfer failed",
    -900: "the master cannot be reached",
    -901: "the master does not answer",
}


class Library(Protocol):
    """The calls of `MooncakeDistributedStore` that are used. Negative results are errors."""

    def setup(
        self,
        host: str,
        metadata: str,
        segment: int,
        buffer: int,
        protocol: str,
        devices: str,
        master: str,
        **more: str,
    ) -> int: ...
    def get_size(self, key: str) -> int: ...
    def get_buffer(self, key: str) -> memoryview | None: ...
    def is_exist(self, key: str) -> int: ...
    def put(self, key: str, value: bytes | bytearray) -> int: ...
    def upsert(self, key: str, value: bytes | bytearray) -> int: ...
    def close(self) -> int: ...


class Refused(Exception):
    """Not with this key or value."""


class Down(Exception):
    """Not now."""


class Session:
    """The library's client, set up when it is first needed. `make` makes one."""

    def __init__(self, make: Callable[[], Library], config: Config) -> None:
        self._make = make
        self._config = config
        self._store: Library | None = None

    def find(self, key: str, limit: int, until: float) -> memoryview | None:
        """The value, in memory that the library lends as long as it is looked at."""
        store, patient = self._opened(), min(time.monotonic() + _ROOM_S, until)
        for _ in range(_TRIES):
            nbytes = store.get_size(key)
            if nbytes in (_MISSING, _NOT_READY):
                return None
            if nbytes < 0:
                raise Down(_coded(nbytes))
            if nbytes > min(limit, self._config.local_buffer_size):
                raise Refused(self._too_long(nbytes, limit))
            handle = store.get_buffer(key)
            if handle is not None:
                return memoryview(handle).cast("B")
            # Its lease may have expired meanwhile, or its owner be gone.
            if time.monotonic() > patient:
                raise Down("a value takes long to be transferred, and fails (is its owner up?)")
            time.sleep(_AGAIN_S)
        raise Refused("a value cannot be transferred (is its owner up, and the lease long enough?)")

    def keep(self, key: str, value: bytes | bytearray, until: float) -> None:
        """Have the value there, or one that was there before."""
        self._require_room(value)
        store, patient = self._opened(), min(time.monotonic() + _ROOM_S, until)
        while True:
            code = store.put(key, value)
            # Success is no proof: an older value that was never completed answers the same.
            if code in (0, _EXISTS) and _exists(store, key):
                return None
            if code not in (0, _EXISTS, _NO_ROOM):
                raise Down(_coded(code))
            if time.monotonic() >= patient:
                if code == _NO_ROOM:
                    raise Refused("the pool has no room, and evicts nothing (enlarge it)")
                return _replace(store, key, value)
            time.sleep(_AGAIN_S)

    def replace(self, key: str, value: bytes | bytearray) -> None:
        """Have the value there, whatever was there before."""
        self._require_room(value)
        _replace(self._opened(), key, value)

    def leave(self) -> None:
        """Let go of the pool; a later call joins it again."""
        if self._store is not None:
            store, self._store = self._store, None
            store.close()

    def _opened(self) -> Library:
        """The client; it must never be called before its setup, nor after it failed."""
        if self._store is None:
            config, store = self._config, self._make()
            own = reach(config.master_server_address)
            more = {} if config.tenant_id == "default" else {"tenant_id": config.tenant_id}
            code = store.setup(
                config.host or own,
                config.metadata_server,
                config.global_segment_size,
                config.local_buffer_size,
                config.protocol,
                config.device_name,
                config.master_server_address,
                **more,
            )
            if code:
                where = config.master_server_address
                raise Down(f"the pool of {where} cannot be joined: {_coded(code)}")
            self._store = store
        return self._store

    def _require_room(self, value: bytes | bytearray) -> None:
        if len(value) > self._config.local_buffer_size:
            raise Refused(self._too_long(len(value), len(value)))

    def _too_long(self, nbytes: int, limit: int) -> str:
        if nbytes > limit:
            return f"a value has {nbytes:,} bytes, and {limit:,} are the most that is taken"
        return f"a value has {nbytes:,} bytes, and local_buffer_size is less"


def _replace(store: Library, key: str, value: bytes | bytearray) -> None:
    """In the place of what a writer has left behind half-written, or somebody has damaged."""
    code = store.upsert(key, value)
    if code or not _exists(store, key):
        raise Down(f"what is there, and is damaged, cannot be replaced: {_coded(code)}")


def _exists(store: Library, key: str) -> bool:
    code = store.is_exist(key)
    if code < 0:
        raise Down(_coded(code))
    return code == 1


def reach(master: str) -> str:
    """This host's own address as the master sees it; Down if nobody listens there.

    Setup would hold the interpreter's lock for 4 s to find that out.
    """
    if "://" in master:  # a registry of masters, which only the library can read
        return socket.gethostbyname(socket.gethostname())
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S) as reached:
            return str(reached.getsockname()[0])
    except (OSError, OverflowError) as error:
        raise Down(f"no master listens at {master}: {one_line(error)}") from None


def main() -> int:
    """Serve whoever passed the descriptors until that hangs up."""
    given = inherited(os.environ, os.getpid())
    with given[LIFE][0] as life, socket.socket(fileno=given[CALLS][0].take()) as calls:
        end_with(life.fileno())
        # Of what crashes here nobody wants the core: it has transfer buffers of gigabytes.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(EOFError, OSError):
            serve(calls)
    return 0


def end_with(pipe: int) -> None:
    """Have the kernel end this process once the other end of `pipe` is closed.

    The signal does so whichever thread runs, and whoever has the interpreter's lock.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGIO, signal.SIGALRM])
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    waiting = select.poll()
    waiting.register(pipe, 0)
    if waiting.poll(0):  # before anybody was to be told
        sys.exit(0)


def serve(calls: socket.socket) -> None:
    """Answer requests one after the other; EOFError at the end."""
    opening = receive_request(calls)
    config = decoded(opening.value)
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        send_reply(calls, Reply(Outcome.UNFIT, one_line(error).encode()))
        return
    send_reply(calls, Reply(Outcome.DONE))
    session = Session(MooncakeDistributedStore, config)
    while True:
        # What this process lends to the pool would be gone with it.
        idle = None if config.embedded else time.monotonic() + opening.seconds
        try:
            _serve_one(calls, session, receive_request(calls, idle))
        except TimeoutError:
            _leave(session)
        except EOFError:
            _leave(session)
            raise


def _serve_one(calls: socket.socket, session: Session, request: Request) -> None:
    # Nothing of the reply may be left when the pool is: it may lie in the library's memory.
    with _alarm(request.seconds + _ALARM_S):
        reply = answer(session, request)
    send_reply(calls, reply)


def answer(session: Session, request: Request) -> Reply:
    """Do what is asked for."""
    until = time.monotonic() + request.seconds
    try:
        if request.verb is Verb.KEEP:
            session.keep(request.key, request.value, until)
            return Reply(Outcome.DONE)
        if request.verb is Verb.REPLACE:
            session.replace(request.key, request.value)
            return Reply(Outcome.DONE)
        found = session.find(request.key, request.limit, until)
        return Reply(Outcome.MISSING) if found is None else Reply(Outcome.FOUND, found)
    except Refused as error:
        return Reply(Outcome.REFUSED, str(error).encode())
    except Down as error:
        return Reply(Outcome.DOWN, str(error).encode())
    except Exception as error:  # noqa: BLE001 - whatever the library raises
        return Reply(Outcome.DOWN, f"{type(error).__name__}: {one_line(error)}".encode())


def _leave(session: Session) -> None:
    with _alarm(_LEAVE_S):
        session.leave()


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """The kernel ends this process if the block takes longer, whatever it is doing."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _coded(code: int) -> str:
    told = _CODES.get(code)
    return f"{told} ({code})" if told else f"code {code}"


if __name__ == "__main__":
    # The library's own end takes seconds, and is not needed.
    os._exit(main())
