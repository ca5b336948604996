"""What others see of a process that hides a word of its command line."""

import subprocess
import sys
from pathlib import Path

import pytest

SECRET = "plt_hünter-2"
HIDES = f"""
import sys
from preloadd.linux.cmdline import hide
hide({SECRET!r})
print("hidden", flush=True)
sys.stdin.read()
"""


def seen(*words: str) -> list[str]:
    """The arguments of such a process, as /proc shows them."""
    argv = [sys.executable, "-c", HIDES, *words]
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    ) as child:
        assert child.stdout.readline() == "hidden\n"
        told = Path(f"/proc/{child.pid}/cmdline").read_bytes().decode().split("\0")
        child.stdin.close()
    assert child.returncode == 0
    return told[3:-1]


@pytest.mark.parametrize("before", ["", "--seed-token="])
def test_a_word_is_hidden_and_no_other(before):
    others = ["--model", "/srv/m", f"{SECRET}x", f"x{SECRET}", ""]
    hidden = before + "x" * len(SECRET.encode())
    assert seen(*others, before + SECRET, "-tp", "2") == [*others, hidden, "-tp", "2"]


def test_each_of_several_is_hidden():
    assert SECRET not in seen(SECRET, "a", f"--seed-token={SECRET}")


def test_nothing_is_changed_where_it_is_not():
    assert seen("a", "b") == ["a", "b"]
