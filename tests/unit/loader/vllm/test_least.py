"""The least that a rank can need, for configurations with what of vLLM's counts here."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from preloadd.domain.placement import Parallel, Placement
from preloadd.loader.vllm.least import least

GIB = 1 << 30


def config(dtype=torch.bfloat16, quantization=None, stored_quantised=False, hf_overrides=None):
    hf = SimpleNamespace(quantization_config={}) if stored_quantised else SimpleNamespace()
    return SimpleNamespace(
        dtype=dtype, quantization=quantization, hf_config=hf, hf_overrides=hf_overrides or {}
    )


@pytest.fixture
def needed(settings):
    """What a rank among so many ranks needs of what is stored."""

    def needed(stored, model_config, **sizes):
        placement = Placement(Parallel(**sizes))
        model = replace(settings.model, placement=placement)
        return least(stored, replace(settings, model=model), model_config)

    return needed


@pytest.mark.parametrize(
    ("stored", "model_config", "sizes", "least"),
    [
        ({"BF16": 16 * GIB}, config(), {}, 8 * GIB),
        ({"BF16": 16 * GIB}, config(), {"tensor": 2, "data": 2}, 2 * GIB),
        ({"F32": 16 * GIB}, config(), {}, 4 * GIB),
        ({"BF16": 16 * GIB}, config(torch.float32), {}, 8 * GIB),
        ({"F8_E4M3": 16 * GIB, "BF16": 2 * GIB}, config(), {}, 9 * GIB),
        ({"BF16": 16 * GIB}, config(quantization="fp8"), {}, 2 * GIB),
        ({"I32": 16 * GIB}, config(quantization="awq", stored_quantised=True), {}, 8 * GIB),
        ({"BF16": 16 * GIB}, config(hf_overrides={"num_hidden_layers": 1}), {}, 0),
    ],
)
def test_the_least_is_what_no_dtype_and_nothing_left_out_can_spare(
    needed, stored, model_config, sizes, least
):
    assert needed(stored, model_config, **sizes) == least


def test_nobody_knows_of_a_stage_that_is_cut_by_hand(needed, monkeypatch):
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,31")
    assert needed({"BF16": 16 * GIB}, config(), pipeline=2) == 0


def test_nor_of_a_draft(settings):
    draft = replace(settings, instance=f"{settings.instance}.draft")
    assert least({"BF16": 16 * GIB}, draft, config()) == 0
