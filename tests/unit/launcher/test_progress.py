import io
import os
import pty

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.launcher.progress import (
    BarDisplay,
    LineDisplay,
    Report,
    Terminal,
    make_display,
    parse_report,
)


@pytest.mark.parametrize(
    ("text", "report"),
    [
        ("reading;5;10", Report("reading", 5, 10)),
        ("warming up;0;0", Report("warming up", 0, 0)),
        ("", None),
        ("reading", None),
        ("reading;5", None),
        ("reading;5;10;15", None),
        (";5;10", None),
        ("reading;-5;10", None),
        ("reading;5;", None),
        ("reading;٣;10", None),
        ("read\x1b[2Jing;5;10", None),
        ("reading;" + "9" * 5000 + ";10", None),
    ],
)
def test_reports_are_parsed_or_ignored(text, report):
    assert parse_report(text) == report


@given(st.text())
def test_parsing_never_fails(text):
    parse_report(text)


def lines(*reports: tuple[str, str, int, int, float]) -> list[str]:
    stream = io.StringIO()
    display = LineDisplay(stream)
    for name, phase, done, total, now in reports:
        display.progress(name, Report(phase, done, total), now=now)
    return stream.getvalue().splitlines()


def test_one_line_every_two_seconds_for_each_rank():
    steps = [("CPU-0", "reading", n << 20, 100 << 20, n / 10) for n in range(61)]
    shown = lines(*steps)
    assert shown == [
        "CPU-0: reading 100.0 MiB",
        "CPU-0: reading 20.0 MiB of 100.0 MiB (20%), 10.0 MiB/s",
        "CPU-0: reading 40.0 MiB of 100.0 MiB (40%), 10.0 MiB/s",
        "CPU-0: reading 60.0 MiB of 100.0 MiB (60%), 10.0 MiB/s",
    ]


def test_the_same_line_is_not_shown_again():
    rehearsal = [("GPU-0", "warming up: starting an engine", 0, 0, n * 5.0) for n in range(5)]
    assert lines(*rehearsal) == ["GPU-0: warming up: starting an engine"]
    stuck = [("GPU-0", "reading", 0, 4 << 20, n * 5.0) for n in range(3)]
    moves = ("GPU-0", "reading", 1 << 20, 4 << 20, 20.0)
    assert lines(*stuck, moves) == [
        "GPU-0: reading 4.0 MiB",
        "GPU-0: reading 1.0 MiB of 4.0 MiB (25%), 51.2 KiB/s",
    ]


def test_ranks_do_not_silence_each_other():
    shown = lines(("CPU-0", "reading", 0, 9, 0.0), ("CPU-1", "reading", 0, 9, 0.1))
    assert [line.partition(":")[0] for line in shown] == ["CPU-0", "CPU-1"]


def test_each_change_of_phase_is_a_line_and_starts_the_rate_over():
    shown = lines(
        ("CPU-0", "planning", 0, 0, 0.0),
        ("CPU-0", "reading", 1024, 4096, 0.1),
        ("CPU-0", "reading", 3072, 4096, 2.1),
        ("CPU-0", "sealing", 0, 0, 2.2),
    )
    assert shown == [
        "CPU-0: planning",
        "CPU-0: reading 1.0 KiB of 4.0 KiB (25%)",
        "CPU-0: reading 3.0 KiB of 4.0 KiB (75%), 1.0 KiB/s",
        "CPU-0: sealing",
    ]


def test_settled_lines_are_told_again():
    stream = io.StringIO()
    display = LineDisplay(stream)
    for _ in range(2):
        display.progress("CPU-0", Report("reading", 0, 0), now=0.0)
        display.settle()
    assert stream.getvalue().count("reading") == 2


def test_reader_that_went_away_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    for display in (LineDisplay(stream), BarDisplay(Terminal(file=stream, force_terminal=True))):
        display.say("hello")
        display.progress("CPU-0", Report("reading", 0, 10), now=0.0)
        display.settle()
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_pipes_and_files_get_lines(tmp_path):
    with (tmp_path / "log").open("w") as stream:
        assert isinstance(make_display(stream), LineDisplay)


def test_terminal_gets_bars(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        display = make_display(stream)
        assert isinstance(display, BarDisplay)
        display.progress("CPU-0", Report("reading", 1 << 20, 4 << 20), now=0.0)
        display.progress("CPU-0", Report("[b]sealing", 4 << 20, 4 << 20), now=0.2)
        display.settle()
        display.say("[ready] all")
        stream.flush()
        shown = ""
        while "[ready] all" not in shown:
            shown += os.read(master, 1 << 16).decode(errors="replace")
    os.close(master)
    assert "CPU-0 reading" in shown
    assert "1.0/4.0 MiB" in shown
    assert "CPU-0 [b]sealing" in shown


def test_dumb_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        assert isinstance(make_display(stream), LineDisplay)
    os.close(master)


def test_bars_are_drawn_at_most_ten_times_a_second():
    stream = io.StringIO()
    display = BarDisplay(Terminal(file=stream, force_terminal=True, width=100))
    for step in range(1, 1000):
        display.progress("CPU-0", Report("reading", step, 1000), now=step / 1000)
    display.settle()
    assert stream.getvalue().count("reading") < 20
