"""One load by vLLM, from order to manifest."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.models.interfaces import SupportsEagleBase

from preloadd.domain.files import FileIdentity
from preloadd.domain.key import CHECKPOINT, Key
from preloadd.domain.manifest import Artifact, Manifest
from preloadd.domain.recipe import LAYOUT, recipe_of
from preloadd.domain.settings import RankSettings
from preloadd.errors import CheckpointError, ReadFailed, UnsupportedModel
from preloadd.frameworks.torch import explained
from preloadd.frameworks.vllm.identity import vllm_key
from preloadd.loader.filling import Filled
from preloadd.loader.identifying import agree, identify
from preloadd.loader.peer import Peer, Want, fill, pace_of
from preloadd.loader.report import Reporter, Tally
from preloadd.loader.room import await_room, require_room
from preloadd.loader.streams import PeerLost
from preloadd.loader.vllm.alone import alone
from preloadd.loader.vllm.arguments import engine_config, reported
from preloadd.loader.vllm.export import Export, Stored, artifact, describe, store
from preloadd.loader.vllm.least import least
from preloadd.loader.vllm.model import build
from preloadd.loader.vllm.warmable import described, taken
from preloadd.memory.api import Filler
from preloadd.weights.checkpoint import Checkpoint, identities_of, open_checkpoint

MOST_TIMES = 4
"""How many times as large as a checkpoint what a peer made of it may be."""


def load(
    settings: RankSettings,
    filler: Filler,
    reporter: Reporter,
    *,
    digest_cache: Path | None,
    peer: Peer | None = None,
) -> Manifest:
    """Load what `settings` say into memory of `filler`, handing each chunk to `reporter`.

    The manifest describes them. PreloadError as of the parts; vLLM's own errors become
    CheckpointError, since it reads and judges the checkpoint.
    """
    started = time.monotonic()
    reporter.progress("opening")
    checkpoint = open_checkpoint(Path(settings.model.path))
    config, model_config = engine_config(settings)
    needed = least(checkpoint.nbytes_by_dtype(), settings, model_config)
    hoped = require_room(filler, needed, part=True, freed=reporter.frees or 0)
    # Before the model is built, which may change what the key is made of.
    key = _key(settings, config, model_config)

    def with_content(digest: str) -> Key:
        return Key(key | {CHECKPOINT: digest})

    digest = agree(settings, checkpoint, digest_cache, reporter, with_content)
    if reporter.frees:
        # What is needed at least may be there before all that was freed, and vLLM does not wait.
        await_room(filler, needed, part=True, hoped=min(hoped, checkpoint.nbytes))
    if peer is not None:
        digest = digest or identify(checkpoint, settings.model.digest, digest_cache, reporter)
        wanted = _wanted(settings, checkpoint, with_content(digest), filler)
        found = fill(peer, wanted, filler, reporter)
        if found is not None:
            theirs, filled = found
            warmup = taken(theirs, config, settings.model.engine_args)
            return _taken(settings, checkpoint, theirs, warmup, filled, started)
    made = _made(settings, checkpoint, config, model_config, filler, reporter)
    _require_unchanged(checkpoint)
    digest = digest or identify(checkpoint, settings.model.digest, digest_cache, reporter)
    return _manifest(settings, checkpoint, with_content(digest), made, started)


class _Made(NamedTuple):
    """What vLLM made, and where it was stored."""

    export: Export
    attributes: dict[str, bool | int | float | str]
    warmup: Artifact
    stored: Stored


def _made(
    settings: RankSettings,
    checkpoint: Checkpoint,
    config: VllmConfig,
    model_config: ModelConfig,
    filler: Filler,
    reporter: Reporter,
) -> _Made:
    tally = _Tallies(reporter, checkpoint.nbytes)
    placement = reported(config, settings.model)
    with alone(config, placement):
        shards = [shard.path for shard in checkpoint.shards]
        with _judged(settings.model.name), explained(filler.room):
            built = build(config, model_config, settings.model.layout, shards, tally)
        with explained(filler.room):
            export = describe(built)
            attributes = _attributes(built.model)
            warmup = described(
                config, placement, settings.parsed_instance.role, settings.model.engine_args
            )
            stored = store(export, filler, settings.model.chunk_bytes, reporter)
    return _Made(export, attributes, warmup, stored)


def _manifest(
    settings: RankSettings, checkpoint: Checkpoint, key: Key, made: _Made, started: float
) -> Manifest:
    return Manifest(
        generation=secrets.token_hex(16),
        layout=LAYOUT,
        backend=settings.model.memory.value,
        chunks=made.stored.chunks,
        storages=made.stored.storages,
        tensors=made.export.tensors,
        key=key,
        recipe=recipe_of(settings, checkpoint.identities()),
        shards=checkpoint.weights_identities(),
        aliases=made.export.aliases,
        attributes=made.attributes,
        artifacts=(
            Artifact("config", "config.json", checkpoint.config_bytes),
            artifact(made.export),
            made.warmup,
        ),
        counters={
            "bytes_read": checkpoint.nbytes,
            "files": len(checkpoint.shards),
            "load_ms": int((time.monotonic() - started) * 1000),
        },
    )


def _wanted(settings: RankSettings, checkpoint: Checkpoint, key: Key, filler: Filler) -> Want:
    """Weights as vLLM would make them here: how large they are is not known before."""
    most = min(filler.room()[0], MOST_TIMES * checkpoint.nbytes + settings.model.chunk_bytes)

    def fits(manifest: Manifest) -> None:
        if manifest.backend != settings.model.memory.value:
            raise PeerLost(f"its weights are for memory of the kind {manifest.backend}")
        if sum(manifest.chunks) > most:
            raise PeerLost(
                f"its arena has {sum(manifest.chunks):,} bytes, {most:,} at most do here"
            )

    return Want(key, checkpoint.nbytes, pace_of(checkpoint, filler), fits)


def _taken(
    settings: RankSettings,
    checkpoint: Checkpoint,
    theirs: Manifest,
    warmup: Artifact,
    filled: Filled,
    started: float,
) -> Manifest:
    """The peer's manifest as one of this rank."""
    _require_unchanged(checkpoint)
    own = (Artifact("config", "config.json", checkpoint.config_bytes), warmup)
    names = {(one.kind, one.name) for one in own}
    others = (one for one in theirs.artifacts if (one.kind, one.name) not in names)
    return replace(
        theirs,
        generation=secrets.token_hex(16),
        recipe=recipe_of(settings, checkpoint.identities()),
        shards=checkpoint.weights_identities(),
        artifacts=(*own, *others),
        counters={
            "bytes_read": 0,
            "bytes_peer": filled.bytes_peer,
            "files": len(checkpoint.shards),
            "fill_ms": int(filled.seconds * 1000),
            "load_ms": int((time.monotonic() - started) * 1000),
        },
    )


