"""The native builder: one rank's share of a safetensors checkpoint, byte for byte as stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from preloadd.domain.key import Key
from preloadd.domain.settings import RankSettings
from preloadd.frameworks.identity import native_key, stored_dtype
from preloadd.loader.reader import OpenFile, Piece, pieces
from preloadd.weights.checkpoint import Checkpoint, config_of, open_checkpoint
from preloadd.weights.checkpoint.reading import unchanged
from preloadd.weights.plan import ArenaPlan, Source, pack, select


class Native:
    """A checkpoint opened and cut for one rank. Reads headers, no weights.

    CheckpointError, UnsupportedModel and ConfigError say what keeps it from being loaded.
    """

    def __init__(self, settings: RankSettings, granularity: int) -> None:
        model = settings.model
        self._settings = settings
        self.checkpoint: Checkpoint = open_checkpoint(Path(model.path))
        numbers = {shard.path: number for number, shard in enumerate(self.checkpoint.shards)}
        sources = {
            name: Source(
                file=numbers[stored.shard.path],
                dtype=stored.info.dtype,
                shape=stored.info.shape,
                start=stored.info.start,
                nbytes=stored.info.nbytes,
            )
            for name, stored in self.checkpoint.tensors.items()
        }
        with config_of(self.checkpoint.folder):
            slices = select(sources, self.checkpoint.config, model.placement)
        self.plan: ArenaPlan = pack(slices, model.chunk_bytes, granularity)

    @contextmanager
    def opened(self) -> Iterator[list[OpenFile]]:
        """The shards, to be read in the block; ReadFailed at its end if one changed meanwhile."""
        with ExitStack() as files:
            yield [
                OpenFile(shard.path, files.enter_context(unchanged(shard.path, shard.identity)))
                for shard in self.checkpoint.shards
            ]

    def pieces_of(self, chunk: int) -> list[Piece]:
        """What has to be read into one chunk, in file order."""
        storages = self.plan.storages
        found: list[Piece] = []
        for row, part in enumerate(self.plan.slices):
            if storages.chunk[row] != chunk:
                continue
            target = storages.offset[row]
            for run in part.runs:
                found += pieces(run.file, run.offset, run.row_nbytes, run.rows, run.stride, target)
                target += run.nbytes
        return found

    def key(self, content: str) -> Key:
        """The key of what this makes, given the checkpoint's content as `content` digests it."""
        config = self.checkpoint.config
        with config_of(self.checkpoint.folder):
            return native_key(
                config,
                checkpoint=content,
                dtype=stored_dtype(config, self.checkpoint.nbytes_by_dtype),
                placement=self._settings.model.placement,
                role=self._settings.parsed_instance.role,
                revision=self._settings.model.revision,
            )
