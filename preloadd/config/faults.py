"""What a validation found, told as lines an operator can act on: key, what is wrong, remedy."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from preloadd.config.files import HOST_FILE, Fault, Key, Layers, spelled
from preloadd.config.strict import fields_of, tables_of

Model = TypeVar("Model", bound=BaseModel)

_LONGEST_GIVEN = 60

_EXPECTED = {
    "bool_type": "must be true or false, without quotes",
    "byte_size": 'must be a number of bytes, or text with a unit such as "1GiB"',
    "byte_size_unit": 'must be a number of bytes, or text with a unit such as "1GiB"',
    "dict_type": "must be a table",
    "finite_number": "must be a finite number",
    "float_type": "must be a number, without quotes",
    "int_type": "must be a whole number, without quotes",
    "model_type": "must be a table",
    "string_type": "must be text in quotes",
    "too_long": "has too many entries",
    "too_short": "must not be empty",
    "tuple_type": "must be a list in [ ]",
}
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}

_HOSTS = {
    "weight_cache_socket_dir": "socket_dir",
    "weight_cache_health_host": "supervisor.host",
    "weight_cache_health_port": "supervisor.port",
    "rendezvous_timeout": "deadlines.rendezvous_s",
    "peer_silence_timeout": "deadlines.peer_silence_s",
}
"""Keys of the host's file by the names of the flags of `preloadd run` that say the same."""


def validated(
    model: type[Model], layers: Layers, fallback: str
) -> tuple[Model | None, list[Fault]]:
    """The value that `layers` make, or all that is wrong with them.

    `fallback` is the origin of a fault that no file wrote, such as a missing key.
    """
    try:
        return model.model_validate(layers.values), []
    except ValidationError as error:
        found = error.errors(include_url=False)
        return None, [
            told(fault, model, layers.origin(fault["loc"]) or fallback) for fault in found
        ]


def understood(model: type[Model], said: object) -> tuple[Model, frozenset[str]]:
    """What a table says of `model`, all of whose keys may be left out, and which keys are unknown.

    Those with a fault are, and left out. Behind one that the model does not have may be any that is
    not there and has such a name, or none like it.
    """
    known = frozenset(model.model_fields)
    if not isinstance(said, dict):
        return model(), known
    try:
        return model.model_validate(said), frozenset()
    except ValidationError as error:
        wrong = {str(fault["loc"][0]) for fault in error.errors(include_url=False)}
    right = {key: value for key, value in said.items() if key not in wrong}
    absent = known - said.keys()
    for name in wrong - known:
        wrong |= set(get_close_matches(name, absent, n=len(known))) or absent
    return model.model_validate(right), frozenset(wrong)


def told(fault: ErrorDetails, model: type[BaseModel], origin: str) -> Fault:
    """One finding of a validation of `model`."""
    key = spelled(fault["loc"])
    if fault["type"] == "missing":
        return Fault(origin, key, "must be given (add the key)")
    if fault["type"] == "extra_forbidden":
        names = tuple(map(str, fault["loc"]))
        return Fault(origin, key, f"no such key ({unknown_hint(model, names)})")
    if fault["type"] == "value_error":
        return Fault(origin, key, fault["msg"].removeprefix("Value error, "))
    return Fault(origin, key, f"{_wanted(fault)} (given: {_given(fault['input'])})")


def unknown_hint(model: type[BaseModel], key: Key) -> str:
    """What somebody may have meant who wrote `key`, which `model` does not have."""
    *table, name = key
    if name in _HOSTS:
        return f"write {_HOSTS[name]} in {HOST_FILE}, for all groups"
    places = [(place, False) for place, _ in fields_of(model)]
    places += [(place, True) for place in tables_of(model)]
    here = [place[-1] for place, _ in places if list(place[:-1]) == table]
    for place, is_table in places:
        if place[-1] == name and not is_table:
            return _belongs(place[:-1])
    if near := get_close_matches(name, here, n=1):
        return f"did you mean {near[0]!r}?"
    everywhere = {place[-1]: place for place, is_table in places if not is_table}
    if near := get_close_matches(name, everywhere, n=1):
        return f"did you mean {spelled(everywhere[near[0]])!r}?"
    return f"known here: {', '.join(here)}"


def _belongs(table: Sequence[str]) -> str:
    if not table:
        return "it belongs at the top of the file, before the first [table]"
    return f"it belongs under [{spelled(table)}]"


def _wanted(fault: ErrorDetails) -> str:
    kind, context = fault["type"], fault.get("ctx", {})
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return f"must be {words} {context[bound]}"
    if kind == "literal_error":
        return f"must be {context['expected']}"
    return _EXPECTED.get(kind, fault["msg"])


def _given(value: object) -> str:
    """`value` as it may stand on one line; never long."""
    text = repr(value)
    return text if len(text) <= _LONGEST_GIVEN else f"{text[:_LONGEST_GIVEN]}…"
