"""Processes that are started without some of their standard streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import json, os, socket, sys
from preloadd.linux import streams
streams.prepare()
with socket.socket() as opened:
    number = opened.fileno()
leads = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)]
inherited = all(map(os.get_inheritable, range(3)))
for stream in (sys.stdout, sys.stderr):
    stream.write("told\\n")
    stream.flush()
sys.stdin.read()
open(sys.argv[1], "w").write(json.dumps([leads, number, inherited]))
"""
NOWHERE = os.devnull


def probe(closing: str, folder: Path) -> tuple[list[str], int, bool]:
    """What the descriptors 0 to 2 lead to, and the number that the next one got."""
    told, out, err = (folder / name for name in ("told", "out", "err"))
    with out.open("w") as stdout, err.open("w") as stderr:
        subprocess.run(
            ["sh", "-c", f'exec "$@" {closing}', "sh", sys.executable, "-c", PROBE, told],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            check=True,
            timeout=20,
        )
    assert err.read_text() in {"told\n", ""}
    leads, number, inherited = json.loads(told.read_text())
    names = {str(out): "out", str(err): "err"}
    return [names.get(lead, lead) for lead in leads], number, inherited


@pytest.mark.parametrize(
    ("closing", "leads"),
    [
        ("", [NOWHERE, "out", "err"]),
        ("<&-", [NOWHERE, "out", "err"]),
        (">&-", [NOWHERE, NOWHERE, "err"]),
        ("2>&-", [NOWHERE, "out", "out"]),
        (">&- 2>&-", [NOWHERE, NOWHERE, NOWHERE]),
        ("<&- >&- 2>&-", [NOWHERE, NOWHERE, NOWHERE]),
    ],
)
def test_nothing_else_gets_the_number_of_a_stream(closing, leads, tmp_path):
    found, number, inherited = probe(closing, tmp_path)
    assert found == leads
    assert number > 2
    assert inherited


def test_a_name_that_is_no_text_can_be_written():
    code = "from preloadd.linux import streams; import sys; streams.prepare(); "
    code += r"[s.write('\udcff\xfc\n') for s in (sys.stdout, sys.stderr)]"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        timeout=20,
    )
    assert done.stdout == done.stderr == rb"\udcff\xfc" + b"\n"


def test_streams_that_are_no_files_are_left_alone():
    """Tests, and whoever embeds this, replace them."""
    code = "import io, sys; sys.stdout = io.StringIO(); from preloadd.linux import streams; "
    code += "streams.prepare(); assert isinstance(sys.stdout, io.StringIO)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)
