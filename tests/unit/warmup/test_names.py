from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.warmup.names import TableName, chosen_root, is_config_hash, versions_root


@given(st.integers(0, 99999), st.integers(0, 99999))
def test_a_name_is_read_as_it_is_written(dp_rank, rank):
    assert TableName.parse(str(TableName(dp_rank, rank))) == TableName(dp_rank, rank)


def test_it_is_the_name_that_vllm_gives():
    assert str(TableName(1, 12)) == "autotune_configs_dp1_rank12.json"


@pytest.mark.parametrize(
    "text",
    [
        "autotune_configs.json",
        "autotune_configs_dp0_rank01.json",
        "autotune_configs_dp0_rank-1.json",
        "autotune_configs_dp0_rank0.json\n",
        "autotune_configs_dp0_rank٣.json",
        "../autotune_configs_dp0_rank0.json",
        ".autotune_configs_dp0_rank0.json",
        "pcie_ipc_allreduce_tp_0_1.json",
    ],
)
def test_other_files_are_none(text):
    assert TableName.parse(text) is None


def test_hashes():
    assert is_config_hash("0a" * 32)
    for text in ("", "0A" * 32, "0a" * 31, "0a" * 32 + "\n", "../" + "0" * 61):
        assert not is_config_hash(text)


@pytest.mark.parametrize(
    ("environ", "root"),
    [
        ({"HOME": "/h"}, "/h/.cache/vllm"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/c"}, "/c/vllm"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/c", "VLLM_CACHE_ROOT": "~/v"}, "/h/v"),
    ],
)
def test_where_engines_look_that_were_told_nothing(environ, root):
    assert versions_root(environ) == Path(root, "flashinfer_autotune_cache")
    assert chosen_root(environ) is None


def test_where_engines_look_that_were_told():
    told = {"VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "~/t", "HOME": "/h"}
    assert chosen_root(told) == Path("/h/t")
