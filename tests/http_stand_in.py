"""Something on a port of this host that takes connections and does with them what a test says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from preloadd.domain.endpoint import Endpoint

Act = Callable[[socket.socket, threading.Event], object]
"""What is done with a connection whose request was read; the event is set when the test is over."""


@contextmanager
def serving(
    act: Act | bytes, host: str = "127.0.0.1", *, requests: list[bytes] | None = None
) -> Iterator[Endpoint]:
    """Each connection in a thread of its own; bytes are sent, and that is all.

    What was asked is added to `requests`.
    """
    over = threading.Event()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    kept = [] if requests is None else requests
    threads = [threading.Thread(target=_accept, args=[listener, act, over, kept])]
    threads[0].start()
    try:
        yield Endpoint(host, listener.getsockname()[1])
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        threads[0].join()
        listener.close()


def _accept(
    listener: socket.socket, act: Act | bytes, over: threading.Event, requests: list[bytes]
) -> None:
    threads = []
    with suppress(OSError):
        while True:
            client, _ = listener.accept()
            threads.append(threading.Thread(target=_serve, args=[client, act, over, requests]))
            threads[-1].start()
    for thread in threads:
        thread.join()


def _serve(
    client: socket.socket, act: Act | bytes, over: threading.Event, requests: list[bytes]
) -> None:
    client.settimeout(10)
    # Whoever asks may hang up at any time.
    with client, suppress(OSError):
        asked = b""
        while b"\r\n\r\n" not in asked:
            got = client.recv(4096)
            if not got:
                return
            asked += got
        requests.append(asked)
        if isinstance(act, bytes):
            client.sendall(act)
        else:
            act(client, over)


def response(body: bytes, *, status: str = "200 OK", more: str = "") -> bytes:
    """A whole answer."""
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body
