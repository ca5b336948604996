from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain.experts import held_as
from preloadd.domain.placement import (
    ExpertPlacement,
    Parallel,
    Placement,
    layers_of,
    place,
)
from preloadd.errors import CheckpointError, ConfigError, UnsupportedModel
from preloadd.weights.plan import ARCHITECTURES, Slice, select

Shapes = dict[str, tuple[int, ...]]

HEAD_NORMS = {"Qwen3ForCausalLM", "Gemma3ForCausalLM", "Qwen3MoeForCausalLM"}
FEED_FORWARD_NORMS = {"Gemma2ForCausalLM", "Gemma3ForCausalLM"}
WITH_EXPERTS = {"MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"}


@dataclass(frozen=True)
class Model:
    """A model of any known family, in sizes of a few elements."""

    architecture: str
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 2
    hidden: int = 4
    units: int = 4
    vocabulary: int = 8
    layers: int = 2
    experts: int = 4
    groups: int = 1
    tied: bool = False
    stacked: bool = False
    biases: bool = False

    @property
    def config(self) -> dict[str, object]:
        experts = {"num_experts": self.experts, "n_group": self.groups}
        return {
            "architectures": [self.architecture],
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "tie_word_embeddings": self.tied,
            **(experts if self.architecture in WITH_EXPERTS else {}),
        }

    @property
    def shapes(self) -> Shapes:
        """What such a checkpoint holds, by name."""
        found = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            found |= {prefix + name: shape for name, shape in self._layer(layer).items()}
        found["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            found["lm_head.weight"] = (self.vocabulary, self.hidden)
        return found

    def _layer(self, layer: int) -> Shapes:
        norms = ["input_layernorm", "post_attention_layernorm"]
        if self.architecture in FEED_FORWARD_NORMS:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        found = {f"{norm}.weight": (self.hidden,) for norm in norms} | self._attention()
        if self.architecture in WITH_EXPERTS and (layer or self.architecture[0] == "M"):
            return found | self._experts()
        return found | self._feed_forward("mlp")

    def _attention(self) -> Shapes:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        fused = {"qkv_proj": q + 2 * kv}
        rows = fused if self.architecture[0] == "P" else {"q_proj": q, "k_proj": kv, "v_proj": kv}
        found = self._linear({f"self_attn.{name}": (n, self.hidden) for name, n in rows.items()})
        found |= self._linear({"self_attn.o_proj": (self.hidden, q)})
        found["self_attn.rotary_emb.inv_freq"] = (self.head_dim,)
        if self.architecture in HEAD_NORMS:
            found["self_attn.q_norm.weight"] = found["self_attn.k_norm.weight"] = (self.head_dim,)
        return found

    def _feed_forward(self, module: str) -> Shapes:
        fused = {"gate_up_proj": 2 * self.units}
        parts = {"gate_proj": self.units, "up_proj": self.units}
        rows = fused if self.architecture[0] == "P" else parts
        found = self._linear({f"{module}.{name}": (n, self.hidden) for name, n in rows.items()})
        return found | self._linear({f"{module}.down_proj": (self.hidden, self.units)})

    def _experts(self) -> Shapes:
        mixtral = self.architecture[0] == "M"
        module = "block_sparse_moe" if mixtral and not self.stacked else "mlp"
        found: Shapes = {f"{module}.gate.weight": (self.experts, self.hidden)}
        if self.architecture == "Qwen2MoeForCausalLM":
            found |= self._feed_forward("mlp.shared_expert")
            found["mlp.shared_expert_gate.weight"] = (1, self.hidden)
        if self.stacked:
            found["mlp.experts.gate_up_proj"] = (self.experts, 2 * self.units, self.hidden)
            found["mlp.experts.down_proj"] = (self.experts, self.hidden, self.units)
            return found
        into, out = (self.units, self.hidden), (self.hidden, self.units)
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        for expert in range(self.experts):
            for name, shape in zip(names, (into, into, out), strict=True):
                found[f"{module}.experts.{expert}.{name}.weight"] = shape
        return found

    def _linear(self, weights: Shapes) -> Shapes:
        found = {f"{module}.weight": shape for module, shape in weights.items()}
        if self.biases:
            found |= {f"{module}.bias": shape[:1] for module, shape in weights.items()}
        return found


def everyone(parallel: Parallel) -> list[Placement]:
    return [place(parallel, rank) for rank in range(parallel.world)]


# ---- the reference: the same rules said with torch, rank by rank


def reference(model: Model, name: str, whole: torch.Tensor, at: Placement) -> torch.Tensor | None:
    """What the rank holds of a tensor; None where it holds nothing of it."""
    if not on_stage(model, name, at):
        return None
    if ".experts." in name and at.parallel.expert:
        return dealt(model, name, whole, at)
    ranks, rank = at.parallel.tensor, at.tensor_rank
    if ".experts." in name:
        ranks, rank = at.parallel.data * ranks, at.data_rank * ranks + rank
    return megatron(model, name, whole, ranks, rank)


def on_stage(model: Model, name: str, at: Placement) -> bool:
    first, last = at.pipeline_rank == 0, at.pipeline_rank == at.parallel.pipeline - 1
    if name.startswith("model.layers."):
        return int(name.split(".")[2]) in layers_of(at, model.layers)
    return first or (last and model.tied) if "embed_tokens" in name else last


def dealt(model: Model, name: str, whole: torch.Tensor, at: Placement) -> torch.Tensor | None:
    """In turns where the model has groups and all is one replica, in blocks else."""
    ranks = at.parallel.data * at.parallel.tensor
    rank = at.data_rank * at.parallel.tensor + at.tensor_rank
    turns = at.parallel.expert_placement == "round_robin"
    if turns and model.groups > 1 and at.parallel.data == 1:
        mine = list(range(rank, model.experts, ranks))
    else:
        mine = np.array_split(np.arange(model.experts), ranks)[rank].tolist()
    if model.stacked:
        return whole[mine]
    return whole if int(name.split(".")[5]) in mine else None


def megatron(model: Model, name: str, whole: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    *_, module, leaf = name.split(".")
    if leaf not in {"weight", "bias"}:
        module = leaf
    kv = min(ranks, model.kv_heads)
    if module in {"k_proj", "v_proj"}:
        return whole.chunk(kv)[rank * kv // ranks]
    if module == "qkv_proj":
        sizes = [model.heads * model.head_dim, *[model.kv_heads * model.head_dim] * 2]
        q, k, v = whole.split(sizes)
        at_kv = rank * kv // ranks
        return torch.cat([q.chunk(ranks)[rank], k.chunk(kv)[at_kv], v.chunk(kv)[at_kv]])
    if module == "gate_up_proj":
        axis = int(".experts." in name)
        gate, up = whole.chunk(2, axis)
        return torch.cat([gate.chunk(ranks, axis)[rank], up.chunk(ranks, axis)[rank]], axis)
    if module in {"o_proj", "down_proj", "w2"}:
        axis = 2 if leaf == "down_proj" else 1
        return whole if leaf == "bias" else whole.chunk(ranks, axis)[rank]
    columns = {"q_proj", "gate_proj", "up_proj", "w1", "w3", "embed_tokens", "lm_head"}
    return whole.chunk(ranks)[rank] if module in columns else whole


# ---- properties


@st.composite
def divided(draw):
    """A model and sizes of a group that divide it."""
    tensor = draw(st.integers(1, 4))
    divisors = [n for n in range(1, tensor + 1) if tensor % n == 0]
    kv_heads = draw(st.sampled_from([*divisors, 2 * tensor]))
    pipeline = draw(st.integers(1, 3))
    data = draw(st.integers(1, 3))
    architecture = draw(st.sampled_from(sorted(ARCHITECTURES)))
    parallel = Parallel(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        expert=architecture in WITH_EXPERTS and draw(st.booleans()),
        expert_placement=draw(st.sampled_from(ExpertPlacement)),
    )
    model = Model(
        architecture,
        heads=draw(st.integers(1, 2)) * max(tensor, kv_heads),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4])),
        hidden=draw(st.sampled_from([2, 6])),
        units=2 * tensor * data * draw(st.integers(1, 2)),
        vocabulary=tensor * draw(st.integers(1, 3)),
        layers=pipeline + draw(st.integers(0, 2)),
        experts=tensor * data + draw(st.integers(0, 3)),
        groups=draw(st.integers(1, 2)),
        tied=draw(st.booleans()),
        stacked=draw(st.booleans()),
        biases=draw(st.booleans()),
    )
    return model, parallel


