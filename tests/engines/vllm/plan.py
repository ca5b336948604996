"""Tells as JSON what vLLM itself would launch where, and what its engines would then look for.

vLLM's own command plans daemons until it would start the first one. Its engines' groups are those
that it would form of processes; nothing but arithmetic has taken place.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.utils import get_pp_indices
from vllm.entrypoints.cli import preload
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
from vllm.model_executor.model_loader.weight_cache.daemon import WeightCacheDaemon
from vllm.model_executor.models import registry
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.utils import get_physical_gpu_ids_for_local_dp_rank

from preloadd.engine.vllm.request import local_rank, placement_of

STRATEGIES = ("linear", "round_robin")


class _Planned(BaseException):
    """Everything is decided, and nothing has begun."""


class _Processes:
    """Stands for `multiprocessing`: what processes would be told, until one would start."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def get_context(self, _: str) -> _Processes:
        return self

    def Queue(self) -> None:  # noqa: N802 - the name is the library's
        pass

    def Process(self, *, args: tuple[Any, ...], **_: object) -> _Processes:  # noqa: N802
        self.told.append(args)
        return self

    def start(self, *_: object) -> None:
        raise _Planned


class _Group:
    """Stands for a group of processes, as one of them sees it."""

    def __init__(self, groups: Sequence[list[int]], *_: object, **__: object) -> None:
        ranks = next(ranks for ranks in groups if torch.distributed.get_rank() in ranks)
        self.world_size = len(ranks)
        self.rank_in_group = ranks.index(torch.distributed.get_rank())


def main() -> int:
    """Standard input: numbers of experts and layers, and command lines as lists of words."""
    asked = json.load(sys.stdin)
    # Left to itself vLLM starts a process for each class of models that it has not seen.
    registry._run_in_subprocess = lambda look: look()
    preload.check_ipc_platform_support = lambda: None
    parallel_state.init_model_parallel_group = _Group
    command = preload.PreloadSubcommand()
    parser = FlexibleArgumentParser()
    command.add_cli_args(parser)
    answers = [
        _answer(
            lambda line=line: command.cmd(parser.parse_args(line)),
            asked["experts"],
            asked["layers"],
        )
        for line in asked["lines"]
    ]
    sys.stdout.write(json.dumps(answers))
    return 0


def _answer(launch: Callable[[], None], experts: int, layers: int) -> dict[str, Any]:
    """What is planned, or why it is not."""
    processes = preload.multiprocessing = _Processes()
    preload._start_health_server = processes.start
    try:
        launch()
    except _Planned:
        pass
    except Exception as error:  # noqa: BLE001 - whatever vLLM refuses with
        return {"refused": f"{type(error).__name__}: {error}"}
    config = processes.told[0][2]
    try:
        engines = [*_engines(config, experts, layers)]
    except Exception as error:  # noqa: BLE001
        return {"refused": f"by the engine: {error}"}
    return {"daemons": [_daemon(*told) for told in processes.told], "engines": engines}


def _daemon(
    rank: int,
    local: int,
    config: VllmConfig,
    method: str,
    folder: str | None,
    _: object,
    draft: bool,
    data: int,
    pipeline: int,
) -> dict[str, Any]:
    """What one daemon makes of what it is told."""
    made = WeightCacheDaemon(config, rank, local, method, folder, draft, data, pipeline)
    return {
        "draft": draft,
        "local": made.local_rank,
        "rank": made.global_rank,
        "world": made.world_size,
        "place": [made.dp_rank, made.pp_rank, made.tp_rank],
        "method": method,
    }


def _engines(config: VllmConfig, experts: int, layers: int) -> Iterator[dict[str, Any]]:
    """What each worker of the engines on this node is: its GPU, its groups, its part of a model."""
    told = config.parallel_config
    gpus = list(range(told.world_size_across_dp))
    for replica in range(told.data_parallel_size_local):
        own = _of_replica(told, replica, moe=config.model_config.is_moe)
        found = get_physical_gpu_ids_for_local_dp_rank(
            "", replica, told.world_size, told.local_world_size, user_assigned_gpu_ids=gpus
        )
        before = own.data_parallel_rank * own.world_size
        before += own.local_world_size * own.node_rank_within_dp
        seen = copy.copy(config)
        seen.parallel_config = own
        for number, gpu in enumerate(found):
            yield {"local": gpu, **_worker(seen, before + number, experts, layers)}


def _of_replica(told: ParallelConfig, local: int, *, moe: bool) -> ParallelConfig:
    """What the engine of one replica of this node is told, as `run_engine_core` decides it."""
    own = copy.deepcopy(told)
    own.data_parallel_index = told.data_parallel_rank + local
    if own.data_parallel_size > 1:
        own.data_parallel_rank_local = local
    if own.data_parallel_size > 1 and moe:
        own.data_parallel_rank = own.data_parallel_index
    else:
        own.reconfigure_for_independent_dp_rank()
    return own


def _worker(config: VllmConfig, rank: int, experts: int, layers: int) -> dict[str, Any]:
    """What a process of an engine is among its groups."""
    parallel = config.parallel_config
    _pretend(rank, parallel.world_size_across_dp)
    with set_current_vllm_config(config):
        parallel_state.initialize_model_parallel(
            parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        )
    data, stage = parallel_state.get_dp_group(), parallel_state.get_pp_group()
    tensor = parallel_state.get_tp_group()
    dealt = FusedMoEParallelConfig.make(
        tensor.world_size, 1, data.world_size, 1, vllm_parallel_config=parallel
    )
    return {
        "data": [data.world_size, data.rank_in_group],
        "pipeline": [stage.world_size, stage.rank_in_group],
        "tensor": [tensor.world_size, tensor.rank_in_group],
        "host device": local_rank(parallel, placement_of(config)),
        "expert": [dealt.ep_size, dealt.ep_rank],
        "experts": {how: _experts(dealt, experts, how) for how in STRATEGIES},
        "layers": get_pp_indices(layers, stage.rank_in_group, stage.world_size),
        # Its model runners make a drafter only if `get_pp_group().is_last_rank`.
        "draft": bool(config.speculative_config) and stage.rank_in_group == stage.world_size - 1,
    }


def _pretend(rank: int, world: int) -> None:
    """Make this process the `rank`-th of so many."""
    torch.distributed.is_initialized = lambda: True
    torch.distributed.get_world_size = lambda *_: world
    torch.distributed.get_rank = lambda *_: rank
    torch.distributed.get_backend = lambda *_: "gloo"
    parallel_state._WORLD = SimpleNamespace(local_rank=0, device_group=None)
    for name in ("_TP", "_ETP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB"):
        setattr(parallel_state, name, None)


def _experts(dealt: FusedMoEParallelConfig, experts: int, strategy: str) -> list[int]:
    """The experts that this process holds."""
    _, where, _ = determine_expert_map(dealt.ep_size, dealt.ep_rank, experts, strategy)
    if where is None:
        return list(range(experts))
    return [number for number, place in enumerate(where.tolist()) if place >= 0]


if __name__ == "__main__":
    sys.exit(main())
