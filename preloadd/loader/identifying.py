"""Which content a checkpoint has, told as a phase of a load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from preloadd.domain.key import Key
from preloadd.domain.settings import Digest, RankSettings
from preloadd.loader.report import Reporter, Tally
from preloadd.weights.checkpoint import Checkpoint, content


def agree(
    settings: RankSettings,
    checkpoint: Checkpoint,
    digest_cache: Path | None,
    reporter: Reporter,
    key: Callable[[str], Key],
) -> str:
    """The content, once all ranks agree on the `key` that it makes; '' where they need not meet,
    and `identify` costs less after the files were read. What is replaced is gone then."""
    if settings.rendezvous is None:
        if reporter.frees is not None:
            reporter.identified({})
        return ""
    digest = identify(checkpoint, settings.model.digest, digest_cache, reporter)
    reporter.identified(key(digest))
    return digest


def identify(
    checkpoint: Checkpoint, method: Digest, digest_cache: Path | None, reporter: Reporter
) -> str:
    """The content of `checkpoint`, `<method>:<hex>`. Progress goes to `reporter`."""
    told = Tally(reporter, "identifying", checkpoint.nbytes)
    told(0)
    return content(checkpoint, method, digest_cache, progress=told)
