import errno
import os
import resource
import stat
import threading

import pytest

from preloadd.errors import InsecurePath
from preloadd.linux.fds import OwnedFd
from preloadd.linux.plain import (
    make_file,
    naming,
    open_file,
    open_folder,
    read_file,
    read_up_to,
    staged,
    write_whole,
)


@pytest.fixture
def here(tmp_path):
    with OwnedFd(os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        yield fd


def test_files_are_opened_by_their_path_or_below_a_folder(here, tmp_path):
    (tmp_path / "f").write_bytes(b"x")
    for fd in (open_file(tmp_path / "f"), open_file("f", here)):
        with fd:
            assert os.read(fd.fileno(), 9) == b"x"
            assert not os.get_inheritable(fd.fileno())


def test_no_link_is_followed(here, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for opened in (open_file, open_folder):
        with pytest.raises(InsecurePath, match=r"^/a\\nb is a .*link.*remove it$"):
            opened("link", here, named="/a\nb")
    with pytest.raises(InsecurePath, match=f"^{tmp_path / 'link'} is a symbolic link"):
        open_file(tmp_path / "link")


def test_what_is_no_file_is_refused_and_not_waited_for(here, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    os.mknod(tmp_path / "socket", stat.S_IFSOCK | 0o600)
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "socket", "folder"):
        with pytest.raises(InsecurePath, match=f"^whole/{name} is no regular file: remove it"):
            open_file(name, here, named=f"whole/{name}")


@pytest.mark.timeout(10)
def test_links_are_followed_if_that_is_asked_for_to_files_alone(here, tmp_path):
    (tmp_path / "f").write_bytes(b"whole")
    os.mkfifo(tmp_path / "pipe")
    os.mknod(tmp_path / "socket", stat.S_IFSOCK | 0o600)
    (tmp_path / "folder").mkdir()
    for name in ("f", "pipe", "socket", "folder", "gone"):
        (tmp_path / f"to-{name}").symlink_to(name)
    with open_file("to-f", here, follow=True) as fd:
        assert not os.get_inheritable(fd.fileno())
    assert read_file(tmp_path / "to-f", 3, follow=True) == b"who"
    for name in ("pipe", "socket", "folder"):
        path = tmp_path / f"to-{name}"
        with pytest.raises(InsecurePath, match=f"^{path} is no regular file: remove it"):
            read_file(path, 9, follow=True)
    with pytest.raises(FileNotFoundError, match=f"'{tmp_path}/to-gone'"):
        read_file(tmp_path / "to-gone", 9, follow=True)


def test_files_are_read_up_to_a_limit(tmp_path):
    (tmp_path / "f").write_bytes(b"whole")
    assert read_file(tmp_path / "f", 9) == b"whole"
    assert read_file(tmp_path / "f", 3) == b"who"
    (tmp_path / "link").symlink_to("f")
    with pytest.raises(InsecurePath, match="is a symbolic link"):
        read_file(tmp_path / "link", 9)


def test_errors_of_reading_name_the_file():
    # The first page of a process is never mapped, and reading it is EIO.
    with pytest.raises(OSError, match=f"{os.strerror(errno.EIO)}: '/proc/self/mem'"):
        read_file("/proc/self/mem", 9)


def test_all_is_read_though_the_kernel_gives_a_part_at_once():
    reading, writing = map(OwnedFd, os.pipe())
    with reading, writing:
        os.write(writing.fileno(), b"one ")
        later = threading.Timer(0.02, os.write, (writing.fileno(), b"two three"))
        later.start()
        assert read_up_to(reading, 7) == b"one two"
        later.join()


def test_what_is_no_folder_is_refused(here, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    open_folder("folder", here).close()
    with pytest.raises(InsecurePath, match=r"^whole/file is no folder: remove it"):
        open_folder("file", here, named="whole/file")


def test_what_is_wrong_on_the_way_is_not_told_of_the_end(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    for opened in (open_file, open_folder):
        with pytest.raises(OSError, match=os.strerror(errno.ELOOP)) as caught:
            opened(tmp_path / "loop/x")
        assert caught.value.filename == f"{tmp_path}/loop/x"
        with pytest.raises(NotADirectoryError, match="'/whole/x'"):
            opened(tmp_path / "file/x", named="/whole/x")


def test_errors_name_the_whole_path(here):
    for opened in (open_file, open_folder):
        with pytest.raises(FileNotFoundError, match="'/whole/gone'"):
            opened("gone", here, named="/whole/gone")


def test_errors_of_two_names_name_the_one_that_is_meant(here):
    with pytest.raises(FileNotFoundError, match=r"'/whole/gone'$"), naming("/whole/gone"):
        os.link("gone", "x", src_dir_fd=here.fileno(), dst_dir_fd=here.fileno())


def test_new_files_are_private_and_never_old_ones(here, tmp_path):
    before = os.umask(0o777)
    try:
        with make_file("f", here) as fd:
            assert not os.get_inheritable(fd.fileno())
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to("elsewhere")
    for name in ("f", "link"):
        with pytest.raises(FileExistsError):
            make_file(name, here)


def test_all_is_written_though_the_kernel_takes_a_part_at_once():
    reading, writing = map(OwnedFd, os.pipe2(os.O_NONBLOCK))
    with reading, writing, pytest.raises(BlockingIOError):
        # Less than all is taken, without an error, until there is no room for the rest.
        write_whole(writing, bytes(1 << 20))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_staged_file_is_whole_and_gone_unless_it_is_renamed(here, tmp_path):
    with staged("f", here, b"whole") as fresh:
        assert names(tmp_path) == [fresh]
        found = tmp_path / fresh
        assert (found.read_bytes(), stat.S_IMODE(found.stat().st_mode)) == (b"whole", 0o600)
    assert names(tmp_path) == []
    with staged("f", here, b"whole", dress=lambda fd: os.fchmod(fd.fileno(), 0o640)) as fresh:
        (tmp_path / fresh).rename(tmp_path / "f")
    assert names(tmp_path) == ["f"]
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o640


def test_a_staged_file_is_left_behind_by_no_error(here, tmp_path):
    def fail(fd):
        raise PermissionError

    with pytest.raises(PermissionError), staged("f", here, b"x", dress=fail):
        pass
    with pytest.raises(KeyboardInterrupt), staged("f", here, b"x"):
        raise KeyboardInterrupt
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"), staged("f", here, b"xy"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == []
