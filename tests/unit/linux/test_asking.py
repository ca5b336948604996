"""Real commands: what they say, how they end, and that nothing of them is left."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path

import pytest

from preloadd.linux.asking import LONGEST, Answer, ask
from preloadd.linux.process import Identity
from tests.unit.linux.test_process import eventually, is_gone

ENVIRON = {"PATH": os.environ["PATH"]}
NOBODY = Identity(65534, 65534, (65534, 65533))


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def asked(command: list[str], timeout: float = 20.0) -> Answer:
    return ask(command, ENVIRON, timeout=timeout)


def test_both_streams_and_a_shells_status_are_told() -> None:
    told = asked(["sh", "-c", "echo a; echo b; echo one >&2; echo ' two' >&2; echo >&2; exit 3"])
    assert told == Answer(3, b"a\nb\n", b"one\n two\n\n")
    assert told.complaint == "two"
    assert asked(["true"]) == Answer(0, b"")
    assert asked(["true"]).complaint == ""
    assert Answer(1, b"", b"\x1b[2J\x07evil\n").complaint == "\\x1b[2J\\x07evil"
    assert asked(["sh", "-c", "kill -9 $$"]).status == 128 + signal.SIGKILL
    missing = asked(["/nonexistent"])
    assert (missing.status, missing.started) == (127, False)
    assert missing.complaint.startswith("/nonexistent cannot be started: ")


def test_only_the_end_of_a_long_answer_is_kept() -> None:
    code = f"import sys; print('x' * {3 * LONGEST}, 'end'); print('y' * {LONGEST}, file=sys.stderr)"
    told = asked(python(code))
    assert (len(told.said), len(told.errors)) == (LONGEST, LONGEST)
    assert told.said.endswith(b"x end\n")


def test_what_never_ends_is_ended_in_time_and_costs_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"yes did not finish within 0\.2 s"):
        asked(["yes"], timeout=0.2)
    assert time.monotonic() - began < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10


@pytest.mark.parametrize("hides", ["", ">/dev/null 2>&1 "])
@pytest.mark.parametrize("waits", [True, False], ids=["hangs", "ends"])
def test_what_it_started_ends_with_it(tmp_path: Path, hides: str, waits: bool) -> None:
    pid = tmp_path / "pid"
    command = f"sleep 60 {hides}& echo $! > {pid}; echo told; {'wait' if waits else ''}"
    if waits:
        with pytest.raises(TimeoutError):
            asked(["sh", "-c", command], timeout=0.2)
    else:
        # Nobody waits for the other one, which may still have the stream.
        assert asked(["sh", "-c", command]) == Answer(0, b"told\n")
    assert eventually(lambda: is_gone(int(pid.read_text())))


def test_one_that_closes_its_streams_is_waited_for() -> None:
    assert asked(["sh", "-c", "exec >&- 2>&-; sleep 0.1; exit 4"]) == Answer(4, b"")


def test_what_is_left_by_one_that_hides_from_its_group_holds_up_nobody(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"""
import os, time
if os.fork():
    print("told", flush=True)
    while not os.path.exists({str(pid)!r}): time.sleep(0.002)
    os._exit(0)
os.setsid()
open({str(tmp_path / "new")!r}, "w").write(str(os.getpid()))
os.rename({str(tmp_path / "new")!r}, {str(pid)!r})
time.sleep(60)
"""
    try:
        assert asked(python(code)) == Answer(0, b"told\n")
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_it_is_begun_where_it_is_told_to(tmp_path: Path) -> None:
    assert ask(["pwd"], ENVIRON, timeout=20, cwd=str(tmp_path)).said == f"{tmp_path}\n".encode()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_has_another_user_answer_who_dies_with_it_as_well() -> None:
    told = ask(
        ["grep", "-E", "^(Uid|Gid|Groups):", "/proc/self/status"],
        ENVIRON,
        timeout=20,
        identity=NOBODY,
    )
    fields = dict(line.split(":") for line in told.said.decode().splitlines())
    assert fields["Uid"].split() == fields["Gid"].split() == ["65534"] * 4
    assert set(fields["Groups"].split()) == {"65533", "65534"}
    code = (
        "import ctypes; n = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(n));"
        "print(n.value)"
    )
    told = ask(["/usr/bin/python3", "-c", code], ENVIRON, timeout=20, identity=NOBODY)
    if told.status == 0:  # there may be none
        assert told.said == b"9\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root can become another user")
def test_who_may_not_become_another_user_is_told() -> None:
    told = ask(["true"], ENVIRON, timeout=20, identity=NOBODY)
    assert (told.status, told.complaint) == (126, "true cannot be started: Operation not permitted")
