"""The effective settings with the origin of each value, for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

from pydantic import BaseModel

from preloadd.config.engine import layers_of
from preloadd.config.files import Key, Layers, spelled
from preloadd.config.host import GroupFile, HostSettings, Survey
from preloadd.config.strict import fields_of

DEFAULT = "default"


class Value(NamedTuple):
    """One effective setting; nothing among them is secret."""

    key: str
    value: object
    origin: str


def host_values(found: Survey) -> list[Value]:
    """Every setting of the host, which has no faults."""
    assert found.host is not None
    return list(_values(found.host, HostSettings, found.layers))


def group_values(file: GroupFile) -> list[Value]:
    """Every setting of a group, which has no faults."""
    assert file.group is not None
    layers = layers_of(file.document)
    return list(_values(file.group, type(file.group), layers))


def as_table(found: Survey) -> str:
    """TOML-like lines, each with its origin."""
    parts = ["[host]", *_lines(host_values(found))]
    for file in found.groups:
        parts += ["", f"[{file.path.name}]", *_lines(group_values(file))]
    return "\n".join(parts) + "\n"


def as_json(found: Survey) -> str:
    """The same for machines."""
    body = {
        "host": _object(host_values(found)),
        "groups": [
            {"file": str(file.path), "settings": _object(group_values(file))}
            for file in found.groups
        ],
    }
    return json.dumps(body, indent=2) + "\n"


def _values(settings: BaseModel, model: type[BaseModel], layers: Layers) -> Iterator[Value]:
    for key, _ in fields_of(model):
        yield Value(spelled(key), _at(settings, key), layers.origins.get(key, DEFAULT))


def _at(settings: BaseModel, key: Key) -> object:
    value: object = settings
    for name in key:
        value = getattr(value, name)
    return value


def _lines(values: list[Value]) -> Iterator[str]:
    written = [_written(value) for value in values]
    width = max(map(len, written))
    for text, value in zip(written, values, strict=True):
        yield f"{text:<{min(width, 60)}}  # {value.origin}"


def _written(value: Value) -> str:
    if value.value is None:
        return f"{value.key} is not given"
    return f"{value.key} = {json.dumps(value.value, ensure_ascii=False)}"


def _object(values: list[Value]) -> dict[str, dict[str, object]]:
    return {value.key: {"value": value.value, "origin": value.origin} for value in values}
