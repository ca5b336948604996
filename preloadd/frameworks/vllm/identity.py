"""The key of weights that vLLM has laid out: everything that chose the bytes, by name.

The bytes are not those of the checkpoint: vLLM fuses, shards, quantises and repacks them, each
depending on its version, its configuration, the hardware and switches in the environment. vLLM
itself would notice none of these differing. Both sides call `vllm_key` with configuration objects
that vLLM made of the same arguments, before any model is built: building and post-processing may
change them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import vllm
from vllm import envs
from vllm.config import ModelConfig, VllmConfig

from preloadd.domain.ids import Role
from preloadd.domain.key import CHECKPOINT, Key, canonical, table
from preloadd.domain.placement import Placement
from preloadd.domain.recipe import BUILDER_VERSIONS, KERNELS, LAYOUT
from preloadd.domain.settings import Builder, Layout
from preloadd.domain.switches import switches
from preloadd.frameworks.identity import ROPE_NAMES, place_fields, rope_of
from preloadd.frameworks.vllm.drafts import backends
from preloadd.weights.checkpoint import code_of, locate

_VOLATILE = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
"""Of a model's configuration: where it lies and who wrote it, which changes no weight."""

_NAMED = frozenset({"architectures", "quantization_config"})
"""Of a model's configuration: what has a field of its own, besides what says how positions are
told. All else is one field, a table."""

_LONG_ROPE = frozenset({"longrope", "su"})
"""Kinds of rotary embedding whose cached angles depend on the longest request that is served."""


def vllm_key(
    config: VllmConfig,
    model: ModelConfig,
    *,
    checkpoint: str,
    placement: Placement,
    role: Role,
    layout: Layout,
    environ: Mapping[str, str],
) -> Key:
    """The key of what vLLM makes of a checkpoint for one rank.

    `model` is the target's or the draft's part of `config`; `checkpoint` the content
    (`<method>:<hex>`), empty on an engine's side that has not read it; `layout` says which of
    vLLM's steps the bytes have behind them.

    A target's key says nothing of a draft: with or without one, its weights are the same. A draft's
    names what it takes from its target's configuration, and none of the target's weights: it is
    built for so many layers of such a size, and whether it uses the target's embedding and head is
    decided in the engine, by flags that come with the draft.
    """
    hf = model.hf_config.to_dict()
    fields = {
        CHECKPOINT: checkpoint,
        "revision": model.revision or "",
        "role": role.value,
        "weight_layout": layout.value,
        **place_fields(placement),
        **_model(hf, model),
        "code": _code(hf, model, environ),
        **_kernels(config, role),
        **_makers(environ),
    }
    if role is Role.DRAFT:
        fields["target"] = _target(config)
    return Key(fields)


def _model(hf: Mapping[str, Any], model: ModelConfig) -> dict[str, str]:
    """What the model's configuration says, by names where people ask, and as a whole."""
    quantization = {
        "checkpoint": _plain(hf.get("quantization_config")),
        "runtime": _plain(getattr(model, "quantization_config", None)),
    }
    return {
        "architecture": ",".join(hf.get("architectures") or []),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": _text(model.quantization),
        "quantization_config": table(quantization),
        "rope": table(_plain(_rope(hf, model))),
        "model_config": table(_plain(_unnamed(_lasting(hf)))),
        "model_impl": _text(getattr(model, "model_impl", "auto")),
        "runner": _text(getattr(model, "runner_type", None)),
        "convert": _text(getattr(model, "convert_type", None)),
    }


def _code(hf: Mapping[str, Any], model: ModelConfig, environ: Mapping[str, str]) -> str:
    """What of the checkpoint's own code runs: none, unless it has some and may run it."""
    if not (getattr(model, "trust_remote_code", False) and hf.get("auto_map")):
        return ""
    folder = locate(model.model, model.revision or "", environ=environ)
    # Code may also come from elsewhere, by a name in the configuration and this revision.
    return table({"files": code_of(folder), "revision": getattr(model, "code_revision", None)})