@pytest.mark.slow
@given(divided(), st.sampled_from(["BF16", "F8_E4M3", "F4"]))
def test_every_rank_reads_what_torch_would_cut(checkpoint, chosen, dtype):
    model, parallel = chosen
    made = checkpoint(model.shapes, dtype)
    for placement in everyone(parallel):
        held = {piece.name: piece for piece in select(made.sources, model.config, placement)}
        for name in model.shapes:
            wanted = reference(model, name, torch.from_numpy(made.bits(name)), placement)
            assert (name in held) == (wanted is not None), name
            if wanted is not None:
                assert np.array_equal(made.held(held[name]), wanted.numpy()), name
                assert held[name].shape == tuple(wanted.shape[:-1])


@pytest.mark.slow
@given(divided())
def test_all_ranks_together_hold_every_byte_as_often_as_they_should(checkpoint, chosen):
    model, parallel = chosen
    made = checkpoint(model.shapes, "F16")
    pieces = [
        piece
        for placement in everyone(parallel)
        for piece in select(made.sources, model.config, placement)
    ]
    uses = made.uses(pieces)
    for name, source in made.sources.items():
        counted = uses[source.file][source.start : source.start + source.nbytes]
        assert np.array_equal(counted, copies(model, name, source.nbytes, parallel)), name
        uses[source.file][source.start : source.start + source.nbytes] = 0
    assert not any(file.any() for file in uses), "bytes outside of every tensor are read"


