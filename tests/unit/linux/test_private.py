import os
import stat

import pytest

from preloadd.errors import InsecurePath
from preloadd.linux.private import locked_folder, read_private, replace_file, write_private


def write(folder, content):
    with locked_folder(folder) as opened:
        write_private(opened, "f", content)


def test_content_is_replaced_whole_for_its_owner_alone(tmp_path):
    tmp_path.chmod(0o755)
    for content in (b"one", b"", b"x" * 100_000):
        write(tmp_path, content)
        assert read_private(tmp_path / "f", {os.geteuid()}) == content
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_file_of_somebody_else_is_refused(tmp_path):
    write(tmp_path, b"x")
    with pytest.raises(InsecurePath, match=f"belongs to user {os.geteuid()}"):
        read_private(tmp_path / "f", {4242})


def test_what_is_no_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "f", 0o600)
    with pytest.raises(InsecurePath, match="no regular file"):
        read_private(tmp_path / "f", {os.geteuid()})


def test_failed_write_leaves_nothing(tmp_path):
    (tmp_path / "f").mkdir()
    with pytest.raises(IsADirectoryError):
        write(tmp_path, b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_replaced_file_keeps_mode_and_owner(tmp_path):
    path = tmp_path / "f"
    path.write_text("old")
    path.chmod(0o640)
    replace_file(path, b"new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_root_writes_for_the_service_whose_folder_it_is(tmp_path):
    os.chown(tmp_path, 4242, 4243)
    write(tmp_path, b"x")
    found = (tmp_path / "f").stat()
    assert (found.st_uid, found.st_gid) == (4242, 4243)
