import json

from preloadd.admin.show import as_json, as_table
from preloadd.config.host import survey


def test_every_value_has_its_origin(host):
    host.host("[supervisor]\nport = 1234\n")
    file = host.group(more="[parallel]\nenable_expert_parallel = true\n")
    found = survey(host.config, {"PRELOADD_LOG_LEVEL": "debug"}, {("deadlines", "stop_s"): 3.0})
    told = json.loads(as_json(found))
    assert told["host"]["log_level"] == {"value": "debug", "origin": "PRELOADD_LOG_LEVEL"}
    assert told["host"]["deadlines.stop_s"] == {"value": 3.0, "origin": "command line"}
    assert told["host"]["supervisor.port"]["origin"] == str(host.config / "preloadd.toml")
    assert told["host"]["supervisor.host"] == {"value": "127.0.0.1", "origin": "default"}
    (group,) = told["groups"]
    assert group["file"] == str(file)
    assert group["settings"]["parallel.enable_expert_parallel"]["origin"] == str(file)
    assert group["settings"]["name"] == {"value": "a", "origin": "default"}
    assert group["settings"]["gpus"]["value"] == ["CPU-0"]


def test_table_has_a_line_for_each(host):
    host.group()
    text = as_table(survey(host.config, {}))
    assert 'log_level = "info"' in text
    assert "  # default" in text
    assert "[a.toml]" in text
    assert f'model = "{host.model}"' in text


def test_sizes_that_an_engine_is_given_are_told_from_the_file(host):
    file = host.group(more='builder = "vllm"\nengine_args = { tp = 1, dtype = "auto" }\n')
    (group,) = json.loads(as_json(survey(host.config, {})))["groups"]
    told = group["settings"]
    assert told["engine_args"] == {"value": {"tp": 1, "dtype": "auto"}, "origin": str(file)}
    assert told["parallel.tensor_parallel_size"] == {"value": 1, "origin": str(file)}
    assert told["layout"] == {"value": "auto", "origin": "default"}


def test_values_of_drop_ins_and_what_nobody_gave(host):
    file = host.group()
    drop_in = file.with_suffix(".toml.d") / "node.toml"
    drop_in.parent.mkdir()
    drop_in.write_text("[parallel]\nnnodes = 1\n")
    found = survey(host.config, {})
    (group,) = json.loads(as_json(found))["groups"]
    assert group["settings"]["parallel.nnodes"] == {"value": 1, "origin": str(drop_in)}
    assert group["settings"]["gpus"]["origin"] == str(file)
    assert group["settings"]["parallel.node_rank"] == {"value": None, "origin": "default"}
    shown = " ".join(as_table(found).split())
    assert f"parallel.nnodes = 1 # {drop_in}" in shown
    assert "parallel.node_rank is not given # default" in shown
