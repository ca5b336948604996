"""What vLLM calls in each of its processes: entry point of the group `vllm.general_plugins`."""

from __future__ import annotations

import logging

log = logging.getLogger("vllm.preloadd")
"""Below vLLM's own logger, whose handlers and level it shares."""


def register() -> None:
    """Have `--load-format ipc_cache` attach to preloadd. May be called any number of times."""
    _share_log()
    try:
        from vllm.model_executor import model_loader

        from preloadd.engine.vllm.loader import PreloaddLoader
        from preloadd.engine.vllm.request import FORMAT
    except ImportError as error:
        log.warning(
            "preloadd leaves the load format ipc_cache alone: it needs vLLM 0.30 or newer (%s)",
            error,
        )
        return
    known = getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {})
    if known.get(FORMAT) is PreloaddLoader:
        return
    # vLLM warns of a name that is taken, which is the point here.
    known.pop(FORMAT, None)
    model_loader.register_model_loader(FORMAT)(PreloaddLoader)


def _share_log() -> None:
    """Have what the rest of preloadd says go where vLLM's own words go.

    Nothing is changed where a process, as a loader's, has set up logging for everybody.
    """
    if not logging.getLogger().handlers:
        logging.getLogger("preloadd").parent = logging.getLogger("vllm")
