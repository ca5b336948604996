"""The key of weights as they lie in a checkpoint, computed alike by native loader and engines.

Everything is taken from `config.json` as written on disk, not from a framework's config object: a
framework fills in defaults of its own version, and the two sides may run different versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from preloadd.domain.experts import held_as
from preloadd.domain.ids import Role
from preloadd.domain.key import CHECKPOINT, Key, bounded, canonical
from preloadd.domain.placement import Placement
from preloadd.domain.recipe import BUILDER_VERSIONS, LAYOUT
from preloadd.domain.settings import Builder
from preloadd.errors import CheckpointError

_ROPE_FIELDS = ("rope_theta", "rope_local_base_freq", "partial_rotary_factor", "rotary_pct")
_ROPE_TABLES = ("rope_scaling", "rope_parameters")
_LONGEST = "max_position_embeddings"

ROPE_NAMES = frozenset({*_ROPE_FIELDS, *_ROPE_TABLES, _LONGEST})
"""What `rope_of` reads of a text model's configuration."""


def native_key(
    config: Mapping[str, Any],
    *,
    checkpoint: str,
    dtype: str,
    placement: Placement,
    role: Role,
    revision: str,
) -> Key:
    """The key of what the native builder makes of a checkpoint.

    `config` is the parsed `config.json`; `checkpoint` its content (`<method>:<hex>`), empty on an
    engine's side that has not read it; `dtype` a name such as `bfloat16` (see `stored_dtype`).
    `placement` is told as `held_as` has it: any replica of a dense model matches any other.
    CheckpointError names what in `config` is not of the kind it must be.
    """
    quantization = _table(config, "quantization_config")
    return Key(
        {
            CHECKPOINT: checkpoint,
            "architecture": _architecture(config),
            **place_fields(held_as(placement, config)),
            "role": role.value,
            "dtype": dtype,
            "quantization": canonical(str(quantization.get("quant_method", ""))),
            "quantization_config": bounded(canonical(quantization)),
            "rope": canonical(rope_of(config)),
            "kv_cache_dtype": "auto",
            "kv_cache_skip_layers": canonical([]),
            "revision": revision,
            "builder": Builder.NATIVE.value,
            "builder_version": BUILDER_VERSIONS[Builder.NATIVE],
            "layout": str(LAYOUT),
        }
    )


def place_fields(placement: Placement) -> dict[str, str]:
    """The fields of a key that say which part of the model it is."""
    parallel = placement.parallel
    return {
        "tp_size": str(parallel.tensor),
        "tp_rank": str(placement.tensor_rank),
        "pp_size": str(parallel.pipeline),
        "pp_rank": str(placement.pipeline_rank),
        "dp_size": str(parallel.data),
        "dp_rank": str(placement.data_rank),
        "ep_size": str(placement.expert_size),
        "ep_rank": str(placement.expert_rank),
        "expert_placement": parallel.expert_placement.value,
    }


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"config.json: architectures is {names!r}: expected a list of names")
    return ",".join(names)


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object under `name`, empty where there is none; CheckpointError for anything else."""
    table = config.get(name) or {}
    if not isinstance(table, dict):
        raise CheckpointError(f"config.json: {name} is {table!r}: expected an object")
    return table


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary position parameters of the text model, in one form whichever way the file writes them.

    Older files have `rope_theta` and `rope_scaling` side by side, newer ones one `rope_parameters`.
    Where both are there and differ, as when somebody overrides the one, which of them counts is
    the framework's business: both are told.
    """
    text = _table(config, "text_config") or config
    beside: dict[str, Any] = {
        name: text[name] for name in _ROPE_FIELDS if text.get(name) is not None
    }
    found = dict(beside)
    for table in _ROPE_TABLES:
        source = _table(text, table)
        found.update({name: value for name, value in source.items() if value is not None})
    overridden = {f"{name} beside": own for name, own in beside.items() if found[name] != own}
    kind = found.pop("type", None)
    found["rope_type"] = found.get("rope_type") or kind or "default"
    if text.get(_LONGEST) is not None:
        found[_LONGEST] = text[_LONGEST]
    return found | overridden


def stored_dtype(config: Mapping[str, Any], stored: Callable[[], Mapping[str, int]]) -> str:
    """The dtype a checkpoint is kept in, as torch names it: what config says, else what prevails.

    `stored` is asked only then; it maps safetensors' dtype names to bytes stored in them.
    """
    for table in (config, _table(config, "text_config")):
        said = table.get("dtype") or table.get("torch_dtype")
        if isinstance(said, str) and said:
            return said.removeprefix("torch.")
    floating = {name: nbytes for name, nbytes in stored().items() if name in _TORCH_NAMES}
    if not floating:
        return "float32"
    return _TORCH_NAMES[max(floating, key=lambda name: floating[name])]


_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
