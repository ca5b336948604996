"""One load, from order to manifest: open, make room, fill, digest, describe."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from preloadd.domain.manifest import Artifact, Manifest
from preloadd.domain.recipe import LAYOUT, recipe_of
from preloadd.domain.settings import Builder, RankSettings, Reader
from preloadd.errors import ConfigError
from preloadd.loader.filling import Filled, fill
from preloadd.loader.identifying import agree, identify
from preloadd.loader.native import Native
from preloadd.loader.needs import PLACES, lacks
from preloadd.loader.peer import Peer, fill_native
from preloadd.loader.report import Reporter
from preloadd.loader.room import await_room, require_room
from preloadd.memory.api import Filler
from preloadd.protocol import payload


def load(
    settings: RankSettings,
    filler: Filler,
    reporter: Reporter,
    *,
    digest_cache: Path | None,
    peer: Peer | None = None,
) -> Manifest:
    """Load what `settings` say into memory of `filler`, handing each piece to `reporter`.

    With a `peer`, weights come from there where that is faster than the disk.
    Closes `filler`, whatever comes. Raises a PreloadError that names what is wrong; chunks that
    were handed over by then are the receiver's to give up. What is returned has been told.
    """
    with closing(filler):
        build = _BUILDERS[settings.model.builder]
        manifest = build(settings, filler, reporter, digest_cache, peer)
        # Before the filler is closed: that of a device takes its time.
        reporter.manifest(payload.encode(manifest))
    return manifest


def _load_native(
    settings: RankSettings,
    filler: Filler,
    reporter: Reporter,
    digest_cache: Path | None,
    peer: Peer | None,
) -> Manifest:
    started = time.monotonic()
    reporter.progress("opening")
    native = Native(settings, filler.granularity)
    # All that can be foreseen, while what is replaced is still there.
    reading = _reading(settings.model.reader)
    needed = native.plan.arena_nbytes + reading.buffer_nbytes(native)
    require_room(filler, needed, freed=reporter.frees or 0)
    digest = agree(settings, native.checkpoint, digest_cache, reporter, native.key)
    if reporter.frees:
        await_room(filler, needed)
    filled = None
    if peer is not None:
        method = settings.model.digest
        digest = digest or identify(native.checkpoint, method, digest_cache, reporter)
        filled = fill_native(peer, native, native.key(digest), filler, reporter)
    filled = filled or reading.fill(native, filler, reporter)
    digest = digest or identify(native.checkpoint, settings.model.digest, digest_cache, reporter)
    return _manifest(settings, native, digest, filled, started)


def _load_vllm(
    settings: RankSettings,
    filler: Filler,
    reporter: Reporter,
    digest_cache: Path | None,
    peer: Peer | None,
) -> Manifest:
    try:
        from preloadd.loader.vllm import build
    except ImportError as error:
        raise ConfigError(
            f'builder is "vllm", and {lacks(error)}: install it there, or name the interpreter of '
            f"the engine ({PLACES})"
        ) from error
    return build.load(settings, filler, reporter, digest_cache=digest_cache, peer=peer)


def _manifest(
    settings: RankSettings, native: Native, digest: str, filled: Filled, started: float
) -> Manifest:
    return Manifest(
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
            "bytes_read": filled.bytes_read,
            "bytes_direct": filled.bytes_direct,
            "bytes_peer": filled.bytes_peer,
            "files": len(native.checkpoint.shards),
            "fill_ms": int(filled.seconds * 1000),
            "load_ms": int((time.monotonic() - started) * 1000),
        },
    )


class _Reading(NamedTuple):
    """How a reader fills chunks, and the bytes of the same memory that it needs besides them."""

    fill: Callable[[Native, Filler, Reporter], Filled]
    buffer_nbytes: Callable[[Native], int]


def _reading(reader: Reader) -> _Reading:
    match reader:
        case Reader.PREAD:
            return _Reading(fill, lambda _: 0)
        case Reader.INSTANTTENSOR:
            return _reading_instantly()


def _reading_instantly() -> _Reading:
    try:
        from preloadd.loader import instant
    except ImportError as error:
        raise ConfigError(
            f'reader is "instanttensor", which this Python does not have ({error}): install '
            'instanttensor and torch into it, or set reader = "pread"'
        ) from error
    return _Reading(instant.fill, instant.buffer_nbytes)


_Build = Callable[[RankSettings, Filler, Reporter, Path | None, Peer | None], Manifest]
_BUILDERS: dict[Builder, _Build] = {
    Builder.NATIVE: _load_native,
    Builder.VLLM: _load_vllm,
}
