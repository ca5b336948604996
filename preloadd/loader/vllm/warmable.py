"""What a rank is told of the tables that vLLM's engines over its weights look for.

By which hash vLLM knows a configuration depends on the model that was built over it, and is written
into the manifest. What FlashInfer has to be asked for costs seconds: that is found out afterwards.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import msgspec
from vllm.config import VllmConfig

from preloadd.domain.ids import Role
from preloadd.domain.lines import one_line
from preloadd.domain.manifest import Artifact, Manifest
from preloadd.domain.placement import Placement
from preloadd.frameworks import flashinfer
from preloadd.frameworks.vllm import tuning
from preloadd.frameworks.vllm.compiled import compile_identity
from preloadd.protocol.messages import Warmable

log = logging.getLogger(__name__)

KIND, NAME = "warmup", "tables.json"

_MAX_TOLD = 500
_MAX_IDENTITY = 48 * 1024
"""Bytes: one packet tells it, beside much that is short."""


class _Found(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is written into the manifest, and read from it: a peer's is not to be believed."""

    config_hash: str = ""
    ranks: tuple[tuple[int, int], ...] = ()
    dp_rank: int = 0
    rank: int = 0
    why_not: str = ""
    untuned: bool = False
    identity: dict[str, str] = {}


def described(
    config: VllmConfig, placement: Placement, role: Role, engine_args: Sequence[str]
) -> Artifact:
    """For the manifest: hash and ranks, or why no engine looks for a table, and what code that is
    compiled here is of.

    To be called where vLLM knows the `placement` of this rank, after the model was built.
    """
    try:
        found = _found(config, placement, role, engine_args)
    except Exception as error:
        log.warning("it is not known which tables engines look for", exc_info=True)
        found = _Found(why_not=f"vLLM does not say which tables it looks for: {_told(error)}")
    return _written(found)


def taken(theirs: Manifest, config: VllmConfig, engine_args: Sequence[str]) -> Artifact:
    """The same of weights that came from a peer: of its own, only the hash is kept, and the ranks.
    Where compiled code lies and what it is of is this host's affair."""
    try:
        found = _read(theirs)
        identity = _identity(config, found.config_hash, found.ranks, engine_args)
        found = msgspec.structs.replace(
            found,
            identity=identity if found.identity else {},
            untuned=bool(tuning.never_tunes(config)),
        )
    except Exception as error:
        log.warning("what the peer says of warming up is of no use", exc_info=True)
        found = _Found(why_not=f"the peer does not say which tables there are: {_told(error)}")
    return _written(found)


def warmable(manifest: Manifest) -> Warmable:
    """What `described` wrote, with the folder of tables and what FlashInfer says of this place."""
    found = msgspec.structs.asdict(_read(manifest))
    if found["why_not"]:
        return Warmable(**found)
    try:
        return Warmable(**found, root=str(tuning.root()), metadata=dict(flashinfer.environment()))
    except Exception as error:
        log.warning("FlashInfer cannot be asked", exc_info=True)
        return Warmable(**found | {"why_not": f"FlashInfer cannot be asked: {_told(error)}"})


def _read(manifest: Manifest) -> _Found:
    artifacts = manifest.artifacts
    written = next(one.data for one in artifacts if (one.kind, one.name) == (KIND, NAME))
    return msgspec.json.decode(written, type=_Found)


def _written(found: _Found) -> Artifact:
    return Artifact(KIND, NAME, msgspec.json.encode(found))


def _found(
    config: VllmConfig, placement: Placement, role: Role, engine_args: Sequence[str]
) -> _Found:
    if role is Role.DRAFT:
        return _Found(why_not="engines tune drafts together with their targets")
    config_hash, ranks = tuning.config_hash(config), tuning.ranks(placement)
    identity = _identity(config, config_hash, ranks, engine_args)
    own = ranks[placement.rank]
    why_not = tuning.untuned(config, placement)
    never = bool(tuning.never_tunes(config))
    return _Found(config_hash, ranks, own[0], own[1], why_not, never, identity)


def _identity(
    config: VllmConfig,
    config_hash: str,
    ranks: Sequence[tuple[int, int]],
    engine_args: Sequence[str],
) -> dict[str, str]:
    """What compiled code has to be of; none if nothing is compiled, or it is too long."""
    if not config.compilation_config.mode:
        return {}
    found = compile_identity(
        config, config_hash=config_hash, engine_args=engine_args, ranks=ranks, environ=os.environ
    )
    if len(msgspec.json.encode(found.fields)) > _MAX_IDENTITY:
        log.warning("compiled code is not kept: the arguments of its engines are too long")
        return {}
    return found.fields


def _told(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}")[:_MAX_TOLD]
