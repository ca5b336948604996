"""The tables against what transformers really saves, and against its own sharding plans."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from preloadd.domain.placement import Parallel, place
from preloadd.weights.plan import ARCHITECTURES, Source, select
from preloadd.weights.plan.dimensions import dimensions
from preloadd.weights.plan.families import OUTSIDE_LAYERS, Rule, Unit
from preloadd.weights.plan.names import locate

TINY = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS = {
    "LlamaForCausalLM": transformers.LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
    "MistralForCausalLM": transformers.MistralConfig(**TINY),
    "Qwen2ForCausalLM": transformers.Qwen2Config(**TINY),
    "Qwen3ForCausalLM": transformers.Qwen3Config(**TINY, head_dim=16),
    "Phi3ForCausalLM": transformers.Phi3Config(**TINY),
    "GemmaForCausalLM": transformers.GemmaConfig(**TINY, head_dim=16),
    "Gemma2ForCausalLM": transformers.Gemma2Config(**TINY, head_dim=16),
    "Gemma3ForCausalLM": transformers.Gemma3TextConfig(**TINY, head_dim=16),
    "MixtralForCausalLM": transformers.MixtralConfig(**TINY, num_local_experts=4),
    "Qwen2MoeForCausalLM": transformers.Qwen2MoeConfig(
        **TINY, **EXPERTS, shared_expert_intermediate_size=24, mlp_only_layers=[0]
    ),
    "Qwen3MoeForCausalLM": transformers.Qwen3MoeConfig(
        **TINY, **EXPERTS, head_dim=16, mlp_only_layers=[0]
    ),
}
WITH_EXPERTS = [name for name, family in ARCHITECTURES.items() if family.has_experts]
SAVED = [(name, True) for name in ARCHITECTURES] + [(name, False) for name in WITH_EXPERTS]


def save(architecture: str, folder: Path, *, original: bool = True) -> tuple[dict, dict]:
    """config.json and sources of a tiny model, as transformers saves it."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[architecture])
    model.save_pretrained(folder, save_original_format=original)
    (file,) = folder.glob("*.safetensors")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [architecture]
    length = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + length])
    header.pop("__metadata__", None)
    return config, {
        name: Source(
            file=0,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            start=8 + length + entry["data_offsets"][0],
            nbytes=entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }


def rule(architecture: str, name: str) -> Rule | None:
    spot = locate(name)
    table = OUTSIDE_LAYERS if spot.layer is None else ARCHITECTURES[architecture].layer
    return table.get(spot.tail)


@pytest.mark.parametrize(("architecture", "original"), SAVED)
def test_every_tensor_that_transformers_saves_has_a_rule(architecture, original, tmp_path):
    config, sources = save(architecture, tmp_path, original=original)
    assert not [name for name in sources if rule(architecture, name) is None]
    for parallel in (Parallel(tensor=2), Parallel(tensor=4, pipeline=2), Parallel(pipeline=2)):
        for rank in range(parallel.world):
            assert select(sources, config, place(parallel, rank))


@pytest.mark.parametrize(("architecture", "original"), SAVED)
def test_two_ranks_together_hold_the_saved_model(architecture, original, tmp_path):
    """Read with safetensors, cut with torch, compared with what the runs of the plan read."""
    config, sources = save(architecture, tmp_path, original=original)
    (file,) = tmp_path.glob("*.safetensors")
    stored = file.read_bytes()
    shards = [
        {piece.name: piece for piece in select(sources, config, place(Parallel(tensor=2), rank))}
        for rank in range(2)
    ]
    with safe_open(file, "pt") as opened:
        for name in sources:
            whole = opened.get_tensor(name)
            for rank, shard in enumerate(shards):
                wanted = megatron(architecture, name, whole, rank)
                assert read(stored, shard[name]).equal(wanted), name


def read(stored: bytes, piece) -> torch.Tensor:
    rows = [
        stored[run.offset + row * run.stride :][: run.row_nbytes]
        for run in piece.runs
        for row in range(run.rows)
    ]
    return torch.frombuffer(bytearray().join(rows), dtype=torch.float32).reshape(piece.shape)


def megatron(architecture: str, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """What rank `rank` of 2 holds, said independently of the tables; CONFIGS have 4 and 2 heads."""
    module = name.removesuffix(".weight").removesuffix(".bias")
    if module.endswith("qkv_proj"):
        width = whole.shape[0] // 8
        return torch.cat(
            [part.chunk(2)[rank] for part in whole.split([4 * width, *[2 * width] * 2])]
        )
    if module.endswith("gate_up_proj"):
        axis = whole.ndim - 2
        gate, up = whole.chunk(2, axis)
        return torch.cat([gate.chunk(2, axis)[rank], up.chunk(2, axis)[rank]], axis)
    if module.endswith(("o_proj", "down_proj", ".w2")):
        return whole if name.endswith(".bias") else whole.chunk(2, whole.ndim - 1)[rank]
    columns = (
        "q_proj",
        "k_proj",
        "v_proj",
        "gate_proj",
        "up_proj",
        ".w1",
        ".w3",
        "embed_tokens",
        "lm_head",
    )
    return whole.chunk(2)[rank] if module.endswith(columns) else whole


@pytest.mark.parametrize("architecture", CONFIGS)
def test_defaults_are_those_of_transformers(architecture):
    """Embeddings are tied where neither config.json nor the checkpoint says otherwise."""
    defaults = type(CONFIGS[architecture])()
    assert ARCHITECTURES[architecture].tied is defaults.tie_word_embeddings
    config = {"num_experts": 1} | CONFIGS[architecture].to_dict()
    read = dimensions(config, ARCHITECTURES[architecture], has_head=True)
    assert (read.layers, read.heads, read.kv_heads) == (2, 4, 2)
    assert read.head_dim == (getattr(CONFIGS[architecture], "head_dim", None) or 8)


STYLES = {
    "colwise": 0,
    "rowwise": 1,
    "replicated_with_grad_allreduce": None,
    "colwise_gather_output": 0,
    "rowwise_split_input": 1,
}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_axes_are_those_of_transformers_own_plan(architecture):
    """Its plan for phi3 and stacked experts keeps other layouts, so only linear layers compare."""
    plan = CONFIGS[architecture].base_model_tp_plan
    compared = 0
    for pattern, style in plan.items():
        if style not in STYLES:
            continue
        found = [
            rule
            for tail, rule in ARCHITECTURES[architecture].layer.items()
            if not rule.stacked and fnmatchcase(f"layers.0.{tail}", f"{pattern}.weight")
        ]
        compared += len(found)
        assert {rule.axis for rule in found} <= {STYLES[style]}, pattern
    assert compared >= 4


def test_all_known_architectures_are_tested():
    assert CONFIGS.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rules_are_consistent(architecture):
    for tail, found in ARCHITECTURES[architecture].layer.items():
        assert (found.axis is None) == (found.parts == ()), tail
        assert not tail.endswith(".bias") or found.axis in {None, 0}, tail
        assert not found.parts or (Unit.EXPERT in found.parts) == ("experts." in tail), tail
        assert found.stacked == ("experts." in tail and "*" not in tail), tail
