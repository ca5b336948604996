from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.errors import ConfigError
from preloadd.linux import ancillary
from preloadd.linux.logs import (
    JournalHandler,
    PriorityFormatter,
    configure,
    encode,
    error_code,
    is_journal,
    priority,
)
from preloadd.linux.memfd import read_sealed
from tests.checkout import ROOT
from tests.descriptors import open_descriptors

log = logging.getLogger("preloadd.test")

NOBODY = Path("/nonexistent/journal")


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    # `configure` closes the handlers it replaces, and these are pytest's.
    root.handlers.clear()
    yield root
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


class Journal:
    """What listens in the journal's place, and reads as it does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(path))

    def entry(self) -> dict[str, str]:
        """The next entry, which must be there."""
        received = ancillary.receive(self._socket, 1 << 20)
        if not received.fds:
            return decode(received.data)
        assert received.data == b""
        (file,) = received.fds
        with file:
            return decode(read_sealed(file.fileno(), 1 << 24))

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def journal(socket_dir: Path) -> Iterator[Journal]:
    journal = Journal(socket_dir / "journal")
    yield journal
    journal.close()


def decode(data: bytes) -> dict[str, str]:
    """The fields of an entry, by the rules of systemd's page."""
    fields = {}
    while data:
        line, _, data = data.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            size = int.from_bytes(data[:8], "little")
            value, data = data[8 : 8 + size], data[8 + size :]
            assert data[:1] == b"\n"
            data = data[1:]
        assert name.decode() not in fields
        fields[name.decode()] = value.decode()
    return fields


def journal_of(fd: int) -> dict[str, str]:
    found = os.fstat(fd)
    return {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}


@pytest.fixture
def to_journal(
    root_logger: logging.Logger, capfd: pytest.CaptureFixture[str], journal: Journal
) -> Callable[..., None]:
    """Configures this process as one whose standard error leads to `journal`."""

    def configured(level: str = "INFO", path: Path = journal.path, **fields: str) -> None:
        configure(level, journal_of(2), identifier="preloadd-rank", fields=fields, journal=path)

    return configured


@pytest.mark.parametrize(
    ("level", "expected"),
    [(10, 7), (15, 7), (20, 6), (25, 6), (30, 4), (40, 3), (50, 2), (60, 2)],
)
def test_levels_become_priorities(level: int, expected: int) -> None:
    assert priority(level) == expected


def test_every_line_carries_the_priority() -> None:
    record = logging.LogRecord("n", logging.ERROR, "f", 1, "one\ntwo %s", ("three",), None)
    assert PriorityFormatter().format(record) == "<3>one\n<3>two three"


def test_only_the_very_stream_counts_as_the_journal() -> None:
    reader, writer = os.pipe()
    assert is_journal(journal_of(writer), writer)
    assert not is_journal({}, writer)
    assert not is_journal({"JOURNAL_STREAM": "1:2"}, writer)
    assert not is_journal({"JOURNAL_STREAM": "nonsense"}, writer)
    os.close(reader)
    os.close(writer)


def test_an_entry_is_one_line_a_field() -> None:
    assert encode({"MESSAGE": "a=b", "PRIORITY": "6"}) == b"MESSAGE=a=b\nPRIORITY=6\n"


def test_several_lines_are_told_with_their_length() -> None:
    assert encode({"MESSAGE": "a\nb"}) == b"MESSAGE\n\x03\0\0\0\0\0\0\0a\nb\n"


@given(st.dictionaries(st.from_regex(r"[A-Z]{1,9}", fullmatch=True), st.text(), max_size=5))
def test_whatever_is_told_comes_back(fields: dict[str, str]) -> None:
    assert decode(encode(fields)) == fields


def test_half_a_surrogate_pair_does_not_lose_the_entry() -> None:
    assert decode(encode({"MESSAGE": "x\ud800"})) == {"MESSAGE": r"x\ud800"}


def test_the_journal_gets_fields(to_journal: Callable[..., None], journal: Journal) -> None:
    to_journal(group="llama", instance="GPU-1.draft", gpu_uuid="GPU-1", empty="")
    log.warning("chunk %d", 3, extra={"phase": "load"})
    log.debug("unseen")
    entry = journal.entry()
    assert int(entry.pop("CODE_LINE")) > 100
    assert entry == {
        "MESSAGE": "chunk 3",
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "preloadd-rank",
        "LOGGER": "preloadd.test",
        "CODE_FILE": __file__,
        "CODE_FUNC": "test_the_journal_gets_fields",
        "PRELOADD_GROUP": "llama",
        "PRELOADD_INSTANCE": "GPU-1.draft",
        "PRELOADD_GPU_UUID": "GPU-1",
        "PRELOADD_PHASE": "load",
    }
    with pytest.raises(BlockingIOError):
        journal.entry()


def test_an_error_of_ours_is_told_with_its_code(
    to_journal: Callable[..., None], journal: Journal
) -> None:
    to_journal()
    log.error("%s", ConfigError("no such file"))
    assert journal.entry()["PRELOADD_ERROR_CODE"] == "config"
    with suppress(ConfigError):
        fail()
    entry = journal.entry()
    assert entry["PRELOADD_ERROR_CODE"] == "config"
    assert entry["MESSAGE"].startswith("it failed\nTraceback")
    assert entry["MESSAGE"].endswith("ConfigError: wrong")


