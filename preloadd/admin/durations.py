"""Lengths of time as people write them: 90s, 30m, 12h, 90d."""

from __future__ import annotations

import re

from preloadd.errors import ConfigError

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_WRITTEN = re.compile(r"(\d+)([smhd])\Z", re.ASCII)
_DIGITS = 20
LONGEST_S = 100 * 365 * 86400


def seconds(text: str, flag: str, *, least: float = 0.0) -> float:
    """The seconds that `text` stands for, at least so many; ConfigError names the flag."""
    found = _WRITTEN.match("0s" if text == "0" else text)
    if found is None:
        raise ConfigError(
            f"{flag}: {text!r} is no length of time: write a number and s, m, h or d, such as 90d"
        )
    # So many digits are too long in any unit, and Python reads no thousands of them.
    length = int(found[1]) * _UNITS[found[2]] if len(found[1]) < _DIGITS else LONGEST_S + 1
    if length < least:
        raise ConfigError(f"{flag}: {text!r} is over at once: write a longer time, such as 90d")
    if length > LONGEST_S:
        raise ConfigError(f"{flag}: {text!r} is too long: write {LONGEST_S // 86400}d or less")
    return float(length)
