"""The trampoline as its parent meets it: a script run by path, with descriptors in its way."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from preloadd.linux import trampoline

ISOLATED = [sys.executable, "-I", "-S"]
TRAMPOLINE = [*ISOLATED, trampoline.__file__, ""]

# Gives each number in argv[1] a file named after it, then becomes the rest of argv.
ARRANGE = """
import fcntl, json, os, sys
files = {}
for number in set(json.loads(sys.argv[1])):
    file = os.memfd_create(f"file-{number}")
    files[number] = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 100)
    os.close(file)
for number, file in files.items():
    os.dup2(file, number)
os.execv(sys.argv[2], sys.argv[2:])
"""

REPORT = """
import json, os
files = {}
for fd in os.listdir("/proc/self/fd"):
    if int(fd) > 2 and os.path.islink(f"/proc/self/fd/{fd}"):  # the listing's own is closed
        files[fd] = os.readlink(f"/proc/self/fd/{fd}")
listen = {name: value for name, value in os.environ.items() if name.startswith("LISTEN_")}
print(json.dumps([os.getpid(), listen, files]))
"""


class Told(NamedTuple):
    """What the command found: its pid, the LISTEN_ variables, and its files by number."""

    pid: int
    listen: dict[str, str]
    files: dict[str, str]


class Done(NamedTuple):
    """How a command ended, what it wrote, and whether the pipe said that it could not be begun."""

    status: int
    output: str
    errors: str
    failed: bool


def run(
    command: Sequence[str],
    passed: Sequence[str] = (),
    *,
    parent: Sequence[str] = ("0", "0"),
    before: Sequence[str] = (),
    environ: dict[str, str] | None = None,
) -> Done:
    reading, writing = os.pipe()
    failed = fcntl.fcntl(writing, fcntl.F_DUPFD_CLOEXEC, 60)
    os.close(writing)
    try:
        done = subprocess.run(
            [*before, *TRAMPOLINE, *parent, str(failed), str(len(passed)), *passed, *command],
            env=environ,
            capture_output=True,
            text=True,
            pass_fds=[failed],
        )
        os.close(failed)
        said = os.read(reading, 9)
    finally:
        os.close(reading)
    return Done(done.returncode, done.stdout, done.stderr, bool(said))


def arranged(numbers: list[int], names: list[str], environ: dict[str, str]) -> Told:
    passed = [f"{number}:{name}" for number, name in zip(numbers, names, strict=True)]
    before = [*ISOLATED, "-c", ARRANGE, json.dumps(numbers)]
    done = run([*ISOLATED, "-c", REPORT], passed, before=before, environ=environ)
    assert done.status == 0, done.errors
    return Told(*json.loads(done.output))


@given(numbers=st.lists(st.integers(3, 9), max_size=7))
@example(numbers=[4, 3])
@example(numbers=[5, 3, 4])
@example(numbers=[3, 3, 4])
@settings(max_examples=8)
def test_any_numbers_become_three_and_up_and_nothing_else_stays(numbers: list[int]) -> None:
    told = arranged(numbers, [f"name-{number}" for number in numbers], {})
    assert told.files == {
        str(3 + index): f"/memfd:file-{number} (deleted)" for index, number in enumerate(numbers)
    }


def test_nearly_all_that_may_be_open_can_be_passed() -> None:
    limited = ["sh", "-c", 'ulimit -n 40; exec "$@"', "sh"]
    command = [*ISOLATED, "-c", "import os; print(os.environ['LISTEN_FDS'])"]
    assert run(command, ["0:lease"] * 30, before=limited).output == "30\n"


def test_the_command_is_told_what_it_has() -> None:
    told = arranged([7, 5, 6], ["chunk", "listen", "chunk"], {"LISTEN_FDS": "99"})
    assert told.listen == {
        "LISTEN_PID": str(told.pid),
        "LISTEN_FDS": "3",
        "LISTEN_FDNAMES": "chunk:listen:chunk",
    }


def test_a_command_without_descriptors_does_not_inherit_the_parents_variables() -> None:
    stale = {"LISTEN_PID": "1", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b"}
    assert arranged([], [], stale).listen == {}


@pytest.mark.parametrize(("command", "status"), [("/no/such/command", 127), ("/etc/passwd", 126)])
def test_a_command_that_cannot_be_executed_is_told_as_a_shell_would(
    command: str, status: int
) -> None:
    done = run([command])
    assert done.status == status
    assert done.errors.startswith(f"{command} cannot be started: ")
    assert done.failed


def test_a_command_that_ends_with_such_a_status_was_executed() -> None:
    done = run(["sh", "-c", "exit 127"])
    assert (done.status, done.failed) == (127, False)


def test_a_parent_that_is_gone_already_ends_the_process() -> None:
    done = run(["true"], parent=["1", str(int(signal.SIGTERM))])
    assert (done.status, done.failed) == (-signal.SIGTERM, False)


def test_signals_are_as_a_shell_would_leave_them() -> None:
    ignored = int(run(["grep", "SigIgn", "/proc/self/status"]).output.split()[1], 16)
    # `make` leaves signals ignored that the C library keeps for itself and nobody can set.
    left = {number for number in signal.valid_signals() if ignored >> (number - 1) & 1}
    # What whoever started this had ignored, as a shell does for what runs in the background, stays.
    inherited = {n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN}
    assert left <= inherited - {signal.SIGPIPE, signal.SIGXFSZ}


def test_it_imports_nothing_that_makes_every_start_slower() -> None:
    source = f"import runpy, sys; runpy.run_path({trampoline.__file__!r}); print(*sys.modules)"
    done = subprocess.run([*ISOLATED, "-c", source], capture_output=True, text=True)
    assert not {"preloadd", "argparse", "ctypes", "subprocess"} & set(done.stdout.split())
    assert "fcntl" in done.stdout.split()
