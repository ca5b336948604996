from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from preloadd.linux import memfd
from preloadd.linux.process import Child, spawn

PYTHON = [sys.executable, "-I", "-S", "-c"]
SLEEP = ["sleep", "60"]
ENVIRON = {"PATH": os.environ["PATH"]}


def eventually(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + 5
    while not holds() and time.monotonic() < until:
        time.sleep(0.002)
    return holds()


def is_gone(pid: int) -> bool:
    """Whether the process has ended, zombie or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def executing(child: Child, command: str) -> bool:
    return eventually(lambda: Path(f"/proc/{child.pid}/comm").read_text().strip() == command)


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit(255)", 255),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("import os; os.kill(os.getpid(), 15)", 143),
    ],
)
def test_statuses_are_those_of_a_shell(source: str, status: int) -> None:
    with spawn([*PYTHON, source], environ=ENVIRON) as child:
        assert child.wait(10) == status
        assert child.poll() == child.status == status


def test_a_running_child_has_no_status_and_waiting_ends_in_time() -> None:
    with spawn(SLEEP, environ=ENVIRON) as child:
        assert child.poll() is None
        assert child.status is None
        with pytest.raises(TimeoutError, match=str(child.pid)):
            child.wait(0.01)
    assert child.status == 137


def test_the_descriptor_tells_the_end_before_anything_is_reaped() -> None:
    with spawn(SLEEP, environ=ENVIRON) as child:
        assert not select.select([child], [], [], 0)[0]
        child.signal(signal.SIGTERM)
        assert select.select([child], [], [], 10)[0]
        assert child.status is None
        assert child.poll() == 143


def test_signals_to_an_ended_child_hit_nobody() -> None:
    with spawn(["true"], environ=ENVIRON) as child:
        select.select([child], [], [], 10)
        child.signal(signal.SIGKILL)
        assert child.wait() == 0
        child.signal(signal.SIGKILL)
        child.kill_group()


def test_closing_twice_is_harmless() -> None:
    child = spawn(SLEEP, environ=ENVIRON)
    child.close()
    child.close()


def test_the_environment_and_the_descriptors_are_exactly_those_given(tmp_path: Path) -> None:
    out = tmp_path / "out"
    source = f"import os; open({str(out)!r}, 'w').write(repr(("
    source += "sorted(os.environ), os.environ['LISTEN_FDNAMES'], int(os.environ['LISTEN_PID']) == "
    source += (
        "os.getpid(), [os.pread(fd, 9, 0) for fd in (3, 4, 5)], os.listdir('/proc/self/fd'))))"
    )
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(memfd.sealed_bytes("payload", text)) for text in (b"one", b"two")
        )
        fds = [("b", two.fileno()), ("a", one.fileno()), ("b", two.fileno())]
        child = stack.enter_context(spawn([*PYTHON, source], environ=ENVIRON, fds=fds))
        assert child.wait(10) == 0
        assert not os.get_inheritable(one.fileno())
    names, listed, addressed, contents, numbers = eval(out.read_text())
    # Python adds LC_CTYPE where no locale is set.
    assert set(names) - {"LC_CTYPE"} == {"LISTEN_FDNAMES", "LISTEN_FDS", "LISTEN_PID", "PATH"}
    assert (listed, addressed) == ("b:a:b", True)
    assert contents == [b"two", b"one", b"two"]
    assert len(numbers) == 3 + 3 + 2  # standard ones, those passed, and the two the probe opened


def test_the_standard_input_is_empty() -> None:
    source = "import sys; raise SystemExit(len(sys.stdin.read()))"
    with spawn([*PYTHON, source], environ=ENVIRON) as child:
        assert child.wait(10) == 0


def test_a_child_leads_a_group_of_its_own() -> None:
    with spawn(SLEEP, environ=ENVIRON) as child:
        assert os.getpgid(child.pid) == child.pid
        child.signal(signal.SIGKILL)
        child.wait()


# Starts a process that ignores SIGTERM, tells its pid, and sleeps or ends.
PARENTING = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = subprocess.Popen(["sleep", "60"])
signal.signal(signal.SIGTERM, signal.SIG_DFL)
os.write(3, str(grandchild.pid).encode())
if sys.argv[1:]:
    signal.pause()
os._exit(5)
"""


def grandchild_of(argv: list[str]) -> tuple[Child, int]:
    with memfd.create("pid") as fd:
        child = spawn(argv, environ=ENVIRON, fds=[("out", fd.fileno())])
        assert eventually(lambda: os.fstat(fd.fileno()).st_size > 0)
        return child, int(os.pread(fd.fileno(), 20, 0))


def test_what_a_leader_leaves_behind_dies_before_its_status_is_known() -> None:
    child, grandchild = grandchild_of([*PYTHON, PARENTING])
    with child:
        select.select([child], [], [], 10)
        assert not is_gone(grandchild)
        assert not child.group_gone()
        assert child.wait() == 5
        assert eventually(lambda: is_gone(grandchild))


def test_a_whole_group_is_killed() -> None:
    child, grandchild = grandchild_of([*PYTHON, PARENTING, "stay"])
    with child:
        child.kill_group()
        assert child.wait(10) == 137
        assert eventually(lambda: is_gone(grandchild))


def test_closing_kills_the_whole_group() -> None:
    child, grandchild = grandchild_of([*PYTHON, PARENTING, "stay"])
    child.close()
    assert eventually(lambda: is_gone(grandchild))


def test_a_group_is_gone_when_its_last_member_is() -> None:
    with spawn(SLEEP, environ=ENVIRON) as child:
        assert not child.group_gone()
        child.kill_group()
        child.wait()
        assert eventually(child.group_gone)


# Spawns a child that is to die with it, tells its pid, and waits to be killed.
DYING = """
import os, signal, sys, time
from preloadd.linux.process import spawn
child = spawn(["sleep", "60"], environ=os.environ, parent_death_signal=signal.SIGTERM)
while open(f"/proc/{child.pid}/comm").read() != "sleep\\n": time.sleep(0.002)
print(child.pid, flush=True)
signal.pause()
"""


def test_a_child_dies_with_its_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DYING], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert not is_gone(child)
        parent.kill()
        parent.wait()
        assert eventually(lambda: is_gone(child))


