"""The kinds of values that files may hold, and the models that refuse everything else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
)
from pydantic.fields import FieldInfo

from preloadd.config.files import Key
from preloadd.domain.access import LAST_ID, is_no_id

LogLevel = Literal["debug", "info", "warning", "error"]

MIN_CHUNK = 1 << 16
MAX_CHUNK = 1 << 38
PAGE = 4096
MAX_RANKS = 64
"""On one node."""

MAX_WORLD = 1024
"""Of a group over all its nodes."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


class Strict(BaseModel):
    """A table that refuses what it does not know, takes no value for another, never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _whole_pages(value: ByteSize) -> ByteSize:
    """Rounded down, so that 1GB, which is no multiple of a page, may be written."""
    return ByteSize(value - value % PAGE)


def _chunk_or_default(value: ByteSize) -> ByteSize:
    if 0 < value < MIN_CHUNK:
        raise ValueError(f"must be at least {MIN_CHUNK} (0 stands for the default of the memory)")
    return _whole_pages(value)


def listed(value: object) -> object:
    """TOML's lists as the tuples of a frozen model."""
    return tuple(value) if isinstance(value, list) else value


def _one_line(value: str) -> str:
    if not value.strip() or not value.isprintable():
        raise ValueError("must be text on one line (write what is meant, or leave the key out)")
    return value


def _maybe_one_line(value: str) -> str:
    return _one_line(value) if value else value


def _absolute(value: str) -> str:
    if not _one_line(value).startswith("/"):
        raise ValueError(
            f"{value!r} is no absolute path (begin with '/': the service has no current folder)"
        )
    return value


def _maybe_absolute(value: str) -> str:
    return _absolute(value) if value else value


def _named(value: str) -> str:
    if not _NAME.match(value):
        raise ValueError(
            f"{value!r} cannot be part of a unit's name (begin with a letter or digit, go on with "
            "those, '.', '_' and '-', at most 64 in all)"
        )
    return value


def _known(kind: str, value: str) -> str:
    if is_no_id(value):
        text = f"is no number of a {kind}: 0 to {LAST_ID} (write one of these, or a name)"
        raise ValueError(text)
    return value


GroupId = AfterValidator(partial(_known, "group"))
UserId = AfterValidator(partial(_known, "user"))
"""Who may be given by name or by number, as text."""

Text = Annotated[str, AfterValidator(_one_line)]
MaybeText = Annotated[str, AfterValidator(_maybe_one_line)]
AbsolutePath = Annotated[str, AfterValidator(_absolute)]
MaybePath = Annotated[str, AfterValidator(_maybe_absolute)]
Name = Annotated[str, AfterValidator(_named)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(listed)]
Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]
Pause = Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)]
Size = Annotated[int, Field(ge=1, le=MAX_WORLD)]
MaybeChunkBytes = Annotated[ByteSize, Field(ge=0, le=MAX_CHUNK), AfterValidator(_chunk_or_default)]
ChunkBytes = Annotated[ByteSize, Field(ge=MIN_CHUNK, le=MAX_CHUNK), AfterValidator(_whole_pages)]


def fields_of(model: type[BaseModel], at: Key = ()) -> Iterator[tuple[Key, FieldInfo]]:
    """Every setting of `model` with its place; tables are entered, not told."""
    for name, info in model.model_fields.items():
        inner: Any = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from fields_of(inner, (*at, name))
        else:
            yield (*at, name), info


def tables_of(model: type[BaseModel], at: Key = ()) -> Iterator[Key]:
    """The place of every table of `model`."""
    for name, info in model.model_fields.items():
        inner: Any = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield (*at, name)
            yield from tables_of(inner, (*at, name))
