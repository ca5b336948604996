"""What one life leaves for the next, also where something else is in its place."""

import os

import pytest

from preloadd.errors import InsecurePath
from preloadd.rank.record import MAX_NBYTES, leave, left


def test_what_was_left_is_found_by_the_next_life(tmp_path):
    path = tmp_path / "it.json"
    assert left(path) is None
    for content in (b"one", b""):
        leave(path, content)
        assert left(path) == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.timeout(10)
def test_what_no_rank_has_left_is_neither_followed_nor_waited_for(tmp_path):
    path = tmp_path / "it.json"
    os.mkfifo(path)
    with pytest.raises(InsecurePath, match=f"^{path} is no regular file: remove it"):
        left(path)
    path.unlink()
    (tmp_path / "secret").write_text("x")
    path.symlink_to("secret")
    with pytest.raises(InsecurePath, match=f"^{path} is a symbolic link"):
        left(path)
    leave(path, b"mine")
    assert ((tmp_path / "secret").read_text(), left(path)) == ("x", b"mine")


@pytest.mark.timeout(10)
def test_what_is_in_the_way_of_a_new_one_is_neither_written_to_nor_waited_for(tmp_path):
    path = tmp_path / "it.json"
    os.mkfifo(tmp_path / "it.new")
    leave(path, b"mine")
    assert left(path) == b"mine"
    (tmp_path / "elsewhere").symlink_to(tmp_path, target_is_directory=True)
    leave(tmp_path / "elsewhere" / "that.json", b"mine")
    assert not (tmp_path / "that.json").exists()


def test_no_more_is_read_than_any_record_has(tmp_path):
    path = tmp_path / "it.json"
    path.write_bytes(bytes(MAX_NBYTES + 9))
    assert len(left(path)) == MAX_NBYTES


def test_a_place_that_is_gone_hinders_nobody(tmp_path, caplog):
    path = tmp_path / "gone/it.json"
    leave(path, b"x")
    assert f"{path} could not be written: No such file" in caplog.text
    assert left(path) is None
