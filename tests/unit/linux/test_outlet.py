"""Streams that nobody waits for, over real pipes and terminals."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from preloadd.linux import outlet as module
from preloadd.linux.outlet import MOST_WAITING, outlet
from tests.checkout import ROOT

LINE = f"{'x' * 99}\n"


class Pipe:
    """A pipe that is full: what leads into it, and what can be read from it."""

    def __init__(self) -> None:
        self.reading, writing = os.pipe()
        self.stream = os.fdopen(writing, "w", encoding="utf-8")
        with open(f"/proc/self/fd/{writing}", "wb", buffering=0, opener=_nonblocking) as other:
            while other.write(b"." * 4096):
                pass

    def read(self, until: str) -> str:
        """Read on until that comes, or the pipe's end."""
        read = b""
        while until not in (text := read.decode().lstrip(".")):
            more = os.read(self.reading, 1 << 16)
            if not more:
                return text
            read += more
        return text


def _nonblocking(path: str, _flags: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_NONBLOCK)


@pytest.fixture
def full() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    with suppress(OSError):
        os.close(pipe.reading)
    pipe.stream.close()


@contextmanager
def quickly() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 0.5


def test_a_reader_that_hangs_is_not_waited_for_and_told_what_is_lost(full: Pipe) -> None:
    with outlet(full.stream) as out:
        with quickly():
            for number in range(2 * MOST_WAITING // len(LINE)):
                out.write(f"{number:09}{LINE[9:]}")
                out.flush()
        read = full.read("in time")
    numbers = [int(line[:9]) for line in read.splitlines() if line[:1].isdigit()]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) * len(LINE) >= MOST_WAITING - len(LINE)


def test_what_comes_after_what_is_lost_is_written_again(full: Pipe) -> None:
    with outlet(full.stream) as out:
        total = 2 * MOST_WAITING // len(LINE)
        for _ in range(total):
            out.write(LINE)
        read = full.read("read in time: ")
        until = time.monotonic() + 5
        while "again\n" not in read and time.monotonic() < until:
            # As long as the loss is not told, what is written adds to it.
            out.write("again\n")
            read += full.read("\n")
    found = re.search(r"preloadd: lines lost here, which nobody read in time: (\d+)\n", read)
    assert found
    assert read.count(LINE) + int(found[1]) == pytest.approx(total, abs=2)
    assert "again\n" in read[found.end() :]


@pytest.mark.parametrize("lines", [1, 2])
def test_closing_waits_a_moment_for_a_reader(
    full: Pipe, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FLUSH_S", 0.8)
    out = outlet(full.stream)
    for left in reversed(range(lines)):
        out.write(f"{left} more\n")
    late = threading.Timer(0.5, full.read, ["0 more"])
    late.start()
    began = time.monotonic()
    out.close()
    assert 0.5 <= time.monotonic() - began < 0.75
    late.join()


def test_closing_does_not_wait_for_ever(full: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_S", 0.05)
    out = outlet(full.stream)
    out.write("first\n")
    out.write("second\n")
    with quickly():
        out.close()
    full.stream.close()
    assert "second" not in full.read("second")


def test_a_slow_reader_gets_the_last_words_and_what_is_lost_before_them(
    full: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FLUSH_S", 0.4)
    read = b""

    def slowly() -> None:
        nonlocal read
        while more := os.read(full.reading, 4096):
            read += more
            if b"the last words\n" not in read[-8192:]:
                time.sleep(0.01)

    total = 2 * MOST_WAITING // len(LINE)
    reader = threading.Thread(target=slowly)
    with outlet(full.stream) as out:
        for _ in range(total):
            out.write(LINE)
        out.write("the last words\n")
        reader.start()
    full.stream.close()
    reader.join()
    text = read.decode().lstrip(".")
    found = re.search(r"preloadd: lines lost here, which nobody read in time: (\d+)\n", text)
    assert found
    assert text.count(LINE) + int(found[1]) == total
    assert text[found.end() :] == "the last words\n"


def test_closing_loses_nothing_that_is_read_in_time(full: Pipe) -> None:
    with outlet(full.stream) as out:
        for number in range(1000):
            out.write(f"{number:09}{LINE[9:]}")
        late = threading.Timer(0.1, full.read, [f"{999:09}{LINE[9:]}"])
        late.start()
    late.join()


def test_a_stream_that_somebody_made_non_blocking_loses_nothing(full: Pipe) -> None:
    os.set_blocking(full.stream.fileno(), False)
    with outlet(full.stream) as out:
        out.write(f"{'y' * 100_000} whole\n")
        assert "y" * 100_000 in full.read("whole")


def test_a_reader_that_went_away_is_no_error(full: Pipe) -> None:
    os.close(full.reading)
    with quickly(), outlet(full.stream) as out:
        out.write("hello\n")


def test_a_stopped_terminal_is_not_waited_for() -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream, outlet(stream) as out:
        assert out.isatty()
        termios.tcflow(slave, termios.TCOOFF)
        with quickly():
            out.write("hello\n")
        termios.tcflow(slave, termios.TCOON)
        assert os.read(master, 100) == b"hello\r\n"
    os.close(master)


def test_encoding_and_errors_are_those_of_the_stream(full: Pipe) -> None:
    with open(
        full.stream.fileno(), "w", encoding="ascii", errors="backslashreplace", closefd=False
    ) as stream:
        with outlet(stream) as out:
            out.write("mödel\n")
            assert full.read("\n").endswith("m\\xf6del\n")


def test_without_a_thread_it_is_written_all_the_same(
    full: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    os.set_blocking(full.reading, False)
    with suppress(BlockingIOError):
        while os.read(full.reading, 1 << 16):
            pass
    with outlet(full.stream) as out:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            out.write("hello\n")
        assert os.read(full.reading, 100) == b"hello\n"


def test_a_process_ends_though_nobody_reads_it(full: Pipe) -> None:
    code = """if True:
        import logging, os, sys
        from preloadd.linux import logs
        logs.configure("INFO", {}, waits=False)
        for number in range(9999):
            logging.info("line %d", number)
        sys.exit(3)
    """
    assert ended(code, full) == 3


@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_process_ends_by_an_error_though_nobody_reads_it(full: Pipe, where: str) -> None:
    code = f"""if True:
        import sys, threading
        from preloadd.linux import logs
        logs.configure("INFO", {{}}, waits=False)
        def fail():
            raise ValueError("nobody foresaw it")
        if "{where}" == "main":
            fail()
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        sys.exit(1)
    """
    assert ended(code, full) == 1


def ended(code: str, full: Pipe) -> int:
    """How Python ends whose standard error nobody reads."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=full.stream,
        timeout=15,
    ).returncode
