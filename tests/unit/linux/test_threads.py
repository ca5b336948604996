"""What is told where no thread can be started."""

from __future__ import annotations

import threading

import pytest

from preloadd.errors import PreloadError
from preloadd.linux.threads import starting
from tests.threads import threads_left


def test_a_thread_that_is_refused_is_told_with_the_limits() -> None:
    with threads_left(0), pytest.raises(PreloadError) as caught:
        with starting("looking"):
            threading.Thread(target=print).start()
    assert str(caught.value).startswith("looking: this process gets no more threads (can't start")
    assert "TasksMax=" in str(caught.value)
    assert "ulimit -u" in str(caught.value)


def test_whatever_else_fails_is_told_as_it_is() -> None:
    with pytest.raises(OSError, match="disk"), starting("looking"):
        raise OSError("disk")
