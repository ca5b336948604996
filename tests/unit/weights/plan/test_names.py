import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.weights.plan.names import Spot, locate


@pytest.mark.parametrize(
    ("name", "spot"),
    [
        ("lm_head.weight", Spot("lm_head.weight")),
        ("model.layers.7.mlp.gate.weight", Spot("mlp.gate.weight", 7)),
        ("model.layers.10.mlp.experts.3.w1.weight", Spot("mlp.experts.*.w1.weight", 10, 3)),
        ("model.layers.0.mlp.experts.down_proj", Spot("mlp.experts.down_proj", 0)),
        ("model.layers.0.mlp.shared_expert.up.weight", Spot("mlp.shared_expert.up.weight", 0)),
    ],
)
def test_names_are_taken_apart(name, spot):
    assert locate(name) == spot


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.mlp.gate.weight",
        "xmodel.layers.0.mlp.gate.weight",
        "model.layers.00.mlp.gate.weight",
        "model.layers.-1.mlp.gate.weight",
        "model.layers.٣.mlp.gate.weight",
        "model.layers.0.",
        "model.layers.1",
    ],
)
def test_what_is_not_exactly_a_layer_is_none(name):
    assert locate(name) == Spot(name)


@pytest.mark.parametrize(
    ("name", "of_experts"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj", True),
        ("model.layers.0.mlp.experts.gate_up_proj_scale", True),
        ("model.layers.0.mlp.experts.1.gate_proj.weight", True),
        ("model.layers.0.mlp.shared_expert.gate_proj.weight", False),
        ("model.layers.0.mlp.gate.weight", False),
        ("model.norm.weight", False),
    ],
)
def test_tensors_of_experts_are_told_from_all_others(name, of_experts):
    assert locate(name).of_experts is of_experts


@given(st.text())
def test_any_text_is_a_name(name):
    assert locate(name).tail == name or locate(name).layer is not None
