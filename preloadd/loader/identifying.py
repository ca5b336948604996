"""Which content a checkpoint has, told as a phase of a load."""

from __future__ import annotations

from pathlib import Path

from preloadd.domain.settings import Digest
from preloadd.loader.report import Reporter, Tally
from preloadd.weights.checkpoint import Checkpoint, content


def identify(
    checkpoint: Checkpoint, method: Digest, digest_cache: Path | None, reporter: Reporter
) -> str:
    """The content of `checkpoint`, `<method>:<hex>`. Progress goes to `reporter`."""
    told = Tally(reporter, "identifying", checkpoint.nbytes)
    told(0)
    return content(checkpoint, method, digest_cache, progress=told)
