"""One question over HTTP to somebody who is not trusted: bounded in time and in bytes."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from preloadd.domain.amounts import size
from preloadd.domain.endpoint import Endpoint
from preloadd.errors import PreloadError, ProtocolViolation, Unavailable

_ABSENT = "absent"


def get(endpoint: Endpoint, path: str, *, timeout: float, limit: int) -> bytes:
    """The body of what `endpoint` answers to GET `path`. Redirects are not followed.

    Blocks `timeout` seconds at most, but for the time that a name takes to resolve; takes `limit`
    bytes at most, headers included. Unavailable if there is no whole answer in time,
    ProtocolViolation for any answer but 200 and for what is no HTTP: the text says why in a few
    words, all of them ours.
    """
    deadline = time.monotonic() + timeout
    with _told(timeout), _connected(endpoint, deadline, limit) as line:
        connection = http.client.HTTPConnection(endpoint.host, endpoint.port)
        connection.sock = line
        connection.request("GET", path, headers={"Connection": "close", "Accept": "*/*"})
        with connection.getresponse() as response:
            if response.status != http.HTTPStatus.OK:
                raise ProtocolViolation(_refused(response.status))
            return _whole(response, limit)


class _Line(socket.socket):
    """A connection that receives no more than `limit` bytes, and nothing after `deadline`."""

    deadline: float
    limit: int
    left: int

    def recv_into(self, buffer: bytearray, nbytes: int = 0, flags: int = 0) -> int:  # type: ignore[override]
        """As of any socket. TimeoutError after the deadline, ProtocolViolation over the limit."""
        self.settimeout(_until(self.deadline))
        got = super().recv_into(buffer, nbytes, flags)
        self.left -= got
        if self.left < 0:
            raise _too_long(self.limit)
        return got


def _whole(response: http.client.HTTPResponse, limit: int) -> bytes:
    """The body. Told no amount, the library makes room for whatever length the peer claims."""
    if (response.length or 0) > limit:
        raise _too_long(limit)
    try:
        body = response.read(limit + 1)
    except ValueError as error:
        # The library lets it out for a chunk of a length below nothing.
        raise http.client.HTTPException(str(error)) from error
    if response.length:
        raise http.client.IncompleteRead(body, response.length)
    return body


@contextmanager
def _connected(endpoint: Endpoint, deadline: float, limit: int) -> Iterator[_Line]:
    """A connection to the first address of `endpoint` that takes one."""
    found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    for tried, (family, kind, protocol, _, address) in enumerate(found, 1):
        with _Line(family, kind, protocol) as line:
            line.deadline, line.limit, line.left = deadline, limit, limit
            # An address that swallows everything leaves the others their share of the time.
            line.settimeout(_until(deadline) / (len(found) - tried + 1))
            try:
                line.connect(address)
            except OSError:
                if tried == len(found):
                    raise
                continue
            line.settimeout(_until(deadline))
            yield line
            return
    raise Unavailable(_ABSENT, "its name has no address")


@contextmanager
def _told(timeout: float) -> Iterator[None]:
    """What the standard library raises, in words that may be shown: none of them is the peer's."""
    try:
        yield
    except PreloadError:
        raise
    except TimeoutError as error:
        raise Unavailable(_ABSENT, f"no answer within {timeout:g} s") from error
    except (http.client.RemoteDisconnected, http.client.IncompleteRead, BrokenPipeError) as error:
        raise Unavailable(_ABSENT, "it hung up before the end of its answer") from error
    except http.client.HTTPException as error:
        raise ProtocolViolation("what it answers is no HTTP") from error
    except (socket.gaierror, UnicodeError) as error:
        raise Unavailable(_ABSENT, f"its name cannot be resolved{_reason(error)}") from error
    except PermissionError as error:
        raise Unavailable(
            _ABSENT,
            "this host lets nothing out to it: see its firewall, and the unit's IPAddressAllow=",
        ) from error
    except OSError as error:
        raise Unavailable(_ABSENT, (error.strerror or "it cannot be reached").lower()) from error


def _until(deadline: float) -> float:
    """Seconds that are left, more than none; TimeoutError."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _too_long(limit: int) -> ProtocolViolation:
    return ProtocolViolation(f"its answer is longer than {size(limit)}")


def _reason(error: Exception) -> str:
    return f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""


def _refused(status: int) -> str:
    if status == http.HTTPStatus.NOT_FOUND:
        return "it answers 404: no supervisor of preloadd, or an earlier version"
    if 300 <= status < 400:
        return f"it redirects ({status}), which is not followed: name the supervisor itself"
    return f"it answers {status}"
