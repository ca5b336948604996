"""What vLLM's arguments say of speculative decoding, and whether the draft has ranks of its own.

Standard library only: whoever cannot import what judges files asks this as well. The generator of
systemd, which can import nothing of this package, comes to the same answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from preloadd.config.arguments import Argument, Wrong
from preloadd.config.files import TOO_DEEP, is_deep
from preloadd.domain.strict_json import Malformed, NoJson, decode, distinct
from preloadd.domain.vllm import DRAFT_METHODS

CONFIG = "speculative-config"

_NUMBER = "num_speculative_tokens"

PIECES = {
    "spec-method": "method",
    "spec-model": "model",
    "spec-tokens": _NUMBER,
}
"""Arguments that say one thing of the configuration each."""

_TEXTS = ("method", "model", "revision")

_MTP = "mtp"
_ONCE = "(write all of it in speculative-config)"


@dataclass(frozen=True, slots=True)
class Speculation:
    """vLLM's configuration of speculative decoding, as far as it is written.

    `by_key` is the argument that says a key, as people wrote it; `written` is that which stands for
    all others.
    """

    values: Mapping[str, object]
    by_key: Mapping[str, str] = field(default_factory=dict, compare=False)
    written: str = field(default=CONFIG, compare=False)

    @property
    def method(self) -> str:
        """How drafts are made; '' leaves that for vLLM to guess. Old names of `mtp` are `mtp`."""
        method = str(self.values.get("method", ""))
        return _MTP if method.endswith(f"_{_MTP}") else method

    @property
    def model(self) -> str:
        """The draft's checkpoint; '' is that of the target."""
        return str(self.values.get("model", ""))

    @property
    def revision(self) -> str:
        """The revision of `model`."""
        return str(self.values.get("revision", ""))

    @property
    def held(self) -> bool:
        """Whether the draft is of a kind that can have ranks."""
        return self.method in DRAFT_METHODS

    @property
    def why_not_held(self) -> str:
        """What to tell people, behind where it is written, of a draft that has no ranks; '' if it
        can have some."""
        if self.held:
            return ""
        named = f"method {self.method!r}" if self.method else "no method"
        return (
            f"names {named}: engines load such a draft from disk, if it has weights at "
            f"all; ranks hold drafts of the methods {', '.join(sorted(DRAFT_METHODS))}"
        )

    def where(self, key: str) -> str:
        """The argument that says `key`, or that could."""
        return self.by_key.get(key, self.written)

    @property
    def argument(self) -> Argument:
        """The whole as one argument in canonical form."""
        text = json.dumps(dict(self.values), ensure_ascii=False, sort_keys=True)
        return Argument(CONFIG, (text,), CONFIG)


class Gathered(NamedTuple):
    """Arguments without those that speak of a draft, what these say, and what is wrong with it."""

    others: list[Argument]
    speculation: Speculation | None
    wrong: list[Wrong]


def gather(arguments: Iterable[Argument], said: Mapping[str, str]) -> Gathered:
    """Find what the arguments say of speculative decoding, and complete it with what is `said`.

    vLLM itself would silently drop a whole configuration of which parts stand elsewhere as well.
    """
    others, whole, parts = [], [], []
    for argument in arguments:
        name = argument.name.partition(".")[0]
        if argument.name == CONFIG:
            whole.append(argument)
        elif name == CONFIG or name in PIECES:
            parts.append(argument)
        else:
            others.append(argument)
    if not whole and not parts:
        return Gathered(others, None, [])
    found, wrong = _read(whole, parts, said)
    if not wrong:
        wrong += _unfit(found)
    return Gathered(others, found, wrong)