def test_what_nothing_catches_is_logged() -> None:
    code = """if True:
        import sys, threading
        from preloadd.linux.logs import configure
        configure("INFO", {}, fields={"instance": "CPU-0"}, waits=False)
        def fail(error):
            raise error
        for error in SystemExit("unsaid"), ValueError("in a thread"):
            thread = threading.Thread(target=fail, args=[error])
            thread.start()
            thread.join()
        fail(ValueError("in the end"))
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=15,
    )
    assert done.returncode == 1
    told = re.findall(r"^.* CRITICAL CPU-0 .*\nTraceback|^\w+Error: .*", done.stderr, re.MULTILINE)
    assert [told[1], told[3]] == ["ValueError: in a thread", "ValueError: in the end"]
    assert len(told) == 4
    assert "unsaid" not in done.stderr


def fail() -> None:
    try:
        raise_("wrong")
    except ConfigError:
        log.exception("it failed")
        raise


def raise_(text: str) -> None:
    raise ConfigError(text)


@pytest.mark.parametrize("args", [(), ("x", OSError(5, "x")), ({"a": 1},)])
def test_other_errors_have_no_code(args: tuple[object, ...]) -> None:
    assert error_code(logging.LogRecord("n", 40, "f", 1, "m", args, None)) == ""


def test_an_entry_too_long_for_a_datagram_comes_in_a_memory_file(
    to_journal: Callable[..., None], journal: Journal
) -> None:
    to_journal()
    log.info("x" * (1 << 20))
    assert journal.entry()["MESSAGE"] == "x" * (1 << 20)


def test_while_the_journal_is_away_lines_go_to_standard_error(
    to_journal: Callable[..., None], journal: Journal, capfd: pytest.CaptureFixture[str]
) -> None:
    to_journal(path=NOBODY)
    log.warning("chunk %d", 3)
    assert capfd.readouterr().err == "<4>preloadd.test: chunk 3\n"


def test_a_restarted_journal_is_found_again(
    to_journal: Callable[..., None], journal: Journal, capfd: pytest.CaptureFixture[str]
) -> None:
    to_journal()
    journal.close()
    log.info("lost?")
    assert "<6>preloadd.test: lost?" in capfd.readouterr().err
    journal.path.unlink()
    again = Journal(journal.path)
    log.info("back")
    assert again.entry()["MESSAGE"] == "back"
    again.close()


def test_a_journal_that_hangs_is_not_waited_for_and_told_what_it_lost(
    root_logger: logging.Logger, journal: Journal, capfd: pytest.CaptureFixture[str]
) -> None:
    root_logger.addHandler(JournalHandler(journal.path, "x", {}))
    began = time.monotonic()
    for n in range(1000):
        log.error("line %d", n)
    assert time.monotonic() - began < 0.5
    assert capfd.readouterr().err == ""
    taken = len(entries(journal))
    assert 0 < taken < 1000
    log.error("awake")
    notice, awake = entries(journal)
    assert notice["MESSAGE"].startswith(f"{1000 - taken} entries before this one are lost")
    assert (notice["PRIORITY"], notice["SYSLOG_IDENTIFIER"]) == ("4", "x")
    assert awake["MESSAGE"] == "awake"
    log.error("again")
    assert [entry["MESSAGE"] for entry in entries(journal)] == ["again"]


def entries(journal: Journal) -> list[dict[str, str]]:
    """All entries that are there."""
    found = []
    with suppress(BlockingIOError):
        while True:
            found.append(journal.entry())
    return found


def test_a_full_standard_error_is_not_waited_for_either(
    root_logger: logging.Logger, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(5)
    with ours, theirs, ours.makefile("w", buffering=1) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        root_logger.addHandler(JournalHandler(NOBODY, "x", {}))
        began = time.monotonic()
        for n in range(5000):
            log.error("line %d", n)
        assert time.monotonic() - began < 2
        theirs.setblocking(False)
        read = b""
        with suppress(BlockingIOError):
            while True:
                read += theirs.recv(1 << 20)
    lines = read.decode().splitlines()
    assert 0 < len(lines) < 5000
    assert lines[-1] == f"<3>preloadd.test: line {len(lines) - 1}"


def test_the_last_words_are_taken_before_the_process_ends(
    to_journal: Callable[..., None], journal: Journal
) -> None:
    to_journal()
    (handler,) = logging.getLogger().handlers
    log.error("the end")
    late = threading.Timer(0.1, journal.entry)
    began = time.monotonic()
    late.start()
    handler.flush()
    assert 0.1 <= time.monotonic() - began < 0.5
    late.join()


def test_a_record_that_cannot_be_formatted_is_reported(
    to_journal: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    to_journal()
    log.info("%d", "no number")
    assert "no number" in capfd.readouterr().err


def test_a_person_gets_time_and_level(
    root_logger: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    configure(logging.DEBUG, {})
    log.debug("seen")
    line = capfd.readouterr().err
    assert line.endswith(" DEBUG preloadd.test: seen\n")
    assert line.startswith("20")


def test_a_person_is_told_which_rank_speaks(
    root_logger: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    configure("INFO", {}, fields={"instance": "CPU-0%s", "group": "llama"})
    log.info("seen")
    assert capfd.readouterr().err.endswith(" INFO CPU-0%s preloadd.test: seen\n")


def test_configuring_again_does_not_double_the_lines(
    root_logger: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    configure("INFO", {})
    configure("INFO", {})
    log.info("once")
    assert capfd.readouterr().err.count("once") == 1


def test_configuring_again_closes_the_socket(to_journal: Callable[..., None]) -> None:
    before = open_descriptors()
    for _ in range(5):
        to_journal()
    assert open_descriptors() <= before + 1
    assert sys.stderr is not None
