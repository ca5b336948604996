from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from preloadd.config.files import Fault, parse
from preloadd.config.host import HostConfig, HostSettings, environment, load, survey, variable
from preloadd.config.strict import fields_of
from preloadd.domain.settings import Deadlines
from preloadd.errors import ConfigError
from tests.unit.config.groups import GROUP, SPREAD


def faults(folder: Path, environ=None, overrides=None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(folder, environ or {}, overrides)
    return str(caught.value).replace(f"{folder}/", "").splitlines()


def test_defaults_are_those_of_the_service(write):
    config = load(write(), {})
    assert config == HostConfig()
    assert config.socket_dir == "/run/preloadd"
    assert config.deadlines.deadlines.silence == 300
    assert config.groups == ()


def test_every_deadline_of_a_rank_is_a_key_of_its_name(write):
    names = [field.name for field in fields(Deadlines)]
    told = {name: 20.0 + number for number, name in enumerate(names)}
    lines = [f"{name}_s = {value}" for name, value in told.items()]
    config = load(write({"preloadd.toml": "\n".join(["[deadlines]", *lines])}), {})
    assert config.deadlines.deadlines == Deadlines(**told)
    assert HostConfig().deadlines.deadlines == Deadlines()


def test_file_drop_ins_environment_and_command_line_in_that_order(write):
    folder = write(
        {
            "preloadd.toml": '[supervisor]\nhost = "a"\nport = 1\nask_timeout_s = 1\n',
            "preloadd.toml.d/20.toml": "[supervisor]\nport = 3\nask_timeout_s = 3\n",
            "preloadd.toml.d/10.toml": "[supervisor]\nport = 2\nask_timeout_s = 2\n",
        }
    )
    environ = {"PRELOADD_SUPERVISOR_ASK_TIMEOUT_S": "4", "PRELOADD_LOG_LEVEL": "debug"}
    config = load(folder, environ, {("log_level",): "error"})
    assert config.supervisor.host == "a"
    assert config.supervisor.port == 3
    assert config.supervisor.ask_timeout_s == 4
    assert config.log_level == "error"


def test_groups_come_in_order_of_their_files(write):
    folder = write(
        {
            "groups.d/b.toml": GROUP,
            "groups.d/a.toml": GROUP.replace("CPU-0", "CPU-1"),
            "groups.d/c.toml.example": "nonsense",
        }
    )
    assert [group.name for group in load(folder, {}).groups] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "key", "told"),
    [
        ('log_level = "loud"', "log_level", "must be 'debug', 'info', 'warning' or 'error'"),
        ('socketdir = "/x"', "socketdir", "did you mean 'socket_dir'?"),
        ('socket_dir = "run"', "socket_dir", "no absolute path"),
        ("port = 1", "port", "belongs under [supervisor]"),
        ("[supervisor]\nport = 0", "supervisor.port", "must be at least 1 (given: 0)"),
        ("[supervisor]\nport = 65536", "supervisor.port", "must be at most 65535"),
        ('[supervisor]\nport = "80"', "supervisor.port", "without quotes"),
        ('[supervisor]\npeers = ["a:1", "x"]', "supervisor.peers[1]", "'x': write a host and its"),
        ('[supervisor]\npeers = "a:1"', "supervisor.peers", "must be a list in [ ]"),
        ('[supervisor]\nhost = "a\\nb"', "supervisor.host", "on one line"),
        ("[deadlines]\nstop_s = -1", "deadlines.stop_s", "must be more than 0"),
        ("[deadlines]\nstop_s = inf", "deadlines.stop_s", "finite"),
        ("groups = []", "groups", "no such key"),
        ("supervisor = 1", "supervisor", "must be a table"),
        ("log_level = 2024-01-01", "log_level", "must be"),
    ],
)
def test_fault_names_file_key_and_remedy(write, text, key, told):
    (line,) = faults(write({"preloadd.toml": text}))
    assert line.startswith(f"preloadd.toml: {key}: ")
    assert told in line


def test_fault_names_where_the_value_came_from(write):
    folder = write(
        {
            "preloadd.toml": 'log_level = "info"\n[supervisor]\nport = 1\n',
            "preloadd.toml.d/x.toml": 'log_level = "loud"',
        }
    )
    found = faults(folder, {"PRELOADD_SUPERVISOR_PORT": "x"}, {("state_dir",): "relative"})
    assert sorted(line.partition(" ")[0] for line in found) == [
        "PRELOADD_SUPERVISOR_PORT:",
        "command",
        "preloadd.toml.d/x.toml:",
    ]


def test_all_faults_of_all_files_at_once(write):
    folder = write(
        {
            "preloadd.toml": "a = 1\nlog_level = 3",
            "preloadd.toml.d/x.toml": "b = = 1",
            "groups.d/a.toml": "c = 1\ngpus = []",
            "groups.d/b.toml": "d",
        }
    )
    found = faults(folder)
    assert [line.partition(":")[0] for line in found] == [
        "preloadd.toml.d/x.toml",
        "preloadd.toml",
        "preloadd.toml",
        "groups.d/a.toml",
        "groups.d/a.toml",
        "groups.d/a.toml",
        "groups.d/b.toml",
    ]
    assert "line 1" in found[0]


def test_device_in_two_groups_and_name_of_two_groups(write):
    folder = write(
        {
            "groups.d/a.toml": GROUP + "modelz = 1",
            "groups.d/b.toml": f'name = "a"\n{GROUP}',
        }
    )
    found = faults(folder)
    assert [line.split(":")[:2] for line in found] == [
        ["groups.d/a.toml", " modelz"],
        ["groups.d/b.toml", " name"],
        ["groups.d/b.toml", " gpus"],
    ]
    assert "'a' is the group of groups.d/a.toml" in found[1]
    folder = write({"groups.d/b.toml": GROUP, "groups.d/b.toml.d/n.toml": 'name = "a"\n'})
    told = [line.split(":")[:2] for line in faults(folder)]
    assert ["groups.d/b.toml.d/n.toml", " name"] in told
    assert "CPU-0 is given to the group of groups.d/a.toml" in found[2]


