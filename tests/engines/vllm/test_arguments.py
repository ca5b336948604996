"""What preloadd makes of vLLM's arguments means the same to vLLM's own parser."""

import json
import subprocess

import pytest

from preloadd.config.arguments import SHORT, Argument, from_table, from_words, words_of
from preloadd.config.vllm import divide
from tests.engines.vllm import harness

LINES = [
    ["--max_model_len", "4096", "--dtype=bfloat16", "-q", "fp8", "--trust-remote-code"],
    ["--max-model-len", "4k", "--no-enable-prefix-caching", "--enable-prefix-caching"],
    ["--seed", "-1", "--gpu-memory-utilization", "0.5", "-O3"],
    ["-O", "2", "--hf-overrides", '{"rope_theta": 1e6, "a": {"b_c": [1, -2]}}'],
    ["-cc.mode", "3", "-cc.cudagraph_capture_sizes+", "1,2", "--enforce-eager"],
    ["--compilation_config.mode", "3", "--compilation_config.custom_ops+=none", "-q=fp8"],
    ["--kv-cache-dtype-skip-layers", "0", "1", "sliding_window", "--kv-cache-dtype", "fp8"],
    ["-sc", '{"method": "ngram", "num_speculative_tokens": 3}', "--max-num-seqs", "8"],
    ["--kernel-config", '{"linear_backend": "cutlass"}', "--served-model-name", "a", "b"],
]
TABLE = {
    "max_model_len": 4096,
    "-q": "fp8",
    "enforce-eager": True,
    "enable-prefix-caching": False,
    "kv-cache-dtype-skip-layers": ["0", 1],
    "served-model-name": ["one"],
    "kernel-config": {"linear_backend": "cutlass"},
    "compilation-config.mode": 3,
    "gpu-memory-utilization": 0.5,
    "O": 3,
}
TABLE_AS_A_LINE = [
    *("--max-model-len", "4096", "-q", "fp8", "--enforce-eager", "--no-enable-prefix-caching"),
    *("--kv-cache-dtype-skip-layers", "0", "1", "--served-model-name", "one"),
    *("--kernel-config", '{"linear_backend": "cutlass"}', "--compilation-config.mode", "3"),
    *("--gpu-memory-utilization", "0.5", "-O3"),
]


@pytest.fixture(scope="module")
def vllm(vllm_python):
    """What vLLM's parser says of each line as it is, and in canonical form."""
    lines = [*LINES, *(canonical(from_words(line)) for line in LINES)]
    lines += [TABLE_AS_A_LINE, canonical(from_table(TABLE))]
    done = subprocess.run(
        [vllm_python, "-m", "tests.engines.vllm.parse"],
        cwd=harness.ROOT,
        env=harness.environ(vllm_python),
        input=json.dumps(lines),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def canonical(found) -> list[str]:
    arguments = list(found)
    assert all(isinstance(argument, Argument) for argument in arguments), arguments
    return list(words_of(arguments))


@pytest.mark.slow
def test_lines_are_understood_alike(vllm):
    understood = vllm["understood"][: 2 * len(LINES)]
    for line, (raw, ours) in zip(
        LINES, zip(understood[: len(LINES)], understood[len(LINES) :], strict=True), strict=True
    ):
        assert raw == ours, line


@pytest.mark.slow
def test_tables_are_understood_as_the_lines_they_stand_for(vllm):
    raw, ours = vllm["understood"][-2:]
    assert raw == ours


@pytest.mark.slow
def test_short_forms_are_vllms(vllm):
    ours = {short: f"--{name}" for short, name in SHORT.items() if short != "O"}
    assert {**ours, **vllm["short"]} == {**vllm["short"], **ours}
    assert vllm["short"].keys() <= SHORT.keys()


@pytest.mark.slow
def test_no_argument_of_vllm_is_taken_for_the_beginning_of_another(vllm):
    for name in vllm["names"]:
        if name.startswith("--"):
            told = [wrong.text for wrong in divide(from_words([f"{name}=1"])).wrong]
            assert not [text for text in told if "may be short for" in text], name
