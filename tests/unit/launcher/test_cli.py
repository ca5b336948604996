"""The command line as a user meets it, in a process of its own."""

import os
import re
import subprocess
import sys

import typer.main

from preloadd.config.arguments import SHORT
from preloadd.config.run import RunOptions
from preloadd.domain.launch import flag
from preloadd.launcher.cli import app
from tests.checkout import ROOT


def run(*arguments: str, columns: int = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "preloadd.launcher", *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": str(columns), "TERM": "dumb", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=20,
    )


def test_help_tells_every_flag_whole_and_in_sections():
    done = run("--help")
    assert done.returncode == 0
    assert "Usage: preloadd run " in done.stdout
    told = set(re.findall(r"--[a-z-]+", done.stdout))
    assert told >= {flag(name) for name in RunOptions.model_fields} - {"--engine-args"}
    assert "options of `vllm serve`" in done.stdout
    for section in (
        "Model",
        "Parallelism",
        "Parallelism over several nodes",
        "Engines",
        "Warm-up",
        "Health endpoint",
        "Processes",
    ):
        assert f"\n{section}" in done.stdout


def test_help_is_a_switch_and_its_prose_fills_the_lines():
    told = run("-h", "--builder", "vllm", columns=80).stdout
    assert re.search(r"-h, --help +Show this", told), told
    assert "<bool>" not in told
    assert " anywhere on the line, or after a --. Give " in told


def test_defaults_that_help_tells_are_those_of_the_options():
    shown = re.sub(r"\s+", " ", run("--help").stdout)
    for name, field in RunOptions.model_fields.items():
        if isinstance(field.default, str | float) and field.default:
            told = str(field.default).removesuffix(".0")
            assert re.search(rf"{flag(name)} .*?Default: {told}\.", shown), name


def test_all_faults_are_told_at_once():
    done = run("-tp", "0", "--digest", "md5", "--chunk-bytes", "")
    assert done.returncode == 78
    assert done.stdout == ""
    first, *faults = done.stderr.splitlines()
    assert first == "preloadd run:"
    assert [line.partition(": ")[0].strip() for line in faults] == [
        "--tensor-parallel-size",
        "--model",
        "--digest",
        "--chunk-bytes",
    ]


def test_one_fault_is_one_line():
    done = run("--model", "/nonexistent", "--memory", "host")
    assert done.returncode == 66
    assert done.stderr == "preloadd run: /nonexistent: no such folder: correct the path\n"


def test_every_flag_arrives_under_its_field_name():
    """Each is given a value that only its own field refuses."""
    wrong = {
        "builder": "x",
        "layout": "x",
        "memory": "x",
        "gpus": ",",
        "reader": "x",
        "chunk_bytes": "x",
        "digest": "x",
        "tensor_parallel_size": "x",
        "pipeline_parallel_size": "x",
        "data_parallel_size": "x",
        "expert_placement_strategy": "x",
        "nnodes": "x",
        "node_rank": "x",
        "data_parallel_size_local": "x",
        "data_parallel_start_rank": "x",
        "weight_cache_master_port": "x",
        "weight_cache_draft_master_port": "x",
        "master_port": "x",
        "data_parallel_rpc_port": "x",
        "access_group": "",
        "access_user": "",
        "seed_listen_host": "a\tb",
        "seed_listen_port": "x",
        "seed_source_host": "a\tb",
        "seed_source_port": "x",
        "seed_timeout": "x",
        "seed_token_file": "~nobody-there/x",
        "seed_tls_cert": "~nobody-there/x",
        "seed_tls_key": "~nobody-there/x",
        "seed_tls_ca": "~nobody-there/x",
        "weight_cache_health_host": "",
        "weight_cache_health_port": "x",
        "log_level": "x",
    }
    done = run(*(word for name, value in wrong.items() for word in (flag(name), value)))
    told = {line.partition(":")[0].strip() for line in done.stderr.splitlines()[1:]}
    assert told == {flag(name) for name in wrong} | {"--model"}


def test_flags_may_be_repeated_and_switches_take_no_value():
    done = run(
        *("--model", "/", "--memory", "host", "--access-group", "a", "--access-group", "b"),
        *("--restart-ranks", "--enable-expert-parallel", "-pp", "2"),
    )
    assert "no group 'a'" in done.stderr or "choose one yourself" in done.stderr


def test_short_forms_are_those_that_vllms_arguments_have():
    command = typer.main.get_command(app)
    own = {
        name.lstrip("-"): option.name.replace("_", "-")
        for option in command.params
        for name in option.opts
        if not name.startswith("--")
    }
    assert {"tp", "pp", "dp", "dpl", "dpr", "dpa", "dpp", "ep", "n", "r"} == own.keys()
    assert own == {short: SHORT[short] for short in own}


def test_faults_of_nodes_are_told_by_their_flags_before_anything_is_looked_for():
    done = run("/nonexistent", "-tp", "4", "-n", "3", "-r", "0", "-dpa", "localhost")
    assert done.returncode == 78
    told = [line.partition(": ")[0].strip() for line in done.stderr.splitlines()[1:]]
    assert told == ["--nnodes", "--master-addr", "--weight-cache-master-port"]


def test_unknown_flag_is_a_usage_error():
    done = run("--model", "x", "--colour", "red")
    assert done.returncode == 2
    assert "--colour" in done.stderr


def test_flag_that_is_nearly_right_is_told_the_right_one():
    done = run("--model", "x", "--memmory", "host")
    assert done.returncode == 2
    assert "--memmory. Did you mean --memory? Options of vLLM need" in done.stderr


def test_short_forms_may_have_their_number_attached():
    assert "--nnodes: is 3" in run("/nonexistent", "-tp", "4", "-n3", "-r0").stderr


def test_flags_of_vllm_are_for_its_builder():
    line = ["/nonexistent", "--memory", "host", "--max-model-len", "4096", "-q", "fp8"]
    for words, name in (
        (line, "--max-model-len"),
        (["M", "--memory", "host", "--dtype=float16"], "--dtype"),
        (["M", "--memory", "host", "--", "--dtype", "float16"], "--dtype"),
    ):
        done = run(*words)
        assert done.returncode == 2
        told = " ".join(done.stderr.split())
        assert told.endswith(f"No such option: {name}. Options of vLLM need --builder vllm."), told
    done = run(*line, "--builder", "vllm", "--", "--seed", "-1")
    assert done.returncode == 66
    assert done.stderr == "preloadd run: /nonexistent: no such folder: correct the path\n"


def test_a_load_format_that_cannot_be_is_told_with_those_that_can_before_anything_is_started():
    line = ["/", "--memory", "host", "--builder", "vllm", "--load-format", "nosuch"]
    done = run(*line)
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.startswith("preloadd run: --load-format: 'nosuch' is no format"), done.stderr
    assert "safetensors, sharded_state)" in done.stderr


def test_a_parallel_flag_given_twice_is_a_fault_in_whatever_way():
    line = ["--model", "/", "--memory", "host"]
    for more in (
        ["-tp", "2", "--tensor-parallel-size", "4"],
        ["-tp", "2", "--builder", "vllm", "--tensor_parallel_size", "4"],
        ["--builder", "vllm", "-tp=2", "--", "-tp", "4"],
    ):
        done = run(*line, *more)
        assert done.returncode == 78
        assert "--tensor-parallel-size: is given with different values, 2 and 4" in done.stderr
