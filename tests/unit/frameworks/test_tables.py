"""Where tables are looked for: alike on all sides, apart for what makes other products."""

from pathlib import Path

import pytest

from preloadd.domain.ids import Role
from preloadd.domain.placement import Parallel, Placement, place
from preloadd.frameworks.identity import native_key
from preloadd.frameworks.tables import config_hash, table_name, table_names, table_path
from preloadd.warmup.names import OVERRIDE, TableName, is_config_hash

CONFIG = {"architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0}


ALONE = Placement(Parallel())


def key(placement: Placement = ALONE, *, config: dict = CONFIG, **more: str) -> dict:
    said = {"checkpoint": "sampled-1:00ff", "dtype": "bfloat16", "revision": ""} | more
    return native_key(config, placement=placement, role=Role.TARGET, **said)


def test_all_ranks_of_a_group_have_their_tables_in_one_folder() -> None:
    parallel = Parallel(tensor=2, pipeline=2)
    keys = [key(place(parallel, rank)) for rank in range(4)]
    assert len({config_hash(each) for each in keys}) == 1
    assert is_config_hash(config_hash(keys[0]))
    assert [table_name(each) for each in keys] == [TableName(0, rank) for rank in range(4)]
    assert {table_names(each) for each in keys} == {tuple(TableName(0, rank) for rank in range(4))}


def test_replicas_that_share_experts_are_numbered_on() -> None:
    config = CONFIG | {"num_experts": 4}
    mine = key(place(Parallel(tensor=2, data=2, expert=True), 3), config=config)
    assert table_name(mine) == TableName(1, 3)
    assert table_names(mine) == (
        TableName(0, 0),
        TableName(0, 1),
        TableName(1, 2),
        TableName(1, 3),
    )


def test_replicas_of_a_dense_model_are_each_alone() -> None:
    keys = [key(place(Parallel(data=2), rank)) for rank in range(2)]
    assert {table_names(each) for each in keys} == {(TableName(0, 0),)}
    assert config_hash(keys[0]) == config_hash(keys[1])


SAME = {
    "another revision of the same content": key(revision="main"),
    "other positions": key(config=CONFIG | {"rope_theta": 500000.0}),
    "a draft": native_key(
        CONFIG,
        placement=ALONE,
        role=Role.DRAFT,
        checkpoint="sampled-1:00ff",
        dtype="bfloat16",
        revision="",
    ),
}
OTHER = {
    "other content": key(checkpoint="sampled-1:ff00"),
    "another dtype": key(dtype="float16"),
    "another division": key(place(Parallel(tensor=2), 0)),
    "another quantisation": key(config=CONFIG | {"quantization_config": {"quant_method": "fp8"}}),
}


@pytest.mark.parametrize("other", SAME.values(), ids=SAME)
def test_what_makes_no_other_products_changes_nothing(other: dict) -> None:
    assert config_hash(other) == config_hash(key())


@pytest.mark.parametrize("other", OTHER.values(), ids=OTHER)
def test_what_does_changes_the_folder(other: dict) -> None:
    assert config_hash(other) != config_hash(key())


def test_weights_of_another_builder_have_none_here() -> None:
    with pytest.raises(ValueError, match="where vLLM has them"):
        config_hash(key() | {"builder": "vllm"})


def test_the_path_is_below_the_folder_that_was_chosen() -> None:
    path = table_path(key(), {OVERRIDE: "/srv/tables"})
    assert path == Path("/srv/tables", config_hash(key()), "autotune_configs_dp0_rank0.json")
