"""Which of FlashInfer's tables engines of vLLM look for, and where: asked of vLLM, where it says.

Engines of several ranks have a table each, in files by configuration and rank. An engine of one
rank has FlashInfer's managed store, which knows no configuration, unless its vLLM is older.
"""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.flashinfer import has_flashinfer

from preloadd.domain.placement import Placement

_CAPABILITY = 90
"""As vLLM has it, 10 times that of the oldest GPUs for which it tunes: Hopper."""


def untuned(config: VllmConfig, placement: Placement) -> str:
    """Why engines look for no table of any rank, for people; '' if they do."""
    if why := never_tunes(config):
        return why
    speculative = config.speculative_config
    if speculative is not None and speculative.draft_model_config is not None:
        return "a draft model takes part: the first engine tunes"
    if placement.parallel.world == 1 and has_managed_store(config):
        return "an engine of one rank keeps what it tunes in FlashInfer's own store"
    return ""


def never_tunes(config: VllmConfig) -> str:
    """Why engines tune nothing, wherever that would be kept; '' if they may."""
    kernels: Any = getattr(config, "kernel_config", None)
    if getattr(kernels, "enable_flashinfer_autotune", None) is False:
        return "FlashInfer's autotuner is switched off in the engine's arguments"
    if not current_platform.is_cuda() or not current_platform.has_device_capability(_CAPABILITY):
        return "vLLM tunes on GPUs of compute capability 9.0 and newer only"
    if not has_flashinfer():
        return "FlashInfer, or what it compiles with, is not in the engine's environment"
    return ""


def has_managed_store(config: VllmConfig) -> bool:
    """Whether an engine of one rank has no table of its own."""
    try:
        from vllm.utils.flashinfer import has_flashinfer_autotune_v2
    except ImportError:
        return False
    elastic = getattr(config.parallel_config, "enable_elastic_ep", False)
    return bool(has_flashinfer_autotune_v2()) and not elastic


def config_hash(config: VllmConfig) -> str:
    """By what vLLM tells configurations apart in its folder of tables.

    To be asked of a configuration over which a model was built: the size of a block of its cache
    depends on it. That is settled later in engines, so it is here for a copy.
    """
    settled = copy.copy(config)
    settled.cache_config = copy.copy(config.cache_config)
    settle: Any = getattr(current_platform, "update_block_size_for_backend", lambda _: None)
    settle(settled)
    return _hashed(settled)


def root() -> Path:
    """The folder of tables of this process's engines; needs FlashInfer."""
    try:
        from vllm.model_executor.warmup.flashinfer_autotune_cache import flashinfer_autotune_root
    except ImportError:
        return _own_root()
    return Path(flashinfer_autotune_root())


def ranks(placement: Placement) -> tuple[tuple[int, int], ...]:
    """(data-parallel rank, rank) of all ranks that engines at that place work together with, which
    name their tables."""
    parallel = placement.parallel
    return tuple((rank // parallel.replica, rank) for rank in range(parallel.world))


def _hashed(config: VllmConfig) -> str:
    try:
        from vllm.model_executor.warmup.flashinfer_autotune_cache import (
            flashinfer_autotune_cache_hash,
        )
    except ImportError:
        return hashlib.sha256(config.compute_hash(include_version=False).encode()).hexdigest()
    # All it wants of a runner is its configuration.
    return str(flashinfer_autotune_cache_hash(SimpleNamespace(vllm_config=config)))


def _own_root() -> Path:
    """As vLLM composes it where it has no function for it."""
    chosen = getattr(envs, "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR", None)
    if chosen:
        return Path(chosen).expanduser()
    from flashinfer.jit import env

    workspace = Path(env.FLASHINFER_WORKSPACE_DIR)
    folder = Path(envs.VLLM_CACHE_ROOT) / "flashinfer_autotune_cache"
    return folder / workspace.parent.name / workspace.name
