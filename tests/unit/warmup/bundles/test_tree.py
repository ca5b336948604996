import os
import stat

import pytest

from preloadd.errors import InsecurePath
from preloadd.linux.fds import OwnedFd
from preloadd.warmup.bundles import tree


@pytest.fixture
def top(tmp_path):
    with OwnedFd(os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        yield fd


def test_what_is_new_is_private_whatever_the_mask(top, tmp_path):
    before = os.umask(0o777)
    try:
        tree.fresh(top, "a/b/c").close()
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / path).stat().st_mode) for path in ("a", "a/b", "a/b/c")]
    assert modes == [0o700, 0o700, 0o600]


def test_no_file_is_opened_twice_for_writing(top, tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    with pytest.raises(FileExistsError, match="a"):
        tree.fresh(top, "a")


@pytest.mark.parametrize("path", ["link", "link/file", "real/link/file", "real/file/below"])
def test_no_link_is_followed(top, tmp_path, path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real/link").symlink_to("../real")
    with pytest.raises(InsecurePath, match=r"link|real/file"):
        tree.opened(top, path)


def test_devices_are_no_files(top, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InsecurePath, match="pipe"):
        tree.opened(top, "pipe")


def test_folders_of_everybody_are_refused(top, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(0o777)
    with pytest.raises(InsecurePath, match=r"a in a/b .*0777.*chmod go-w"):
        tree.entered(top, "a/b", make=True)


def test_folders_are_listed(top, tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/link").symlink_to("b")
    (tmp_path / "a/file").touch()
    assert tree.folders(top, "a") == ["b"]
    assert tree.folders(top, "no/such") == []


def test_what_passes_is_not_walked(top, tmp_path):
    for name in ("a", "b.lock", "c.123.tmp", "locks/x", "__pycache__/y.pyc", "tmp.pid_1/z", "d/e"):
        (tmp_path / "top" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "top" / name).touch()
    assert sorted(path for path, _ in tree.walked(top, "top")) == ["top/a", "top/d/e"]
