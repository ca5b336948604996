from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from preloadd.domain.endpoint import Endpoint
from preloadd.domain.ids import Instance
from preloadd.errors import ConfigError
from preloadd.supervisor.roster import Expected
from preloadd.supervisor.setup import Setup, setup

GROUP = 'model = "/srv/m"\ngpus = ["{}"]\n'


def options(**given) -> Namespace:
    usual = {
        "socket_dir": None,
        "instance": [],
        "host": None,
        "port": None,
        "log_level": None,
        "peer": [],
    }
    return Namespace(**{**usual, **given})


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    (tmp_path / "groups.d").mkdir()
    (tmp_path / "preloadd.toml").write_text(
        f'socket_dir = "{tmp_path}/run"\n[supervisor]\nport = 1234\nask_timeout_s = 1.5\n'
    )
    (tmp_path / "groups.d/llama.toml").write_text(GROUP.format("CPU-0"))
    return tmp_path


def configured(etc: Path, **given) -> Setup:
    return setup(options(**given), {"PRELOADD_CONFIG_DIR": str(etc)})


def expected(name: str, group: str = "") -> Expected:
    return Expected(Instance.parse(name), group)


def test_a_foreground_group_is_given_on_the_command_line(socket_dir):
    made = setup(options(socket_dir=socket_dir, instance=["CPU-1", "CPU-0"], port=5), {})
    assert made.roster().ranks == (expected("CPU-1"), expected("CPU-0"))
    assert (made.host, made.port, made.units) == ("127.0.0.1", 5, None)


def test_a_socket_directory_alone_is_searched_anew_each_time(socket_dir):
    made = setup(options(socket_dir=socket_dir), {})
    assert made.roster().ranks == ()
    (socket_dir / "CPU-3").mkdir()
    (socket_dir / "CPU-3/rank.sock").touch()
    assert made.roster().ranks == (expected("CPU-3"),)


def test_without_options_the_configuration_says_all(etc):
    made = configured(etc)
    assert made.socket_dir == etc / "run"
    assert (made.host, made.port, made.pace.overdue) == ("127.0.0.1", 1234, 1.5)
    assert made.units is not None
    assert made.roster().ranks == (expected("CPU-0", "llama"),)
    assert made.roster().trouble == ""


def test_peers_come_from_the_configuration_or_the_command_line(etc, socket_dir):
    assert configured(etc).peers == ()
    (etc / "preloadd.toml").write_text('[supervisor]\npeers = ["node-2:1", "http://[::1]:2/"]\n')
    assert configured(etc).peers == (Endpoint("node-2", 1), Endpoint("::1", 2))
    assert configured(etc, peer=["a:1", "http://a:1"]).peers == (Endpoint("a", 1),)
    assert setup(options(socket_dir=socket_dir, peer=["a:1"]), {}).peers == (Endpoint("a", 1),)


def test_options_stand_over_the_configuration(etc):
    made = configured(etc, host="::1", port=0, log_level="debug")
    assert (made.host, made.port, made.log_level) == ("::1", 0, "debug")


def test_one_broken_group_leaves_the_others(etc):
    made = configured(etc)
    (etc / "groups.d/qwen.toml").write_text("gpus = [")
    (etc / "groups.d/tiny.toml").write_text(GROUP.format("CPU-2"))
    wanted = made.roster()
    assert wanted.ranks == (expected("CPU-0", "llama"), expected("CPU-2", "tiny"))
    assert "qwen.toml" in wanted.trouble


def test_a_configuration_broken_later_leaves_everything(etc):
    made = configured(etc)
    made.roster()
    (etc / "preloadd.toml").write_text("port = ")
    wanted = made.roster()
    assert wanted.ranks == (expected("CPU-0", "llama"),)
    assert "preloadd.toml" in wanted.trouble


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"instance": ["TPU:0"]}, "TPU:0"),
        ({"instance": ["CPU-0"]}, "--socket-dir"),
        ({"socket_dir": Path("/run"), "peer": ["a"]}, "--peer 'a': write a host and its port"),
    ],
)
def test_faults_of_the_command_line(given, said):
    with pytest.raises(ConfigError, match=said):
        setup(options(**given), {})


def test_a_broken_host_file_is_fatal_at_the_start(etc):
    (etc / "preloadd.toml").write_text("[supervisor]\nport = 'x'\ntypo = 1\n")
    with pytest.raises(ConfigError) as caught:
        configured(etc)
    assert "port" in str(caught.value)
    assert "typo" in str(caught.value)


def test_systemctl_is_not_taken_for_this_service(etc, tmp_path):
    program = tmp_path / "systemctl"
    answer = "Id=preloadd@CPU-0.service\nLoadState=loaded"
    program.write_text(f"#!/bin/sh\nenv >{tmp_path}/environment\necho '{answer}'\n")
    program.chmod(0o755)
    environ = {"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1", "LISTEN_FDS": "1", "KEPT": "yes"}
    made = setup(
        options(),
        {"PRELOADD_CONFIG_DIR": str(etc), "PATH": f"{tmp_path}:/usr/bin:/bin", **environ},
    )
    made.units(["preloadd@CPU-0.service"])
    seen = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines())
    assert environ.keys() & seen.keys() == {"KEPT"}
