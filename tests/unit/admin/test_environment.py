import json
import os
import sys
from pathlib import Path

import pytest

from preloadd.admin import inside
from preloadd.admin.environment import interpreter, look, parts, require_own, user_name
from preloadd.admin.service import Service
from preloadd.errors import ConfigError


def answer(command):
    return Service("", dict(os.environ), None, stands_in=False).answer(command)


def script(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_an_interpreter_is_named_by_itself_its_name_or_its_folder(tmp_path, monkeypatch):
    (tmp_path / "v/bin").mkdir(parents=True)
    (tmp_path / "v/bin/python").symlink_to(sys.executable)
    named = str(tmp_path / "v/bin/python")
    assert interpreter(str(tmp_path / "v")) == named
    assert interpreter(named) == named  # the link itself: that is the environment
    monkeypatch.setenv("PATH", str(tmp_path / "v/bin"))
    assert interpreter("python") == named
    monkeypatch.chdir(tmp_path)
    assert interpreter("v/bin/python") == named


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("/nowhere/python", "/nowhere/python: no executable file"),
        ("/etc", "/etc has no bin/python"),
    ],
)
def test_what_is_none_is_named(given, text):
    with pytest.raises(ConfigError, match=f"{text}: name an interpreter") as told:
        interpreter(given)
    assert "folder" in str(told.value)


def test_an_environment_tells_what_it_has():
    found = look(sys.executable, answer)
    assert found.release == sys.version_info[:3]
    assert Path(found.site).is_dir()
    assert found.versions["msgspec"]
    assert found.installed


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("echo 'not today' >&2; exit 3", "not today"),
        ("echo '[1, 2]'", "it does not answer as a Python does"),
        ('echo "$@" >&2; exit 1', ""),
        ("exit 0", "it does not answer as a Python does"),
    ],
)
def test_what_is_no_python_is_named_with_what_it_said(tmp_path, body, why):
    path = script(tmp_path / "tool", body)
    with pytest.raises(ConfigError) as told:
        look(str(path), answer)
    assert f"{path} does not tell what is installed there: {why}" in str(told.value)
    assert "name an interpreter of Python 3.11" in str(told.value)
    assert len(str(told.value)) < 600


def test_what_it_says_moves_no_cursor(tmp_path):
    path = script(tmp_path / "tool", r"printf '\033[2J\033]0;pwn\007evil' >&2; exit 1")
    with pytest.raises(ConfigError, match=r": \\x1b\[2J\\x1b\]0;pwn\\x07evil: name") as told:
        look(str(path), answer)
    assert str(told.value).isprintable()
    tells = {
        "release": [3, 11, 0],
        "site": "/s",
        "versions": dict.fromkeys(inside.ASKED, "1\x1b"),
        "distribution": None,
        "package": "",
        "version": "2\x07",
        "entry_points": [],
    }
    found = look("x", lambda _: ("", json.dumps(tells).encode()))
    assert (set(found.versions.values()), found.version) == ({"1\\x1b"}, "2\\x07")


def test_one_that_cannot_be_executed(tmp_path):
    (tmp_path / "python").write_text("")
    with pytest.raises(ConfigError, match="does not tell"):
        look(str(tmp_path / "python"), answer)


def test_what_is_roots_or_ones_own_may_be_run(tmp_path):
    require_own(*parts("/bin/sh"), tmp_path)


def test_users_without_a_name_have_a_number():
    assert user_name(0) == "root"
    assert user_name(54321) == "user 54321"
