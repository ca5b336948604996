"""How the tensors of each known architecture are cut: one table a family, read like a model card.

The convention is Megatron's. *Column parallel* cuts the output features (axis 0) and the bias with
them. *Row parallel* cuts the input features (axis 1); every rank has the whole bias, and adds it
once, after the sum over ranks. *Vocabulary* cuts the entries (axis 0). All else is replicated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Unit(StrEnum):
    """What an axis counts, as it is called in errors. Cuts fall between units."""

    HEADS = "attention heads"
    KV_HEADS = "key-value heads"
    FEED_FORWARD = "feed-forward units"
    SHARED = "feed-forward units of the shared expert"
    EXPERT = "feed-forward units of an expert"
    VOCABULARY = "vocabulary entries"


@dataclass(frozen=True, slots=True)
class Rule:
    """Cut `axis` within each of its `parts` (several where projections are fused into one tensor).

    `axis` None means replicated. `stacked` means that axis 0 counts experts.
    """

    axis: int | None = None
    parts: tuple[Unit, ...] = ()
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """Rules for the tensors below `model.layers.<n>.`; the number of an expert is written `*`.

    `tied` says whether input and output embeddings are one where config.json does not say.
    """

    layer: Mapping[str, Rule]
    tied: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether expert parallelism means anything here."""
        return any(rule.stacked for rule in self.layer.values())


EMBEDDING = "model.embed_tokens."
"""What starts so belongs to the first pipeline stage, and to the last where embeddings are tied."""

HEAD = ("model.norm.", "lm_head.")
"""What starts so belongs to the last pipeline stage."""

OUTSIDE_LAYERS: Mapping[str, Rule] = {
    "model.embed_tokens.weight": Rule(0, (Unit.VOCABULARY,)),
    "model.norm.weight": Rule(),
    "lm_head.weight": Rule(0, (Unit.VOCABULARY,)),
    "lm_head.bias": Rule(0, (Unit.VOCABULARY,)),
}


def _column(module: str, *parts: Unit) -> dict[str, Rule]:
    return {f"{module}.weight": Rule(0, parts), f"{module}.bias": Rule(0, parts)}


def _row(module: str, part: Unit) -> dict[str, Rule]:
    return {f"{module}.weight": Rule(1, (part,)), f"{module}.bias": Rule()}


def _replicated(*modules: str) -> dict[str, Rule]:
    return {f"{module}.weight": Rule() for module in modules}


def _feed_forward(module: str, unit: Unit) -> dict[str, Rule]:
    return (
        _column(f"{module}.gate_proj", unit)
        | _column(f"{module}.up_proj", unit)
        | _row(f"{module}.down_proj", unit)
    )


def _stacked_experts(module: str) -> dict[str, Rule]:
    """All experts of a layer in two tensors, as transformers 5 holds them and can save them."""
    return {
        f"{module}.gate_up_proj": Rule(1, (Unit.EXPERT, Unit.EXPERT), stacked=True),
        f"{module}.down_proj": Rule(2, (Unit.EXPERT,), stacked=True),
    }


# Early checkpoints of the Llama family carry the rotary frequencies; engines compute their own.
_ROTARY = {"self_attn.rotary_emb.inv_freq": Rule()}

_ATTENTION = (
    _column("self_attn.q_proj", Unit.HEADS)
    | _column("self_attn.k_proj", Unit.KV_HEADS)
    | _column("self_attn.v_proj", Unit.KV_HEADS)
    | _row("self_attn.o_proj", Unit.HEADS)
    | _ROTARY
)
_HEAD_NORMS = _replicated("self_attn.q_norm", "self_attn.k_norm")
_NORMS = _replicated("input_layernorm", "post_attention_layernorm")
_FEED_FORWARD_NORMS = _replicated("pre_feedforward_layernorm", "post_feedforward_layernorm")

_LLAMA = _ATTENTION | _feed_forward("mlp", Unit.FEED_FORWARD) | _NORMS

_PHI3 = (
    _column("self_attn.qkv_proj", Unit.HEADS, Unit.KV_HEADS, Unit.KV_HEADS)
    | _row("self_attn.o_proj", Unit.HEADS)
    | _ROTARY
    | _column("mlp.gate_up_proj", Unit.FEED_FORWARD, Unit.FEED_FORWARD)
    | _row("mlp.down_proj", Unit.FEED_FORWARD)
    | _NORMS
)

_MIXTRAL = (
    _ATTENTION
    | _NORMS
    | _replicated("block_sparse_moe.gate", "mlp.gate")
    | _column("block_sparse_moe.experts.*.w1", Unit.EXPERT)
    | _column("block_sparse_moe.experts.*.w3", Unit.EXPERT)
    | _row("block_sparse_moe.experts.*.w2", Unit.EXPERT)
    | _stacked_experts("mlp.experts")
)

# A Qwen model may mix layers with experts and dense ones (`mlp_only_layers`).
_QWEN_EXPERTS = (
    _LLAMA
    | _replicated("mlp.gate")
    | _feed_forward("mlp.experts.*", Unit.EXPERT)
    | _stacked_experts("mlp.experts")
)
_QWEN2_MOE = (
    _QWEN_EXPERTS
    | _feed_forward("mlp.shared_expert", Unit.SHARED)
    | _replicated("mlp.shared_expert_gate")
)

ARCHITECTURES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(_LLAMA),
    "MistralForCausalLM": Family(_LLAMA),
    "Qwen2ForCausalLM": Family(_LLAMA),
    "Qwen3ForCausalLM": Family(_LLAMA | _HEAD_NORMS),
    "Phi3ForCausalLM": Family(_PHI3),
    "GemmaForCausalLM": Family(_LLAMA, tied=True),
    "Gemma2ForCausalLM": Family(_LLAMA | _FEED_FORWARD_NORMS, tied=True),
    "Gemma3ForCausalLM": Family(_LLAMA | _FEED_FORWARD_NORMS | _HEAD_NORMS, tied=True),
    "MixtralForCausalLM": Family(_MIXTRAL),
    "Qwen2MoeForCausalLM": Family(_QWEN2_MOE),
    "Qwen3MoeForCausalLM": Family(_QWEN_EXPERTS | _HEAD_NORMS),
}
"""What can be divided, by the name in config.json's `architectures`. Anything else loads whole."""
