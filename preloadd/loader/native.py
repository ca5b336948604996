"""The native builder: one rank's share of a safetensors checkpoint, byte for byte as stored."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from preloadd.domain.key import Key
from preloadd.domain.settings import ModelSettings, RankSettings
from preloadd.frameworks.identity import native_key, stored_dtype
from preloadd.loader.pieces import Piece, pieces
from preloadd.loader.source import OpenFile, opened_direct
from preloadd.memory.api import PIECE
from preloadd.weights.checkpoint import Checkpoint, config_of, open_checkpoint
from preloadd.weights.checkpoint.reading import unchanged
from preloadd.weights.native import sources_of
from preloadd.weights.plan import ArenaPlan, Run, pack, select


class Native:
    """A checkpoint opened and cut for one rank. Reads headers, no weights.

    CheckpointError, UnsupportedModel and ConfigError say what keeps it from being loaded.
    """

    def __init__(self, settings: RankSettings, granularity: int) -> None:
        self.model: ModelSettings = settings.model
        self._role = settings.parsed_instance.role
        self._settings = settings
        self.checkpoint: Checkpoint = open_checkpoint(Path(self.model.path))
        sources = sources_of(self.checkpoint)
        with config_of(self.checkpoint.folder):
            slices = select(sources, self.checkpoint.config, self.model.placement)
        self.plan: ArenaPlan = pack(slices, self.model.chunk_bytes, granularity)

    @contextmanager
    def opened(self, *, direct: bool = False) -> Iterator[list[OpenFile]]:
        """The shards, to be read in the block; ReadFailed at its end if one changed meanwhile.

        With `direct` they can be read past the page cache too, where file and system allow it.
        """
        with ExitStack() as files:
            opened = []
            for shard in self.checkpoint.shards:
                fd = files.enter_context(unchanged(shard.path, shard.identity))
                past = files.enter_context(opened_direct(fd)) if direct else None
                opened.append(OpenFile(shard.path, fd, past))
            yield opened

    def pieces_of(self, chunk: int, piece: int = PIECE) -> Iterator[Piece]:
        """What has to be read into one chunk, in file order, at most `piece` bytes at once."""
        return pieces(self._runs_of(chunk), piece)

    def rows_of(self, chunk: int) -> range:
        """Which rows of the plan are in one chunk: it was laid out in their order."""
        chunks = self.plan.storages.chunk
        return range(bisect_left(chunks, chunk), bisect_right(chunks, chunk))

    def _runs_of(self, chunk: int) -> Iterator[tuple[Run, int]]:
        for row in self.rows_of(chunk):
            target = self.plan.storages.offset[row]
            for run in self.plan.slices[row].runs:
                yield run, target
                target += run.nbytes

    def key(self, content: str) -> Key:
        """The key of what this makes, given the checkpoint's content as `content` digests it."""
        config = self.checkpoint.config
        with config_of(self.checkpoint.folder):
            return native_key(
                config,
                checkpoint=content,
                dtype=stored_dtype(config, self.checkpoint.nbytes_by_dtype),
                placement=self.model.placement,
                role=self._role,
                revision=self.model.revision,
            )
