"""What an engine wants that reads a checkpoint as it is stored: the twin of the native builder."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from preloadd.domain.ids import DeviceId, Role
from preloadd.domain.key import Key
from preloadd.domain.placement import Parallel, Placement
from preloadd.domain.settings import Memory
from preloadd.engine.checkpoint import EngineCheckpoint
from preloadd.engine.client import Wanted
from preloadd.frameworks.identity import native_key, stored_dtype
from preloadd.weights.checkpoint import config_of, read_config

WHOLE = Placement(Parallel())
"""The only rank of an undivided model."""


class NativeCheckpoint(EngineCheckpoint):
    """A checkpoint of which an engine uses the bytes as they are stored."""

    def __init__(
        self,
        folder: Path,
        *,
        revision: str = "",
        dtype: str = "auto",
        digest_cache: Path | None = None,
    ) -> None:
        super().__init__(folder, digest_cache)
        self.config: dict[str, Any] = read_config(folder)
        self._revision = revision
        self._dtype = dtype

    @cached_property
    def stored_dtype(self) -> str:
        """The dtype of the weights, as torch names it."""
        return stored_dtype(self.config, self._nbytes_by_dtype)

    def wanted(
        self,
        device: DeviceId,
        *,
        client: str,
        memory: Memory = Memory.HOST,
        role: Role = Role.TARGET,
        placement: Placement = WHOLE,
    ) -> Wanted:
        """What to ask the daemon of `device` for, whose memory is of that kind."""
        dtype = self.stored_dtype if self._dtype == "auto" else self._dtype

        def key(checkpoint: str) -> Key:
            with config_of(self.folder):
                return native_key(
                    self.config,
                    checkpoint=checkpoint,
                    dtype=dtype,
                    placement=placement,
                    role=role,
                    revision=self._revision,
                )

        return Wanted(device, role, client, self.files, key, self.digest, memory)

    def _nbytes_by_dtype(self) -> dict[str, int]:
        return self.opened.nbytes_by_dtype()