def copies(model: Model, name: str, nbytes: int, parallel: Parallel) -> np.ndarray:
    """How many ranks hold each byte of a tensor."""
    kv = parallel.data * max(1, parallel.tensor // model.kv_heads)
    if ".experts." in name and (
        parallel.expert or not name.endswith(("down_proj.bias", "w2.bias"))
    ):
        return np.full(nbytes, 1)
    if any(part in name for part in ("norm", "gate.weight", "expert_gate", "inv_freq")) or (
        name.endswith(".bias") and any(part in name for part in ("o_proj", "down_proj"))
    ):
        return np.full(nbytes, parallel.data * parallel.tensor)
    if "qkv_proj" in name:
        query = nbytes * model.heads // (model.heads + 2 * model.kv_heads)
        return np.concatenate([np.full(query, parallel.data), np.full(nbytes - query, kv)])
    if "k_proj" in name or "v_proj" in name:
        return np.full(nbytes, kv)
    twice = "embed_tokens" in name and model.tied and parallel.pipeline > 1
    return np.full(nbytes, parallel.data * (1 + twice))


@pytest.mark.slow
@given(divided())
def test_shards_put_together_are_the_whole(checkpoint, chosen):
    model, parallel = chosen
    made = checkpoint(model.shapes, "F16")
    shards: dict[str, list[Slice]] = {}
    for placement in everyone(parallel):
        for piece in select(made.sources, model.config, placement):
            shards.setdefault(piece.name, []).append(piece)
    assert shards.keys() == model.shapes.keys()
    for name, pieces in shards.items():
        assert np.array_equal(made.joined(pieces), made.bits(name)), name


@pytest.mark.slow
@given(divided())
def test_slices_come_in_the_order_of_the_files(checkpoint, chosen):
    model, parallel = chosen
    made = checkpoint(model.shapes)
    turned = dict(reversed(made.sources.items()))
    for placement in everyone(parallel):
        pieces = select(turned, model.config, placement)
        starts = [
            (made.sources[piece.name].file, made.sources[piece.name].start) for piece in pieces
        ]
        assert starts == sorted(starts)


@pytest.mark.slow
@given(divided())
def test_data_parallel_replicas_hold_the_same_but_for_experts(checkpoint, chosen):
    model, parallel = chosen
    made = checkpoint(model.shapes)

    def beside_experts(placement: Placement) -> list[Slice]:
        held = select(made.sources, model.config, placement)
        return [piece for piece in held if ".experts." not in piece.name]

    for placement in everyone(parallel):
        first = Placement(parallel, placement.tensor_rank, placement.pipeline_rank, 0)
        assert beside_experts(placement) == beside_experts(first)
        if model.architecture not in WITH_EXPERTS:
            alone = held_as(placement, model.config)
            assert alone.parallel.data == 1
            assert select(made.sources, model.config, placement) == select(
                made.sources, model.config, alone
            )


# ---- what is refused, and how it is said


LLAMA = Model("LlamaForCausalLM")


def chosen(checkpoint, model: Model, parallel: Parallel, rank: int = 0, **more) -> list[Slice]:
    """What a rank holds of `model`; `more` overrides config.json."""
    sources = checkpoint(model.shapes).sources
    return select(sources, model.config | more, place(parallel, rank))


def test_every_size_that_does_not_divide_is_told_at_once(checkpoint):
    model = Model("LlamaForCausalLM", heads=9, kv_heads=3, units=6, vocabulary=49, layers=2)
    parallel = Parallel(tensor=2, pipeline=3, expert=True)
    for rank in range(parallel.world):
        with pytest.raises(ConfigError) as caught:
            chosen(checkpoint, model, parallel, rank)
        assert str(caught.value).splitlines() == [
            "9 attention heads do not divide by 2 tensor-parallel ranks",
            "3 key-value heads do not divide by 2 tensor-parallel ranks",
            "49 vocabulary entries do not divide by 2 tensor-parallel ranks",
            "tensor parallel sizes that divide this model: 1",
            "expert parallelism is on, but LlamaForCausalLM has no experts: turn it off",
            "2 layers do not make 3 pipeline stages: use at most 2",
        ]


def test_sizes_that_would_divide_are_offered(checkpoint):
    model = Model("LlamaForCausalLM", heads=9, kv_heads=3, units=18, vocabulary=27)
    with pytest.raises(ConfigError, match=r"sizes that divide this model: 1, 3, 9$"):
        chosen(checkpoint, model, Parallel(tensor=2))


def test_dealt_experts_need_not_divide(checkpoint):
    model = Model("MixtralForCausalLM", units=3, experts=5)
    told = "3 feed-forward units of an expert do not divide by 2 tensor-parallel ranks"
    with pytest.raises(ConfigError, match=told):
        chosen(checkpoint, model, Parallel(tensor=2))
    with pytest.raises(ConfigError) as caught:
        chosen(checkpoint, model, Parallel(data=2))
    assert str(caught.value).splitlines() == [
        "3 feed-forward units of an expert do not divide by 2 ranks (1 tensor x 2 data)",
        "tensor parallel sizes that divide this model beside data parallel size 2: none",
    ]
    held = chosen(checkpoint, model, Parallel(tensor=2, expert=True), rank=1)
    assert {piece.name.split(".")[5] for piece in held if ".experts." in piece.name} == {"3", "4"}


@pytest.mark.parametrize("names", [["OtherForCausalLM"], None])
@pytest.mark.parametrize(
    ("parallel", "more"),
    [
        (Parallel(tensor=2), {}),
        (Parallel(pipeline=2), {}),
        (Parallel(data=2), {"n_routed_experts": 8}),
        (Parallel(data=2, expert=True), {"n_routed_experts": 8}),
    ],
)
def test_an_unknown_architecture_is_not_divided(checkpoint, names, parallel, more):
    with pytest.raises(UnsupportedModel) as caught:
        chosen(checkpoint, LLAMA, parallel, architectures=names, **more)
    assert str(caught.value).startswith(names[0] if names else "a model without architectures")
    assert "use parallel sizes of 1" in str(caught.value)
    assert all(name in str(caught.value) for name in ARCHITECTURES)


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(data=2), Parallel(expert=True)])
def test_anything_loads_whole_where_nothing_is_divided(checkpoint, parallel):
    shapes = {"x": (), "y.weight": (0, 3), "z": (7,)}
    made = checkpoint(shapes)
    for config in ({}, {"architectures": ["Other"]}, {"quantization_config": {"bits": 4}}):
        held = select(made.sources, config, place(parallel, 0))
        assert {piece.name: piece.shape for piece in held} == shapes
        assert all(np.array_equal(made.held(piece), made.bits(piece.name)) for piece in held)


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"quant_method": "fp8"}, "fp8"), ({"bits": 4}, "method not named"), ("odd", "not named")],
)
def test_a_quantised_checkpoint_is_not_cut(checkpoint, settings, told):
    with pytest.raises(
        UnsupportedModel, match=rf"quantised \({told}|quantised \(method {told}"
    ) as caught:
        chosen(checkpoint, LLAMA, Parallel(tensor=2), quantization_config=settings)
    assert str(caught.value).endswith("tensor parallel size 1 only")


