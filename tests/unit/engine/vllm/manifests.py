"""Manifests by hand, of what a builder might have left."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from preloadd.domain import dtypes
from preloadd.domain.manifest import Kind, Manifest, Storages, Tensors, check
from preloadd.domain.recipe import LAYOUT, Recipe

_generations = itertools.count()


class Row(NamedTuple):
    """A tensor: a view of the storage of that number, `skip` elements into it."""

    name: str
    kind: Kind
    storage: int
    dtype: str = "F32"
    shape: tuple[int, ...] = (4,)
    strides: tuple[int, ...] | None = None
    skip: int = 0


def manifest(
    rows: Sequence[Row], storages: Sequence[tuple[int, int, int]], chunks: tuple[int, ...]
) -> Manifest:
    """One by hand; storages are chunk, offset and length in bytes."""
    names, kinds, of, codes, shapes, strides, skips = map(list, zip(*rows, strict=True))
    made = Manifest(
        generation=f"{next(_generations):032x}",
        layout=LAYOUT,
        backend="host",
        chunks=chunks,
        storages=Storages(*map(list, zip(*storages, strict=True))),
        tensors=Tensors(
            name=names,
            kind=[int(kind) for kind in kinds],
            dtype=[dtypes.CODES[code] for code in codes],
            shape=shapes,
            strides=strides,
            storage=of,
            skip=skips,
        ),
        key={},
        recipe=Recipe({}, ()),
    )
    check(made)
    return made
