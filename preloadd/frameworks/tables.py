"""Where FlashInfer's tables for weights of a checkpoint are: found alike by loader and engines.

Folders and names are those that vLLM has for its own (see `warmup.names`). What stands for its hash
of a configuration is a hash of the fields of the key that decide which products of matrices there
are; it is vLLM's for no configuration.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from preloadd.domain.key import canonical
from preloadd.domain.placement import Parallel, Placement, place
from preloadd.domain.settings import Builder
from preloadd.warmup.names import TableName, chosen_root, versions_root

_SHAPING = (
    "architecture",
    "builder",
    "checkpoint",
    "dtype",
    "dp_size",
    "ep_size",
    "expert_placement",
    "pp_size",
    "quantization",
    "quantization_config",
    "tp_size",
)
"""What all ranks of a group have in common. The checkpoint decides the sizes of whole matrices."""


def config_hash(key: Mapping[str, str]) -> str:
    """What the tables of all ranks of a group are filed under; `key` is that of any of them.

    ValueError for a key of weights that another builder than the native one has made.
    """
    if key.get("builder") != Builder.NATIVE:
        raise ValueError("tables of these weights are where vLLM has them")
    shaping = {field: key.get(field, "") for field in _SHAPING}
    return hashlib.sha256(canonical(shaping).encode()).hexdigest()


def table_name(key: Mapping[str, str]) -> TableName:
    """The name of the table of the rank that has this `key`."""
    return _named(_placement(key))


def table_names(key: Mapping[str, str]) -> tuple[TableName, ...]:
    """Those of all ranks of its group."""
    parallel = _placement(key).parallel
    return tuple(_named(place(parallel, rank)) for rank in range(parallel.world))


def tables_root(environ: Mapping[str, str]) -> Path:
    """The folder that a FlashInfer of this process and this environment has its tables below.

    Imports that, which may raise anything, unless the environment names the folder.
    """
    if (chosen := chosen_root(environ)) is not None:
        return chosen
    from flashinfer.jit import env

    workspace = Path(env.FLASHINFER_WORKSPACE_DIR)
    return versions_root(environ) / workspace.parent.name / workspace.name


def table_path(key: Mapping[str, str], environ: Mapping[str, str]) -> Path:
    """Where the table of the rank that has this `key` is, if there is one."""
    return tables_root(environ) / config_hash(key) / str(table_name(key))


def _placement(key: Mapping[str, str]) -> Placement:
    tensor, pipeline, data = (int(key[f"{kind}_size"]) for kind in ("tp", "pp", "dp"))
    ranks = (int(key[f"{kind}_rank"]) for kind in ("tp", "pp", "dp"))
    return Placement(Parallel(tensor, pipeline, data), *ranks)


def _named(placement: Placement) -> TableName:
    return TableName(placement.data_rank, placement.rank)
