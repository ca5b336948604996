"""JSON that somebody else wrote: bounded, and without what Python's reader lets pass.

Whatever `decode` returns can be written and read again by any Python, at any depth of its stack.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NoReturn

MAX_NBYTES = 8 << 20
MAX_DEPTH = 32
"""Far below what any reader's stack bears."""

MAX_CONTAINERS = 1 << 18
"""Lists and objects: each costs some 60 bytes of memory for two of the file."""

MAX_DIGITS = 20
"""Of an integer. Python refuses to read those of more than some thousands."""


class Malformed(ValueError):
    """It is not such JSON; the text says why, and is to follow the name of the file."""


class NoJson(Malformed):
    """It is no JSON at all."""


def decode(raw: bytes, limit: int = MAX_NBYTES) -> object:
    """The value that `raw` holds, of at most `limit` bytes; Malformed."""
    if len(raw) > limit:
        raise Malformed(f"it has more than {limit:,} bytes")
    if raw.count(b"[") + raw.count(b"{") > MAX_CONTAINERS:
        raise Malformed(f"it has more than {MAX_CONTAINERS:,} lists and objects")
    try:
        value: object = json.loads(
            raw.decode("utf-8"),
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_constant,
            object_pairs_hook=distinct,
        )
    except Malformed:
        raise
    except UnicodeDecodeError as error:
        raise Malformed(f"it is no UTF-8 from byte {error.start} on") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise NoJson(f"it is no JSON: {error}") from None
    if is_deeper(value, MAX_DEPTH):
        raise _too_deep()
    return value


def is_deeper(value: object, levels: int) -> bool:
    """Whether tables and lists are nested deeper than so many levels. Does not recurse itself."""
    level = [value]
    for _ in range(levels):
        level = [child for one in level for child in _children(one)]
        if not level:
            return False
    return True


def _too_deep() -> Malformed:
    return Malformed(f"it is nested deeper than {MAX_DEPTH} levels")


def _children(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise Malformed(f"it has an integer of {len(text):,} digits")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Malformed("it has a number beyond those a computer calculates with")
    return value


def _constant(text: str) -> NoReturn:
    raise Malformed(f"it has {text}, which is no JSON")


def distinct(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """An object of these; Malformed for a name that is there twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise Malformed(f"it has {twice[:80]!r} twice")
    return found
