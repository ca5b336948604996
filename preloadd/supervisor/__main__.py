"""The process: takes the listening socket it was given, or opens one, and serves until stopped."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from preloadd.domain.ids import Instance
from preloadd.errors import ConfigError, PreloadError
from preloadd.linux import logs
from preloadd.linux.notify import inherited
from preloadd.supervisor.app import create_app
from preloadd.supervisor.snapshots import Lookout

RANK_TIMEOUT = 2.0
"""Seconds a rank has to answer before it counts as stuck; probes usually wait longer than that."""

STOP_TIMEOUT = 2
"""Seconds that requests in progress have to finish when the process is told to stop."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve; the exit status. A stop by a signal ends the process with that signal."""
    options = _parser().parse_args(arguments)
    logs.configure(options.log_level.upper(), os.environ)
    try:
        instances = [Instance.parse(text) for text in options.instance]
        listener = _listener(options)
    except PreloadError as error:
        sys.stderr.write(f"preloadd supervisor: {error}\n")
        return error.exit_status
    lookout = Lookout(options.socket_dir, instances, timeout=RANK_TIMEOUT)
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(lookout.look),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=STOP_TIMEOUT,
        )
    )
    server.run(sockets=[listener])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("preloadd supervisor", description=__doc__)
    parser.add_argument("--socket-dir", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--instance",
        action="append",
        required=True,
        metavar="INSTANCE",
        help="a rank to watch, such as CPU-0; may be repeated",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument(
        "--listen-fd",
        metavar="NAME",
        help="serve on the inherited descriptor of this name; --host and --port then only tell it",
    )
    parser.add_argument(
        "--log-level", default="info", choices=["debug", "info", "warning", "error"]
    )
    return parser


def _listener(options: argparse.Namespace) -> socket.socket:
    """The listening socket, which the caller owns; ConfigError."""
    if options.listen_fd is None:
        return _open_listener(options.host, options.port)
    given = inherited(os.environ, os.getpid()).get(options.listen_fd, [])
    if len(given) != 1:
        raise ConfigError(
            f"--listen-fd {options.listen_fd}: {len(given)} descriptors of that name were "
            "inherited: pass exactly one, or give --host and --port"
        )
    return socket.socket(fileno=given[0].take())


def _open_listener(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host {host} --port {port}: {error}: choose others") from error


if __name__ == "__main__":
    sys.exit(main())
