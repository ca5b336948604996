import os
import select
import signal
import sys

import pytest

from preloadd.launcher.processes import Process, child_environ


def python(code: str) -> Process:
    return Process([sys.executable, "-c", code], dict(os.environ))


def wait(process: Process) -> int:
    assert select.select([process], [], [], 10)[0]
    return process.end()


def test_lives_one_after_the_other():
    with python("raise SystemExit(3)") as process:
        for _ in range(2):
            process.start([])
            assert process.pid is not None
            assert wait(process) == 3
            assert process.pid is None


def test_death_by_a_signal_is_told_as_a_shell_does():
    with python("import os; os.kill(os.getpid(), 9)") as process:
        process.start([])
        assert wait(process) == 137


def test_terminate_and_kill():
    for stop, status in ((Process.terminate, 143), (Process.kill, 137)):
        with python("import time; time.sleep(60)") as process:
            process.start([])
            stop(process)
            assert wait(process) == status


def test_between_lives_there_is_nothing_to_do_or_to_ask():
    with python("") as process:
        process.terminate()
        process.kill()
        with pytest.raises(ValueError, match="does not run"):
            process.fileno()
        with pytest.raises(ValueError, match="does not run"):
            process.end()


def test_close_kills_what_lives():
    process = python("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)")
    process.start([])
    pid = process.pid
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def test_children_get_the_environment_but_not_the_line_to_the_launchers_own_manager():
    ours = {"PATH": "/bin", "NOTIFY_SOCKET": "/run/systemd", "WATCHDOG_USEC": "1"}
    assert child_environ(ours) == {"PATH": "/bin"}
    assert child_environ(ours, NOTIFY_SOCKET="/x") == {"PATH": "/bin", "NOTIFY_SOCKET": "/x"}
