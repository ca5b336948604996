"""What the operator sees: bars on a terminal, plain lines elsewhere. Nothing else prints.

A display never fails: a reader that went away must not cost the weights.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Protocol, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from preloadd.domain.amounts import progress, size
from preloadd.errors import PreloadError
from preloadd.linux.outlet import outlet

LINE_EVERY = 2.0
"""Seconds between two plain lines of one rank in one phase."""

DRAW_EVERY = 0.1
"""Seconds between two drawings of the bars."""


@dataclass(frozen=True, slots=True)
class Report:
    """How far a rank is: bytes done of total in this phase (a total of 0 is not known)."""

    phase: str
    done: int
    total: int


class Display(Protocol):
    """Where the launcher tells people what happens."""

    def say(self, text: str) -> None:
        """Show lines that stay."""

    def progress(self, name: str, report: Report, *, now: float) -> None:
        """Show how far the rank `name` is; `now` in seconds of any steady clock."""

    def settle(self) -> None:
        """Take down what moves, until the next `progress`."""


def parse_report(text: str) -> Report | None:
    """The report in `<phase>;<done bytes>;<total bytes>`; None if it is none."""
    phase, _, numbers = text.partition(";")
    done, _, total = numbers.partition(";")
    if not (phase.isprintable() and phase and _is_count(done) and _is_count(total)):
        return None
    return Report(phase, int(done), int(total))


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def complain(stream: TextIO, error: PreloadError) -> None:
    """Say on `stream` why the launcher gives up; every fault on a line of its own."""
    lines = str(error).splitlines() or [error.code.value]
    between = "\n  " if len(lines) > 1 else " "
    with outlet(stream) as out:
        out.write(f"preloadd run:{between}{between.join(lines)}\n")


def make_display(stream: TextIO) -> Display:
    """Bars if `stream` is a terminal that can move its cursor, else lines."""
    console = Terminal(file=stream, highlight=False, soft_wrap=True)
    if console.is_terminal and not console.is_dumb_terminal:
        return BarDisplay(console)
    return LineDisplay(stream)


@dataclass(frozen=True, slots=True)
class _Shown:
    """Of one rank: its phase, when that began and where, and the last line and its time."""

    phase: str
    began: float
    base: int
    last: float
    line: str


class LineDisplay:
    """Plain lines: each change of phase, and every `LINE_EVERY` seconds what is new."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown: dict[str, _Shown] = {}

    def say(self, text: str) -> None:
        """Show lines that stay."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def progress(self, name: str, report: Report, *, now: float) -> None:
        """Show a line if the phase is new, or if the last line is old and there is another one."""
        shown = self._shown.get(name)
        line = f"{name}: {progress(report.phase, report.done, report.total)}"
        if shown is None or shown.phase != report.phase:
            self._shown[name] = _Shown(report.phase, now, report.done, now, line)
            self.say(line)
        elif now - shown.last >= LINE_EVERY:
            rate = (report.done - shown.base) / (now - shown.began)
            line = f"{line}{f', {size(rate)}/s' if rate > 0 else ''}"
            self._shown[name] = replace(shown, last=now, line=line)
            if line != shown.line:
                self.say(line)

    def settle(self) -> None:
        """Forget phases, so that the next one is told again."""
        self._shown.clear()


class Terminal(Console):
    """A console that falls silent when nobody reads it; rich's own would end the process."""

    def on_broken_pipe(self) -> None:
        """Say nothing any more."""
        self.quiet = True


class BarDisplay:
    """One bar a rank. There is no refresh thread: bars are drawn when a report comes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: Progress | None = None
        self._tasks: dict[str, tuple[TaskID, str]] = {}
        self._drawn = float("-inf")

    def say(self, text: str) -> None:
        """Show lines that stay, above the bars."""
        with contextlib.suppress(OSError, ValueError):
            self._console.print(text, markup=False)

    def progress(self, name: str, report: Report, *, now: float) -> None:
        """Move the bar of `name`; a new phase starts it over."""
        with contextlib.suppress(OSError, ValueError):
            bars = self._running()
            fresh = self._move(bars, name, report)
            if fresh or report.done >= report.total or now - self._drawn >= DRAW_EVERY:
                bars.refresh()
                self._drawn = now

    def settle(self) -> None:
        """Remove the bars."""
        with contextlib.suppress(OSError, ValueError):
            if self._bars is not None:
                self._bars.stop()
        self._bars = None
        self._tasks.clear()

    def _running(self) -> Progress:
        if self._bars is None:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(compact=True),
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._bars.start()
        return self._bars

    def _move(self, bars: Progress, name: str, report: Report) -> bool:
        """Whether the phase is new."""
        task, phase = self._tasks.get(name, (None, ""))
        if task is None:
            task = bars.add_task("", total=None)
        elif phase != report.phase:
            bars.reset(task)
        self._tasks[name] = task, report.phase
        told = escape(f"{name} {report.phase}")
        bars.update(task, description=told, completed=report.done, total=report.total or None)
        return phase != report.phase
