"""What one life of a rank tells the next of its warm-up, also where the place is not as it was."""

import os
import subprocess
import sys

import pytest

from preloadd.rank.warmup.mark import NAME, Mark

FAIL = r"""
import sys
from pathlib import Path
from preloadd.rank.warmup.mark import Mark
Mark(Path(sys.argv[1])).fail("5 \u00b5s \udcff")
"""


@pytest.fixture
def mark(tmp_path):
    return Mark(tmp_path)


def test_it_is_there_until_the_weights_are_warm(mark, tmp_path):
    assert mark.left() is None
    mark.begin()
    assert Mark(tmp_path).left() == ""
    mark.fail("the engine ended with 3")
    assert Mark(tmp_path).left() == "the engine ended with 3"
    mark.clear()
    mark.clear()
    assert (mark.left(), list(tmp_path.iterdir())) == (None, [])


def test_words_of_an_engine_are_kept_whatever_the_locale_is(mark, tmp_path):
    environ = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", FAIL, tmp_path], env=environ, check=True)
    assert mark.left() == "5 µs \\udcff"


def test_what_others_have_put_there_is_neither_followed_nor_waited_for(mark, tmp_path):
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / NAME).symlink_to(target)
    assert "is a symbolic link" in mark.left()
    mark.fail("x")
    assert (target.read_text(), mark.left()) == ("precious", "x")
    mark.clear()
    os.mkfifo(tmp_path / NAME)
    assert "it is not known whether these weights are warm" in mark.left()


def test_a_long_one_is_cut_and_a_lost_folder_hinders_nobody(mark, tmp_path, caplog):
    (tmp_path / NAME).write_bytes(b"x" * 10_000 + b"\n\xff")
    assert mark.left() == "x" * 4096
    gone = Mark(tmp_path / "gone")
    gone.begin()
    assert f"{NAME} could not be written: No such file" in caplog.text
    gone.clear()
    assert gone.left() is None
