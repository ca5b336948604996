import json

import pytest

from preloadd.errors import ConfigError
from preloadd.weights.vllm import require_heads


@pytest.fixture
def folder(tmp_path):
    """`folder(config)`: one with this `config.json`."""

    def write(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"num_attention_heads": 4}, "1, 2, 4"),
        ({"num_attention_heads": 32, "num_key_value_heads": 3}, "1, 2, 4, 8, 16, 32"),
        ({"num_attention_heads": 3, "text_config": {"num_attention_heads": 14}}, "1, 2, 7, 14"),
        ({"num_attention_heads": 4, "rope_scaling": {"factor": 8}}, "1, 2, 4"),
        ({"num_attention_heads": 2**61}, "1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024"),
    ],
)
def test_heads_that_do_not_divide_are_told_with_the_sizes_that_fit(folder, config, told):
    with pytest.raises(ConfigError) as caught:
        require_heads(folder(config), 3, ["--dtype=float16"])
    heads = config.get("text_config", config)["num_attention_heads"]
    assert str(caught.value) == (
        f"{heads} attention heads do not divide by 3 tensor-parallel ranks\n"
        f"tensor parallel sizes that divide them: {told}"
    )


def test_heads_that_divide_are_no_fault(folder):
    for tensor in (1, 2, 4, 8):
        require_heads(folder({"num_attention_heads": 8}), tensor, [])


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_attention_heads": "4"},
        {"num_attention_heads": [4, 4]},
        {"num_attention_heads": True},
        {"num_attention_heads": 0},
        {"num_attention_heads": 4, "text_config": {"hidden_size": 8}},
        {"num_attention_heads": 4, "language_config": {"num_attention_heads": 6}},
        {"n_head": 4},
    ],
)
def test_what_only_vllm_can_tell_is_left_to_it(folder, config):
    require_heads(folder(config), 3, [])


@pytest.mark.parametrize(
    "word", ['--hf-overrides={"a":1}', "--hf-overrides.a=1", "--hf-config-path=/x"]
)
def test_what_takes_the_place_of_config_json_is_left_to_vllm(folder, word):
    require_heads(folder({"num_attention_heads": 4}), 3, ["--dtype=float16", word])


def test_a_config_that_cannot_be_read_is_for_the_ranks_to_complain_of(tmp_path):
    require_heads(tmp_path, 3, [])
    (tmp_path / "config.json").write_text("{")
    require_heads(tmp_path, 3, [])