def test_experts_of_a_quantised_checkpoint_are_not_cut_over_replicas(checkpoint):
    with pytest.raises(UnsupportedModel, match=r"1 only, its replicas with expert parallelism"):
        chosen(
            checkpoint,
            Model("MixtralForCausalLM"),
            Parallel(data=2),
            quantization_config={"quant_method": "fp8"},
        )


@pytest.mark.parametrize("settings", [None, {}])
def test_no_quantisation_may_be_spelt_out(checkpoint, settings):
    assert chosen(checkpoint, LLAMA, Parallel(tensor=2), quantization_config=settings)


def test_stages_and_experts_of_a_quantised_checkpoint_load_as_they_are(checkpoint):
    model = Model("Qwen3MoeForCausalLM", layers=2, experts=2)
    scales = {f"{name}_scale": () for name in model.shapes if name.endswith("proj.weight")}
    packed = {"model.embed_tokens.qweight": (1, 3), "lm_head.g_idx": (5,)}
    made = checkpoint(model.shapes | scales | packed)
    config = model.config | {"quantization_config": {"quant_method": "fp8"}}
    parallel = Parallel(pipeline=2, data=2, expert=True)
    shards = [select(made.sources, config, placement) for placement in everyone(parallel)]
    assert all(piece.axis is None for shard in shards for piece in shard)
    by_rank = [{piece.name for piece in shard} for shard in shards]
    assert set.union(*by_rank) == made.sources.keys()
    expert = "model.layers.1.mlp.experts.1.up_proj.weight"
    for name in (expert, f"{expert}_scale"):
        assert [name in held for held in by_rank] == [False, False, False, True]
    for name in ("lm_head.weight", "lm_head.g_idx"):
        assert [name in held for held in by_rank] == [False, True, False, True]


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("model.layers.0.self_attn.q_norm.weight", Parallel(tensor=2)),
        ("model.layers.0.mlp.down_proj.weight_scale", Parallel(tensor=2)),
        ("model.layers.2.mlp.down_proj.weight", Parallel(tensor=2)),
        ("model.layers.2.mlp.down_proj.weight", Parallel(pipeline=2)),
        ("model.layers.0.mlp.experts.0.up_proj.weight", Parallel(pipeline=2)),
        ("visual.patch_embed.weight", Parallel(pipeline=2)),
        ("model.embed_tokens.bias", Parallel(tensor=2)),
    ],
)
def test_a_tensor_that_no_rule_covers_is_refused_by_name(checkpoint, name, parallel):
    made = checkpoint(LLAMA.shapes | {name: (4, 4)})
    for placement in everyone(parallel):
        with pytest.raises(UnsupportedModel, match=f"^{name}: no tensors of LlamaForCausalLM"):
            select(made.sources, LLAMA.config, placement)


