import os

import pytest

from preloadd.errors import CheckpointError, ReadFailed
from preloadd.weights.checkpoint import code_of


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "modeling_x.py").write_text("layers = 1\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/norm.py").write_text("eps = 1e-6\n")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_code_is_the_same_wherever_it_lies_and_whatever_lies_beside_it(folder, tmp_path_factory):
    before = code_of(folder)
    assert before.startswith("blake3:")
    (folder / "README.md").write_text("more")
    copy = tmp_path_factory.mktemp("copy")
    (copy / "parts").mkdir()
    for name in ("modeling_x.py", "parts/norm.py"):
        (copy / name).symlink_to(folder / name)
    assert code_of(folder) == code_of(copy) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "modeling_x.py").write_text("layers = 2\n"),
        lambda folder: (folder / "parts/norm.py").write_text("eps = 1e-5\n"),
        lambda folder: (folder / "new.py").touch(),
        lambda folder: (folder / "modeling_x.py").unlink(),
        lambda folder: (folder / "modeling_x.py").rename(folder / "modeling_y.py"),
        lambda folder: (folder / "parts/norm.py").rename(folder / "norm.py"),
    ],
)
def test_any_other_code_is_told_apart(folder, change):
    before = code_of(folder)
    change(folder)
    assert code_of(folder) != before


def test_a_checkpoint_without_code_has_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert code_of(tmp_path) == ""


def test_code_that_is_missing_is_an_error_that_names_it(folder):
    (folder / "gone.py").symlink_to(folder / "nowhere")
    with pytest.raises(CheckpointError, match=r"gone\.py is a link to a file that is gone"):
        code_of(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_code_that_cannot_be_read_is_an_error_that_names_it(folder):
    (folder / "modeling_x.py").chmod(0)
    with pytest.raises(ReadFailed, match=r"modeling_x\.py: Permission denied"):
        code_of(folder)
