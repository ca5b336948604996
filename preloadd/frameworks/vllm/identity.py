"""The key of weights that vLLM has laid out: everything that chose the bytes, by name.

The bytes are not those of the checkpoint: vLLM fuses, shards, quantises and repacks them, each
depending on its version, its configuration, the hardware and switches in the environment. vLLM
itself would notice none of these differing. Both sides call `vllm_key` with configuration objects
that vLLM made of the same arguments, before any model is built: building and post-processing may
change them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import vllm
from vllm.config import ModelConfig, VllmConfig

from preloadd.domain.ids import Role
from preloadd.domain.key import CHECKPOINT, Key, bounded, canonical
from preloadd.domain.placement import Placement
from preloadd.domain.recipe import BUILDER_VERSIONS, LAYOUT
from preloadd.domain.settings import Builder, Layout
from preloadd.frameworks.identity import place_fields, rope_of
from preloadd.frameworks.vllm.drafts import backends

_VOLATILE = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
"""Of a model's configuration: where it lies and who wrote it, which changes no weight."""

_SWITCH = re.compile(
    r"VLLM_(?!.*(?:ATOMIC_ADD|QUICK_REDUCE|WARMUP)).*"
    r"(?:AITER|ATTENTION|BATCH_INVARIANT|CPU_SGL|CPU_INT4|CUTLASS|DCP|DEEP_GEMM|FP4|FP8|GEMM|KERNEL|"
    r"LAYERNAME|MARLIN|MLA|MOE|NVFP4|MXFP|PAD|PARTITION|PREPACK|QUANT|REPLICATE|SHARD|SHUFFLE|TRTLLM)"
)
"""Environment: variables of vLLM by which a user chooses kernels, and so how weights are laid out.

A pattern, since each version has other ones; one too many costs a mismatch that is told, one too
few wrong weights.
"""

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
        "quantization_config": bounded(canonical(quantization)),
        "rope": bounded(canonical(_rope(hf, model))),
        "model_config": bounded(canonical(_plain(_lasting(dict(hf)))), limit=0),
        "model_impl": _text(getattr(model, "model_impl", "auto")),
    }


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
    switches = {name: value for name, value in environ.items() if _SWITCH.match(name)}
    return {
        "builder": Builder.VLLM.value,
        "builder_version": BUILDER_VERSIONS[Builder.VLLM],
        "layout": str(LAYOUT),
        "vllm": str(vllm.__version__),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or torch.version.hip or "",
        "hardware": hardware(),
        "libraries": canonical(_libraries()),
        "environment": bounded(canonical(switches)),
    }


def _libraries() -> dict[str, str]:
    """Versions of what vLLM takes kernels from where it is installed, and lays weights out for."""
    found = {}
    for name in ("flashinfer-python", "deep-gemm", "triton-kernels"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


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
