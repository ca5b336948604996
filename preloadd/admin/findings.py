"""What doctor finds: how bad, about what, and what to do; for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from preloadd.domain.lines import one_line


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


def as_table(findings: Sequence[Finding]) -> str:
    """One finding a line, its remedy below it, and a sum at the end."""
    width = max((len(finding.subject) for finding in findings), default=0)
    lines = []
    for finding in findings:
        first, *more = map(one_line, finding.text.splitlines() or [""])
        lines.append(f"{finding.severity:<7}  {finding.subject:<{width}}  {first}")
        indent = " " * (width + 11)
        lines += [f"{indent}{line}" for line in more]
        if finding.remedy:
            lines.append(f"{indent}-> {one_line(finding.remedy)}")
    counts = [(kind, sum(f.severity is kind for f in findings)) for kind in reversed(Severity)]
    told = ", ".join(f"{count} {kind}" for kind, count in counts if count)
    return "\n".join([*lines, "", told or "nothing was looked at", ""])


def as_json(findings: Sequence[Finding]) -> str:
    """The same for machines."""
    body = {"healthy": not has_fault(findings), "findings": [asdict(f) for f in findings]}
    return json.dumps(body, indent=2) + "\n"
