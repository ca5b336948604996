"""Options of the engine side, as users write them. An unknown key is an error, not a surprise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Self

from preloadd.domain.leases import Mode
from preloadd.errors import ConfigError


class Where(StrEnum):
    """Which memory an engine uses weights in: that of the GPU torch works on, or the host's."""

    AUTO = "auto"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Options:
    """How an engine attaches.

    `memory`: where its weights are to be; host memory is used only if asked for. `socket_path`: one
    daemon's socket; None finds it by device. `socket_dir`: the folder of sockets; None searches the
    usual ones. `mode`: map read-only, or copy and release. `fallback`: load from disk when there
    are no weights to attach; False waits up to `state_timeout_s` seconds for a daemon that is not
    there or still loading, then raises. A daemon may take as long to free what was copied.
    `connect_timeout_s`: seconds for one connection and for each answer on it.
    """

    memory: Where = Where.AUTO
    socket_path: Path | None = None
    socket_dir: Path | None = None
    mode: Mode = Mode.ZERO_COPY
    fallback: bool = True
    connect_timeout_s: float = 5.0
    state_timeout_s: float = 300.0

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Self:
        """Options out of user input; ConfigError lists every fault."""
        if not isinstance(given, Mapping):
            raise ConfigError(f"options are {given!r}: expected a table such as {{'mode': 'copy'}}")
        known = {entry.name for entry in fields(cls)}
        faults = [
            f"unknown option {name!r}: expected one of {', '.join(sorted(known))}"
            for name in sorted(given.keys() - known)
        ]
        values: dict[str, Any] = {}
        for name in sorted(given.keys() & known):
            try:
                values[name] = _PARSERS[name](given[name])
            except (TypeError, ValueError) as error:
                faults.append(f"option {name}: {error}")
        if values.get("socket_path") is not None and values.get("socket_dir") is not None:
            faults.append("socket_path and socket_dir exclude each other: give one")
        if faults:
            raise ConfigError("\n".join(faults))
        return cls(**values)


def _path(value: object) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, (str, Path)) or not str(value):
        raise ValueError(f"{value!r} is no path")
    return Path(value)


def _one_of(choices: type[StrEnum], value: object) -> StrEnum:
    try:
        return choices(str(value))
    except ValueError:
        meaning = f" ({_MEANINGS[choices]})" if choices in _MEANINGS else ""
        raise ValueError(f"{value!r} is none of {', '.join(choices)}{meaning}") from None


_MEANINGS: dict[type[StrEnum], str] = {Where: "auto is the memory of the GPU"}
"""What choices mean whose names do not say it."""


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")  # noqa: TRY004
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is no number of seconds")  # noqa: TRY004
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no number of seconds")
    if value > _MOST_S:
        raise ValueError(f"{value!r} is more than a day: give {_MOST_S} seconds or less")
    return float(value)


_MOST_S = 86_400


_PARSERS: dict[str, Callable[[object], object]] = {
    "memory": partial(_one_of, Where),
    "socket_path": _path,
    "socket_dir": _path,
    "mode": partial(_one_of, Mode),
    "fallback": _flag,
    "connect_timeout_s": _seconds,
    "state_timeout_s": _seconds,
}
