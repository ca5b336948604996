"""Ranks of a made-up group: where each is, and what it claims."""

import msgspec
from hypothesis import strategies as st

from preloadd.domain.settings import Rendezvous
from preloadd.protocol.rendezvous.messages import Join

PATIENCE, SILENCE = 60.0, 8.0
WORLD, NODES = 4, 2

WILD = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text() | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
"""Whatever a field may hold."""


def at(rank: int, world: int = WORLD, nodes: int = NODES) -> Rendezvous:
    return Rendezvous("10.0.0.1", 29700, rank, world, rank * nodes // world, nodes)


def join(rank: int, *, checkpoint: str = "full:00", **changes) -> Join:
    made = Join(
        preloadd="1.0",
        group="llama",
        role="target",
        builder="native",
        world=WORLD,
        rank=rank,
        node=rank * NODES // WORLD,
        nodes=NODES,
        key={"checkpoint": checkpoint},
    )
    return msgspec.structs.replace(made, **changes)


def comes(rank: int) -> Join:
    """What a rank says before it knows what it would load."""
    return join(rank, identifying=True, key={})
