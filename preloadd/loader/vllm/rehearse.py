"""The engine of a warm-up: `python -m preloadd.loader.vllm.rehearse`, started by a rank.

It is vLLM's own, with the group's arguments, all of its ranks, and weights from their daemons. What
is made for the next start, it makes as it starts. The order comes over the inherited link, as to a
loader; the engine's processes are gone when this one is, or its rank.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

from preloadd.domain.settings import Memory, RankSettings
from preloadd.errors import ConfigError, LoaderFailed, PreloadError
from preloadd.linux import logs
from preloadd.linux.passed import inherited
from preloadd.loader.report import Reporter, passed_link
from preloadd.transport.blocking import Link

log = logging.getLogger("preloadd.rehearsal")

IDENTIFIER = "preloadd-rehearsal"

FORMAT = "ipc_cache"

_END_S = 10.0
"""Seconds that an engine has to end by itself, once its rank is gone."""

_PATIENCE_S = 30.0
"""Seconds that the engine waits for a daemon. All served before it was started."""

_FAILED = 1


def main() -> int:
    """Start the engine that the rank orders, have it say one token, and end it."""
    logs.configure("INFO", os.environ, identifier=IDENTIFIER)
    link = passed_link(inherited(os.environ, os.getpid()), "this engine")
    if link is None:
        return ConfigError().exit_status
    reporter = Reporter(link, clock=time.monotonic)
    signal.signal(signal.SIGTERM, _leave)
    try:
        settings = reporter.order().settings
        threading.Thread(target=_end_with, args=(link,), daemon=True).start()
        _rehearse(settings, reporter)
    except PreloadError as error:
        return _tell(reporter, error)
    except ConnectionError:
        return _FAILED
    except Exception as error:  # vLLM raises anything
        log.exception("the engine failed")
        words = " ".join(str(error).split())
        return _tell(reporter, LoaderFailed(f"vLLM: {type(error).__name__}: {words}", _FAILED))
    return 0


def _rehearse(settings: RankSettings, reporter: Reporter) -> None:
    reporter.progress("importing vLLM")
    try:
        # Only here: the engine's processes import this module as well.
        from preloadd.loader.vllm import throwaway
    except ImportError as error:
        raise ConfigError(f"{sys.executable} lacks what an engine needs: {error}") from error
    reporter.progress("starting an engine")
    asyncio.run(throwaway.run(settings, attaching(settings), reporter))


def attaching(settings: RankSettings) -> dict[str, object]:
    """The arguments by which an engine attaches to the ranks of this one's group."""
    options: dict[str, object] = {
        "fallback": False,
        "socket_dir": settings.socket_dir,
        "state_timeout_s": _PATIENCE_S,
    }
    if settings.model.memory is Memory.HOST:
        options["memory"] = Memory.HOST.value
    changes: dict[str, object] = {"load_format": FORMAT, "model_loader_extra_config": options}
    if not settings.warmup.autotune:
        changes["enable_flashinfer_autotune"] = False
    return changes


def _tell(reporter: Reporter, error: PreloadError) -> int:
    with suppress(ConnectionError):
        reporter.failed(error)
    return error.exit_status


def _leave(number: int, _: object) -> NoReturn:
    """Let the engine end on its way out: what it has in shared memory goes with it."""
    raise SystemExit(128 + number)


def _end_with(link: Link) -> None:
    """Wait until the rank hangs up, which it does at its end only; then end all of this engine."""
    waiting = select.poll()
    waiting.register(link, select.POLLRDHUP)
    waiting.poll()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_S)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
