"""One rank of a group without the others: vLLM's process groups, of the right size, but silent.

A rank's weights depend on how large its groups are and where in them it stands, and on nothing that
the other ranks hold. So a loader needs none of them: no rendezvous, no port, and a rank that was
lost loads again without the others. What would talk to them all the same is an error, and never a
wrong answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state

from preloadd.domain.placement import Placement
from preloadd.errors import UnsupportedModel
from preloadd.frameworks.vllm.patching import replaced

_BACKEND = "fake"
"""Torch's own backend for groups without peers."""

_TALKING = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all"),
    *("all_to_all_single", "broadcast", "broadcast_object_list", "gather"),
    *("gather_object", "irecv", "isend", "monitored_barrier", "recv", "recv_object_list"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
    *("send", "send_object_list"),
)
"""Functions of `torch.distributed` that exchange something. Without peers they would hand out what
happens to lie in memory. A barrier does not, and making groups ends with one."""


class _Silent(parallel_state.GroupCoordinator):  # type: ignore[misc]
    """A group in which this rank knows its place. Without a communicator its methods raise."""

    def __init__(
        self,
        group_ranks: list[list[int]],
        local_rank: int,
        torch_distributed_backend: object,
        use_device_communicator: object,
        use_message_queue_broadcaster: object = False,  # noqa: FBT002 - vLLM's signature
        group_name: str | None = None,
        **_: object,
    ) -> None:
        with replaced(dist, "new_group", partial(_new_group, dist.new_group)):
            super().__init__(
                group_ranks,
                local_rank,
                _BACKEND,
                use_device_communicator=False,
                use_message_queue_broadcaster=False,
                group_name=group_name,
            )


class _Exchange:
    """What moves tokens among ranks that share experts, without them: kernels are set up with its
    sizes, and nothing of weights depends on what else it would be."""

    def __init__(self) -> None:
        shared, data = parallel_state.get_ep_group(), parallel_state.get_dp_group()
        self.rank, self.world_size = shared.rank_in_group, shared.world_size
        self.dp_rank, self.dp_world_size = data.rank_in_group, data.world_size
        self.all2all_manager = self

    def get_handle(self, *_: object) -> None:
        """There is nothing to take hold of."""

    def destroy(self) -> None:
        """There is nothing to end."""


def _on_one_node(group: dist.ProcessGroup, *_: object, **__: object) -> list[bool]:
    """For each rank whether it is on one node with another: nobody asks them, as nothing depends
    on it here."""
    return [True] * dist.get_world_size(group)


def _new_group(new: Callable[..., object], ranks: list[int], **_: object) -> object:
    return new(ranks, backend=_BACKEND)


@contextmanager
def alone(config: VllmConfig, placement: Placement) -> Iterator[None]:
    """A block in which vLLM takes this process for the rank at `placement` of a whole group.

    UnsupportedModel where in it something wants to talk to other ranks.
    """
    parallel = placement.parallel
    rank = placement.rank
    # What a CPU worker names its shared memory by.
    os.environ.setdefault("VLLM_DIST_IDENT", f"preloadd{os.getpid()}")
    # Another way to make groups, which needs peers.
    os.environ["VLLM_DISTRIBUTED_USE_SPLIT_GROUP"] = "0"
    with ExitStack() as undo:
        dist.init_process_group(
            backend=_BACKEND, rank=rank, world_size=parallel.world, store=FakeStore()
        )
        undo.callback(dist.destroy_process_group)
        undo.enter_context(replaced(parallel_state, "GroupCoordinator", _Silent))
        undo.enter_context(replaced(parallel_state, "in_the_same_node_as", _on_one_node))
        for name in _TALKING:
            undo.enter_context(replaced(dist, name, partial(_refused, name)))
        parallel_state.init_distributed_environment(
            parallel.world, rank, "env://", local_rank=0, backend=_BACKEND
        )
        undo.enter_context(set_current_vllm_config(config))
        parallel_state.ensure_model_parallel_initialized(parallel.tensor, parallel.pipeline)
        undo.callback(parallel_state.destroy_model_parallel)
        if parallel.data > 1:
            parallel_state.get_ep_group().device_communicator = _Exchange()
        undo.enter_context(replaced(dist, "barrier", partial(_refused, "barrier")))
        yield


@contextmanager
def reading_alone() -> Iterator[None]:
    """A block in which readers of files do not share the work with other ranks, as some would."""
    with replaced(dist, "is_initialized", lambda: False):
        yield


def _refused(name: str, *_: Any, **__: Any) -> NoReturn:  # noqa: ANN401
    raise UnsupportedModel(
        f"this model exchanges something between ranks while it is loaded ({name}), which the "
        "builder vllm does not offer: load it without preloadd"
    )
