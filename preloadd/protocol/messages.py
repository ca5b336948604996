"""Every message of the wire and of the loader link, as msgspec structs.

One packet is one message: a version byte, then msgpack of a tagged struct (see `docs/protocol.md`).
Sizes are bytes, times are seconds. Nothing here is trusted: `protocol.connection` decides.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec

from preloadd.domain.files import FileIdentity
from preloadd.domain.leases import Mode
from preloadd.domain.lifecycle import State
from preloadd.domain.settings import RankSettings

VERSION = 1
"""First byte of every packet. A peer with another one is answered with `Refused` and hung up on."""

MAX_PACKET = 64 * 1024
"""Bytes. The kernel's default send buffer would take 212,960."""


SETTINGS = "settings"
"""Name of the inherited descriptor in which a launcher tells a rank its `RankSettings`, as JSON."""

TOKENS = "seed-tokens"
"""Name of the one in which it hands tokens of seeding to a rank, one a line."""

LINK = "link"
"""Name of the inherited descriptor through which a loader talks to its rank."""

REHEARSAL = "PRELOADD_REHEARSAL"
"""Environment: by what an engine shows that it is the one that its rank warms up with."""

MAX_WARMUP = 128
"""Files of warm-up state that are told at once: one for each rank of a group, say."""


Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e10)]
"""A time that can be shown: no NaN, nothing infinite, and no more than three centuries."""


class Reason(StrEnum):
    """Why a daemon that is there does not hand out weights."""

    STARTING = "starting"
    LOADING = "loading"
    RELEASED = "released"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    STOPPING = "stopping"
    BUSY = "busy"


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages. Unknown fields are ignored, unknown tags refused."""


# ---- engine or operator to rank ---------------------------------------------------------------


class Attach(Message, frozen=True, tag="attach"):
    """Ask for the weights. `files` are the identities of the engine's own shards, or empty.

    `rehearsal` is the pass of the engine that a rank has started itself (see `REHEARSAL`).
    """

    key: dict[str, str]
    device: str
    mode: Mode = Mode.ZERO_COPY
    client: str = ""
    files: tuple[FileIdentity, ...] = ()
    rehearsal: str = ""


class Release(Message, frozen=True, tag="release"):
    """Free the weights, parked descriptors included."""


class Load(Message, frozen=True, tag="load"):
    """Load again after a release (operator)."""


class Memory(Message, frozen=True, tag="memory"):
    """Ask how much device memory an engine with this key would find already taken."""

    key: dict[str, str]
    device: str
    files: tuple[FileIdentity, ...] = ()


class Profiling(Message, frozen=True, tag="profiling"):
    """Say on a lease that this engine now measures how much memory is free, or does so no more.

    Meanwhile the rank frees none, for so long at most from when a lease said so first.
    """

    active: bool


class Status(Message, frozen=True, tag="status"):
    """Ask how the rank is."""


class Watch(Message, frozen=True, tag="watch"):
    """Be told of every change of state from now on; the first `StateChanged` comes at once."""


class WarmupAsked(Message, frozen=True, tag="warmup"):
    """Ask for what there is of a kind of warm-up state for this configuration (see `warmup`)."""

    kind: str
    config_hash: str


# ---- rank to engine or operator -----------------------------------------------------------------


class Granted(Message, frozen=True, tag="granted"):
    """Descriptors follow in this packet: the manifest, then every chunk in order.

    `profiling` and `warmup`: the rank knows the requests of these names. One that does not would
    hang up over them.
    """

    generation: str
    lease: str
    backend: str
    manifest: int
    chunks: tuple[int, ...]
    profiling: bool = False
    warmup: bool = False


class Field(Message, frozen=True):
    """One differing field with both values, cut to 512 characters each."""

    name: str
    daemon: str
    engine: str


class Mismatched(Message, frozen=True, tag="mismatch"):
    """The keys differ; at most 64 fields are told."""

    fields: tuple[Field, ...]


class NotAvailable(Message, frozen=True, tag="unavailable"):
    """No weights now. With `LOADING`, `done` of `total` bytes are those of the load's `phase`."""

    reason: Reason
    detail: str
    phase: str = ""
    done: int = 0
    total: int = 0


class Done(Message, frozen=True, tag="done"):
    """A request without an answer of its own was carried out."""


class Refused(Message, frozen=True, tag="refused"):
    """The request is not acceptable: `code` is one of `errors.ErrorCode`."""

    code: str
    detail: str


class MemoryHeld(Message, frozen=True, tag="memory-held"):
    """Bytes of device memory that an engine with this key must count as already there."""

    nbytes: int


class LeaseTold(Message, frozen=True):
    """One lease as told by `status`."""

    id: str
    client: str
    pid: int
    mode: Mode
    generation: str
    profiling: bool = False


