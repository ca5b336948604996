"""What an engine takes over from its daemon before it warms up, so that it need not make it.

By then its model is built, since vLLM's hash of a configuration depends on that. Nothing here keeps
an engine from starting: what cannot be had, it makes by itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial

from vllm.config import VllmConfig

from preloadd.domain.ids import Role
from preloadd.domain.placement import Placement
from preloadd.engine import bundles, tables
from preloadd.engine.client import Attachment
from preloadd.frameworks import flashinfer
from preloadd.frameworks.vllm import tuning
from preloadd.frameworks.vllm.compiled import compile_identity
from preloadd.protocol.messages import REHEARSAL
from preloadd.warmup.names import TableName
from preloadd.warmup.seeding.tables import KIND

log = logging.getLogger("vllm.preloadd")

Step = Callable[[VllmConfig, Placement, Attachment], str]
"""Takes one kind over; one line for the log, or '' where there is nothing to say."""


def take_over(config: VllmConfig, role: Role, placement: Placement, attachment: Attachment) -> None:
    """Have the daemon's warm-up state where vLLM looks for it. Every rank does so, to the same end:
    engines of replicas do not wait for each other."""
    if role is Role.DRAFT or os.environ.get(REHEARSAL):
        return
    for step in _STEPS:
        try:
            told = step(config, placement, attachment)
        except Exception as error:  # FlashInfer and vLLM raise anything
            log.warning("preloadd: this engine warms up by itself: %s", error)
            log.debug("preloadd: taking over failed", exc_info=True)
            continue
        if told:
            log.info("preloadd: %s", told)


def _tables(config: VllmConfig, placement: Placement, attachment: Attachment) -> str:
    if why := tuning.untuned(config, placement):
        log.debug("preloadd: no tables are asked for: %s", why)
        return ""
    config_hash = tuning.config_hash(config)
    received = attachment.warmup(KIND, config_hash, limit=tables.LIMIT)
    if not received:
        return f"the daemon has no tables of FlashInfer for this configuration ({config_hash[:12]})"
    wanted = [TableName(*rank) for rank in tuning.ranks(placement)]
    unused = partial(flashinfer.unused, here=flashinfer.environment())
    return tables.install(received, wanted, tuning.root(), config_hash, unused)


def _compiled(config: VllmConfig, placement: Placement, attachment: Attachment) -> str:
    config_hash = tuning.config_hash(config)

    def ask(kind: str, limit: int) -> Mapping[str, bytes]:
        return attachment.warmup(kind, config_hash, limit=limit)

    def identity() -> Mapping[str, str]:
        ranks = tuning.ranks(placement)
        return compile_identity(
            config, config_hash=config_hash, engine_args=(), ranks=ranks, environ=os.environ
        ).fields

    return bundles.take(ask, config_hash, identity)


_STEPS: tuple[Step, ...] = (_tables, _compiled)