def _kernels(config: VllmConfig, role: Role) -> dict[str, str]:
    """What was asked for that weights are laid out for."""
    kernels, chosen = getattr(config, "kernel_config", None), backends(config, role)
    skipped = getattr(config.cache_config, "kv_cache_dtype_skip_layers", None) or ()
    per_quantization = getattr(kernels, "linear_backend_per_quant", None) or {}
    return {
        "kv_cache_dtype": _text(chosen.kv_cache_dtype),
        "kv_cache_skip_layers": canonical(sorted(map(str, skipped))),
        "moe_backend": _text(chosen.moe or "auto"),
        "linear_backend": _text(getattr(kernels, "linear_backend", "auto")),
        "linear_backend_per_quant": canonical(_plain(per_quantization)),
        "attention_backend": _text(chosen.attention or "auto"),
    }


def _target(config: VllmConfig) -> str:
    """What a draft takes from the model that it drafts for."""
    model = config.model_config
    return canonical(
        {
            "architecture": ",".join(model.hf_config.architectures or []),
            "hidden_size": model.get_hidden_size(),
            "layers": model.get_total_num_hidden_layers(),
        }
    )


def _makers(environ: Mapping[str, str]) -> dict[str, str]:
    """What built the bytes: versions, hardware as far as kernels are chosen by it, and switches."""
    # What vLLM does not know somebody else reads.
    known = {n: v for n, v in switches(environ).items() if n in envs.environment_variables}
    return {
        "builder": Builder.VLLM.value,
        "builder_version": BUILDER_VERSIONS[Builder.VLLM],
        "layout": str(LAYOUT),
        "vllm": str(vllm.__version__),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or torch.version.hip or "",
        "hardware": hardware(),
        "libraries": table(_libraries()),
        "environment": table(known),
    }


@cache
def _libraries() -> Mapping[str, str]:
    """Versions of `KERNELS`, by the names of distributions."""
    found = {}
    for name in KERNELS.values():
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@cache
def hardware() -> str:
    """What kernels are chosen by: a GPU's compute capability, or the instructions of the CPU."""
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"sm_{major}{minor}" if torch.version.cuda else torch.cuda.get_device_name()
    probes = {
        "amx": "_is_amx_tile_supported",
        "avx512_bf16": "_is_avx512_bf16_supported",
        "avx512": "_is_avx512_supported",
        "avx512_vnni": "_is_vnni_supported",
    }
    found = [name for name, probe in probes.items() if getattr(torch.cpu, probe)()]
    return canonical([torch.backends.cpu.get_cpu_capability(), *sorted(found)])


def _rope(hf: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    found = rope_of(hf)
    if found["rope_type"] in _LONG_ROPE:
        found["max_model_len"] = model.max_model_len
    return found


def _lasting(value: Any) -> Any:  # noqa: ANN401 - a configuration is what its author wrote
    """A configuration without what says where and by what it was written, at any depth."""
    if isinstance(value, dict):
        return {name: _lasting(inner) for name, inner in value.items() if name not in _VOLATILE}
    return value


def _unnamed(hf: Mapping[str, Any]) -> dict[str, Any]:
    """What of a configuration has no field of its own."""
    rest = {name: value for name, value in hf.items() if name not in _NAMED}
    text = rest.get("text_config") or rest
    others = {name: value for name, value in text.items() if name not in ROPE_NAMES}
    return rest | {"text_config": others} if "text_config" in rest else others


def _plain(value: Any) -> Any:  # noqa: ANN401
    """`value` as JSON has it; what JSON has no form for by its own text."""
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        plain = [_plain(inner) for inner in value]
        return sorted(plain, key=repr) if isinstance(value, (set, frozenset)) else plain
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _text(value: Any) -> str:  # noqa: ANN401
    """One setting; an enumeration by its name."""
    return "" if value is None else str(getattr(value, "name", value))