class StatusTold(Message, frozen=True, tag="status-told"):
    """How the rank is. `counters` tell what loading cost, now and in this process; see the docs.

    `done` of `total` bytes are those of the present `phase` of a load: the next begins at 0 again.
    `warmup` are lines for people: what is made ready besides the weights, and what is wrong there.
    `divided` says why nobody gets these weights, where other ranks have those of other files.
    """

    group: str
    instance: str
    device: str
    role: str
    pid: int
    version: str
    state: State
    detail: str = ""
    model: str = ""
    backend: str = ""
    builder: str = ""
    generation: str = ""
    adopted: bool = False
    tensors: int = 0
    tensor_bytes: int = 0
    arena_bytes: int = 0
    chunks: int = 0
    phase: str = ""
    done: int = 0
    total: int = 0
    uptime_s: Seconds = 0.0
    ready_s: Seconds = 0.0
    leases: tuple[LeaseTold, ...] = ()
    lease_count: int = 0
    counters: dict[str, int] = {}
    key: dict[str, str] = {}
    warmup: tuple[str, ...] = ()
    divided: str = ""

    def shared_with(self, kind: type) -> dict[str, Any]:
        """What is told here under names that a value of `kind` has as well, to be kept there."""
        names = set(self.__struct_fields__) & set(kind.__annotations__)
        return {name: getattr(self, name) for name in names}


class StateChanged(Message, frozen=True, tag="state"):
    """Sent to watchers. The same generation after a restart means: nothing to do.

    While it warms up, a rank lets in only who shows a pass, of which `warming` is the SHA-256.
    `checkpoint` is that of the key of its weights.
    """

    state: State
    generation: str = ""
    warming: str = ""
    checkpoint: str = ""


class WarmupTold(Message, frozen=True, tag="warmup-told"):
    """What there is: names, none twice, and bytes. The files follow in this packet, in order."""

    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()


Request = Attach | Release | Load | Memory | Profiling | Status | Watch | WarmupAsked
Reply = (
    Granted
    | Mismatched
    | NotAvailable
    | Done
    | Refused
    | MemoryHeld
    | StatusTold
    | StateChanged
    | WarmupTold
)


# ---- rank and its loader ------------------------------------------------------------------------


class Order(Message, frozen=True, tag="order"):
    """Rank to loader, once: what to load.

    Where that replaces parked weights, `frees` are the bytes that are freed once all is ready.
    """

    settings: RankSettings
    frees: int | None = None


class Identified(Message, frozen=True, tag="identified"):
    """Loader to rank, before it fills anything and when nothing is in its way: the key of what it
    would load, empty where no ranks meet.

    Only where they meet first (`RankSettings.rendezvous`), or parked weights are replaced
    (`Order.frees`). The loader waits for `Proceed`.
    """

    key: dict[str, str]


class Proceed(Message, frozen=True, tag="proceed"):
    """Rank to loader: all ranks agree on what it has identified, and what it replaces is gone."""


class Progress(Message, frozen=True, tag="progress"):
    """Loader to rank: bytes done of total in this phase; also the sign of life."""

    phase: str
    done: int = 0
    total: int = 0


class ChunkFilled(Message, frozen=True, tag="chunk"):
    """Loader to rank: one chunk; its descriptor is in this packet. Not sealed yet."""

    index: int
    nbytes: int


class ManifestWritten(Message, frozen=True, tag="manifest"):
    """Loader to rank: all chunks are filled and unmapped. Carries the sealed manifest."""

    nbytes: int


class Warmable(Message, frozen=True, tag="warmable"):
    """Loader to rank, after the manifest: which tables engines over these weights look for.

    `root` is the folder for them, `ranks` are (data-parallel rank, rank) of the whole world,
    `metadata` is what FlashInfer says of this environment. With `tunes` the loader waits for
    `Tune`, and tunes its own if it is told to; else `why_not` says why it does not, and `untuned`
    that engines certainly tune nothing. `identity` is what code that vLLM compiles here
    has to be compiled for; empty where it compiles none.
    """

    config_hash: str = ""
    dp_rank: int = 0
    rank: int = 0
    root: str = ""
    ranks: tuple[tuple[int, int], ...] = ()
    metadata: dict[str, str | None] = {}
    tunes: bool = False
    why_not: str = ""
    untuned: bool = False
    identity: dict[str, str] = {}


class Tune(Message, frozen=True, tag="tune"):
    """Rank to loader: whether it is to tune. If not, the table is where it is looked for."""

    wanted: bool


class Tuned(Message, frozen=True, tag="tuned"):
    """Loader to rank: how tuning ended. `failure` is for people; weights are good all the same."""

    entries: int = 0
    hits: int = 0
    seconds: Seconds = 0.0
    failure: str = ""


class Failed(Message, frozen=True, tag="failed"):
    """Loader to rank, last: why there will be no weights. `code` is one of `errors.ErrorCode`."""

    code: str
    detail: str


LoaderReport = Identified | Progress | ChunkFilled | ManifestWritten | Warmable | Tuned | Failed
