"""What the rank daemons of a group that spans hosts say to each other.

Nobody believes what a peer says about itself: it is compared with what the others say, and told.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from preloadd.protocol.rendezvous.wording import TOLD, ranks_named

MAX_FRAME = 64 * 1024
"""Bytes of an encoded message."""

MAX_WORLD = 16_384
"""Ranks: so many numbers fit a frame."""

BEATS = 4
"""Signs of life in the time after which one is missed."""

Number = Annotated[int, Meta(ge=0, le=MAX_WORLD)]
Name = Annotated[str, Meta(max_length=256)]
Value = Annotated[str, Meta(max_length=MAX_FRAME)]
Told = Annotated[str, Meta(max_length=TOLD)]
Silence = Annotated[float, Meta(gt=0)]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages. Unknown fields are ignored, unknown tags refused."""


class Join(Message, frozen=True, tag="join"):
    """Member, first: who this is, and what it claims to be about to load.

    `key` is without the fields that tell a rank's own place. `identifying`: it does not know it
    yet, and will say so again when it does. `serving`: it has these weights already, and needs
    nobody's leave. Said again on one connection, it is another load. `group` is its own name for
    it, which is compared with no other's: whoever comes to one port is of one group. `nodes` is 0
    where nobody knows how many there are, and then `node` says nothing. `drafts`: its group holds a
    draft, of which the key says nothing. `silence`: seconds until it takes one that it does not
    hear for lost.
    """

    preloadd: Name
    group: Name
    role: Name
    builder: Name
    world: Number
    rank: Number
    node: Number
    nodes: Number
    key: Annotated[dict[Name, Value], Meta(max_length=512)]
    drafts: bool = False
    silence: Silence = math.inf
    serving: bool = False
    identifying: bool = False

    def __str__(self) -> str:
        nodes = [self.node] if self.nodes else []
        return ranks_named([self.rank], nodes, self.role)


class Beat(Message, frozen=True, tag="beat"):
    """Both ways: a sign of life. Rank 0 tells which ranks are `missing` while it gathers, whether
    it serves (`free`), so that its loss ends nothing that has only begun, and the `silence` of the
    least patient of all, so that it is heard from everybody in time."""

    missing: Annotated[tuple[Number, ...], Meta(max_length=MAX_WORLD)] = ()
    free: bool = False
    silence: Silence = math.inf


class Agreed(Message, frozen=True, tag="agreed"):
    """From rank 0: all ranks are there and agree, so go on.

    `free`: rank 0 serves, so its own loss ends no load any more. Said again when that becomes so.
    """

    free: bool = False


class Done(Message, frozen=True, tag="done"):
    """From a member: it serves, whatever others do."""


class Failed(Message, frozen=True, tag="failed"):
    """From a member, last: its load failed, and why."""

    why: Told


class Ended(Message, frozen=True, tag="ended"):
    """From rank 0, last: this load has to end, and why."""

    why: Told


FromMember = Join | Beat | Done | Failed
FromConvener = Beat | Agreed | Ended
