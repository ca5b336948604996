"""All benchmarks in a row: what is looked at before gigabytes are written, and what is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.checkout import ROOT

pytestmark = pytest.mark.slow


def begun(tmp_path: Path, *arguments: str) -> "subprocess.Popen[str]":
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "bench.gpu.all", str(tmp_path / "out"), *arguments],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--only", "load,adapt"], "there is no adapt: name some of attach, adopt"),
        (["--only", "load", "--memory", "host", "--rums", "3"], "unrecognized arguments: --rums"),
        (["--only", "load", "--gpu", "GPU-0"], "bench.gpu.load: no GPU GPU-0 to measure on"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_written(tmp_path, arguments, why):
    with begun(tmp_path, *arguments) as process:
        _, told = process.communicate(timeout=60)
    assert (process.returncode, why in told) == (2, True), told
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_nothing_is_left_when_it_is_ended(tmp_path):
    scratch = tmp_path / "scratch"
    arguments = ["--memory", "host", "--gib", "0.05", "--only", "load"]
    with begun(tmp_path, *arguments) as process:
        # Its own folder, and that of the benchmark that has begun.
        until = time.monotonic() + 60
        while len(list(scratch.glob("preloadd-bench-*"))) < 2:
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert list(scratch.glob("preloadd-bench-*")) == []