def test_what_two_groups_lay_claim_to_is_told_with_the_files_that_say_it(write):
    folder = write(
        {
            "groups.d/a.toml": 'name = "x"\nmodel = "/srv/m"\ngpus = ["CPU-1"]\n',
            "groups.d/a.toml.d/1.toml": 'name = "b"\ngpus = ["CPU-0"]\n',
            "groups.d/b.toml": GROUP,
        }
    )
    assert faults(folder) == [
        "groups.d/b.toml: name: 'b' is the group of groups.d/a.toml.d/1.toml (rename one of them)",
        (
            "groups.d/b.toml: gpus: CPU-0 is given to the group of groups.d/a.toml.d/1.toml "
            "(remove it from one of them)"
        ),
    ]


def test_a_fault_of_the_host_hides_no_port_that_it_shares_with_a_group(write):
    shared = f"{GROUP}[parallel]\nweight_cache_master_port = 9470\n"
    folder = write({"preloadd.toml": "[deadlines]\nstop_s = 0\n", "groups.d/a.toml": shared})
    keys = [line.split(": ")[1] for line in faults(folder)]
    assert keys == ["deadlines.stop_s", "parallel.weight_cache_master_port"]
    (folder / "preloadd.toml").write_text('[supervisor]\nport = "x"\n')
    assert [line.split(": ")[1] for line in faults(folder)] == ["supervisor.port"]


def test_missing_folder_is_told(tmp_path):
    with pytest.raises(ConfigError, match="PRELOADD_CONFIG_DIR") as caught:
        load(tmp_path / "none", {})
    assert str(tmp_path / "none") in str(caught.value)


def test_survey_goes_on_where_files_are_wrong(write):
    found = survey(
        write({"preloadd.toml": "x = 1", "groups.d/a.toml": GROUP, "groups.d/b.toml": "="}), {}
    )
    assert found.host is None
    assert [file.group is not None for file in found.groups] == [True]
    assert len(found.host_faults) == len(found.group_faults) == 1


def test_edits_are_judged_instead_of_files(write):
    folder = write({"groups.d/a.toml": GROUP})
    found = survey(folder, {}, edits={folder / "groups.d/a.toml": b"gpus = 3"})
    assert [fault.key for fault in found.faults] == ["model", "gpus"]


def test_every_setting_has_a_variable_of_its_own():
    names = [variable(key) for key, _ in fields_of(HostSettings)]
    assert len(set(names)) == len(names)
    assert "PRELOADD_SOCKET_DIR" in names
    assert "PRELOADD_DEADLINES_STOP_S" in names


@pytest.mark.parametrize("text", ["80", "0x50"])
def test_numbers_in_the_environment_are_numbers(text):
    assert list(environment({"PRELOADD_SUPERVISOR_PORT": text})) == [(("supervisor", "port"), 80)]


def test_lists_in_the_environment_are_written_as_in_files(write):
    told = {"PRELOADD_SUPERVISOR_PEERS": '["node-1:9470", "[::1]:9470"]'}
    assert load(write(), told).supervisor.peers == ("node-1:9470", "[::1]:9470")
    (wrong,) = faults(write(), {"PRELOADD_SUPERVISOR_PEERS": "node-1:9470"})
    assert wrong.startswith("PRELOADD_SUPERVISOR_PEERS: supervisor.peers: must be a list in [ ]")


def test_text_in_the_environment_is_text_and_nothing_is_nothing():
    assert list(environment({"PRELOADD_SOCKET_DIR": "1", "PRELOADD_LOG_LEVEL": ""})) == [
        (("socket_dir",), "1")
    ]


keys = st.sampled_from(
    ["model", "gpus", "parallel", "supervisor", "port", "name", "memory", "chunk_bytes", "draft"]
) | st.text(max_size=3)
scalars = (
    st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["CPU-0", "all", "vllm", "1GiB", "/srv/m"])
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)
)


def toml(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return '"' + "".join(f"\\U{ord(c):08x}" for c in value) + '"'
        case list():
            return f"[{', '.join(map(toml, value))}]"
        case dict():
            return f"{{{', '.join(f'{toml(k)} = {toml(v)}' for k, v in value.items())}}}"
    return str(value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(table=st.dictionaries(keys, values, max_size=4))
def test_any_document_loads_or_is_told_with_file_and_key(write, table):
    text = "".join(f"{toml(key)} = {toml(value)}\n" for key, value in table.items())
    assert not isinstance(parse(text.encode(), "x"), Fault)
    folder = write({"preloadd.toml": text, "groups.d/g.toml": text})
    for fault in survey(folder, {}).faults:
        assert Path(fault.origin).name in {"preloadd.toml", "g.toml"}
        assert fault.key
        assert fault.text.isprintable()
        assert fault.text.endswith(")")


def test_a_group_whose_drop_in_cannot_be_read_is_none(write):
    folder = write(
        {
            "groups.d/a.toml": SPREAD.format(0, 29600),
            "groups.d/a.toml.d/x.toml": "x",
            "groups.d/b.toml": SPREAD.format(1, 29601),
        }
    )
    found = survey(folder, {})
    assert [file.path.name for file in found.groups] == ["b.toml"]
    assert [Path(fault.origin).name for fault in found.faults] == ["x.toml"]
