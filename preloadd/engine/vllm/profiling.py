"""While vLLM measures what an engine needs of its GPU's memory, nobody may give memory back.

vLLM compares free memory before and after, and ends if there is more of it. So the daemon is told
when that begins and when it is over; and in copy mode, where the daemon's weights are freed once
the engine has its own, that waits as well.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakSet

from preloadd.domain.leases import Mode
from preloadd.domain.settings import Memory
from preloadd.engine.client import Attachment
from preloadd.engine.torch import Weights

log = logging.getLogger("vllm.preloadd")

DEADLINE_S = 300.0
"""After so long a copy is taken over even if vLLM never said that it is done measuring."""

_WORKER = "vllm.v1.worker.gpu_worker"
_MEASURES = "determine_available_memory"

_measured: WeakSet[Attachment] = WeakSet()
_copied: WeakSet[Weights] = WeakSet()
_lock = threading.Lock()


def begin(attachment: Attachment, memory: Memory) -> None:
    """Announce that memory is measured from now on, if it is a GPU's."""
    if memory is Memory.HOST:
        return
    if not _wrap():
        log.debug("this vLLM's worker does not say when it has measured its memory")
        return
    attachment.profiling(active=True)
    with _lock:
        _measured.add(attachment)


def hold(weights: Weights, memory: Memory) -> None:
    """Take a copy over, at once or when memory has been measured. Nothing for mapped weights."""
    if weights.mode is not Mode.COPY:
        return
    if memory is Memory.HOST:
        weights.take_over()
        return
    with _lock:
        _copied.add(weights)
    timer = threading.Timer(DEADLINE_S, _take_over, (weakref.ref(weights),))
    timer.daemon = True
    timer.start()


def finish() -> None:
    """Memory has been measured: say so on all leases, and take copies over."""
    with _lock:
        measured, copied = list(_measured), list(_copied)
        _measured.clear()
        _copied.clear()
    for attachment in measured:
        attachment.profiling(active=False)
    for weights in copied:
        # The daemon may wait for other engines before it answers, which this one need not.
        threading.Thread(target=_take_over, args=(weakref.ref(weights),), daemon=True).start()


def _take_over(copied: weakref.ref[Weights]) -> None:
    """Nothing if it was done already, or the model is gone. The top of a thread of its own."""
    weights = copied()
    try:
        if weights is not None:
            weights.take_over()
    except Exception:
        log.exception("preloadd: a copy was made, but the daemon's weights were not given back")


def _wrap() -> bool:
    """Have vLLM's GPU worker call `finish` when it has measured; whether it will."""
    worker: Any = getattr(sys.modules.get(_WORKER), "Worker", None)
    measures: Callable[..., int] | None = getattr(worker, _MEASURES, None)
    if measures is None:
        return False
    if getattr(measures, "tells_preloadd", False):
        return True

    @wraps(measures)
    def telling(*args: object, **kwargs: object) -> int:
        try:
            return measures(*args, **kwargs)
        finally:
            finish()

    telling.tells_preloadd = True  # type: ignore[attr-defined]
    setattr(worker, _MEASURES, telling)
    return True
