"""The leak check itself: a check that checks nothing looks just like a clean suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = ROOT / "tests" / "conftest.py"

LEAKING = {
    "descriptor": "import os\ndef test(): os.open('/dev/null', os.O_RDONLY)",
    "zombie": "import os\ndef test():\n  if os.fork() == 0: os._exit(0)",
    "child": """
import signal, subprocess
def test(): kept.append(subprocess.Popen(['sleep', '60'], process_group=0))
kept = []
def teardown_module(): kept[0].kill(); kept[0].wait()
""",
    "Thread": """
import threading
end = threading.Event()
def test(): threading.Thread(target=end.wait).start()
def teardown_module(): end.set()
""",
}
CLEAN = """
import threading, time
def test(): threading.Thread(target=time.sleep, args=(0.05,)).start()
"""


@pytest.mark.slow
def test_every_kind_of_leak_fails_its_test_and_only_that(tmp_path: Path) -> None:
    text = CONFTEST.read_text().replace("GRACE_S = 2.0", "GRACE_S = 0.2")
    (tmp_path / "conftest.py").write_text(text)
    for name, source in LEAKING.items():
        (tmp_path / f"test_{name}.py").write_text(source)
    (tmp_path / "test_clean.py").write_text(CLEAN)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", "."],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "200", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{len(LEAKING) + 1} passed, {len(LEAKING)} errors" in done.stdout, (
        done.stdout + done.stderr
    )
    for name in LEAKING:
        (line,) = [
            line for line in done.stdout.splitlines() if line.startswith(f"ERROR test_{name}.py")
        ]
        assert name in line.partition(" - ")[2]
