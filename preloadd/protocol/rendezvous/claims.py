"""What ranks claim to load: what of a key is said to others, and what two say differently."""

from __future__ import annotations

from collections.abc import Mapping

from preloadd.domain.key import OWN_PLACE, Difference, bounded, differences
from preloadd.protocol.codec import cut
from preloadd.protocol.rendezvous.messages import Join

_MAX_KEY = 48 * 1024
"""Bytes of a key's values: the rest of a frame is for their names, and all else in it."""

_DIGESTED_FROM = 128
"""Characters from which a value is said by its digest, where all would be too much."""

_TOLD = 160
"""Characters of a differing value that are told."""

_FIELDS = 8


def shared(key: Mapping[str, str]) -> dict[str, str]:
    """What all ranks have in common of a key, by digests if it would not fit a frame."""
    found = {name: value for name, value in key.items() if name not in OWN_PLACE}
    if sum(len(value.encode()) for value in found.values()) <= _MAX_KEY:
        return found
    return {name: bounded(value, _DIGESTED_FROM) for name, value in found.items()}


def disagreement(one: Join, other: Join) -> str:
    """What two ranks claim differently, naming both with both values; '' if they agree."""
    found = differences(_claims(other), _claims(one))
    if not found:
        return ""
    told = "; ".join(_told(one, other, each) for each in found[:_FIELDS])
    told += f"; and {len(found) - _FIELDS} more" if len(found) > _FIELDS else ""
    if one.group != other.group:
        # Maybe those are two groups, and one of them has the other one's port.
        ours, theirs = cut(one.group, _TOLD), cut(other.group, _TOLD)
        told += f"; {one} is of group {ours}, {other} of {theirs}"
    return told


def _claims(join: Join) -> dict[str, str]:
    mine = {"preloadd": join.preloadd, "role": join.role, "builder": join.builder}
    return {**join.key, **mine, "draft": "held" if join.drafts else "not held"}


def _told(one: Join, other: Join, difference: Difference) -> str:
    """`daemon` is the other one's value."""
    field = cut(difference.field, _TOLD)
    ours, theirs = (cut(value, _TOLD) for value in (difference.engine, difference.daemon))
    return f"{field} is {ours!r} for {one} but {theirs!r} for {other}"
