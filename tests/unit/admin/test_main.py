"""Commands as they are run: real processes, their output and their exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from preloadd.admin.__main__ import main
from preloadd.admin.world import World

ROOT = Path(__file__).parents[3]


def run(host, *arguments, text=None, python=sys.executable):
    return subprocess.run(
        [python, "-m", "preloadd.admin", *arguments],
        env={**host.environ, "PYTHONPATH": str(ROOT)},
        cwd="/",
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.slow
def test_check_is_silent_about_nothing_and_loud_about_all(host):
    host.group()
    done = run(host, "config", "check")
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing is wrong" in done.stdout
    host.group("b", "x = 1")
    host.write("groups.d/c.toml", "= =")
    done = run(host, "config", "check")
    assert (done.returncode, done.stdout) == (78, "")
    assert len(done.stderr.splitlines()) == 3  # the key, the device, the broken file
    told = json.loads(run(host, "config", "check", "--json").stdout)
    assert told["valid"] is False
    assert {fault["key"] for fault in told["faults"]} == {"x", "gpus", ""}


@pytest.mark.slow
def test_show_tells_values_or_all_faults(host):
    host.group()
    done = run(host, "config", "show", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["host"]["daemon_user"]["value"]
    host.group("b", "x = 1", gpus='["CPU-1"]')
    done = run(host, "config", "show")
    assert (done.returncode, done.stdout) == (78, "")
    assert "b.toml: x: no such key" in done.stderr


@pytest.fixture
def systemctl(host):
    """A `systemctl` on the path that writes down what it is asked, and does it."""
    folder = host.root / "bin"
    folder.mkdir()
    tool = folder / "systemctl"
    tool.write_text(f'#!/bin/sh\necho "$@" >>{host.root}/asked\n')
    tool.chmod(0o755)
    host.environ["PATH"] = f"{folder}:{host.environ['PATH']}"
    return host.root / "asked"


def asked(log):
    """What systemd was told to do."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [line for line in lines if " show " not in line]


@pytest.mark.slow
def test_apply_tells_systemd_of_the_groups_and_what_is_to_be_done(host, systemctl):
    host.group()
    done = run(host, "config", "apply", "--dry-run")
    assert done.returncode == 0
    assert "nothing was changed" in done.stdout
    assert not asked(systemctl)
    done = run(host, "config", "apply")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("applied\na: does not run")
    assert systemctl.read_text().split()[-1] == "daemon-reload"


def test_apply_that_would_drop_weights_needs_force(host, systemctl, capsys):
    host.group(more='digest = "full"')
    host.running()
    assert main(["config", "apply"], host.world) == 78
    told = capsys.readouterr().err
    assert "a: CPU-0 would drop its weights: digest" in told
    assert "--force" in told
    assert not asked(systemctl)
    assert main(["config", "apply", "--dry-run"], host.world) == 0
    assert not asked(systemctl)
    assert main(["config", "apply", "--force"], host.world) == 0
    assert "would drop" in capsys.readouterr().err
    assert asked(systemctl)


def test_apply_does_not_take_what_it_cannot_see_for_nothing(host, systemctl, capsys):
    host.group(more='digest = "full"')
    record = host.running()
    record.unlink()
    record.symlink_to(record)
    assert main(["config", "apply", "--dry-run"], host.world) == 0
    told = capsys.readouterr().err
    assert f"CPU-0: whether it would drop its weights is not known: {record} is a symbolic" in told
    assert main(["config", "apply"], host.world) == 78
    assert "--force" in capsys.readouterr().err
    assert not asked(systemctl)
    assert main(["config", "apply", "--force"], host.world) == 0
    assert asked(systemctl)


