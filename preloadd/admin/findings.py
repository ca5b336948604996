"""What doctor finds: how bad, about what, and what to do; for people and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from preloadd.admin.columns import many
from preloadd.domain.lines import one_line

LEAST_WIDTH = 20
"""Columns that a text has, however narrow the terminal is."""


class Severity(StrEnum):
    """`FAULT` keeps something from working; `WARNING` will, or already costs something."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. Everything worse than a note has a remedy."""

    severity: Severity
    subject: str
    text: str
    remedy: str = ""


def ok(subject: str, text: str) -> Finding:
    """All is well."""
    return Finding(Severity.OK, subject, text)


def note(subject: str, text: str, remedy: str = "") -> Finding:
    """Worth knowing."""
    return Finding(Severity.NOTE, subject, text, remedy)


def warning(subject: str, text: str, remedy: str) -> Finding:
    """Works, but not as it should."""
    return Finding(Severity.WARNING, subject, text, remedy)


def fault(subject: str, text: str, remedy: str) -> Finding:
    """Does not work."""
    return Finding(Severity.FAULT, subject, text, remedy)


def has_fault(findings: Sequence[Finding]) -> bool:
    """Whether something does not work."""
    return any(finding.severity is Severity.FAULT for finding in findings)


def as_table(findings: Sequence[Finding], columns: int | None = None) -> str:
    """One finding a line, its remedy below it, and a sum at the end; for a terminal of so many
    `columns` in as many lines as it takes."""
    width = max((len(finding.subject) for finding in findings), default=0)
    indent = " " * (width + 11)
    lines: list[str] = []
    for finding in findings:
        first, *more = map(one_line, finding.text.splitlines() or [""])
        lines += _wrapped(f"{finding.severity:<7}  {finding.subject:<{width}}  ", first, columns)
        for line in more:
            lines += _wrapped(indent, line, columns)
        if finding.remedy:
            lines += _wrapped(f"{indent}-> ", one_line(finding.remedy), columns)
    counts = [(kind, sum(f.severity is kind for f in findings)) for kind in reversed(Severity)]
    told = ", ".join(
        f"{count} {kind}" if kind is Severity.OK else many(kind, count)
        for kind, count in counts
        if count
    )
    return "\n".join([*lines, "", told or "nothing was looked at", ""])


def as_json(findings: Sequence[Finding]) -> str:
    """The same for machines."""
    body = {"healthy": not has_fault(findings), "findings": [asdict(f) for f in findings]}
    return json.dumps(body, indent=2) + "\n"


def _wrapped(start: str, text: str, columns: int | None) -> list[str]:
    """Lines of at most `columns`, unless a word is longer; below the first one indented alike."""
    if columns is None or len(start) + len(text) <= columns:
        return [f"{start}{text}"]
    width = max(columns - len(start), LEAST_WIDTH)
    first, *more = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [
        ""
    ]
    return [f"{start}{first}", *(f"{' ' * len(start)}{line}" for line in more)]
