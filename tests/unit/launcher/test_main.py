import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT


def test_exit_code_survives_a_reader_that_went_away(socket_dir):
    """Rank CPU-0 fails at once: its settings name a model that is no checkpoint."""
    (socket_dir / "model").mkdir()
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as nobody:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "preloadd.launcher"),
                *("--model", str(socket_dir / "model")),
                *("--weight-cache-socket-dir", str(socket_dir / "s")),
            ],
            cwd=ROOT,
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
        )
    assert done.returncode not in (0, 1, 120)
    assert "BrokenPipe" not in done.stderr


def test_usage_errors_exit_with_two():
    done = subprocess.run(
        [sys.executable, "-m", "preloadd.launcher", "--no-such-flag"],
        cwd=ROOT,
        capture_output=True,
        timeout=30,
    )
    assert done.returncode == 2


@pytest.fixture
def model(socket_dir):
    """A folder without a checkpoint, which the rank says."""
    (socket_dir / "model").mkdir()
    return socket_dir / "model"


def run(closing: str, model: Path, *more: str, module: str = "preloadd.launcher"):
    """The launcher, started by a shell with `closing`."""
    return subprocess.run(
        [
            *("sh", "-c", f'{closing} exec "$@"', "sh"),
            *(sys.executable, "-m", *module.split()),
            *("--model", str(model), "--weight-cache-socket-dir", str(model.parent / "s"), *more),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=30,
    )


@pytest.mark.parametrize("module", ["preloadd.launcher", "preloadd run"])
@pytest.mark.parametrize(
    ("closing", "tells"),
    [
        ("exec <&-;", {"stdout", "stderr"}),
        ("exec >&-;", {"stderr"}),
        ("exec 2>&-;", {"stdout"}),
        ("exec <&- >&- 2>&-;", set()),
    ],
)
def test_closed_streams_cost_neither_the_code_nor_the_reason(model, closing, tells, module):
    done = run(closing, model, module=module)
    assert done.returncode == 65
    for name in ("stdout", "stderr"):
        assert ("has no .safetensors files" in getattr(done, name)) is (name in tells)
    assert "Traceback" not in done.stdout + done.stderr


def test_reason_that_ends_it_is_told_where_errors_were_to_go(model):
    done = run("exec 2>&-;", model / "gone")
    assert done.returncode == 66
    assert "no such folder" in done.stdout


@pytest.mark.parametrize("limit", [5, 9, 14])
def test_too_few_descriptors_are_told(model, limit):
    done = run(f"ulimit -n {limit};", model)
    assert done.returncode == 71
    assert done.stderr.startswith(f"preloadd run: this process may have {limit} open files")
    assert "`ulimit -n`" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_names_of_files_are_utf8_whatever_the_locale(socket_dir):
    model = socket_dir / "mödel"
    model.mkdir()
    done = run("export LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0;", model, module="preloadd run")
    assert done.returncode == 65
    assert "mödel has no .safetensors files" in done.stderr


def test_folder_that_is_gone_is_told(model):
    gone = model.parent / "gone"
    gone.mkdir()
    done = run(f"cd {gone}; rmdir {gone};", model, "--weight-cache-socket-dir", "s")
    assert done.returncode == 78
    assert "--weight-cache-socket-dir: cannot be followed from here" in done.stderr
    assert "give an absolute path" in done.stderr


@pytest.mark.parametrize("plant", [Path.mkdir, os.mkfifo])
@pytest.mark.parametrize("name", ["rank.lock", "rank.sock", "~ank.sock"])
def test_what_stands_in_a_ranks_way_is_told_before_it_loads(model, plant, name):
    folder = model.parent / "s" / "CPU-0"
    folder.mkdir(mode=0o700, parents=True)
    (model.parent / "s").chmod(0o700)
    plant(folder / name)
    done = run("", model)
    if plant is os.mkfifo and name != "rank.lock":
        assert "has no .safetensors files" in done.stdout  # a stale file is replaced
    else:
        assert done.returncode in {77, 78}
        (last,) = [line for line in done.stdout.splitlines() if line.startswith("stopping")]
        assert f"{folder / name}" in last
        assert last.endswith("remove it")
