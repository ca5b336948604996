"""A model built, loaded and post-processed by vLLM, up to the layout that is shared."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from preloadd.domain.settings import Layout
from preloadd.errors import CheckpointError, ConfigError, UnsupportedModel
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

    Errors as of `_hold_to` if vLLM would read other files than `shards`, by which the checkpoint is
    identified.

    What cannot be shared is refused before anything is read (UnsupportedQuantForIPCError).
    """
    device = torch.device(config.device_config.device)
    loader = get_model_loader(config.load_config)
    with set_default_torch_dtype(model_config.dtype), torch.no_grad():
        told("creating", 0)
        _make_workspace(device)
        with device:
            model = loader.create_model(config, model_config)
        modules = walk.modules_of(model)
        require_shareable(modules, layout)
        tensors = list(walk.registered(modules))
        outline = walk.outline(modules, tensors)
        names = frozenset(found.name for found in tensors)
        told("loading", 0)
        _hold_to(loader, frozenset(shard.resolve() for shard in shards))
        _count(loader, lambda nbytes: told("loading", nbytes))
        with reading_alone():
            loader.load_weights(model, model_config)
        state: dict[str, walk.Plain] = {}
        if layout is not Layout.RAW:
            told("processing", 0)
            gc.collect()
            before = walk.plain_values(modules)
            with loaders_processing(layout):
                process_weights_after_loading(model, model_config, device)
            after = walk.plain_values(walk.modules_of(model))
            # What was not there may as well be missing as None.
            state = {name: now for name, now in after.items() if before.get(name) != now}
    return Built(model.eval(), outline, names, state)


def _make_workspace(device: torch.device) -> None:
    """Where attention backends take room when they are built. Not in every version."""
    try:
        from vllm.v1.worker.workspace import init_workspace_manager
    except ImportError:
        return
    init_workspace_manager(device)


def _hold_to(loader: BaseModelLoader, shards: frozenset[Path]) -> None:
    """Have a loader, which picks files by its own rules, raise where those are not `shards`.

    One that reads files of its rank alone has to find them among `shards`. ConfigError for an
    option that chooses others, UnsupportedModel for a loader that does not tell what it reads.
    """
    own: Any = loader
    if isinstance(loader, ShardedStateLoader):
        if (loader.load_config.model_loader_extra_config or {}).get("pattern"):
            raise ConfigError(
                "model-loader-extra-config: pattern chooses among files that identify a checkpoint "
                "together: leave it out"
            )
        read = own.iterate_over_files
        own.iterate_over_files = lambda paths: read(_own_of(paths, shards))
    elif (pick := getattr(loader, "_prepare_weights", None)) is not None:
        own._prepare_weights = partial(_picked, pick, shards)  # noqa: SLF001
    else:
        raise UnsupportedModel(
            f"{type(loader).__name__} of vLLM does not tell which files it reads, so that they "
            "cannot be compared with those by which the checkpoint is identified: give another "
            "load-format"
        )


def _picked(pick: Callable[..., Any], shards: frozenset[Path], *args: Any, **named: Any) -> Any:  # noqa: ANN401
    """What a loader picks, files alone or among other things, if those are all `shards`."""
    picked = pick(*args, **named)
    files = _resolved(picked if isinstance(picked, list) else picked[1])
    _refuse_others(files ^ shards)
    return picked


def _own_of(paths: list[str], shards: frozenset[Path]) -> list[str]:
    """The files of a rank, if they are among `shards`."""
    _refuse_others(_resolved(paths) - shards)
    return paths


def _resolved(paths: Iterable[str]) -> frozenset[Path]:
    return frozenset(Path(path).resolve() for path in paths)


def _refuse_others(files: frozenset[Path]) -> None:
    if files:
        other = ", ".join(sorted(file.name for file in files)[:5])
        raise CheckpointError(
            f"vLLM reads other files of this checkpoint than those it is identified by ({other}): "
            "keep one set of safetensors files in its folder, with an index if there are several"
        )


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
