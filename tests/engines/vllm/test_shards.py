"""What the native builder plans for each rank is what vLLM holds there, byte for byte.

vLLM joins some tensors of a checkpoint; what is joined is compared.
"""

import json
import re
import subprocess
from dataclasses import dataclass, field

import pytest
import torch
from safetensors.torch import load_file

from preloadd.domain.experts import held_as
from preloadd.domain.placement import ExpertPlacement, Parallel, Placement, place
from preloadd.weights.checkpoint import open_checkpoint
from preloadd.weights.native import sources_of
from preloadd.weights.plan import select
from tests.engines.vllm import harness

pytestmark = pytest.mark.slow

TURNS = ExpertPlacement.ROUND_ROBIN
JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13_weight": ("w1", "w3"),
    "w2_weight": ("w2",),
}
END = ("model.norm.weight", "lm_head.weight")
QWENS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@dataclass(frozen=True)
class Case:
    """A kind of model, divided."""

    kind: str
    parallel: Parallel = field(default_factory=Parallel)

    def __str__(self) -> str:
        sizes = self.parallel
        told = [f"tp{sizes.tensor}", f"pp{sizes.pipeline}", f"dp{sizes.data}"]
        return "-".join([self.kind, *told, *([f"ep-{sizes.expert_placement}"] * sizes.expert)])

    @property
    def arguments(self) -> dict[str, object]:
        """What vLLM is told."""
        return {
            "tensor_parallel_size": self.parallel.tensor,
            "pipeline_parallel_size": self.parallel.pipeline,
            "data_parallel_size": self.parallel.data,
            "enable_expert_parallel": self.parallel.expert,
            "expert_placement_strategy": self.parallel.expert_placement.value,
        }

    @property
    def ranks(self) -> list[Placement]:
        return [place(self.parallel, rank) for rank in range(self.parallel.world)]


CASES = [
    Case("llama", Parallel(tensor=2)),
    Case("llama", Parallel(tensor=8)),  # twice as many as key-value heads
    Case("llama", Parallel(tensor=2, pipeline=3)),
    Case("llama", Parallel(tensor=2, data=2)),
    Case("llama-tied", Parallel(tensor=2, pipeline=2)),
    Case("qwen3", Parallel(tensor=4)),
    Case("mixtral", Parallel(tensor=2)),
    Case("mixtral", Parallel(tensor=2, expert=True)),
    Case("mixtral", Parallel(tensor=2, data=2)),
    Case("mixtral", Parallel(tensor=1, data=3, expert=True)),
    Case("qwen3-moe", Parallel(tensor=2)),
    Case("qwen3-moe", Parallel(tensor=2, expert=True, expert_placement=TURNS)),
    Case("qwen3-moe", Parallel(tensor=2, pipeline=2, data=2)),
    Case("qwen3-moe", Parallel(tensor=2, pipeline=2, data=2, expert=True)),
    Case("qwen3-moe", Parallel(tensor=2, data=2, expert=True, expert_placement=TURNS)),
]


TURNED = [
    (tensor, data, groups) for tensor in (2, 4) for data in (1, 2) for groups in (None, 1, 2, 8)
]
"""Sizes of groups, and how many groups of experts the model has."""


@pytest.fixture(scope="module")
def vllm(vllm_python, zoo, tmp_path_factory):
    """A folder of what vLLM's ranks hold, for each of the cases; and how it deals experts."""
    folders = {case: tmp_path_factory.mktemp("shards") for case in CASES}
    asked = [
        {
            "model": str(zoo(case.kind)),
            "arguments": case.arguments,
            "folder": str(folder),
            "ranks": [
                {"data": at.data_rank, "stage": at.pipeline_rank, "tensor": at.tensor_rank}
                for at in case.ranks
            ],
        }
        for case, folder in folders.items()
    ]
    done = subprocess.run(
        [vllm_python, "-m", "tests.engines.vllm.shards"],
        cwd=harness.ROOT,
        env=harness.environ(vllm_python),
        input=json.dumps({"cases": asked, "turns": TURNED}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return folders, dict(zip(TURNED, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rank_holds_what_it_holds_in_vllm(case, vllm, zoo):
    folders, _ = vllm
    for rank, at in enumerate(case.ranks):
        ours = native(zoo(case.kind), at)
        theirs = load_file(folders[case] / f"{rank}.safetensors")
        # Some of vLLM's classes have both ends of the model on every stage, and never use them.
        unused = set(() if at.pipeline_rank == at.parallel.pipeline - 1 else END)
        if at.pipeline_rank and case.kind != "llama-tied":
            unused.add("model.embed_tokens.weight")
        theirs = {name: tensor for name, tensor in theirs.items() if name not in unused}
        used = set()
        for name, tensor in theirs.items():
            found, parts = joined(ours, name)
            assert torch.equal(found, tensor), f"rank {rank}: {name}"
            used |= parts
        assert used == ours.keys(), f"rank {rank}"


@pytest.mark.parametrize("turned", TURNED, ids=str)
def test_experts_are_dealt_in_turns_where_vllm_does_so(turned, vllm):
    _, strategies = vllm
    tensor, data, groups = turned
    parallel = Parallel(tensor=tensor, data=data, expert=True, expert_placement=TURNS)
    seen = held_as(place(parallel, 0), {"n_routed_experts": 8, "n_group": groups})
    assert seen.parallel.expert_placement == strategies[turned]


def native(model, at: Placement) -> dict[str, torch.Tensor]:
    """What the native builder puts where `at` is, by the checkpoint's names."""
    checkpoint = open_checkpoint(model)
    found = {}
    for piece in select(sources_of(checkpoint), checkpoint.config, at):
        data = bytearray()
        for run in piece.runs:
            with checkpoint.shards[run.file].path.open("rb") as file:
                for row in range(run.rows):
                    file.seek(run.offset + row * run.stride)
                    data += file.read(run.row_nbytes)
        assert piece.dtype == "BF16"
        found[piece.name] = torch.frombuffer(data, dtype=torch.bfloat16).reshape(piece.shape)
    return found


def joined(ours: dict[str, torch.Tensor], name: str) -> tuple[torch.Tensor, set[str]]:
    """What vLLM has under `name`, of ours, and which of ours that is."""
    experts = re.fullmatch(r"(.+\.experts)\.(?:\w+\.)?(w13_weight|w2_weight)", name)
    if experts:
        return of_experts(ours, experts[1], JOINED[experts[2]])
    module, _, leaf = name.rpartition(".")
    above, _, last = module.rpartition(".")
    parts = [f"{above}.{part}.{leaf}" for part in JOINED.get(last, ())] or [name]
    return torch.cat([ours[part] for part in parts]), set(parts)


def of_experts(
    ours: dict[str, torch.Tensor], module: str, parts: tuple[str, ...]
) -> tuple[torch.Tensor, set[str]]:
    """The experts that a rank holds, in the order of their numbers."""
    numbers = {int(n[1]) for name in ours if (n := re.match(rf"{module}\.(\d+)\.", name))}
    if not module.endswith("block_sparse_moe.experts"):
        parts = tuple(QWENS[part] for part in parts)
    names = [[f"{module}.{number}.{part}.weight" for part in parts] for number in sorted(numbers)]
    rows = [torch.cat([ours[name] for name in each]) for each in names]
    return torch.stack(rows), {name for each in names for name in each}
