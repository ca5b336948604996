"""The memory that weights lie in, and how the hardware behind it is. Values, and the host's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HOST = "host"
"""The id of the memory that all `CPU-n` devices share."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, or the host's memory. Sizes are bytes; None is what the driver does not tell.

    What a driver keeps of a GPU's memory for itself is neither used nor part of the total.
    ECC counts are those since the driver was loaded; `xids` are the numbers of the driver's error
    reports since the supervisor began to look, each with how often it came. Without `persistence`
    the driver gives up what no process has open.
    """

    id: str
    name: str
    memory_used: int | None = None
    memory_total: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    xids: tuple[tuple[int, int], ...] = ()
    persistence: bool | None = None
    problem: str = ""


Sample = Callable[[], Sequence[Device]]
"""Looks at devices; blocks for a moment, and never raises."""


def holder(device: str) -> str:
    """The id of the memory in which the weights of a rank on `device` lie."""
    return HOST if device.startswith("CPU-") else device


def host(root: Path = Path("/")) -> tuple[Device, ...]:
    """The host's memory; nothing where a sandbox hides it."""
    with suppress(OSError):
        text = (root / "proc/meminfo").read_text()
        found = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", text, re.MULTILINE))
        if len(found) == 2:
            total, available = int(found["MemTotal"]) * 1024, int(found["MemAvailable"]) * 1024
            return (Device(HOST, "host memory", total - available, total),)
    return ()
