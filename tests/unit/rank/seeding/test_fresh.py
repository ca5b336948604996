import os

import pytest

from preloadd.errors import ConfigError
from preloadd.rank.seeding.fresh import AGAIN_S, Fresh


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_text("a")
    return path


@pytest.fixture
def fresh(file):
    """What is in the file, and how often it was read, by the length of `reads`."""
    reads = []

    def read():
        reads.append(None)
        return file.read_text()

    return Fresh([file], read), reads


def test_a_file_is_read_once(fresh):
    value, reads = fresh
    assert [value.get(), value.get()] == ["a", "a"]
    assert len(reads) == 1


def test_a_file_that_is_replaced_is_read_again(fresh, file):
    value, _ = fresh
    value.get()
    other = file.with_name("other")
    other.write_text("b")
    other.replace(file)
    assert value.get() == "b"


def test_a_file_that_is_written_under_its_old_time_is_read_again(fresh, file):
    value, _ = fresh
    value.get()
    before = file.stat()
    file.write_text("b")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert value.get() == "b"


def test_what_cannot_be_made_is_tried_again_and_nothing_old_is_given(fresh, file):
    value, _ = fresh
    value.get()
    file.unlink()
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            value.get()
    file.write_text("c")
    assert value.get() == "c"


def test_what_failed_is_not_read_for_everybody_who_asks(file):
    now, reads = 0.0, []

    def read():
        reads.append(None)
        raise ConfigError(file.read_text())

    value = Fresh([file], read, clock=lambda: now)
    for _ in range(3):
        with pytest.raises(ConfigError, match="a"):
            value.get()
    assert len(reads) == 1
    file.write_text("other")
    with pytest.raises(ConfigError, match="other"):
        value.get()
    now = AGAIN_S
    with pytest.raises(ConfigError, match="other"):
        value.get()
    assert len(reads) == 3
