"""Hugging Face transformers as an engine: a causal LM over attached weights, or from disk.

The model is built by transformers itself from the attached tensors in place of a file's, so that
renamed, tied and converted weights, buffers and generation settings come out as from disk.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    modeling_utils,
)
from transformers.utils import logging as transformers_logging

from preloadd.domain.ids import client_name
from preloadd.engine.native import NativeCheckpoint
from preloadd.engine.options import Options
from preloadd.engine.place import CPU, Spot, open_place, spot
from preloadd.engine.torch import Weights, attach_wanted
from preloadd.errors import AttachError, ConfigError, PreloadError
from preloadd.frameworks.torch import device_name
from preloadd.weights.checkpoint import locate
from preloadd.weights.checkpoint.digest_cache import cache_folder_of

log = logging.getLogger(__name__)

Dtype = str | torch.dtype

_PLANNED = ("auto", "balanced", "balanced_low_0", "sequential", "disk")
"""Values of `device_map` by which transformers itself decides what goes where."""

_DISK_ONLY = frozenset(
    {
        "adapter_kwargs",
        "cache_dir",
        "config",
        "device_map",
        "gguf_file",
        "ignore_mismatched_sizes",
        "key_mapping",
        "quantization_config",
        "state_dict",
        "subfolder",
        "tp_plan",
        "trust_remote_code",
        "variant",
    }
)
"""Arguments of transformers that make other weights of a checkpoint than those in its files."""


def from_pretrained(
    model: str | os.PathLike[str],
    *,
    device: str | int | torch.device | None = None,
    revision: str | None = None,
    dtype: Dtype | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,  # noqa: ANN401 - transformers' own
) -> PreTrainedModel:
    """A causal LM in evaluation mode, like `AutoModelForCausalLM.from_pretrained`.

    `device` is the GPU to use, torch's current one if None; `device_map` may name it instead.
    `dtype` is that of the checkpoint if None or "auto"; `torch_dtype` is transformers' older name.
    `options` are those of `preloadd.engine.options.Options`; further arguments go to transformers.
    The attached weights are `model.preloadd`, and their lease ends with the model; without them
    that attribute is None, and so it is in a copy or pickle of the model, which has tensors of its
    own. With `fallback` (the default) every reason not to attach is one warning
    and a load from disk onto the same device, without it a PreloadError. ConfigError for a wrong
    option in any case, and so UnsupportedPlatformForIPCError where there is no GPU and host memory
    was not asked for.

    With `zero_copy` the weights are shared and read-only: parameters need no gradients, and
    writing into one in place ends the process.
    """
    parsed = Options.parse(options or {})
    name = os.fspath(model)
    where = spot(parsed.memory, _device_of(device, kwargs))
    wish = _dtype_of(dtype, kwargs)
    try:
        _require_plain(kwargs)
        return _attached(name, revision or "", wish, parsed, where, kwargs)
    except PreloadError as error:
        if isinstance(error, ConfigError) or not parsed.fallback:
            raise
        log.warning("loading %s from disk: %s", name, error)
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        name, revision=revision or "main", dtype=wish, **(_device_map(where) | kwargs)
    )
    return _holding(loaded, None)


def _device_of(device: str | int | torch.device | None, kwargs: dict[str, Any]) -> str:
    """The one device that is asked for; a `device_map` that says no more is taken out of `kwargs`.

    ConfigError if both are given.
    """
    given = kwargs.get("device_map")
    if given is None:
        return device_name(device)
    if device is not None:
        raise ConfigError("device and device_map exclude each other: give one")
    only = given.get("") if isinstance(given, dict) and len(given) == 1 else given
    if only is None or isinstance(only, dict) or only in _PLANNED:
        return ""
    del kwargs["device_map"]
    return device_name(only)


def _dtype_of(dtype: Dtype | None, kwargs: dict[str, Any]) -> Dtype:
    """The dtype that is asked for by either name; the older one is taken out of `kwargs`.

    ConfigError if both are given and differ.
    """
    given = (dtype, kwargs.pop("torch_dtype", None))
    wishes = {str(wish).removeprefix("torch."): wish for wish in given if wish is not None}
    if len(wishes) > 1:
        raise ConfigError(
            f"dtype and torch_dtype are the same argument, but given as {' and '.join(wishes)}: "
            "leave torch_dtype out"
        )
    return next(iter(wishes.values()), "auto")


def _device_map(where: Spot) -> dict[str, Any]:
    """What has transformers load there. To stay on the CPU it needs no telling, nor accelerate."""
    return {} if where.torch_device == CPU else {"device_map": {"": where.torch_device}}


def _require_plain(kwargs: Mapping[str, Any]) -> None:
    unlike = sorted(name for name in _DISK_ONLY & kwargs.keys() if kwargs[name])
    if kwargs.get("use_safetensors") is False:
        unlike.append("use_safetensors=False")
    if unlike:
        raise AttachError(f"{', '.join(unlike)} cannot be combined with attached weights")


def _attached(
    name: str,
    revision: str,
    dtype: Dtype,
    options: Options,
    where: Spot,
    kwargs: Mapping[str, Any],
) -> PreTrainedModel:
    folder = locate(name, revision, environ=os.environ)
    wish = str(dtype).removeprefix("torch.")
    checkpoint = NativeCheckpoint(
        folder, revision=revision, dtype=wish, digest_cache=cache_folder_of(os.environ)
    )
    config, rest = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **kwargs)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise AttachError(f"transformers has no causal language model for {type(config).__name__}")
    place = open_place(where, os.environ)
    client = client_name(f"transformers-{folder.name}")
    wanted = checkpoint.wanted(place.device, client=client, memory=where.memory)
    rest |= _device_map(where)
    weights = attach_wanted(wanted, options, place)
    with ExitStack() as undo:
        undo.callback(weights.abandon)
        built = _build(config, weights, checkpoint.stored_dtype if wish == "auto" else wish, rest)
        _restore_generation_config(built, folder)
        weights.take_over()
        weakref.finalize(built, weights.abandon)
        undo.pop_all()
    return _holding(built, weights)


def _holding(model: PreTrainedModel, weights: Weights | None) -> PreTrainedModel:
    """`model` with the attribute `preloadd`, which torch's stubs do not foresee."""
    holder: Any = model
    holder.preloadd = weights
    return model


def _build(
    config: PretrainedConfig, weights: Weights, dtype: str, kwargs: Mapping[str, Any]
) -> PreTrainedModel:
    """The model over the attached tensors; AttachError if any weight of it would not be theirs."""
    kind: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    built: PreTrainedModel
    try:
        with _quietly(), _without_warm_up():
            built, told = kind.from_pretrained(
                None,
                config=config,
                state_dict=dict(weights.tensors),
                dtype=getattr(torch, dtype),
                output_loading_info=True,
                **kwargs,
            )
    except (TypeError, ValueError, RuntimeError, ImportError) as error:
        raise AttachError(f"transformers cannot build a {kind.__name__}: {error}") from error
    for fault in ("missing_keys", "mismatched_keys", "error_msgs"):
        if told[fault]:
            named = ", ".join(sorted(map(str, told[fault])))
            raise AttachError(
                f"the attached weights do not make a {kind.__name__}: {fault} {named}"
            )
    _own_buffers(built, weights)
    built.requires_grad_(requires_grad=False)
    return built


def _own_buffers(model: torch.nn.Module, weights: Weights) -> None:
    """Give the model buffers of its own: models write into them, and they are small."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if weights.shares(buffer):
                persistent = name not in module._non_persistent_buffers_set  # noqa: SLF001
                module.register_buffer(name, buffer.clone(), persistent=persistent)


def _restore_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """What transformers does itself when it knows the folder."""
    if not model.can_generate():
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(folder)
    except OSError:
        model.generation_config = GenerationConfig.from_pretrained(
            folder, config_file_name="config.json", _from_model_config=True
        )


@contextmanager
def _quietly() -> Iterator[None]:
    """Without a progress bar for what takes milliseconds."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


_building = threading.Lock()
_WARM_UP = "caching_allocator_warmup"


@contextmanager
def _without_warm_up() -> Iterator[None]:
    """Without the allocation in which transformers lets torch set aside GPU memory for all weights.

    It serves copies, and the attached weights are not copied: the GPU would hold them twice. Loads
    of other threads keep theirs.
    """
    module: Any = modeling_utils
    with _building:
        warm_up = getattr(module, _WARM_UP, None)
        if warm_up is None:  # not in every version
            yield
            return
        builder = threading.get_ident()

        def for_others(*given: object, **named: object) -> None:
            if threading.get_ident() != builder:
                warm_up(*given, **named)

        setattr(module, _WARM_UP, for_others)
        try:
            yield
        finally:
            setattr(module, _WARM_UP, warm_up)
