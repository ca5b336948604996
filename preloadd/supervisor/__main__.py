"""Health, metrics and a status page for the ranks of this host: HTTP, read-only.

Without --socket-dir, the configuration of this host says what to watch and
where to serve.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import anyio
from fastapi import FastAPI

from preloadd.errors import ConfigError, PreloadError
from preloadd.linux import logs
from preloadd.linux.notify import Notifier, watchdog_interval
from preloadd.linux.passed import inherited
from preloadd.supervisor import devices, nvml
from preloadd.supervisor.app import create_app
from preloadd.supervisor.lookout import Lookout
from preloadd.supervisor.peers import Peers
from preloadd.supervisor.serving import Server
from preloadd.supervisor.setup import Setup, setup
from preloadd.supervisor.verdict import judge

log = logging.getLogger("preloadd.supervisor")

IDENTIFIER = "preloadd-supervisor"

STATUS_INTERVAL = 1.0
"""Seconds between looks at what to tell the service manager."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve; the exit status. A stop by a signal ends the process with that signal."""
    logs.configure("INFO", os.environ, identifier=IDENTIFIER, waits=False)
    options = _parser().parse_args(arguments)
    try:
        made = setup(options, os.environ)
        logs.configure(made.log_level.upper(), os.environ, identifier=IDENTIFIER, waits=False)
        listener = _listener(options.listen_fd, made)
        notifier = Notifier(os.environ)
    except PreloadError as error:
        log.error("%s", error)  # noqa: TRY400 - the text is for people, the trace would hide it
        return error.exit_status
    with ExitStack() as owned:
        owned.enter_context(listener)
        owned.callback(notifier.close)
        samples: dict[str, devices.Sample] = {"host memory": devices.host}
        binding = nvml.load()
        if binding is not None:
            samples["the GPU driver"] = nvml.Gpus(binding)
        identity = secrets.token_hex(16)
        pace = made.pace
        lookout = Lookout(
            made.socket_dir,
            made.roster,
            pace=pace,
            units=made.units,
            samples=samples,
            peers=Peers(
                made.peers, identity=identity, timeout=pace.overdue, pause=pace.surroundings
            ),
        )
        app = create_app(lookout.look, host=platform.node(), identity=identity)
        return _run(app, lookout, listener, notifier)


def _run(app: FastAPI, lookout: Lookout, listener: socket.socket, notifier: Notifier) -> int:
    try:
        return anyio.run(_serve, app, lookout, listener, notifier)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


async def _serve(
    app: FastAPI, lookout: Lookout, listener: socket.socket, notifier: Notifier
) -> int:
    """Serve until a signal comes; the exit status. A fault in what goes on beside that ends it as
    well."""
    status = 0
    interval = watchdog_interval(os.environ)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lookout.watch)
        tasks.start_soon(_tell, lookout, notifier)
        if interval is not None:
            tasks.start_soon(_show_life, notifier, interval)
        try:
            await Server(app, listener).run_until_signal()
        except OSError as error:
            log.error("serving HTTP: the socket to listen on is none: %s", error)  # noqa: TRY400
            status = 1
        tasks.cancel_scope.cancel()
    return status


async def _tell(lookout: Lookout, notifier: Notifier) -> None:
    """Keep the service manager informed."""
    told = None
    while notifier.listening:
        ranks = (await lookout.look()).ranks
        reasons = judge(ranks).reasons
        status = "; ".join(reasons) if reasons else f"all {len(ranks)} ranks serve"
        if told is None:
            notifier.ready()
        if status != told:
            notifier.status(status)
        told = status
        await anyio.sleep(STATUS_INTERVAL)


async def _show_life(notifier: Notifier, interval_s: float) -> None:
    """Prove that this loop turns."""
    while True:
        notifier.watchdog()
        await anyio.sleep(interval_s)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "preloadd supervisor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--socket-dir", type=Path, metavar="DIR", help="where the ranks' sockets are"
    )
    parser.add_argument(
        "--instance",
        action="append",
        default=[],
        metavar="INSTANCE",
        help="a rank to watch, such as CPU-0; may be repeated; default: those that are found",
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="the supervisor of another node, to be told of as well; may be repeated",
    )
    parser.add_argument("--host", help="address to serve on")
    parser.add_argument("--port", type=_port)
    parser.add_argument(
        "--listen-fd",
        metavar="NAME",
        help="serve on the inherited descriptor of this name instead",
    )
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"])
    return parser


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r} is no port: give a number from 0 to 65535")
    return int(text)


def _listener(inherited_as: str | None, made: Setup) -> socket.socket:
    """The listening socket, which the caller owns; ConfigError."""
    if inherited_as is None:
        return _open_listener(made.host, made.port)
    given = inherited(os.environ, os.getpid()).get(inherited_as, [])
    if len(given) != 1:
        raise ConfigError(
            f"--listen-fd {inherited_as}: {len(given)} descriptors of that name were "
            "inherited: pass exactly one, or give --host and --port"
        )
    with given[0] as fd:
        if why := _unfit(fd.fileno()):
            raise ConfigError(
                f"--listen-fd {inherited_as}: descriptor {fd.fileno()} {why}: pass a stream socket "
                "that listens, or give --host and --port"
            )
        return socket.socket(fileno=fd.take())


def _unfit(fd: int) -> str:
    """Why nobody could connect to what is open as `fd`, which is borrowed; empty if somebody can.

    A stream socket of any family will do: systemd's ListenStream= may be a path.
    """
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        return f"is no socket ({error.strerror})"
    try:
        if sock.type != socket.SOCK_STREAM:
            return "is a socket of another kind"
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return "" if listens else "is a socket that does not listen"
    finally:
        sock.detach()


def _open_listener(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)
    except UnicodeError:
        raise ConfigError(
            f"--host {host}: no name of a host: give an address of this host"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: {error}: stop what listens there, or choose another "
            "address ([supervisor] in preloadd.toml, or these options)"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
