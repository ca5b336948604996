from __future__ import annotations

import errno
import os
import re
import resource
from pathlib import Path

import pytest

from preloadd.linux.fds import OwnedFd, exhausted, is_exhausted, widen


def opened() -> OwnedFd:
    return OwnedFd(os.open("/dev/null", os.O_RDONLY))


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def test_closes_once_and_refuses_use_after() -> None:
    fd = opened()
    number = fd.fileno()
    fd.close()
    fd.close()
    assert fd.closed
    assert not is_open(number)
    with pytest.raises(ValueError, match="closed or taken"):
        fd.fileno()


def test_taking_moves_ownership() -> None:
    with opened() as fd:
        number = fd.take()
    assert fd.closed
    assert is_open(number)
    os.close(number)


def test_a_duplicate_is_close_on_exec_and_lives_on() -> None:
    with opened() as fd:
        other = fd.duplicate()
    assert not os.get_inheritable(other.fileno())
    other.close()


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        OwnedFd(-1)


def test_repr_tells_number_and_state() -> None:
    fd = opened()
    assert str(fd.fileno()) in repr(fd)
    fd.close()
    assert "closed" in repr(fd)


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.EMFILE, "ulimit -n"), (errno.ENFILE, "fs.file-max")]
)
def test_exhaustion_names_the_limit_and_the_remedy(number: int, remedy: str) -> None:
    error = OSError(number, os.strerror(number))
    assert is_exhausted(error)
    text = str(exhausted(error, "opening the moon"))
    assert "opening the moon" in text
    assert remedy in text


def test_other_errors_are_no_exhaustion() -> None:
    assert not is_exhausted(OSError(errno.ENOMEM, "no memory"))


def table() -> int:
    found = re.search(r"^FDSize:\s+(\d+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1])


def test_room_for_descriptors_is_made_ahead() -> None:
    before = table()
    widen(2 * before)
    assert table() >= 2 * before


def test_no_more_room_is_made_than_a_limit_allows() -> None:
    before, (soft, hard) = table(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4 * before, hard))
    try:
        widen(8 * before)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert table() < 8 * before