def _key(settings: RankSettings, config: VllmConfig, model_config: ModelConfig) -> Key:
    return vllm_key(
        config,
        model_config,
        checkpoint="",
        placement=reported(config, settings.model),
        role=settings.parsed_instance.role,
        layout=settings.model.layout,
        environ=os.environ,
    )


@contextmanager
def _judged(name: str) -> Iterator[None]:
    """Give vLLM's errors, as it loads the model of this name, a meaning."""
    try:
        yield
    except (ValueError, KeyError, OSError, AssertionError) as error:
        raise CheckpointError(f"vLLM cannot load {name}: {error}") from error
    except (RuntimeError, NotImplementedError, ImportError, AttributeError) as error:
        raise UnsupportedModel(f"vLLM cannot load {name}: {error}") from error


class _Tallies:
    """Tells of phases one after the other, each counted by itself. `total` is of the checkpoint."""

    def __init__(self, reporter: Reporter, total: int) -> None:
        self._total = total
        self._reporter = reporter
        self._phase = ""
        self._tally = Tally(reporter, "", 0)

    def __call__(self, phase: str, nbytes: int) -> None:
        """So many bytes more of `phase` are done."""
        if phase != self._phase:
            self._phase = phase
            self._tally = Tally(self._reporter, phase, self._total if phase == "loading" else 0)
        self._tally(nbytes)


def _attributes(model: nn.Module) -> dict[str, bool | int | float | str]:
    """Flags that loading sets on a draft, as vLLM names them: what it has of its own.

    One that the model does not have is not made up: vLLM asks whether it is there.
    """
    found: dict[str, Any] = {}
    for name in SupportsEagleBase.__annotations__:
        if hasattr(model, name):
            found[name] = bool(getattr(model, name))
    return found


def _require_unchanged(checkpoint: Checkpoint) -> None:
    now: tuple[FileIdentity, ...] = tuple(sorted(identities_of(checkpoint.folder)))
    if now != tuple(sorted(checkpoint.identities())):
        raise ReadFailed(
            f"files in {checkpoint.folder} changed while vLLM read them: load again once they are "
            "complete"
        )
