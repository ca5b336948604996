import pytest

from preloadd.domain.placement import Parallel
from preloadd.errors import CheckpointError, ConfigError, UnsupportedModel
from preloadd.weights.checkpoint import open_checkpoint
from preloadd.weights.native import prove_divisible, require_divisible, sources_of
from tests.checkpoints import CONFIG, SHARDS, llama


@pytest.fixture
def model(tmp_path):
    return llama(tmp_path / "model")


def test_every_tensor_is_found_where_it_lies(model):
    checkpoint = open_checkpoint(model)
    sources = sources_of(checkpoint)
    assert sources.keys() == checkpoint.tensors.keys()
    assert {source.file for source in sources.values()} == set(range(len(SHARDS)))
    for name, source in sources.items():
        stored = checkpoint.tensors[name]
        assert checkpoint.shards[source.file].path == stored.shard.path
        assert (source.start, source.nbytes) == (stored.info.start, stored.info.nbytes)


@pytest.mark.parametrize(
    "parallel", [Parallel(), Parallel(tensor=2, pipeline=2, data=3), Parallel(data=8)]
)
def test_a_group_that_can_hold_the_model_is_let_be(model, parallel):
    prove_divisible(open_checkpoint(model), parallel)


def test_all_that_keeps_a_group_from_holding_the_model_is_told_at_once(model):
    layers = CONFIG["num_hidden_layers"]
    with pytest.raises(ConfigError) as caught:
        prove_divisible(open_checkpoint(model), Parallel(tensor=3, pipeline=layers + 1))
    told = str(caught.value)
    assert "attention heads do not divide by 3 tensor-parallel ranks" in told
    assert f"{layers} layers do not make {layers + 1} pipeline stages" in told


def test_a_model_that_nobody_knows_how_to_divide_is_named(tmp_path):
    model = llama(tmp_path / "novel", config=CONFIG | {"architectures": ["NovelForCausalLM"]})
    prove_divisible(open_checkpoint(model), Parallel(data=2))
    with pytest.raises(UnsupportedModel, match="NovelForCausalLM cannot be divided over ranks"):
        prove_divisible(open_checkpoint(model), Parallel(pipeline=2))


def test_a_wrong_config_is_named_with_its_folder(tmp_path):
    model = llama(tmp_path / "wrong", config=CONFIG | {"num_key_value_heads": 0})
    with pytest.raises(CheckpointError, match=r"wrong/config\.json: num_key_value_heads is 0"):
        prove_divisible(open_checkpoint(model), Parallel(tensor=2))


def test_a_model_that_the_ranks_cannot_divide_is_refused(tmp_path):
    model = llama(tmp_path / "model")
    require_divisible(model, Parallel(tensor=2, pipeline=2, data=2))
    with pytest.raises(ConfigError, match="attention heads do not divide by 3 tensor-parallel"):
        require_divisible(model, Parallel(tensor=3))
    novel = llama(tmp_path / "novel", config=CONFIG | {"architectures": ["NovelForCausalLM"]})
    with pytest.raises(UnsupportedModel, match="NovelForCausalLM cannot be divided over ranks"):
        require_divisible(novel, Parallel(pipeline=2))
    # One that is not readable is for the ranks to complain of.
    require_divisible(tmp_path / "none", Parallel(tensor=3))
