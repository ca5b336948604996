import argparse
import errno
import os

import pytest

from preloadd.admin.cache_errors import Several, closed, telling, told
from preloadd.admin.world import World
from preloadd.errors import ConfigError, InsecurePath


@pytest.mark.parametrize(
    ("number", "status", "remedy"),
    [
        (errno.ENOSPC, 74, "make room there"),
        (errno.EDQUOT, 74, "make room there"),
        (errno.EROFS, 74, "that can be written"),
        (errno.EIO, 74, "the kernel's log"),
        (errno.ENAMETOOLONG, 78, "name another"),
        (errno.ELOOP, 78, "name another"),
        (errno.EAGAIN, 75, "try again when it is done"),
        (errno.EACCES, 77, ""),
        (errno.EPERM, 77, ""),
    ],
)
def test_place_and_remedy_are_told_and_the_status_is_documented(tmp_path, number, status, remedy):
    found = told(OSError(number, os.strerror(number), str(tmp_path / "x")))
    assert found.exit_status == status
    assert str(found).startswith(str(tmp_path / "x"))
    assert os.strerror(number) in str(found)
    assert remedy in str(found)


def test_what_is_in_the_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name, number in (
        ("file/x/y", errno.ENOTDIR),
        ("file", errno.EEXIST),
        ("link", errno.EEXIST),
    ):
        found = told(OSError(number, "x", str(tmp_path / name)))
        assert str(found) == f"{tmp_path / name.partition('/')[0]} is no folder: name another"
        assert isinstance(found, ConfigError)


def test_output_that_fails_is_no_matter_of_caches(tmp_path):
    options, world = argparse.Namespace(), World({}, tmp_path)

    def fails(_, __):
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        telling(fails)(options, world)
    assert telling(lambda _, __: 5)(options, world) == 5


def test_of_several_all_are_told_with_the_status_of_the_first(tmp_path):
    found = Several([InsecurePath("one"), ConfigError("two")])
    assert (str(found), found.exit_status) == ("one\ntwo", 77)
    assert "or as root" not in str(closed(tmp_path))
