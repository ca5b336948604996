"""Sockets on which a call waits in the kernel, and no longer than it may.

Python's own timeouts make a socket non-blocking, and then a call moves what fits a buffer. So a
transfer of megabytes would be hundreds of calls, each of which lets go of the interpreter and waits
for it again.
"""

from __future__ import annotations

import math
import socket
import struct


def limit(sock: socket.socket, seconds: float) -> None:
    """From now on calls block until all is done that was asked for, or for so long.

    Then they return what was done by then; BlockingIOError if that is nothing. To receive so, pass
    MSG_WAITALL.
    """
    fraction, whole = math.modf(seconds)
    timeval = struct.pack("@ll", int(whole), int(fraction * 1_000_000))
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
