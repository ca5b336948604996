"""The health endpoint: a socket of the launcher, and the supervisor child that serves it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from preloadd.domain.ids import Instance
from preloadd.errors import ConfigError
from preloadd.launcher.processes import Process, child_environ
from preloadd.linux.fds import is_exhausted
from preloadd.linux.owner import Owner

LISTENER = "http"
"""Name under which the supervisor inherits the listening socket."""


def listen(host: str, port: int) -> socket.socket:
    """A TCP socket that listens on `host` and `port` (0: any free one), which the caller owns.

    `host` may stand in brackets, as in URLs. ConfigError names the flag that has to change.
    """
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        family, _, _, _, address = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no name of a host"
        raise ConfigError(
            f"--weight-cache-health-host: {host}: {why}: give an address of this host"
        ) from error
    try:
        return socket.create_server(address, family=family)
    except OSError as error:
        if is_exhausted(error):
            raise
        raise ConfigError(
            f"--weight-cache-health-port: {host} port {port}: {os.strerror(error.errno or 0)}: "
            "stop what listens there, choose another port, or 0 for any free one"
        ) from error


class Health(Owner):
    """Owns the listening socket, which outlives the child that serves it, and that child."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        socket_dir: Path,
        instances: Sequence[Instance],
        environ: Mapping[str, str],
        log_level: str = "info",
    ) -> None:
        host, port = listener.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/healthz"
        self._listener = listener
        command = [
            *(sys.executable, "-m", "preloadd.supervisor"),
            *("--socket-dir", str(socket_dir), "--listen-fd", LISTENER),
            *("--host", host, "--port", str(port), "--log-level", log_level),
            *(word for instance in instances for word in ("--instance", str(instance))),
        ]
        self.process = Process(command, child_environ(environ))

    def start(self) -> None:
        """Begin to serve: see `Process.start`. Until then, connections wait in a queue."""
        self.process.start([(LISTENER, self._listener.fileno())])

    def close(self) -> None:
        """Kill the child if it lives, and refuse connections from now on."""
        self.process.close()
        self._listener.close()