@pytest.mark.parametrize("name", ["mlp.experts.8.up_proj.weight", "mlp.experts.up_proj_scale"])
def test_a_tensor_of_no_known_expert_is_refused_by_name(checkpoint, name):
    model = Model("Qwen3MoeForCausalLM", experts=8)
    made = checkpoint(model.shapes | {f"model.layers.1.{name}": (4, 4)})
    with pytest.raises(UnsupportedModel, match=rf"model\.layers\.1\.{name}: no tensors"):
        select(made.sources, model.config, place(Parallel(data=2, expert=True), 0))


def test_of_many_tensors_that_no_rule_covers_some_are_named(checkpoint):
    made = checkpoint(LLAMA.shapes | {f"extra.{n}": (1,) for n in range(9)})
    with pytest.raises(UnsupportedModel, match=r"extra\.\d and 4 more: no tensors of Llama"):
        select(made.sources, LLAMA.config, place(Parallel(tensor=2), 0))


def test_a_stack_of_another_number_of_experts_is_refused(checkpoint):
    model = Model("MixtralForCausalLM", stacked=True)
    told = r"experts\.\w+ has shape \(4, \d, 4\), but config\.json counts 5 experts"
    with pytest.raises(CheckpointError, match=told):
        chosen(checkpoint, model, Parallel(tensor=2, expert=True), num_experts=5)


def test_a_projection_that_contradicts_config_is_refused(checkpoint):
    told = (
        r"self_attn\.[qkvo]_proj\.weight is \d long on axis \d, but config\.json says 4 attention"
    )
    with pytest.raises(CheckpointError, match=told):
        chosen(checkpoint, LLAMA, Parallel(tensor=2), head_dim=4)


def test_a_packed_dtype_is_not_cut_inside_a_byte(checkpoint):
    model = Model("LlamaForCausalLM", units=2)
    made = checkpoint(model.shapes, "F4")
    with pytest.raises(UnsupportedModel, match=r"down_proj\.weight: .* F4 falls inside a byte"):
        select(made.sources, model.config, place(Parallel(tensor=2), 0))


# ---- single decisions


