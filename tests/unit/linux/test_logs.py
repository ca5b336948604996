from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from preloadd.linux.logs import PriorityFormatter, configure, is_journal, priority

log = logging.getLogger("preloadd.test")


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    # `configure` closes the handlers it replaces, and these are pytest's.
    root.handlers.clear()
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


def journal_of(fd: int) -> dict[str, str]:
    found = os.fstat(fd)
    return {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}


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


def test_the_journal_gets_priorities(
    root_logger: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    configure("INFO", journal_of(2))
    log.warning("chunk %d", 3)
    log.debug("unseen")
    assert capfd.readouterr().err == "<4>preloadd.test: chunk 3\n"


def test_a_person_gets_time_and_level(
    root_logger: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    configure(logging.DEBUG, {})
    log.debug("seen")
    line = capfd.readouterr().err
    assert line.endswith(" DEBUG preloadd.test: seen\n")
    assert line.startswith("20")


def test_configuring_again_does_not_double_the_lines(
    root_logger: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    configure("INFO", {})
    configure("INFO", {})
    log.info("once")
    assert capfd.readouterr().err.count("once") == 1
