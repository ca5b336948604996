import pytest

from preloadd.admin.doctor.configuration import examine, read
from preloadd.config.host import HostSettings


def told(host, *, works=True):
    found = examine(host.world, interpreter_works=works)
    return [(f.severity.value, f.subject, f.text, f.remedy) for f in found]


def test_defaults_are_those_of_the_package_that_doctor_cannot_import(host):
    host.write("preloadd.toml", "")
    raw, settings = read(host.world), HostSettings()
    assert raw.socket_dir == settings.socket_dir
    assert raw.state_dir == settings.state_dir
    assert raw.daemon_user == settings.daemon_user
    assert (raw.host, raw.port) == (settings.supervisor.host, settings.supervisor.port)
    assert raw.instances == ("CPU-0",)


def test_what_is_written_is_read_as_far_as_it_makes_sense(host):
    (host.config / "preloadd.toml.d").mkdir()
    host.write("preloadd.toml.d/x.toml", 'socket_dir = "/x"\nstate_dir = 3\n[supervisor]\nport = 1')
    host.write("preloadd.toml.d/y.toml", "= =")
    host.environ["PRELOADD_DAEMON_USER"] = "me"
    raw = read(host.world)
    assert (raw.socket_dir, raw.state_dir, raw.daemon_user) == ("/x", "/var/lib/preloadd", "me")
    assert raw.port == 1
    host.environ |= {"PRELOADD_SUPERVISOR_PORT": "2", "PRELOADD_SUPERVISOR_HOST": "::1"}
    assert (read(host.world).host, read(host.world).port) == ("::1", 2)
    host.environ["PRELOADD_SUPERVISOR_PORT"] = "x"
    assert read(host.world).port == 9470


def test_drafts_are_ranks_as_well(host):
    more = 'builder = "vllm"\nengine_args = { spec-method = "mtp", spec-tokens = 1 }'
    host.group(more=more, gpus='["CPU-0", "CPU-1"]')
    assert read(host.world).instances == ("CPU-0", "CPU-1", "CPU-0.draft", "CPU-1.draft")


@pytest.mark.slow
def test_valid_configuration_and_memory(host):
    found = told(host)
    assert [f[:2] for f in found] == [("ok", "configuration"), ("ok", "memory")]
    assert "a need " in found[1][2]


@pytest.mark.slow
def test_faults_with_their_remedies(host):
    host.group("b", "x = 1", gpus='["CPU-1"]')
    found = told(host)
    assert found[0] == (
        "fault",
        "configuration",
        f"{host.config}/groups.d/b.toml: x: no such key",
        found[0][3],
    )
    assert found[0][3].startswith("known here: name")


@pytest.mark.slow
def test_too_little_memory(host):
    (host.root / "proc").mkdir()
    (host.root / "proc/meminfo").write_text("MemAvailable:       1 kB\n")
    severity, subject, text, remedy = told(host)[-1]
    assert (severity, subject) == ("warning", "memory")
    assert "MemAvailable leaves 1,024" in text
    assert "free memory" in remedy


@pytest.mark.slow
def test_weights_of_running_ranks_are_there_already(host):
    host.running()
    assert "memory" not in [f[1] for f in told(host)]


def test_nothing_can_be_said_without_an_interpreter(host):
    assert told(host, works=False)[0][0] == "note"


def test_interpreter_that_breaks_off_is_told(host, tool):
    tool("half", "echo nonsense; echo 'it broke' >&2")
    host.environ["PRELOADD_PYTHON"] = str(host.root / "bin/half")
    assert told(host)[0][:3] == ("fault", "configuration", "could not be checked: it broke")


@pytest.mark.slow
def test_no_group_is_a_note(host):
    (host.config / "groups.d/a.toml").unlink()
    assert told(host)[-1][:3] == ("note", "configuration", "no group is configured")
