"""One load, from order to manifest: open, make room, fill chunk by chunk, digest, describe."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from preloadd.domain.manifest import Artifact, Manifest
from preloadd.domain.recipe import LAYOUT, recipe_of
from preloadd.domain.settings import RankSettings
from preloadd.errors import OutOfRoom
from preloadd.loader.native import Native
from preloadd.loader.reader import OpenFile, read
from preloadd.loader.report import Reporter
from preloadd.memory.api import Filler
from preloadd.protocol import payload
from preloadd.weights.checkpoint import content

_MOST_THREADS = 8


def load(
    settings: RankSettings, filler: Filler, reporter: Reporter, *, digest_cache: Path | None
) -> None:
    """Load what `settings` say into memory of `filler`, handing each piece to `reporter`.

    Raises a PreloadError that names what is wrong; chunks that were handed over by then are the
    receiver's to give up.
    """
    started = time.monotonic()
    reporter.progress("opening")
    native = Native(settings, filler.granularity)
    wanted = native.plan.arena_nbytes
    _require_room(filler, wanted)
    with native.opened() as files:
        bytes_read = _fill(native, files, filler, reporter)
    told = _Told(reporter, "identifying", native.checkpoint.nbytes)
    told(0)
    digest = content(native.checkpoint, settings.model.digest, digest_cache, progress=told)
    manifest = Manifest(
        generation=secrets.token_hex(16),
        layout=LAYOUT,
        backend=settings.model.memory.value,
        chunks=native.plan.chunks,
        storages=native.plan.storages,
        tensors=native.plan.tensors,
        key=native.key(digest),
        recipe=recipe_of(settings, native.checkpoint.identities()),
        shards=native.checkpoint.weights_identities(),
        artifacts=(Artifact("config", "config.json", native.checkpoint.config_bytes),),
        counters={
            "bytes_read": bytes_read,
            "files": len(native.checkpoint.shards),
            "load_ms": int((time.monotonic() - started) * 1000),
        },
    )
    reporter.manifest(payload.encode(manifest))


def _require_room(filler: Filler, wanted: int) -> None:
    free, limit = filler.room()
    if wanted > free:
        raise OutOfRoom(wanted=wanted, free=free, limit=limit)


def _fill(native: Native, files: list[OpenFile], filler: Filler, reporter: Reporter) -> int:
    """Fill and hand over every chunk; bytes read from the checkpoint."""
    told = _Told(reporter, "loading", native.plan.tensor_nbytes)
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    for index, nbytes in enumerate(native.plan.chunks):
        with filler.create(nbytes) as chunk:
            with chunk.view(0, nbytes) as window:
                read(files, native.pieces_of(index), window, threads=threads, done=told)
            reporter.chunk(index, chunk)
    return told.done


class _Told:
    """Adds up bytes and reports them."""

    def __init__(self, reporter: Reporter, phase: str, total: int) -> None:
        self.done = 0
        self._reporter, self._phase, self._total = reporter, phase, total

    def __call__(self, nbytes: int) -> None:
        self.done += nbytes
        self._reporter.progress(self._phase, min(self.done, self._total), self._total)
