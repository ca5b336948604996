"""A model built, loaded and post-processed by vLLM, up to the layout that is shared."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from preloadd.domain.settings import Layout
from preloadd.errors import CheckpointError
from preloadd.frameworks.vllm import walk
from preloadd.frameworks.vllm.layouts import loaders_processing, require_shareable
from preloadd.loader.vllm.alone import reading_alone
from preloadd.loader.vllm.built import Built

Told = Callable[[str, int], None]
"""Told of a phase, and of so many bytes more in it."""


def build(
    config: VllmConfig,
    model_config: ModelConfig,
    layout: Layout,
    shards: Collection[Path],
    told: Told,
) -> Built:
    """The model in evaluation mode, weights in `layout`; within `alone`.

    CheckpointError if vLLM would read other files than `shards`, which identify the checkpoint.

    What cannot be shared is refused before anything is read (UnsupportedQuantForIPCError).
    """
    device = torch.device(config.device_config.device)
    loader = get_model_loader(config.load_config)
    with set_default_torch_dtype(model_config.dtype), torch.no_grad():
        told("creating", 0)
        _make_workspace(device)
        with device:
            model = loader.create_model(config, model_config)
        require_shareable(model, layout)
        modules = walk.modules_of(model)
        outline = walk.outline(modules)
        names = frozenset(found.name for found in walk.registered(modules))
        told("loading", 0)
        _hold_to(loader, frozenset(shard.resolve() for shard in shards))
        _count(loader, lambda nbytes: told("loading", nbytes))
        with reading_alone():
            loader.load_weights(model, model_config)
        if layout is not Layout.RAW:
            told("processing", 0)
            gc.collect()
            with loaders_processing(layout):
                process_weights_after_loading(model, model_config, device)
    return Built(model.eval(), outline, names)


def _make_workspace(device: torch.device) -> None:
    """Where attention backends take room when they are built. Not in every version."""
    try:
        from vllm.v1.worker.workspace import init_workspace_manager
    except ImportError:
        return
    init_workspace_manager(device)


def _hold_to(loader: BaseModelLoader, shards: frozenset[Path]) -> None:
    """Have a loader that picks files by its own rules raise where those are not `shards`."""
    pick: Any = getattr(loader, "_prepare_weights", None)
    if pick is None:
        return

    def held(*args: object, **kwargs: object) -> object:
        picked = pick(*args, **kwargs)
        files = frozenset(Path(file).resolve() for file in picked[1])
        if files != shards:
            other = ", ".join(sorted(file.name for file in files ^ shards)[:5])
            raise CheckpointError(
                f"vLLM reads other files of this checkpoint than those it is identified by "
                f"({other}): keep one set of safetensors files in its folder, with an index if "
                "there are several"
            )
        return picked

    loader._prepare_weights = held  # noqa: SLF001


def _count(loader: BaseModelLoader, told: Callable[[int], None]) -> None:
    """Have a loader that hands over tensor after tensor tell of each; others stay silent."""
    weights: Any = getattr(loader, "get_all_weights", None)
    if weights is None:
        return

    def counted(*args: object, **kwargs: object) -> Iterator[tuple[str, torch.Tensor]]:
        tensors: Iterable[tuple[str, torch.Tensor]] = weights(*args, **kwargs)
        for name, tensor in tensors:
            yield name, tensor
            told(tensor.nbytes)

    loader.get_all_weights = counted