def _read(
    whole: Sequence[Argument], parts: Sequence[Argument], said: Mapping[str, str]
) -> tuple[Speculation, list[Wrong]]:
    """What is said by arguments that say it all, the last of which counts, and by others."""
    values: dict[str, object] = {}
    by_key: dict[str, str] = {}
    wrong, written = [], (whole or parts)[-1].written
    for each in whole:
        if fault := _read_whole(each, values):
            wrong.append(fault)
        else:
            written = each.written
    for each in parts:
        if fault := _read_part(each, values, alone=not whole):
            wrong.append(fault)
        else:
            by_key[_keys(each)[0]] = each.written
    return Speculation({**said, **values}, by_key, written), wrong


def _read_whole(argument: Argument, values: dict[str, object]) -> Wrong | None:
    try:
        told = _value(argument.values[0] if len(argument.values) == 1 else "")
        if not isinstance(told, dict):
            return Wrong(argument.written, 'is no table or JSON object (write {"method": ...})')
        # Underscores as vLLM itself has them; null is what is not said.
        named = distinct([(key.replace("-", "_"), value) for key, value in told.items()])
    except Malformed as error:
        return Wrong(argument.written, _odd(error))
    values.clear()
    values.update({key: value for key, value in named.items() if value is not None})
    return None


def _read_part(argument: Argument, values: dict[str, object], *, alone: bool) -> Wrong | None:
    path = argument.name.partition(".")[2]
    if not alone and path:
        return Wrong(argument.written, f"stands beside the whole {_ONCE}")
    keys = _keys(argument)
    if len(argument.values) != 1 or path.endswith("+"):
        return Wrong(argument.written, f"must have one value {_ONCE}")
    (text,) = argument.values
    # Method and model are text to vLLM whatever they look like; in a table, as JSON has it.
    try:
        value = text if not path and keys[0] != _NUMBER else _value(text)
    except Malformed as error:
        return Wrong(argument.written, _odd(error))
    return _put(values, keys, value, argument.written)


def _keys(part: Argument) -> list[str]:
    """Where in the configuration the value of a part belongs."""
    name, _, path = part.name.partition(".")
    first, *inner = path.split(".") if path else [PIECES[name]]
    return [first.replace("-", "_"), *inner]


def _put(
    values: dict[str, object], keys: Sequence[str], value: object, written: str
) -> Wrong | None:
    """Set the value at a place where nothing is yet."""
    at = values
    for key in keys[:-1]:
        inner = at.setdefault(key, {})
        if not isinstance(inner, dict):
            return Wrong(written, f"says {key} again {_ONCE}")
        at = inner
    if keys[-1] in at:
        return Wrong(written, f"says {keys[-1]} again {_ONCE}")
    at[keys[-1]] = value
    return None


def _value(text: str) -> object:
    """What `text` says as JSON, or itself if it is none; Malformed."""
    try:
        found = decode(text.encode(errors="surrogatepass"))
    except NoJson:
        return text
    if is_deep(found):
        raise Malformed(f"it {TOO_DEEP}")
    return found


def _odd(error: Malformed) -> str:
    """What is wrong, after the name of an argument."""
    text = str(error).removeprefix("it ")
    return text if text.endswith(")") else f"{text} (correct it)"


def _unfit(found: Speculation) -> Iterator[Wrong]:
    """Of the whole, what would have vLLM, or a rank, fail later."""
    odd = [key for key in _TEXTS if not isinstance(found.values.get(key, ""), str)]
    for key in odd:
        text = f"has a {key} that is no text (write it in quotes)"
        yield Wrong(found.where(key), text, key)
    number = found.values.get(_NUMBER, 1)
    if type(number) is not int or number < 1:  # true is an int as well
        text = f"has {_NUMBER} that are no whole number from 1 on (write one, without quotes)"
        yield Wrong(found.where(_NUMBER), text, _NUMBER)
    written = found.where("method")
    if odd or not found.held or found.model:
        return
    if found.method != _MTP:
        text = f"names no model (give the checkpoint of the {found.method} head as model)"
        yield Wrong(written, text)
    elif _NUMBER not in found.values:
        yield Wrong(written, f"does not say how many tokens are guessed (add {_NUMBER})")
