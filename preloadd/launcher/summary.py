"""What is told once ranks serve: what each holds, how it came by it, and how engines connect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from preloadd.domain.amounts import size
from preloadd.domain.lines import one_line
from preloadd.errors import PreloadError
from preloadd.transport.status import ask_status


@dataclass(frozen=True, slots=True)
class Told:
    """One serving rank. `nbytes` and `seconds` are what it holds and what loading that took, or how
    long after its start it had adopted it; `adopted` is None when the rank did not tell."""

    name: str
    socket: Path
    adopted: bool | None = None
    nbytes: int = 0
    seconds: float = 0.0


def told_by(name: str, socket: Path, *, timeout: float) -> Told:
    """What the rank at `socket` tells. Blocks; a rank that does not answer is told of without."""
    try:
        status = ask_status(socket, timeout=timeout)
    except PreloadError:
        return Told(name, socket)
    # As `preloadctl status` has it: without the start of the rank's and the loader's processes.
    loading = None if status.adopted else status.counters.get("generation_load_ms")
    seconds = status.ready_s if loading is None else loading / 1000
    return Told(name, socket, status.adopted, status.arena_bytes, seconds)


def ready_text(group: str, ranks: Sequence[Told], *, seconds: float, socket_dir: Path) -> str:
    """The lines that say that every rank serves, `seconds` after the first was started."""
    known = all(rank.adopted is not None for rank in ranks)
    total = size(sum(rank.nbytes for rank in ranks)) if known else "size not known"
    plural = "s" if len(ranks) > 1 else ""
    width = max(len(rank.name) for rank in ranks)
    folder = one_line(socket_dir)
    return "\n".join(
        [
            f"ready: {one_line(group)}, {len(ranks)} rank{plural}, {total}, after {seconds:.1f} s",
            *(f"  {rank.name:<{width}}  {_how(rank)}  {one_line(rank.socket)}" for rank in ranks),
            f"engines connect with PRELOADD_SOCKET_DIR={folder} (or the option socket_dir)",
        ]
    )


def again_text(rank: Told) -> str:
    """The line that says that a rank serves again."""
    how = "" if rank.adopted is None else f": {_how(rank)}"
    return f"{rank.name} serves again{how}"


def _how(rank: Told) -> str:
    if rank.adopted is None:
        return "serves"
    verb = "adopted" if rank.adopted else "loaded"
    return f"{verb} {size(rank.nbytes)} in {rank.seconds:.2f} s"
