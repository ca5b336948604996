"""The one formatter of log lines: for the journal with priorities, else for a person's eyes."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

_PRIORITIES = (
    (logging.CRITICAL, 2),
    (logging.ERROR, 3),
    (logging.WARNING, 4),
    (logging.INFO, 6),
)
_DEBUG = 7


class PriorityFormatter(logging.Formatter):
    """Begins each line with `<N>`, which the journal strips and takes for the entry's priority."""

    def format(self, record: logging.LogRecord) -> str:
        """The record, every line of a traceback with the priority: the journal splits at lines."""
        prefix = f"<{priority(record.levelno)}>"
        return "\n".join(prefix + line for line in super().format(record).splitlines())


def priority(level: int) -> int:
    """The syslog priority of a level of `logging`."""
    return next((number for floor, number in _PRIORITIES if level >= floor), _DEBUG)


def is_journal(environ: Mapping[str, str], fd: int) -> bool:
    """Whether `fd` leads to the journal: the manager left its identity in $JOURNAL_STREAM."""
    found = os.fstat(fd)
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def configure(level: str | int, environ: Mapping[str, str]) -> None:
    """Send the log of this process from `level` up to standard error; for `main` only."""
    handler = logging.StreamHandler(sys.stderr)
    if is_journal(environ, 2):
        handler.setFormatter(PriorityFormatter("%(name)s: %(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
