from dataclasses import fields, replace

import pytest

from preloadd.domain.key import MAX_TABLE
from preloadd.warmup.bundles.identity import CompileIdentity, apart

ONE = CompileIdentity(
    config_hash="ab" * 32,
    model="/srv/models/llama",
    vllm="0.33.0",
    torch="2.14.0",
    triton="3.6.0",
    cuda="13.0",
    python="CPython 3.12.4",
    architecture="NVIDIA H200 90",
    environment="{}",
    engine_args=("--dtype=bfloat16",),
    world=2,
    ranks=((0, 0), (1, 0)),
    cache_root="/var/cache/vllm",
    site_packages="/opt/vllm/lib/python3.12/site-packages",
)

OTHER = {"world": 4, "engine_args": (), "ranks": ((0, 0),)}


def test_equal_ones_do_not_differ():
    assert apart(ONE.fields, replace(ONE).fields) == ""


@pytest.mark.parametrize("name", [field.name for field in fields(CompileIdentity)])
def test_whatever_differs_is_told_with_both_values(name):
    other = replace(ONE, **{name: OTHER.get(name, "other")})
    told = apart(ONE.fields, other.fields)
    assert told == f"{name}: there {ONE.fields[name]!r}, here {other.fields[name]!r}"


def test_a_field_that_one_side_lacks_differs():
    assert "new: there '1', here '(absent)'" in apart({**ONE.fields, "new": "1"}, ONE.fields)


def test_it_fits_into_a_manifest():
    long = replace(ONE, engine_args=("x" * 100_000,))
    assert max(map(len, long.fields.values())) <= MAX_TABLE


def test_of_what_others_wrote_no_more_is_told_than_one_reads():
    told = apart({"a": "x\n" * 4000}, {"a": "y"})
    assert len(told) < 400
    assert "\n" not in told


def test_variables_are_told_one_by_one():
    there = replace(ONE, environment='{"VLLM_USE_V2_MODEL_RUNNER":"1"}')
    assert apart(there.fields, ONE.fields) == (
        "environment.VLLM_USE_V2_MODEL_RUNNER: there '1', here '(absent)'"
    )
