"""What tells apart weights that vLLM laid out for something else, with its own configurations."""

import json
import shutil
import subprocess

import pytest

from preloadd.domain.key import differences
from preloadd.domain.recipe import KERNELS
from tests.engines.vllm import harness

pytestmark = pytest.mark.slow

CODE = "class Config: pass\n"
REMOTE = {"auto_map": {"AutoModelForCausalLM": "modeling_x.Model"}}

CASES = {
    "plain": {},
    "tensor parallel": {"tensor": 2},
    "pooling": {"args": ["--runner=pooling", "--convert=embed"]},
    "top-level theta": {"args": ['--hf-overrides={"rope_theta": 5000.0}']},
    "another theta": {
        "args": [
            '--hf-overrides={"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}'
        ]
    },
    "sliding window": {"args": ['--hf-overrides={"sliding_window": 64}']},
    "longer": {"args": ['--hf-overrides={"max_position_embeddings": 1024}']},
    "switch": {"environ": {"VLLM_USE_DEEP_GEMM": "0"}},
    "switch that vLLM does not know": {"environ": {"VLLM_MODEL": "x", "VLLM_KERNEL_OF_MINE": "1"}},
    "where it runs": {
        "environ": {
            "VLLM_LOGGING_LEVEL": "DEBUG",
            "VLLM_PORT": "9000",
            "VLLM_HOST_IP": "10.0.0.1",
            "VLLM_ENGINE_READY_TIMEOUT_S": "9",
        }
    },
    "more requests": {"args": ["--max-num-seqs=7", "--served-model-name=other"]},
}


@pytest.fixture(scope="module")
def told(vllm_python, zoo, tmp_path_factory):
    """What a loader makes of each case; "held" is what becomes of loaders held to files."""
    cases = {
        name: {"model": str(zoo("llama")), "args": [], "environ": {}, **case}
        for name, case in CASES.items()
    }
    own = zoo.variant(zoo("llama"), "code", REMOTE)
    (own / "modeling_x.py").write_text(CODE)
    other = shutil.copytree(own, tmp_path_factory.mktemp("more") / "code")
    (other / "modeling_x.py").write_text(CODE.replace("pass", "..."))
    for name, model, args in (
        ("code", own, ["--trust-remote-code"]),
        ("other code", other, ["--trust-remote-code"]),
        ("code that may not run", own, []),
    ):
        cases[name] = {"model": str(model), "args": args, "environ": {}}
    files = []
    for number in range(3):
        files.append(str(tmp_path_factory.mktemp("files") / f"{number}.safetensors"))
        shutil.copyfile(zoo("llama") / "model.safetensors", files[-1])
    done = subprocess.run(
        [vllm_python, "-m", "tests.engines.vllm.keys"],
        cwd=harness.ROOT,
        env=harness.environ(vllm_python),
        input=json.dumps({"cases": cases, "files": files}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def apart(told):
    """`apart(one, other)`: what differs between the keys of two cases."""

    def differing(one: str, other: str):
        keys = [dict(told[name]["key"], checkpoint="sampled-1:aa") for name in (one, other)]
        return {d.field: (d.daemon, d.engine) for d in differences(*keys)}

    return differing


@pytest.mark.parametrize("case", ["plain", "tensor parallel"])
def test_batches_are_as_large_as_those_of_vllm_serve(told, case):
    assert told[case]["tokens"] == told[case]["served"]


def test_a_model_that_is_run_for_something_else_is_told_by_how(apart):
    found = apart("plain", "pooling")
    assert found["runner"] == ("generate", "pooling")
    assert found["convert"] == ("none", "embed")


@pytest.mark.parametrize(
    ("case", "field", "engine"),
    [
        ("another theta", "rope.rope_theta", "5000"),
        ("sliding window", "model_config.sliding_window", "64"),
        ("longer", "rope.max_position_embeddings", "1024"),
    ],
)
def test_what_is_overridden_is_told_by_name_and_value(apart, case, field, engine):
    found = apart("plain", case)
    assert list(found) == [field]
    assert found[field][1] == engine


def test_a_theta_that_is_given_the_old_way_is_told_as_that_of_rope(apart):
    found = apart("plain", "top-level theta")
    assert found
    assert all(field.startswith("rope.rope_theta") for field in found)
    assert "5000" in str(found)


def test_switches_are_told_one_by_one(apart):
    assert apart("plain", "switch") == {"environment.VLLM_USE_DEEP_GEMM": ("(absent)", "0")}


@pytest.mark.parametrize(
    "case", ["where it runs", "more requests", "switch that vLLM does not know"]
)
def test_what_chooses_no_weights_does_not_count(apart, case):
    assert apart("plain", case) == {}


def test_code_of_a_checkpoint_counts_where_it_may_run(apart, told):
    assert list(apart("code", "other code")) == ["code.files"]
    assert list(apart("code", "code that may not run")) == ["code"]
    assert told["plain"]["key"]["code"] == told["code that may not run"]["key"]["code"] == ""


def test_libraries_are_those_that_are_looked_for_when_weights_are_adopted(told):
    assert json.loads(told["plain"]["key"]["libraries"]).keys() <= set(KERNELS.values())


OTHER = (
    "CheckpointError: vLLM reads other files of this checkpoint than those it is identified by ("
)


@pytest.mark.parametrize(
    ("loader", "outcome"),
    [
        ("streamer", ""),
        ("streamer, one less", f"{OTHER}0.safetensors)"),
        ("streamer, another", f"{OTHER}0.safetensors, other.safetensors)"),
        ("by rank", ""),
        ("by rank, its own", ""),
        ("by rank, another", f"{OTHER}other.safetensors)"),
        ("by rank, chosen", "ConfigError: model-loader-extra-config: pattern chooses"),
        ("silent", "UnsupportedModel: _Silent of vLLM does not tell which files it reads"),
    ],
)
def test_loaders_read_the_files_that_identify_a_checkpoint(told, loader, outcome):
    found = told["held"][loader]
    assert found.startswith(outcome) if outcome else found == ""
