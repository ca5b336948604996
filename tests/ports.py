"""TCP ports for daemons that are told where to listen."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port at which nobody listens on 127.0.0.1: connections to it are refused.

    It is kept for nobody. Somebody else may take it before it is used, unless the network is one of
    the test's own: where a daemon can inherit a socket, hand it one that is bound.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
