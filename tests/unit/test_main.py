"""The script is run as a real process: what it becomes is what counts."""

import json
import os
import subprocess
import sys

import pytest

import preloadd
from preloadd.__main__ import COMMANDS, hint, usage
from tests.checkout import ROOT

PROBE = """\
import json, os, sys


def main(arguments=None):
    print(json.dumps({
        "pid": os.getpid(),
        "arguments": sys.argv[1:] if arguments is None else arguments,
        "module": __spec__.name,
        "safe": os.environ.get("PYTHONSAFEPATH"),
        "imports from": sys.path,
        "encoding": sys.getfilesystemencoding(),
        "inode": os.fstat(INODE).st_ino,
    }))


if __name__ == "__main__":
    main()
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


def test_a_rank_of_an_interpreter_without_packages_is_not_tried_again():
    command = [sys.executable, "-S", "-m", "preloadd", "rank", "CPU-0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=20)
    assert done.returncode == 78
    assert done.stderr.startswith(f"preloadd: {sys.executable} has no package ")
    assert "`preloadctl doctor`" in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_lists_every_command():
    done = run("--help")
    assert done.returncode == 0
    assert all(f"  {name} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_short_form_of_help_is_as_good_as_the_long_one(name):
    asked = [run(name, form) for form in ("-h", "--help")]
    assert [done.returncode for done in asked] == [0, 0], asked
    assert asked[0].stdout == asked[1].stdout
    # What `admin` is for is asked of `preloadctl`, which becomes it.
    named = "preloadctl" if name == "admin" else f"preloadd {name}"
    assert asked[0].stdout.strip().lower().startswith(f"usage: {named}")


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
def become(tmp_path):
    """Runs the real dispatcher over process packages that tell what they got; what they told, and
    what is to be told of the process itself."""
    package = tmp_path / "site" / "preloadd"
    for name in ("", "linux", "rank", "supervisor"):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").write_text('__version__ = "0"\n')
    for copied in ("__main__.py", "linux/streams.py"):
        (package / copied).write_text((ROOT / "preloadd" / copied).read_text())
    work, script = tmp_path / "work", tmp_path / "bin" / "script"
    work.mkdir()
    script.parent.mkdir()
    script.write_text("from preloadd.__main__ import main\nmain()\n")

    def become(command: str, *, as_script: bool, **environ: str):
        with (tmp_path / "held").open("w") as held:
            for name in ("rank", "supervisor"):
                probe = PROBE.replace("INODE", str(held.fileno()))
                (package / name / "__main__.py").write_text(probe)
            child = subprocess.Popen(
                [
                    *(sys.executable, *([script] if as_script else ["-m", "preloadd"])),
                    *(command, "CPU-0", "--flag"),
                ],
                cwd=work,
                env={**os.environ, "PYTHONPATH": str(package.parent), **environ},
                pass_fds=[held.fileno()],
                stdout=subprocess.PIPE,
            )
            output, _ = child.communicate(timeout=20)
            return json.loads(output), {"pid": child.pid, "inode": os.fstat(held.fileno()).st_ino}

    return become


@pytest.mark.parametrize("as_script", [False, True])
@pytest.mark.parametrize("command", ["rank", "supervisor"])
def test_becomes_the_package_and_keeps_pid_and_descriptors(become, command, as_script, tmp_path):
    told, expected = become(command, as_script=as_script)
    assert expected.items() <= told.items()
    assert told["arguments"] == ["CPU-0", "--flag"]
    assert told["module"] == f"preloadd.{command}.__main__"
    # Only who says `-m` counts on the current folder; nobody counts on the script's.
    assert told["safe"] == ("1" if as_script else None)
    searched = {os.path.realpath(entry or tmp_path / "work") for entry in told["imports from"]}
    assert (str(tmp_path / "work") in searched) is not as_script
    assert str(tmp_path / "bin") not in searched
    assert str(tmp_path / "site") in searched


@pytest.mark.parametrize("command", ["rank", "supervisor"])
def test_a_script_that_searches_safely_loses_no_folder(become, command, tmp_path):
    told, _ = become(command, as_script=True, PYTHONSAFEPATH="1")
    assert str(tmp_path / "site") in told["imports from"]


@pytest.mark.parametrize("as_script", [False, True])
@pytest.mark.parametrize("command", ["rank", "supervisor"])
def test_names_of_files_are_utf_8_whatever_the_locale(become, command, as_script):
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    told, expected = become(command, as_script=as_script, **ascii_only)
    assert told["encoding"] == "utf-8"
    assert expected.items() <= told.items()


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
    assert not any(name.startswith("preloadd.rank") for name in loaded)
    assert not loaded & {"typer", "anyio", "pydantic", "fastapi", "msgspec", "rich"}