@pytest.mark.parametrize("written", ["0", "0s", "0d", ""])
def test_a_token_that_is_over_at_once_is_not_made(host, capsys, written):
    assert main(["token", "create", "m", "--expires", written], host.world) == 78
    out, err = capsys.readouterr()
    assert out == ""
    assert "--expires: " in err
    assert not (host.root / "state/tokens.json").exists()


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (PermissionError(13, "Permission denied", "/etc/x"), 77, "/etc/x: Permission denied"),
        (PermissionError(1, "it is refused"), 77, "it is refused: run this as root"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_goes_wrong_is_told_without_a_traceback(host, capsys, error, status, told):
    class Bad(World):
        def daemon_environ(self):
            raise error

    assert main(["config", "show"], Bad(host.environ, host.root)) == status
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_output_that_is_full_is_told(host):
    host.group()
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "preloadd.admin", "config", "show"],
            env={**host.environ, "PYTHONPATH": str(ROOT)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (done.returncode, done.stderr) == (74, "[Errno 28] No space left on device\n")


def test_errors_become_exit_statuses(host, capsys):
    host.environ["PATH"] = "/nowhere"
    host.group(more=f'python = "{sys.executable}"')
    assert main(["config", "apply"], host.world) == 69
    assert "there is no systemctl here" in capsys.readouterr().err


@pytest.mark.slow
def test_tokens_through_their_whole_life(host):
    made = run(host, "token", "create", "mirror", "--expires", "90d")
    assert made.returncode == 0, made.stderr
    secret = made.stdout.strip()
    assert (host.root / "state/tokens.json").stat().st_mode & 0o777 == 0o600
    rotated = run(host, "token", "rotate", "mirror", "--overlap", "1h").stdout.strip()
    assert rotated != secret
    listed = json.loads(run(host, "token", "list", "--json").stdout)["tokens"]
    assert [one["name"] for one in listed] == ["mirror", "mirror"]
    assert all(one["expires"] for one in listed)
    assert run(host, "token", "rotate", "mirror", "--expires", "never").returncode == 0
    listed = json.loads(run(host, "token", "list", "--json").stdout)["tokens"]
    assert [one["expires"] for one in listed].count(None) == 1
    assert run(host, "token", "keep", text=f"{rotated}\n").returncode == 0
    assert (host.root / "state/seed.token").read_text().strip() == rotated
    assert run(host, "token", "revoke", "mirror").returncode == 0
    assert run(host, "token", "list").stdout == "no tokens\n"
    assert run(host, "token", "revoke", "mirror").returncode == 78


@pytest.mark.slow
def test_token_file_that_others_can_read_is_refused(host):
    run(host, "token", "create", "a")
    (host.root / "state/tokens.json").chmod(0o644)
    done = run(host, "token", "list")
    assert (done.returncode, done.stdout) == (77, "")
    assert "chmod 600" in done.stderr


@pytest.mark.slow
def test_a_broken_group_is_no_reason_not_to_revoke(host):
    host.write("groups.d/a.toml", "= =")
    run(host, "token", "create", "a")
    assert run(host, "token", "revoke", "a").returncode == 0
    host.host("x = 1")
    done = run(host, "token", "list")
    assert done.returncode == 78
    assert "preloadd.toml: x: no such key" in done.stderr
    assert run(host, "token", "list", "--state-dir", f"{host.root}/state").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["config"], ["token", "create"]])
def test_wrong_command_lines(host, arguments):
    done = run(host, *arguments)
    assert done.returncode == 2
    assert "usage: preloadctl" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/usr/bin/python3", os.X_OK), reason="no Python of the system")
def test_doctor_runs_on_a_bare_python(host):
    host.environ["PRELOADD_PYTHON"] = "/nowhere/python"
    for arguments in (["-m", "preloadd.admin.doctor"], ["-m", "preloadd.admin", "doctor"]):
        done = subprocess.run(
            ["/usr/bin/python3", "-S", "-E", "-c", BARE, *arguments[1:], "--json"],
            env={**host.environ, "ROOT": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 78, done.stderr
        told = json.loads(done.stdout)
        assert {"severity": "fault", "subject": "interpreter"}.items() <= told["findings"][
            0
        ].items()


BARE = """
import os, runpy, sys
sys.path.insert(0, os.environ["ROOT"])
name = sys.argv[1]
del sys.argv[1]
runpy.run_module(name, run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_doctor_tells_the_same_for_people(host):
    host.group()
    done = run(host, "doctor")
    assert "interpreter" in done.stdout
    assert done.stdout.splitlines()[-1].endswith(" ok")
    assert done.returncode in {0, 78}
