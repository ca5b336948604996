import pytest

from preloadd.domain.ids import Role
from preloadd.domain.key import differences
from preloadd.domain.placement import ExpertPlacement, Parallel, Placement, place
from preloadd.frameworks.identity import native_key, rope_of, stored_dtype

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}


def key(config=CONFIG, **changed):
    given = {
        "checkpoint": "sampled-1:aa",
        "dtype": "bfloat16",
        "placement": Placement(Parallel()),
        "role": Role.TARGET,
        "revision": "",
    }
    return native_key(config, **(given | changed))


def differing(other):
    return [d.field for d in differences(key(), other)]


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (CONFIG, []),
        (CONFIG | {"rope_theta": 10000}, []),
        (CONFIG | {"rope_theta": 500000.0}, ["rope.rope_theta"]),
        (
            CONFIG | {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            ["rope.factor", "rope.rope_type"],
        ),
        (CONFIG | {"max_position_embeddings": 4096}, ["rope.max_position_embeddings"]),
        (CONFIG | {"architectures": ["MistralForCausalLM"]}, ["architecture"]),
        (
            CONFIG | {"quantization_config": {"quant_method": "fp8", "bits": 8}},
            ["quantization", "quantization_config.bits", "quantization_config.quant_method"],
        ),
        (CONFIG | {"_name_or_path": "/elsewhere"}, []),
    ],
)
def test_what_in_the_config_makes_other_weights(config, fields):
    assert differing(key(config)) == fields


@pytest.mark.parametrize(
    ("changed", "fields"),
    [
        ({"checkpoint": "sampled-1:bb"}, ["checkpoint"]),
        ({"dtype": "float16"}, ["dtype"]),
        ({"role": Role.DRAFT}, ["role"]),
        ({"revision": "v2"}, ["revision"]),
        ({"placement": Placement(Parallel(tensor=3), tensor_rank=1)}, ["tp_rank", "tp_size"]),
        ({"placement": Placement(Parallel(pipeline=2), pipeline_rank=1)}, ["pp_rank", "pp_size"]),
        ({"placement": Placement(Parallel(data=2), data_rank=1)}, []),
        (
            {"placement": Placement(Parallel(tensor=2, expert=True), tensor_rank=1)},
            ["ep_rank", "ep_size", "tp_rank", "tp_size"],
        ),
    ],
)
def test_every_other_field_of_the_key_counts(changed, fields):
    assert differing(key(**changed)) == fields


def test_replicas_match_each_other_unless_they_have_experts_between_them():
    parallel = Parallel(tensor=2, data=3)
    dense = [key(placement=place(parallel, rank)) for rank in range(parallel.world)]
    one = [key(placement=place(Parallel(tensor=2), rank)) for rank in range(2)]
    assert dense == one * 3
    experts = CONFIG | {"num_experts": 8}
    keys = [key(experts, placement=place(parallel, rank)) for rank in range(parallel.world)]
    assert [(found["dp_size"], found["dp_rank"]) for found in keys] == [
        ("3", str(rank // 2)) for rank in range(parallel.world)
    ]


@pytest.mark.parametrize(
    ("more", "told"), [({"n_group": 2}, "round_robin"), ({"n_group": 1}, "linear"), ({}, "linear")]
)
def test_the_key_tells_how_experts_are_dealt_and_not_how_they_should_have_been(more, told):
    parallel = Parallel(tensor=2, expert=True, expert_placement=ExpertPlacement.ROUND_ROBIN)
    config = CONFIG | {"num_experts": 8} | more
    assert key(config, placement=place(parallel, 1))["expert_placement"] == told


def test_old_and_new_ways_to_write_rope_are_the_same():
    old = {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", "factor": 8.0}}
    new = {"rope_parameters": {"rope_theta": 500000, "rope_type": "llama3", "factor": 8}}
    assert rope_of(old) == rope_of(new)
    assert rope_of({"text_config": new}) == rope_of(new)


def test_a_value_that_overrides_one_in_the_table_is_told():
    plain = {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}
    assert rope_of(plain | {"rope_theta": 500000}) == rope_of(plain)
    (found,) = differences(key(CONFIG | plain), key(CONFIG | plain | {"rope_theta": 5000.0}))
    assert (found.field, found.daemon, found.engine) == ("rope.rope_theta beside", "10000", "5000")
    one = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert "rope_theta beside" not in rope_of(CONFIG | one)


@pytest.mark.parametrize(
    ("config", "stored", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, {}, "bfloat16"),
        ({"dtype": "torch.float16"}, {"F32": 9}, "float16"),
        ({"text_config": {"dtype": "float32"}}, {}, "float32"),
        ({}, {"F16": 10, "F32": 30, "I64": 90}, "float32"),
        ({}, {"BF16": 100, "F32": 30}, "bfloat16"),
        ({}, {"I8": 5}, "float32"),
    ],
)
def test_the_dtype_is_what_config_says_else_what_prevails(config, stored, dtype):
    assert stored_dtype(config, lambda: stored) == dtype


def test_a_long_quantisation_config_is_told_by_its_digest():
    layers = {f"model.layers.{n}.mlp": {"bits": 4} for n in range(500)}
    long = key(CONFIG | {"quantization_config": {"quant_method": "awq", "layers": layers}})
    assert long["quantization_config"].startswith("blake2b:")
    layers["model.layers.7.mlp"]["bits"] = 8
    other = key(CONFIG | {"quantization_config": {"quant_method": "awq", "layers": layers}})
    assert [d.field for d in differences(long, other)] == ["quantization_config"]
