"""One worker of an engine that is divided over two GPUs: attaches its shard and computes with it.

Functions for a process of its own; torch.distributed joins the processes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import safetensors
import torch

from preloadd.domain.placement import Parallel, Placement
from preloadd.engine.torch import Weights, attach_checkpoint

WORLD = 2
ROWS = 16

held: list[Weights] = []


def attach(model: str, rank: int, index: int, sockets: str) -> dict[str, Any]:
    """Attach the shard of `rank` on the GPU that is `index` here."""
    torch.cuda.set_device(index)
    weights = attach_checkpoint(
        model,
        options={"fallback": False, "socket_dir": sockets, "state_timeout_s": 10},
        placement=Placement(Parallel(tensor=WORLD), tensor_rank=rank),
        client=f"worker-{rank}",
    )
    held.append(weights)
    uuid = torch.cuda.get_device_properties(index).uuid
    devices = {str(tensor.device) for tensor in weights.tensors.values()}
    return {"gpu": f"GPU-{uuid}", "devices": sorted(devices), "nbytes": weights.manifest.nbytes}


def join(rank: int, port: int) -> None:
    """Meet the other worker."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = torch.device("cuda", torch.cuda.current_device())
    torch.distributed.init_process_group("nccl", rank=rank, world_size=WORLD, device_id=device)


def products(model: str, rank: int) -> dict[str, bool]:
    """Products with divided matrices, put together over both GPUs, against the undivided ones.

    All numbers are such that no sum is rounded, so that the results are equal and not just close.
    """
    return {
        **{f"rows of {name}": _by_rows(model, name, rank) for name in ROWS_OF},
        **{f"columns of {name}": _by_columns(model, name) for name in COLUMNS_OF},
    }


ROWS_OF = ("model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.o_proj.weight")
"""Divided along what is summed over: the workers' results are added up."""

COLUMNS_OF = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight")
"""Divided along the result: the workers' results are put side by side."""


def _by_rows(model: str, name: str, rank: int) -> bool:
    shard, whole = held[-1].tensors[name], _undivided(model, name)
    inputs = _inputs(whole.shape[1])
    mine = inputs[:, rank * shard.shape[1] :][:, : shard.shape[1]]
    found = mine @ shard.double().T
    torch.distributed.all_reduce(found)
    return torch.equal(found, inputs @ whole.T) and shard.shape[1] * WORLD == whole.shape[1]


def _by_columns(model: str, name: str) -> bool:
    shard, whole = held[-1].tensors[name], _undivided(model, name)
    inputs = _inputs(whole.shape[1])
    found = inputs @ shard.double().T
    parts = [torch.empty_like(found) for _ in range(WORLD)]
    torch.distributed.all_gather(parts, found)
    return torch.equal(torch.cat(parts, 1), inputs @ whole.T)


def _inputs(columns: int) -> torch.Tensor:
    """Small whole numbers."""
    return (torch.arange(ROWS * columns, device="cuda") * 7 % 9 - 4).view(ROWS, columns).double()


def _undivided(model: str, name: str) -> torch.Tensor:
    for shard in Path(model).glob("*.safetensors"):
        with safetensors.safe_open(shard, "pt") as file:
            if name in file.keys():  # noqa: SIM118
                return file.get_tensor(name).cuda().double()
    raise KeyError(name)


def leave() -> None:
    """Part from the other worker, and give the weights back."""
    torch.distributed.destroy_process_group()
    detach()


def detach() -> None:
    """Give the weights back."""
    torch.cuda.synchronize()
    held.pop().close()
