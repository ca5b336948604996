"""Ranks on a GPU, and engines that attach to them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.gpu.child import Child
from preloadd.domain.settings import Memory
from tests.checkout import ROOT
from tests.gpu.inside import engine as inside
from tests.manager import Manage, Manager


def python_path() -> str:
    """Where this process finds packages that are not installed, first of all preloadd."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def managing_gpu(manage: Manage, gpu: str) -> Manage:
    """Like `manage`, with ranks on a GPU."""

    def made(
        model: Path, *, rank: Mapping[str, Any] | None = None, start: bool = True, **more: Any
    ) -> Manager:
        settings = {"instance": gpu, **(rank or {})}
        chosen = {"memory": Memory.CUDA, "chunk_bytes": 4 << 30, **more}
        manager = manage(model, rank=settings, **chosen)
        manager.environ["PYTHONPATH"] = python_path()
        if start:
            manager.start()
            manager.ready()
        return manager

    return made


def attached(engine: Child, rank: Manager, **options: Any) -> int:
    """Attach in a process of its own; returns once that survives the rank's death."""
    model = rank.settings.model.path
    number = engine(inside.attach, model, socket_path=str(rank.socket), **options)
    held = rank.status().lease_count
    rank.until(lambda: len(rank.leases) >= held, "parked lease")
    return number