def test_the_last_stage_of_a_tied_model_holds_the_embedding_too(checkpoint):
    def embedded(model: Model, **more) -> list[bool]:
        return [
            "model.embed_tokens.weight" in {piece.name for piece in held}
            for held in (chosen(checkpoint, model, Parallel(pipeline=2), n, **more) for n in (0, 1))
        ]

    tied = Model("LlamaForCausalLM", tied=True)
    assert embedded(LLAMA) == [True, False]
    assert embedded(tied) == [True, True]
    assert embedded(tied, tie_word_embeddings=None) == [True, True]
    assert embedded(Model("GemmaForCausalLM"), tie_word_embeddings=None) == [True, True]


def test_a_single_key_value_head_is_held_whole_by_every_rank(checkpoint):
    model = Model("LlamaForCausalLM", heads=4, kv_heads=1)
    for rank in range(4):
        held = {piece.name: piece for piece in chosen(checkpoint, model, Parallel(4), rank)}
        piece = held["model.layers.0.self_attn.k_proj.weight"]
        assert (piece.shape, piece.axis) == ((2, 4), None)


def test_a_tied_embedding_on_a_single_stage_is_held_once(checkpoint):
    held = chosen(checkpoint, Model("GemmaForCausalLM", tied=True), Parallel(tensor=2))
    assert [piece.name for piece in held].count("model.embed_tokens.weight") == 1


def test_stacked_experts_dealt_in_turns_are_one_strided_run(checkpoint):
    model = Model("Qwen3MoeForCausalLM", stacked=True, experts=4, groups=2)
    parallel = Parallel(tensor=2, expert=True, expert_placement=ExpertPlacement.ROUND_ROBIN)
    held = {piece.name: piece for piece in chosen(checkpoint, model, parallel, 1)}
    piece = held["model.layers.1.mlp.experts.down_proj"]
    assert piece.shape == (2, 4, 4)
    assert piece.spans == (range(1, 2), range(3, 4))
    assert [(run.row_nbytes, run.rows, run.stride) for run in piece.runs] == [(64, 2, 128)]


@pytest.mark.parametrize(
    ("parallel", "held"),
    [
        (Parallel(tensor=2, data=2), [(1, (0, 1)), (1, (1, 2)), (1, (2, 3)), (1, (3, 4))]),
        (Parallel(tensor=1, data=2), [(1, (0, 2)), (1, (2, 4))]),
        (Parallel(tensor=2), [(1, (0, 2)), (1, (2, 4))]),
        (Parallel(tensor=2, expert=True), [(0, (0, 2)), (0, (2, 4))]),
        (
            Parallel(tensor=2, data=2, expert=True),
            [(0, (0, 1)), (0, (1, 2)), (0, (2, 3)), (0, (3, 4))],
        ),
    ],
)
def test_replicas_cut_experts_between_them_or_deal_them(checkpoint, parallel, held):
    """Axis and span of what each rank holds of all experts' rows; attention is each replica's."""
    model = Model("Qwen3MoeForCausalLM", stacked=True)
    found = []
    for rank in range(parallel.world):
        shard = {piece.name: piece for piece in chosen(checkpoint, model, parallel, rank)}
        piece = shard["model.layers.1.mlp.experts.gate_up_proj"]
        found.append((piece.axis, (piece.spans[0].start, piece.spans[0].stop)))
        rows = shard["model.layers.1.self_attn.q_proj.weight"].shape[0]
        assert rows * parallel.tensor == model.heads * model.head_dim
    assert found == held


def test_every_replica_of_a_dense_model_holds_all_of_it(checkpoint):
    parallel = Parallel(data=3)
    shards = [chosen(checkpoint, LLAMA, parallel, rank) for rank in range(3)]
    assert {piece.name: piece.shape for piece in shards[0]} == LLAMA.shapes
    assert shards[0] == shards[1] == shards[2]


@pytest.mark.parametrize("how", ExpertPlacement)
def test_more_ranks_than_experts_are_refused(checkpoint, how):
    model = Model("Qwen3MoeForCausalLM", experts=3)
    parallel = Parallel(tensor=2, data=2, expert=True, expert_placement=how)
    for rank in range(parallel.world):
        with pytest.raises(ConfigError) as caught:
            chosen(checkpoint, model, parallel, rank)
        assert str(caught.value) == (
            "3 experts cannot be dealt to 4 ranks (2 tensor x 2 data): use at most 3, or turn "
            "expert parallelism off"
        )
