"""What a process pays for alone, as the kernel counts it. Sizes are bytes."""

from __future__ import annotations

import re
from pathlib import Path

_ANONYMOUS = re.compile(r"^Anonymous:\s+(\d+) kB$", re.MULTILINE)


def rss_anon(pid: int | str = "self") -> int:
    """Resident anonymous memory of a process: what nobody else can share."""
    return _field(pid, "RssAnon")


def rss(pid: int | str = "self") -> int:
    """All resident memory of a process, shared or not."""
    return _field(pid, "VmRSS")


def anonymous_of(name: str, pid: int | str = "self") -> int:
    """Anonymous bytes in mappings whose path begins with `name`: private copies of their pages."""
    return sum(
        1024 * int(match.group(1))
        for mapping in _mappings(pid)
        if f" {name}" in mapping.partition("\n")[0]
        for match in _ANONYMOUS.finditer(mapping)
    )


def _mappings(pid: int | str) -> list[str]:
    text = Path(f"/proc/{pid}/smaps").read_text()
    return re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text)


def _field(pid: int | str, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(name)
