"""What `config check` found, for people and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from preloadd.admin.check import Report
from preloadd.admin.columns import many
from preloadd.domain.lines import one_line


def complaints(report: Report) -> str:
    """Everything that is wrong, one fault a line, then what could not be seen as it should be."""
    told = [*map(str, report.faults), *(f"note: {text}" for text in report.notes)]
    # A fault may have several lines, and other programs have said part of some.
    return "".join(f"{one_line(line)}\n" for text in told for line in text.splitlines())


def summary(report: Report) -> str:
    """One line about what is right; nothing where something is wrong."""
    if report.faults:
        return ""
    groups = many("group", len(report.models))
    ranks = many("rank", sum(len(model.instances) for model in report.models))
    nbytes = sum(model.nbytes for model in report.models)
    return f"nothing is wrong: {groups}, {ranks}, {nbytes:,} bytes of checkpoints\n"


def as_json(report: Report) -> str:
    """The same for machines."""
    body = {"valid": not report.faults, **asdict(report)}
    return json.dumps(body, indent=2) + "\n"
