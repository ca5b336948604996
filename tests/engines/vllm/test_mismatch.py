"""Weights that are not its own are never used: an engine loads from disk and says what differs."""

import dataclasses
from pathlib import Path

import pytest

from tests.engines.vllm import harness
from tests.engines.vllm.harness import Raised
from tests.engines.vllm.zoo import Zoo

pytestmark = pytest.mark.slow

OTHER_ROPE = {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}
UNUSED_QUANTISATION = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                "input_activations": {
                    "num_bits": 8,
                    "type": "int",
                    "strategy": "token",
                    "dynamic": True,
                },
            }
        },
        "ignore": ["re:.*"],
    }
}
"""It quantises no layer, so the files fit."""


@dataclasses.dataclass
class Wrong:
    """What an engine has otherwise than the daemon: the checkpoint, or arguments of vLLM."""

    field: str
    model: object = None
    arguments: dict = dataclasses.field(default_factory=dict)

    def path(self, zoo: Zoo) -> Path:
        return self.model(zoo) if self.model else zoo("llama")


CASES = {
    "fine-tune with equal headers": Wrong("checkpoint", lambda zoo: zoo("llama", seed=2)),
    "another dtype": Wrong("dtype", arguments={"dtype": "float32"}),
    "another base of RoPE": Wrong("rope.rope_theta", arguments={"hf_overrides": OTHER_ROPE}),
    "another quantisation": Wrong(
        "quantization", lambda zoo: zoo.variant(zoo("llama"), "quantised", UNUSED_QUANTISATION)
    ),
    "another architecture": Wrong("architecture", lambda zoo: zoo("qwen3")),
    "another dtype of the KV cache": Wrong("kv_cache_dtype", arguments={"kv_cache_dtype": "fp8"}),
    "another vLLM": Wrong("vllm", arguments={"version": "0.31.0"}),
}


@pytest.fixture(scope="module")
def rank(vllm_python, zoo):
    """One that serves the small Llama, to all tests of this module."""
    with harness.short_folder() as folder:
        with harness.daemon(vllm_python, zoo("llama"), Path(folder)) as made:
            yield made


@pytest.mark.parametrize("case", CASES)
def test_wrong_weights_are_refused_by_name_and_never_used(case, rank, lasting, zoo):
    wrong = CASES[case]
    model = wrong.path(zoo)
    own_disk = {name: value for name, value in wrong.arguments.items() if name != "version"}
    lasting.load(model, **own_disk)
    said = lasting.generate()
    loaded = lasting.attach(model, rank.sockets, also=wrong.arguments)
    assert loaded.shared == 0
    assert f"{wrong.field}: daemon has" in loaded.reason
    assert lasting.generate() == said
    assert rank.status().lease_count == 0
    with pytest.raises(Raised, match=f"Mismatch: .*{wrong.field}: daemon has"):
        lasting.attach(model, rank.sockets, fallback=False, also=wrong.arguments)
    assert rank.status().state == "serving"


def test_the_right_engine_attaches_to_that_very_daemon(rank, lasting, zoo):
    lasting.load(zoo("llama"))
    said = lasting.generate()
    loaded = lasting.attach(zoo("llama"), rank.sockets)
    assert not loaded.reason
    assert lasting.generate() == said
