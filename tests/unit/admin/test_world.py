import os
import sys
from pathlib import Path

import pytest

from preloadd.admin.world import CACHE, World, assignments

A = "GPU-53b1d48b-de77-970d-5f91-576155feee6c"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A=1\nB=two words\n", {"A": "1", "B": "two words"}),
        ("A='x y' \n  B=\"z\"", {"A": "x y", "B": "z"}),
        ("# A=1\n;B=2\nexport C=3\nnonsense\n=4\n", {}),
        ("A='open", {"A": "'open"}),
        ("A=", {"A": ""}),
    ],
)
def test_environment_files(text, found):
    assert dict(assignments(text)) == found


def test_daemons_under_systemd_do_not_have_this_environment(host):
    host.environ["PRELOADD_LOG_LEVEL"] = "debug"
    assert host.world.daemon_environ()["PRELOADD_LOG_LEVEL"] == "debug"
    (host.root / "run/systemd/system").mkdir(parents=True)
    assert host.world.daemon_environ() == {"PRELOADD_CONFIG_DIR": str(host.config)}
    (host.root / "etc/default/preloadd").write_text("PRELOADD_LOG_LEVEL=error\n")
    assert host.world.daemon_environ()["PRELOADD_LOG_LEVEL"] == "error"


def test_interpreter_is_that_of_environment_then_defaults(host):
    assert World({}, host.root).python() == sys.executable
    (host.root / "etc/default/preloadd").write_text("PRELOADD_PYTHON=/opt/a\n")
    assert World({}, host.root).python() == "/opt/a"
    assert World({"PRELOADD_PYTHON": "/opt/b"}, host.root).python() == "/opt/b"


def test_gpus_are_those_that_the_driver_tells(host):
    assert host.world.gpus() == []
    host.gpus(A)
    assert host.world.gpus() == [A]


def test_running_ranks_are_found_and_links_are_not_followed(host, tmp_path):
    host.running("CPU-0", version="1.2")
    link = host.running("CPU-1")
    link.unlink()
    link.symlink_to(host.root / "run/preloadd/CPU-0/running.json")
    host.running("CPU-2").write_text("[]")
    (host.root / "run/preloadd/CPU-3").mkdir()
    (host.root / "run/preloadd/file").touch()
    assert [path.parent.name for path in host.world.records()] == ["CPU-0", "CPU-1", "CPU-2"]
    assert [path.parent.name for path, _ in host.world.running()] == ["CPU-0", "CPU-2"]
    assert host.world.running_versions() == {"CPU-0": "1.2"}


@pytest.mark.timeout(10)
def test_what_is_no_file_is_no_record_and_not_waited_for(host):
    path = host.running("CPU-0")
    path.unlink()
    os.mkfifo(path)
    (found,) = host.world.records().values()
    assert str(found) == f"{path} is no regular file: remove it"
    assert host.world.running() == []


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_running_ranks_that_this_user_cannot_see_are_not_taken_for_none(socket_dir):
    socket_dir.chmod(0o755)
    (socket_dir / "run/preloadd/CPU-0").mkdir(parents=True, mode=0o700)
    os.seteuid(65534)
    try:
        (found,) = World({}, socket_dir).records().values()
    finally:
        os.seteuid(0)
    assert isinstance(found, PermissionError)
    assert World({}, socket_dir).records() == {}


def test_environment_of_the_service_has_its_home_and_its_defaults(host):
    (host.root / "etc/default/preloadd").write_text("HF_HOME=/srv/hf\n")
    environ = host.world.service_environ("root")
    assert (environ["HOME"], environ["HF_HOME"]) == ("/root", "/srv/hf")
    assert environ["XDG_CACHE_HOME"] == CACHE
    assert "HOME" not in host.world.service_environ("nobody-at-all")


def test_cache_folder_is_that_of_the_units():
    unit = (Path(__file__).parents[3] / "systemd/preloadd@.service").read_text()
    assert "Environment=XDG_CACHE_HOME=%C/preloadd\n" in unit
    assert CACHE == "/var/cache/preloadd"  # %C of the system's manager
