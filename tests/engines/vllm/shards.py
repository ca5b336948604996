"""Writes what each rank of vLLM holds of a checkpoint, before anything is made of it for kernels;
and tells as JSON how vLLM would deal experts.

vLLM builds the model and reads the files as it always does; only the groups of processes, in which
nothing is said until a model runs, are stood for by their sizes and places.
"""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.expert_map_manager import (
    determine_expert_placement_strategy,
)
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.utils.torch_utils import set_default_torch_dtype


@dataclass
class _Group:
    """Stands for a group of processes, as one of them sees it."""

    world_size: int = 1
    rank_in_group: int = 0

    @property
    def rank(self) -> int:
        return self.rank_in_group

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    @property
    def device_group(self) -> _Group:
        return self

    cpu_group = device_group

    def size(self) -> int:
        return self.world_size


def main() -> int:
    """Standard input: cases, each a model, arguments of vLLM, coordinates of ranks, a folder; and
    sizes of groups that are to have experts in turns, tensor, data and how many groups of them."""
    # Left to itself vLLM starts a process for each class of models that it has not seen.
    registry._run_in_subprocess = lambda look: look()
    asked = json.load(sys.stdin)
    for case in asked["cases"]:
        config = _config(case["model"], **case["arguments"])
        for rank, place in enumerate(case["ranks"]):
            held = _held(config, **place)
            save_file(held, Path(case["folder"]) / f"{rank}.safetensors")
    turns = [_dealt(config, *sizes) for sizes in asked["turns"]]
    sys.stdout.write("\n" + json.dumps(turns))
    return 0


def _config(model: str, **arguments: object) -> VllmConfig:
    told = EngineArgs(model=model, skip_tokenizer_init=True, enforce_eager=True, **arguments)
    return told.create_engine_config()


def _held(config: VllmConfig, data: int, stage: int, tensor: int) -> dict[str, torch.Tensor]:
    """The tensors of one rank, by vLLM's names."""
    own = copy.copy(config)
    own.parallel_config = copy.deepcopy(config.parallel_config)
    parallel, model = own.parallel_config, own.model_config
    # As `run_engine_core` decides it.
    if parallel.data_parallel_size > 1 and model.is_moe:
        parallel.data_parallel_rank = data
    else:
        parallel.reconfigure_for_independent_dp_rank()
        data = 0
    _pretend(
        _Group(parallel.tensor_parallel_size, tensor),
        _Group(parallel.pipeline_parallel_size, stage),
        _Group(parallel.data_parallel_size, data),
    )
    own.compilation_config = copy.deepcopy(config.compilation_config)  # it counts layers
    with set_current_vllm_config(own), set_default_torch_dtype(model.dtype):
        built = initialize_model(vllm_config=own)
        DefaultModelLoader(LoadConfig()).load_weights(built, model)
    held = built.named_parameters()
    return {name: tensor.detach().clone().contiguous() for name, tensor in held}


def _pretend(tensor: _Group, stage: _Group, data: _Group) -> None:
    """Make this process the one that is there in its groups."""
    experts = _Group(
        data.world_size * tensor.world_size, data.rank * tensor.world_size + tensor.rank
    )
    groups = {"_TP": tensor, "_PP": stage, "_DP": data, "_EP": experts}
    for name in ("_WORLD", "_TP", "_ETP", "_PP", "_DP", "_EP", "_DCP", "_PCP"):
        setattr(parallel_state, name, groups.get(name, _Group()))


def _dealt(config: VllmConfig, tensor: int, data: int, groups: int | None) -> str:
    """The strategy of a model with so many groups of experts, when it is to have them in turns."""
    _pretend(_Group(tensor), _Group(), _Group(data))
    parallel = copy.deepcopy(config.parallel_config)
    parallel.enable_expert_parallel = True
    seen = FusedMoEParallelConfig.make(tensor, 1, data, 1, vllm_parallel_config=parallel)
    return determine_expert_placement_strategy("round_robin", seen, groups, 0, False)


if __name__ == "__main__":
    sys.exit(main())
