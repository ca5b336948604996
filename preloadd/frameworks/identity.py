"""The key of weights as they lie in a checkpoint, computed alike by native loader and engines.

Everything is taken from `config.json` as written on disk, not from a framework's config object: a
framework fills in defaults of its own version, and the two sides may run different versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from preloadd.domain.ids import Role
from preloadd.domain.key import CHECKPOINT, Key, canonical
from preloadd.domain.placement import Placement
from preloadd.domain.recipe import LAYOUT

NATIVE_VERSION = "1"
"""Raised when the native builder puts other bytes under the same name than before."""

_ROPE_FIELDS = ("rope_theta", "rope_local_base_freq", "partial_rotary_factor", "rotary_pct")


def native_key(
    config: Mapping[str, Any],
    *,
    checkpoint: str,
    dtype: str,
    placement: Placement,
    role: Role,
    revision: str,
    kv_cache_dtype: str = "auto",
    kv_cache_skip_layers: Sequence[str] = (),
) -> Key:
    """The key of what the native builder makes of a checkpoint.

    `config` is the parsed `config.json`; `checkpoint` its content (`<method>:<hex>`), empty on an
    engine's side that has not read it; `dtype` a name such as `bfloat16` (see `stored_dtype`).
    """
    quantization = config.get("quantization_config") or {}
    parallel = placement.parallel
    return Key(
        {
            CHECKPOINT: checkpoint,
            "architecture": ",".join(config.get("architectures") or ()),
            "tp_size": str(parallel.tensor),
            "tp_rank": str(placement.tensor_rank),
            "pp_size": str(parallel.pipeline),
            "pp_rank": str(placement.pipeline_rank),
            "dp_size": str(parallel.data),
            "dp_rank": str(placement.data_rank),
            "ep_size": str(placement.expert_size),
            "ep_rank": str(placement.expert_rank),
            "expert_placement": parallel.expert_placement.value,
            "role": role.value,
            "dtype": dtype,
            "quantization": canonical(str(quantization.get("quant_method", ""))),
            "quantization_config": canonical(quantization),
            "rope": canonical(rope_of(config)),
            "kv_cache_dtype": kv_cache_dtype,
            "kv_cache_skip_layers": canonical(sorted(kv_cache_skip_layers)),
            "revision": revision,
            "builder": "native",
            "builder_version": NATIVE_VERSION,
            "layout": str(LAYOUT),
        }
    )


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary position parameters of the text model, in one form whichever way the file writes them.

    Older files have `rope_theta` and `rope_scaling` side by side, newer ones one `rope_parameters`.
    """
    text = config.get("text_config") or config
    found: dict[str, Any] = {
        name: text[name] for name in _ROPE_FIELDS if text.get(name) is not None
    }
    scaling = text.get("rope_scaling") or {}
    parameters = text.get("rope_parameters") or {}
    for source in (scaling, parameters):
        found.update({name: value for name, value in source.items() if value is not None})
    kind = found.pop("type", None)
    found["rope_type"] = found.get("rope_type") or kind or "default"
    if text.get("max_position_embeddings") is not None:
        found["max_position_embeddings"] = text["max_position_embeddings"]
    return found


def stored_dtype(config: Mapping[str, Any], stored: Callable[[], Mapping[str, int]]) -> str:
    """The dtype a checkpoint is kept in, as torch names it: what config says, else what prevails.

    `stored` is asked only then; it maps safetensors' dtype names to bytes stored in them.
    """
    text = config.get("text_config") or {}
    said = config.get("dtype") or config.get("torch_dtype") or text.get("dtype")
    if isinstance(said, str) and said:
        return said.removeprefix("torch.")
    floating = {name: nbytes for name, nbytes in stored().items() if name in _TORCH_NAMES}
    if not floating:
        return "float32"
    return _TORCH_NAMES[max(floating, key=lambda name: floating[name])]


_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
