"""Serving HTTP to whoever connects, with no more descriptors than there are for that."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import anyio
import uvicorn
from anyio.abc import TaskGroup
from fastapi import FastAPI

from preloadd.transport.accepting import Episode, accept

log = logging.getLogger(__name__)

STOP_TIMEOUT = 2
"""Seconds that requests in progress have to finish when the process is told to stop."""

MOST = 64
"""Connections at a time. Every request is answered at once: an older one waits for its client."""

_SHARE = 4
"""Of all descriptors that this process may have, one in so many is for a connection."""


class Server(uvicorn.Server):
    """Serves `app` on `listener`, a stream socket that listens, which it owns from now on, until a
    signal comes.

    Whoever connects is let in: where too many are connected, those that came first are hung up on.
    So nobody who sends half of a request, or reads no answer, keeps others out for longer.
    """

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_graceful_shutdown=STOP_TIMEOUT,
            )
        )
        self._listener = listener
        self._most = min(MOST, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE))
        self._clients: dict[asyncio.Protocol, asyncio.Transport] = {}
        self._crowded = Episode()

    async def run_until_signal(self) -> None:
        """Serve. OSError if the listener is none any more."""
        await self.serve(sockets=[])

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See to the signals that end the process, each of which it gets again after that."""
        with super().capture_signals():
            yield
            if self._captured_signals:
                # SIGTERM then ends it at once, without what Python does when it exits.
                logging.shutdown()

    async def main_loop(self) -> None:
        """Let clients in until it is time to stop; from then on nobody is."""
        # uvicorn's own way of accepting has no limit, and logs each that it has no descriptor for.
        with self._listener:
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(
                        accept, self._listener, partial(self._let_in, tasks), "an HTTP client"
                    )
                    await super().main_loop()
                    tasks.cancel_scope.cancel()
            except BaseExceptionGroup as several:
                if len(several.exceptions) > 1:
                    raise
                raise several.exceptions[0] from None

    def _let_in(self, tasks: TaskGroup, sock: socket.socket, _: object) -> None:
        tasks.start_soon(self._converse, sock)

    async def _converse(self, sock: socket.socket) -> None:
        """Have a client answered, and make room for it."""
        loop = asyncio.get_running_loop()
        try:
            transport, client = await loop.connect_accepted_socket(self._protocol, sock)
        except OSError as error:  # it may have gone already
            log.debug("an HTTP client is not answered: %s", error)
            sock.close()
            return
        there = self.server_state.connections
        before = {known: way for known, way in self._clients.items() if known in there}
        self._clients = before | {client: transport}
        first = list(self._clients)[: -self._most]
        if first and self._crowded.begins():
            log.warning(
                "%d HTTP clients are connected: those that came first are hung up on", self._most
            )
        for oldest in first:
            self._clients.pop(oldest).abort()

    def _protocol(self) -> asyncio.Protocol:
        made: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        return made(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
