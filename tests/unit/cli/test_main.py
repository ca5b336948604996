"""The command as a process: its start, its streams, and how it ends when it is ended."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from preloadd.domain.lifecycle import State
from tests.checkout import ROOT

HEAVY = {"anyio", "asyncio", "fastapi", "torch", "uvicorn", "prometheus_client", "preloadd.config"}


@pytest.fixture
def command(socket_dir, systemd):
    """Starts `preloadctl` on the ranks and the systemd of this test."""

    def start(*arguments, **options):
        environ = {**systemd.environ, "PRELOADD_SOCKET_DIR": str(socket_dir)}
        environ |= {"XDG_RUNTIME_DIR": "/none", "TMPDIR": "/none", "TERM": "xterm"}
        environ |= options.pop("env", {})
        return subprocess.Popen(
            [
                *options.pop("before", []),
                *(sys.executable, *options.pop("flags", []), "-m", "preloadd.cli", *arguments),
            ],
            cwd=ROOT,
            env=environ,
            text=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )

    return start


@pytest.mark.parametrize("arguments", [("--help",), ("status",)])
def test_starts_without_what_it_does_not_need(command, arguments):
    with command(*arguments, flags=["-X", "importtime"]) as process:
        _, err = process.communicate(timeout=20)
    loaded = {line.rpartition("|")[2].strip() for line in err.splitlines()}
    assert "preloadd.cli.app" in loaded
    assert not loaded & HEAVY
    if arguments == ("--help",):
        assert not loaded & {"rich.table", "pydantic"}


def test_expected_trouble_is_one_line_and_no_traceback(command, ranks):
    ranks.serve("CPU-0")
    with command("stop", "smol", env={"PATH": "/none"}) as process:
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (64, "")
    assert err.startswith("preloadctl: smol is not systemd's")
    assert err.count("\n") == 1


def test_an_interpreter_without_packages_is_told_in_one_line(command):
    # Without site-packages there is none.
    environ = {"PYTHONPATH": str(ROOT)}
    with command("status", flags=["-S"], env=environ) as process:
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (78, "")
    assert err.startswith(f"preloadctl: {sys.executable} has no package typer: `preloadctl doctor`")
    assert err.count("\n") == 1


def test_a_reader_that_goes_away_is_no_trouble(command, ranks):
    ranks.serve("CPU-0")
    read, write = os.pipe()
    os.close(read)
    with command("status", stdout=write) as process:
        os.close(write)
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (141, "")


def test_a_full_disk_is_told(command, ranks):
    with Path("/dev/full").open("w") as full, command("version", stdout=full) as process:
        _, err = process.communicate(timeout=20)
    assert process.returncode == 74
    assert err == "preloadctl: [Errno 28] No space left on device: 'standard output'\n"


@pytest.mark.parametrize(
    ("closed", "status", "said"),
    [
        (">&-", 74, "preloadctl: [Errno 9] Bad file descriptor: 'standard output'\n"),
        ("2>&-", 0, ""),
    ],
)
def test_a_stream_that_is_closed_from_the_beginning(command, ranks, closed, status, said):
    ranks.serve("CPU-0")
    shell = ["/bin/sh", "-c", f'exec "$@" {closed}', "sh"]
    with command("status", "--json", before=shell) as process:
        out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (status, said)
    assert bool(out) == (status == 0)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_watching_ends_with_a_signal(command, ranks, number, status):
    ranks.serve("CPU-0")
    with command("status", "--watch", "--interval", "0.1") as process:
        assert process.stdout.readline().startswith("GROUP")
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (status, "")


def test_watching_tells_changes_line_by_line_where_there_is_no_terminal(command, ranks):
    rank = ranks.serve("CPU-0")
    with command("status", "--watch", "--interval", "0.1") as process:
        assert [process.stdout.readline() for _ in range(3)][-1] == "1 group, 1 rank: all serve\n"
        rank.become(state=State.FAILED, detail="no room")
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert line[8:] == " smol CPU-0: serving -> failed: no room\n"


def test_watching_as_json_writes_a_line_for_every_change(command, ranks):
    rank = ranks.serve("CPU-0")
    with command("status", "--watch", "--interval", "0.1", "--json") as process:
        assert '"condition": "serving"' in process.stdout.readline()
        rank.become(state=State.RELEASED)
        assert '"condition": "released"' in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)


def on_terminal(command, *arguments, until, **options):
    """What a command writes to a terminal, ended with Ctrl-C once `until` was seen."""
    ours, theirs = pty.openpty()
    seen = b""
    with command(*arguments, stdin=theirs, stdout=theirs, **options) as process:
        os.close(theirs)
        deadline = time.monotonic() + 20
        while until.encode() not in seen:
            assert select.select([ours], [], [], deadline - time.monotonic())[0], seen
            seen += os.read(ours, 1 << 16)
        process.send_signal(signal.SIGINT)
        while select.select([ours], [], [], 20)[0]:
            try:
                seen += os.read(ours, 1 << 16)
            except OSError:  # the last user of the terminal is gone
                break
        process.communicate(timeout=20)
    os.close(ours)
    return seen.decode(), process.returncode


def test_watching_on_a_terminal_refreshes_in_place_and_gives_it_back(command, ranks):
    ranks.serve("CPU-0")
    seen, status = on_terminal(command, "status", "--watch", "--interval", "0.1", until="all serve")
    assert seen.startswith("\x1b[?1049h\x1b[?25l\x1b[H")
    # The last picture stays.
    assert seen.partition("\x1b[?25h\x1b[?1049l")[2].endswith("all serve\r\n")
    assert status == 130


@pytest.mark.parametrize(
    ("environ", "colored"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colours_are_for_terminals_that_want_them(command, ranks, environ, colored):
    ranks.serve("CPU-0")
    seen, status = on_terminal(command, "status", until="all serve", env=environ)
    assert ("\x1b[32mserving" in seen) is colored
    assert status in (0, 130, -signal.SIGINT)  # it may have come to its end before


def test_a_table_fits_the_terminal(command, ranks):
    ranks.serve("CPU-0", model="org/" + "x" * 100)
    environ = {"COLUMNS": "60", "NO_COLOR": "1"}
    seen, _ = on_terminal(command, "status", until="all serve", env=environ)
    assert max(map(len, seen.splitlines())) <= 60
    assert "x" * 5 in seen


def test_logs_become_journalctl(command, systemd, managed):
    managed("smol", "CPU-0")
    program = systemd.home / "journalctl"
    program.write_text('#!/bin/sh\necho "$$ $*"\n')
    program.chmod(0o755)
    with command("logs", "smol", "-f", "-n", "7") as process:
        out, _ = process.communicate(timeout=20)
    units = ["preloadd-group@smol.target", "preloadd-gate@smol.service"]
    units += ["preloadd-down@smol.service", "preloadd@CPU-0.service"]
    expected = ["--lines=7", "--follow", *(f"--unit={unit}" for unit in units)]
    assert out.split() == [str(process.pid), *expected]


@pytest.mark.parametrize("arguments", [["doctor", "--help"], ["token", "list", "--help"]])
def test_commands_of_admin_keep_their_options(command, arguments):
    with command(*arguments) as process:
        out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")
    assert out.startswith(f"usage: preloadctl {' '.join(arguments[:-1])}")
