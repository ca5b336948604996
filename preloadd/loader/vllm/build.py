"""One load by vLLM, from order to manifest."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.models.interfaces import SupportsEagleBase

from preloadd.domain.files import FileIdentity
from preloadd.domain.key import CHECKPOINT, Key
from preloadd.domain.manifest import Artifact, Manifest
from preloadd.domain.recipe import LAYOUT, recipe_of
from preloadd.domain.settings import RankSettings
from preloadd.errors import CheckpointError, OutOfRoom, ReadFailed, UnsupportedModel
from preloadd.frameworks.vllm.identity import vllm_key
from preloadd.loader.identifying import agree, identify
from preloadd.loader.report import Reporter, Tally
from preloadd.loader.vllm.alone import alone
from preloadd.loader.vllm.arguments import engine_config, reported
from preloadd.loader.vllm.built import Built
from preloadd.loader.vllm.export import artifact, describe, store
from preloadd.loader.vllm.model import build
from preloadd.memory.api import Filler
from preloadd.weights.checkpoint import Checkpoint, identities_of, open_checkpoint


def load(
    settings: RankSettings, filler: Filler, reporter: Reporter, *, digest_cache: Path | None
) -> Manifest:
    """Load what `settings` say into memory of `filler`, handing each chunk to `reporter`.

    The manifest describes them. PreloadError as of the parts; vLLM's own errors become
    CheckpointError, since it reads and judges the checkpoint.
    """
    started = time.monotonic()
    reporter.progress("opening")
    checkpoint = open_checkpoint(Path(settings.model.path))
    config, model_config = engine_config(settings)
    # Before the model is built, which may change what the key is made of.
    key = _key(settings, config, model_config)

    def with_content(digest: str) -> Key:
        return Key(key | {CHECKPOINT: digest})

    digest = agree(settings, checkpoint, digest_cache, reporter, with_content)
    tally = _Tallies(reporter, checkpoint.nbytes)
    with alone(config, reported(config, settings.model)):
        shards = [shard.path for shard in checkpoint.shards]
        built = _built(config, model_config, settings, shards, tally)
        export = describe(built)
        attributes = _attributes(built.model)
        stored = store(export, filler, settings.model.chunk_bytes, reporter)
    _require_unchanged(checkpoint)
    digest = digest or identify(checkpoint, settings.model.digest, digest_cache, reporter)
    return Manifest(
        generation=secrets.token_hex(16),
        layout=LAYOUT,
        backend=settings.model.memory.value,
        chunks=stored.chunks,
        storages=stored.storages,
        tensors=export.tensors,
        key=with_content(digest),
        recipe=recipe_of(settings, checkpoint.identities()),
        shards=checkpoint.weights_identities(),
        aliases=export.aliases,
        attributes=attributes,
        artifacts=(
            Artifact("config", "config.json", checkpoint.config_bytes),
            artifact(export),
        ),
        counters={
            "bytes_read": checkpoint.nbytes,
            "files": len(checkpoint.shards),
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


def _built(
    config: VllmConfig,
    model_config: ModelConfig,
    settings: RankSettings,
    shards: Collection[Path],
    told: _Tallies,
) -> Built:
    try:
        return build(config, model_config, settings.model.layout, shards, told)
    except MemoryError as error:
        raise OutOfRoom(
            wanted=told.total, free=0, limit="the memory that vLLM loads with", part=True
        ) from error
    except (ValueError, KeyError, OSError, AssertionError) as error:
        raise CheckpointError(f"vLLM cannot load {settings.model.name}: {error}") from error
    except (RuntimeError, NotImplementedError, ImportError, AttributeError) as error:
        raise UnsupportedModel(f"vLLM cannot load {settings.model.name}: {error}") from error


class _Tallies:
    """Tells of phases one after the other, each counted by itself. `total` is of the checkpoint."""

    def __init__(self, reporter: Reporter, total: int) -> None:
        self.total = total
        self._reporter = reporter
        self._phase = ""
        self._tally = Tally(reporter, "", 0)

    def __call__(self, phase: str, nbytes: int) -> None:
        """So many bytes more of `phase` are done."""
        if phase != self._phase:
            self._phase = phase
            self._tally = Tally(self._reporter, phase, self.total if phase == "loading" else 0)
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