def test_a_living_parent_keeps_its_child() -> None:
    with spawn(SLEEP, environ=ENVIRON, parent_death_signal=signal.SIGKILL) as child:
        assert executing(child, "sleep")
        assert child.poll() is None


def test_a_missing_command_was_not_started(capfd: pytest.CaptureFixture[str]) -> None:
    with spawn(["/no/such/command"], environ=ENVIRON) as child:
        assert (child.wait(10), child.started) == (127, False)
    assert "/no/such/command" in capfd.readouterr().err


def test_it_is_told_apart_even_where_nothing_can_be_said() -> None:
    with Path("/dev/full").open("wb") as full:
        child = spawn(["/no/such/command"], environ=ENVIRON, stderr=full.fileno())
    with child:
        child.wait(10)
        assert not child.started


def test_standard_streams_that_this_process_lacks_are_not_taken_for_others() -> None:
    code = (
        "import os, sys; from preloadd.linux.process import spawn; os.close(0); os.close(1); "
        "os.close(2); child = spawn(['true'], environ={'PATH': os.environ['PATH']}); "
        "sys.exit(child.wait(10) + 2 * (not child.started))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_one_that_ends_with_the_same_status_was() -> None:
    with spawn(["sh", "-c", "exit 127"], environ=ENVIRON) as child:
        assert (child.wait(10), child.started) == (127, True)
    with spawn(SLEEP, environ=ENVIRON) as child:
        pass
    assert (child.status, child.started) == (137, True)
