"""The engine's own copy of a checkpoint, as far as it tells whether a daemon has the same."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from preloadd.domain.files import FileIdentity
from preloadd.domain.settings import Digest
from preloadd.weights.checkpoint import (
    Checkpoint,
    content,
    open_checkpoint,
    weights_identities_of,
)
from preloadd.weights.checkpoint.digest import METHODS


class EngineCheckpoint:
    """The files in `folder`. Nothing is read before it is needed.

    CheckpointError and ReadFailed as of `weights.checkpoint`.
    """

    def __init__(self, folder: Path, digest_cache: Path | None = None) -> None:
        self.folder = folder
        self._digest_cache = digest_cache

    @cached_property
    def opened(self) -> Checkpoint:
        """The headers of all shards."""
        return open_checkpoint(self.folder)

    @property
    def files(self) -> tuple[FileIdentity, ...]:
        """Which files hold the weights now."""
        return weights_identities_of(self.folder)

    def digest(self, method: str) -> str:
        """The content by a method that a daemon names; ValueError if it is a newer one."""
        for digest, name in METHODS.items():
            if name == method:
                return content(self.opened, Digest(digest), self._digest_cache)
        raise ValueError(f"a newer daemon identifies content by {method}")
