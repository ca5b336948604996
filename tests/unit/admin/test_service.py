import os
import sys

import pytest

from preloadd.admin.service import PACKAGE_ROOT, service, with_this_package
from tests.unit.admin.host import ME
from tests.unit.linux.test_process import eventually, is_gone

ENVIRON = {"PATH": os.environ["PATH"]}


def test_what_a_command_says_last_is_why_it_fails():
    mine = service(ME, ENVIRON)
    assert not mine.stands_in
    assert mine.fails(["/bin/sh", "-c", "exit 0"]) == ""
    assert mine.fails(["/bin/sh", "-c", "echo one >&2; echo two >&2; exit 3"]) == "two"
    assert mine.fails(["/bin/sh", "-c", "exit 3"]) == "/bin/sh ended with status 3"
    assert mine.fails(["/nowhere/x"]) == "/nowhere/x cannot be started: No such file or directory"


def test_a_command_that_never_ends_is_ended_with_all_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr("preloadd.admin.service.TIMEOUT_S", 0.3)
    pid = tmp_path / "pid"
    why, said = service(ME, ENVIRON).answer(["/bin/sh", "-c", f"yes & echo $! > {pid}; yes"])
    assert (why, said) == ("/bin/sh did not finish within 0.3 s", b"")
    assert eventually(lambda: is_gone(int(pid.read_text())))


def test_interpreters_that_can_load_and_cannot():
    mine = service(ME, ENVIRON)
    assert mine.cannot_load(sys.executable) == ""
    for program in ("/bin/true", "/bin/echo"):
        assert mine.cannot_load(program) == "it does not answer as a Python does"


def test_unknown_user_cannot_be_tried():
    assert service("nobody-at-all", ENVIRON).stands_in


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_tries_things_as_the_service(tmp_path):
    nobody = service("nobody", ENVIRON)
    assert nobody.fails(["/bin/sh", "-c", 'test "$(id -un)" = nobody']) == ""
    tmp_path.chmod(0o700)
    assert nobody.fails(["/bin/ls", str(tmp_path)]).endswith("Permission denied")


def test_interpreters_find_this_package(monkeypatch):
    assert with_this_package({"PYTHONPATH": "/x"})["PYTHONPATH"] == f"{PACKAGE_ROOT}:/x"
    assert with_this_package({})["PYTHONPATH"] == str(PACKAGE_ROOT)
    monkeypatch.setattr("preloadd.admin.service.PACKAGE_ROOT", PACKAGE_ROOT / "site-packages")
    assert with_this_package({"A": "1"}) == {"A": "1"}
