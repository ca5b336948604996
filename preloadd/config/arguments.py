"""An engine's command line arguments in one form, however they were written.

As vLLM's parser takes them: a name begins with two dashes and may have underscores for the dashes
in it; a few have a short form. Its value follows, or stands behind a `=`; several values follow as
words of their own. A dot in a name reaches into a table, which otherwise is given as JSON.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from preloadd.config.files import MAX_DEPTH, TOO_DEEP

SHORT = {
    "O": "optimization-level",
    "ac": "attention-config",
    "cc": "compilation-config",
    "dc": "diffusion-config",
    "dcp": "decode-context-parallel-size",
    "dp": "data-parallel-size",
    "dpa": "data-parallel-address",
    "dpb": "data-parallel-backend",
    "dpe": "data-parallel-external-lb",
    "dph": "data-parallel-hybrid-lb",
    "dpl": "data-parallel-size-local",
    "dpm": "data-parallel-multi-port-external-lb",
    "dpn": "data-parallel-rank",
    "dpp": "data-parallel-rpc-port",
    "dpr": "data-parallel-start-rank",
    "ep": "enable-expert-parallel",
    "h": "help",
    "n": "nnodes",
    "pcp": "prefill-context-parallel-size",
    "pp": "pipeline-parallel-size",
    "q": "quantization",
    "r": "node-rank",
    "sc": "speculative-config",
    "tp": "tensor-parallel-size",
}
"""The names that vLLM has short forms of."""

_NO = "no-"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*(?:(?:\.[^\s.=+]+)+\+?)?\Z")
_NUMBER = re.compile(r"-[0-9.]")
_WHOLE_NUMBER = re.compile(r"-[0-9]+\Z")


class Argument(NamedTuple):
    """One argument. `name` is the long one without dashes before it; `written` is as people wrote
    it. Several `values` are a list, none make a switch."""

    name: str
    values: tuple[str, ...]
    written: str


class Wrong(NamedTuple):
    """What is wrong with an argument, and the remedy. Of one that is a table, it may be wrong with
    the value at `inner` there; dashes in that are underscores."""

    written: str
    text: str
    inner: str = ""


def is_name(word: str) -> bool:
    """Whether a word of a command line begins an argument: all others are values."""
    return len(word) > 1 and word.startswith("-") and not _NUMBER.match(word)


def from_words(words: Iterable[str]) -> Iterator[Argument | Wrong]:
    """The arguments on a command line: whatever follows a name is its value, up to the next one."""
    rest = deque(words)
    while rest:
        word = rest.popleft()
        if not is_name(word):
            yield Wrong(word, "is the value of nothing (write the name of the argument before it)")
            continue
        written, equals, value = _divided(word)
        values = [value] if equals else []
        while rest and not equals and not is_name(rest[0]):
            values.append(rest.popleft())
        yield _argument(written, tuple(values))


def from_table(table: Mapping[str, object]) -> Iterator[Argument | Wrong]:
    """The arguments in a table: `true` is a switch, `false` the opposite, an empty list none."""
    for key, value in table.items():
        try:
            name = _name(key)
            if value != []:
                yield _from_value(name, key, value)
        except ValueError as error:
            yield Wrong(key, str(error))


def words_of(arguments: Iterable[Argument]) -> tuple[str, ...]:
    """The arguments as words for a parser, in the order of names: switches stay in theirs."""
    words: list[str] = []
    for argument in sorted(arguments, key=lambda a: a.name.removeprefix(_NO)):
        name, values = f"--{argument.name}", argument.values
        # Only behind a `=` may a value look like a name; only there several can not stand.
        words += [f"{name}={values[0]}"] if len(values) == 1 else [name, *values]
    return tuple(words)


def _divided(word: str) -> tuple[str, str, str]:
    """Name, `=` and value of a word; short forms of the level need no `=`."""
    if word.startswith("-O") and word != "-O":
        return "-O", "=", word[2:].removeprefix("=")
    return word.partition("=")


def _argument(written: str, values: tuple[str, ...]) -> Argument | Wrong:
    try:
        name = _name(written)
    except ValueError as error:
        return Wrong(written, str(error))
    if "." in name and len(values) != 1:
        return Wrong(written, f"has {len(values)} values (one belongs behind a name with a dot)")
    return Argument(name, values, written)


def _name(written: str) -> str:
    """The long name; ValueError if there is none."""
    bare = written.lstrip("-")
    first, dot, rest = bare.partition(".")
    if not written.startswith("--") and first in SHORT:
        first = SHORT[first]
    elif written.startswith("-") and not written.startswith("--"):
        raise ValueError("is no short form that is known (write the long name)")
    name = f"{first.replace('_', '-')}{dot}{rest}"
    if not _NAME.match(name):
        raise ValueError("cannot be the name of an argument (write it as vLLM's help has it)")
    if name.count(".") >= MAX_DEPTH:
        raise ValueError(TOO_DEEP)
    return name


def _from_value(name: str, key: str, value: object) -> Argument:
    """The argument that a table gives; ValueError if a command line cannot say that."""
    if "." in name:
        return Argument(name, (_json(value),), key)
    match value:
        case True:
            return Argument(name, (), key)
        case False:
            opposite = name.removeprefix(_NO) if name.startswith(_NO) else f"{_NO}{name}"
            return Argument(opposite, (), key)
        case list():
            return Argument(name, _listed(value), key)
        case _:
            return Argument(name, (_text(value),), key)


def _listed(values: Sequence[object]) -> tuple[str, ...]:
    texts = tuple(map(_text, values))
    for text in texts:
        if len(texts) > 1 and text.startswith("-") and not _WHOLE_NUMBER.match(text):
            raise ValueError(f"cannot have {text!r} in a list: vLLM would take it for a name")
    return texts


def _text(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError):
        raise ValueError(
            "holds what no argument can (write text, numbers, true or false, lists and tables)"
        ) from None
