"""Real children of a process with an event loop, which turns meanwhile."""

import os
import sys
import time
from pathlib import Path

import anyio
import pytest

from preloadd.linux.asking import Answer
from preloadd.linux.process import Child
from preloadd.transport import child
from preloadd.transport.child import answer

pytestmark = pytest.mark.anyio


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


async def test_its_end_is_waited_for_and_its_status_told():
    code = "import time; print('a', flush=True); time.sleep(0.1); print('b'); raise SystemExit(3)"
    assert await answer(python(code), os.environ) == Answer(3, b"a\nb\n")
    assert (await answer(["/nonexistent"], os.environ)).status == 127


async def test_what_a_manager_told_this_process_is_not_passed_on():
    told = python("import os; print(os.environ.get('NOTIFY_SOCKET'), os.environ['X'])")
    environ = {**os.environ, "NOTIFY_SOCKET": "/run/x", "X": "1"}
    assert await answer(told, environ) == Answer(0, b"None 1\n")


async def test_cancelling_kills_it_with_all_that_it_started(tmp_path):
    code = f"""
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pid = os.fork()
if pid:
    open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{pid}} ")
time.sleep(60)
"""
    with anyio.move_on_after(10) as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answer, python(code), os.environ)
            pids: list[str] = []
            while len(pids) < 2:
                await anyio.sleep(0.01)
                path = tmp_path / "pids"
                pids = path.read_text().split() if path.exists() else []
            tasks.cancel_scope.cancel()
    assert not scope.cancelled_caught
    for pid in pids:
        until = time.monotonic() + 5
        while alive(pid):
            assert time.monotonic() < until
            await anyio.sleep(0.01)


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_nobody_waits_for_one_that_does_not_go(monkeypatch, tmp_path):
    """No process outlives SIGKILL but in a driver that hangs; here it is not killed, but ends."""
    monkeypatch.setattr(child, "END_S", 0.05)
    monkeypatch.setattr(Child, "kill_group", lambda *_: None)
    monkeypatch.setattr(Child, "signal", lambda *_: None)
    began = time.monotonic()
    with anyio.move_on_after(0.1):
        await answer(python("import time; time.sleep(0.8)"), os.environ)
    assert time.monotonic() - began < 0.7
    monkeypatch.undo()
