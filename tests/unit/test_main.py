"""The script is run as a real process: what it becomes is what counts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import preloadd
from preloadd.__main__ import COMMANDS, hint, usage

ROOT = Path(preloadd.__file__).parents[1]
PROBE = """\
import json, os, sys
inode = os.fstat({fd}).st_ino
print(json.dumps([os.getpid(), sys.argv[1:], __spec__.name, sys.flags.safe_path, inode]))
"""


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "preloadd", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=20,
        **options,
    )


def test_version():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"preloadd {preloadd.__version__}\n")


def test_help_lists_every_command():
    done = run("--help")
    assert done.returncode == 0
    assert all(f"  {name} " in done.stdout for name in COMMANDS)


def test_no_command_shows_the_help_as_an_error():
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert usage() in done.stderr


def test_unknown_command_gets_a_hint():
    done = run("supervise")
    assert done.returncode == 2
    assert "'supervise'" in done.stderr
    assert "did you mean `preloadd supervisor`?" in done.stderr


def test_hint_without_a_near_command_lists_them():
    assert "did you mean" not in hint("zzz")
    assert "run, rank, supervisor" in hint("zzz")


@pytest.fixture
def stand_in(tmp_path):
    """A package `preloadd` in which the real dispatcher meets a rank that tells what it got."""
    package = tmp_path / "preloadd"
    (package / "rank").mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "0"\n')
    (package / "__main__.py").write_text((ROOT / "preloadd" / "__main__.py").read_text())
    (package / "rank" / "__init__.py").touch()
    (package / "linux").mkdir()
    (package / "linux" / "__init__.py").touch()
    streams = Path("linux", "streams.py")
    (package / streams).write_text((ROOT / "preloadd" / streams).read_text())
    return package


def start(argv, *, cwd, environ, fd):
    return subprocess.Popen(
        argv, cwd=cwd, env={**os.environ, **environ}, pass_fds=[fd], stdout=subprocess.PIPE
    )


@pytest.mark.parametrize("as_script", [False, True])
def test_becomes_the_package_and_keeps_pid_and_descriptors(stand_in, tmp_path, as_script):
    with (tmp_path / "held").open("w") as held:
        (stand_in / "rank" / "__main__.py").write_text(PROBE.format(fd=held.fileno()))
        script = tmp_path / "script"
        script.write_text("from preloadd.__main__ import main\nmain()\n")
        command = [str(script)] if as_script else ["-m", "preloadd"]
        child = start(
            [sys.executable, *command, "rank", "CPU-0", "--flag"],
            cwd=tmp_path,
            environ={"PYTHONPATH": str(tmp_path)},
            fd=held.fileno(),
        )
        output, _ = child.communicate(timeout=20)
        inode = os.fstat(held.fileno()).st_ino
    told = json.loads(output)
    assert told == [child.pid, ["CPU-0", "--flag"], "preloadd.rank.__main__", as_script, inode]


@pytest.mark.parametrize("closing", [">&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("command", "status"), [("--version", 0), ("--help", 0), ("zzz", 2)])
def test_closed_streams_are_no_error(closing, command, status):
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closing}', "sh", sys.executable, "-m", "preloadd", command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == status
    assert "Traceback" not in done.stderr


def test_dispatcher_pays_for_no_command():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "preloadd", "--version"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=20,
    )
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not loaded & {"typer", "anyio", "pydantic", "fastapi", "msgspec", "rich"}
