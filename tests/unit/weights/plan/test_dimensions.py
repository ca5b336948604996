import pytest

from preloadd.errors import CheckpointError
from preloadd.weights.plan.dimensions import Dimensions, architecture, dimensions
from preloadd.weights.plan.families import ARCHITECTURES

LLAMA = ARCHITECTURES["LlamaForCausalLM"]
GEMMA = ARCHITECTURES["GemmaForCausalLM"]
QWEN3_MOE = ARCHITECTURES["Qwen3MoeForCausalLM"]
CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}


def read(family=LLAMA, *, has_head=True, **more) -> Dimensions:
    return dimensions(CONFIG | more, family, has_head=has_head)


def test_what_config_leaves_open_is_derived():
    assert read() == Dimensions(layers=2, heads=4, kv_heads=4, head_dim=8, experts=0, tied=False)


def test_what_config_says_is_taken():
    assert read(num_key_value_heads=2, head_dim=16, num_experts=8) == Dimensions(
        layers=2, heads=4, kv_heads=2, head_dim=16, experts=0, tied=False
    )


def test_null_means_not_given():
    assert read(num_key_value_heads=None, head_dim=None, tie_word_embeddings=None) == read()


@pytest.mark.parametrize(
    ("family", "flag", "has_head", "tied"),
    [
        (LLAMA, {}, True, False),
        (LLAMA, {"tie_word_embeddings": True}, True, True),
        (LLAMA, {"tie_word_embeddings": False}, False, True),
        (GEMMA, {}, True, True),
        (GEMMA, {"tie_word_embeddings": False}, True, False),
    ],
)
def test_embeddings_are_tied_by_config_by_family_or_for_want_of_a_head(
    family, flag, has_head, tied
):
    assert read(family, has_head=has_head, **flag).tied is tied


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_experts_go_by_two_names(key):
    assert read(QWEN3_MOE, **{key: 8}).experts == 8


@pytest.mark.parametrize(
    ("family", "wrong", "told"),
    [
        (LLAMA, {"num_attention_heads": None}, "num_attention_heads is missing"),
        (LLAMA, {"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers is True"),
        (LLAMA, {"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        (LLAMA, {"num_key_value_heads": 1.0}, "num_key_value_heads is 1.0"),
        (LLAMA, {"head_dim": -8}, "head_dim is -8"),
        (LLAMA, {"hidden_size": None}, "hidden_size is missing"),
        (LLAMA, {"hidden_size": 33}, "hidden_size 33 does not divide by num_attention_heads 4"),
        (QWEN3_MOE, {}, "num_experts is missing"),
    ],
)
def test_a_wrong_value_is_named(family, wrong, told):
    with pytest.raises(CheckpointError) as caught:
        read(family, **wrong)
    assert str(caught.value).startswith(f"config.json: {told}")


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "LlamaForCausalLM"),
        ({"architectures": []}, ""),
        ({"architectures": None}, ""),
        ({"architectures": "LlamaForCausalLM"}, ""),
        ({}, ""),
    ],
)
def test_the_architecture_is_the_first_one_named(config, name):
    assert architecture(config) == name
