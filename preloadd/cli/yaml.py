"""JSON-like values written as YAML that every parser, of 1.1 and of 1.2, reads back alike."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

# What no parser takes for a number, a date, a boolean or an indicator.
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*\Z")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def dump(value: object) -> str:
    """`value` as a document: dicts with text keys, lists, text, numbers, booleans, None.

    TypeError for anything else.
    """
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: object) -> Iterator[str]:
    """The lines of a value that begins on a line of its own."""
    match value:
        case Mapping() if value:
            for key, item in value.items():
                yield from _entry(f"{_text(_key(key))}:", item)
        case list() | tuple() if value:
            for item in value:
                yield from _item(item)
        case _:
            yield _scalar(value)


def _entry(key: str, value: object) -> Iterator[str]:
    if _is_nested(value):
        yield key
        yield from (f"  {line}" for line in _lines(value))
    else:
        yield f"{key} {_scalar(value)}"


def _item(value: object) -> Iterator[str]:
    first, *rest = _lines(value)
    yield f"- {first}"
    yield from (f"  {line}" for line in rest)


def _is_nested(value: object) -> bool:
    return isinstance(value, Mapping | list | tuple) and bool(value)


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a key must be text, not {key!r}")
    return key


def _scalar(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return _text(value)
        case int():
            return str(int(value))
        case float():
            return _number(float(value))
        case Mapping():
            return "{}"
        case list() | tuple():
            return "[]"
        case _:
            raise TypeError(f"{value!r} has no form in YAML")


def _number(value: float) -> str:
    if math.isnan(value):
        return ".nan"
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    mantissa, exponent, power = repr(value).partition("e")
    # YAML 1.1 takes a number without a point for text.
    point = "" if "." in mantissa else ".0"
    return f"{mantissa}{point}{exponent}{power}"


def _text(text: str) -> str:
    if _PLAIN.match(text) and text.lower() not in _WORDS:
        return str(text)
    return f'"{"".join(map(_character, text))}"'


def _character(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    if char.isprintable():
        return char
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
