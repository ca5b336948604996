"""A real subreaper: a process of its own, since it takes every orphan that it gets."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.checkout import ROOT

# The launcher's part is played by this process, a killed rank's by a child that leaves another.
SUBREAPER = """
import ctypes, os, time
from preloadd.linux.orphans import reap_orphans

PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0

def start(code):
    pid = os.fork()
    if not pid:
        code()
        os._exit(7)
    return pid

def ended(pid):
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

def children():
    return set(map(int, open(f"/proc/self/task/{os.getpid()}/children").read().split()))

def await_children(number):
    until = time.monotonic() + 10
    while len(children()) != number:
        assert time.monotonic() < until, children()
        time.sleep(0.001)

assert reap_orphans([])                               # no child at all
ours = start(lambda: start(lambda: None))
ended(ours)
await_children(2)
(orphan,) = children() - {ours}
ended(orphan)
assert not reap_orphans([ours])                       # ours stands first, and is not touched
assert os.waitpid(ours, 0) == (ours, 7 << 8)
assert reap_orphans([ours])
assert not children()

lives = start(lambda: time.sleep(60))
another = start(lambda: None)
ended(another)
assert reap_orphans([lives])                          # one that lives hides nobody
assert children() == {lives}
os.kill(lives, 9)
assert os.waitpid(lives, 0) == (lives, 9)
print("done")
"""


def test_orphans_are_reaped_and_statuses_of_our_own_left():
    done = subprocess.run(
        [sys.executable, "-c", SUBREAPER],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout == "done\n", done.stderr
