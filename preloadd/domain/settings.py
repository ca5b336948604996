"""What a rank and its loader are told: plain frozen values, already validated.

They travel as JSON in a sealed memfd (launcher to rank) and in one packet (rank to loader).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from preloadd.domain.access import Policy
from preloadd.domain.endpoint import Endpoint
from preloadd.domain.files import FileIdentity
from preloadd.domain.ids import Instance, Role
from preloadd.domain.placement import Parallel, Placement
from preloadd.errors import ConfigError


class Memory(StrEnum):
    """Where the bytes live."""

    HOST = "host"
    CUDA = "cuda"
    HIP = "hip"


CHUNK_BYTES: dict[Memory, int] = {Memory.HOST: 1 << 30, Memory.CUDA: 4 << 30, Memory.HIP: 4 << 30}
"""Largest single allocation unless told otherwise. On a GPU each costs every attachment 0.1 ms."""


class Builder(StrEnum):
    """What fills an arena: the checkpoint's own bytes, or what vLLM makes of them."""

    NATIVE = "native"
    VLLM = "vllm"


class Layout(StrEnum):
    """In which form the weights of vLLM lie: see `LAYOUTS`.

    `processed`: after vLLM's post-processing. `plain`: the same, but for weights of linear layers,
    which stay ordinary tensors. `raw`: before it; every engine processes for itself.
    """

    AUTO = "auto"
    PROCESSED = "processed"
    PLAIN = "plain"
    RAW = "raw"


LAYOUTS: dict[Memory, tuple[Layout, ...]] = {
    Memory.HOST: (Layout.PLAIN, Layout.RAW),
    Memory.CUDA: (Layout.PROCESSED,),
    Memory.HIP: (Layout.PROCESSED,),
}
"""What layouts each memory can hold; `auto` is the first of them."""


def resolved(asked: Layout, builder: Builder, memory: Memory) -> Layout:
    """The layout that is meant; ConfigError if there is none such."""
    if builder is not Builder.VLLM:
        if asked is not Layout.AUTO:
            raise ConfigError(
                f"{asked.value!r} is a layout of vLLM's weights, and the builder is "
                f"{builder.value!r} (leave it out, or choose the builder 'vllm')"
            )
        return asked
    possible = LAYOUTS[memory]
    if asked is Layout.AUTO:
        return possible[0]
    if asked not in possible:
        raise ConfigError(
            f"{asked.value!r} is no layout in {memory.value} memory (leave it out, or choose "
            f"{' or '.join(repr(layout.value) for layout in possible)})"
        )
    return asked


class Reader(StrEnum):
    """What reads the files of a checkpoint: our own reader, or the library of that name."""

    PREAD = "pread"
    INSTANTTENSOR = "instanttensor"


class Digest(StrEnum):
    """How checkpoint content is identified where file identities do not settle it."""

    SAMPLED = "sampled"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Access:
    """Who may attach besides root and the daemon's own user: group and user names or numbers."""

    groups: tuple[str, ...] = ()
    users: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds. `speak`: until a connection's first request; `send`: until a reply left the socket;
    `silence`: how long a loader may report no progress; `stop`: from SIGTERM to SIGKILL;
    `profiling`: how long an engine that measures free memory may keep others from freeing any;
    `rendezvous`: how long all ranks of a group that spans hosts may take to come together;
    `peer_silence`: how long none of them may be heard before it is lost."""

    speak: float = 10.0
    send: float = 10.0
    silence: float = 300.0
    stop: float = 10.0
    profiling: float = 300.0
    rendezvous: float = 600.0
    peer_silence: float = 15.0


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint: its local folder, hub ids resolved, and what the user wrote to name it."""

    path: str
    name: str
    revision: str = ""


@dataclass(frozen=True, slots=True)
class Sources:
    """The checkpoints of a group: the target's, and the draft's if ranks hold that."""

    target: Source
    draft: Source | None = None

    def own(self, role: Role) -> Source:
        """What a rank of this role loads."""
        return self.draft or self.target if role is Role.DRAFT else self.target

    def partner(self, role: Role) -> Source | None:
        """What a rank of this role has beside it."""
        return self.target if role is Role.DRAFT else self.draft


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What is loaded. `path` is a local folder, hub ids resolved; `name` what the user wrote.

    For the builder vllm, `engine_args` are vLLM's own arguments in canonical form, without what
    other fields say, and `layout` is never `auto`. Native, there are neither. `partner` is the
    other model of a speculation: the target of a draft, and the draft of a target if ranks hold it.
    """

    path: str
    name: str
    revision: str = ""
    builder: Builder = Builder.NATIVE
    memory: Memory = Memory.HOST
    reader: Reader = Reader.PREAD
    digest: Digest = Digest.SAMPLED
    chunk_bytes: int = 1 << 30
    placement: Placement = field(default_factory=lambda: Placement(Parallel()))
    engine_args: tuple[str, ...] = ()
    layout: Layout = Layout.AUTO
    partner: Source | None = None


@dataclass(frozen=True, slots=True)
class Versions:
    """What is installed for the loader's interpreter; '' where that was not looked for, or not
    found. `environment` are the variables that choose for vLLM's weights, as `key.table` has it."""

    vllm: str = ""
    torch: str = ""
    transformers: str = ""
    flashinfer: str = ""
    deep_gemm: str = ""
    triton_kernels: str = ""
    environment: str = "{}"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of a group that spans hosts meet before they load, and who this one is there.

    Rank 0 listens on `address`, which is its host's. Ranks are those of one `role`, from 0.
    Where nobody knows how many `nodes` there are, and so which `node` this is, both are 0.
    """

    address: str
    port: int
    rank: int
    world: int
    node: int
    nodes: int
    role: Role = Role.TARGET

    @property
    def where(self) -> str:
        """Address and port as people are told them."""
        return str(Endpoint(self.address, self.port))

    @property
    def setting(self) -> str:
        """What says the port."""
        draft = "draft_" if self.role is Role.DRAFT else ""
        return f"weight_cache_{draft}master_port"


@dataclass(frozen=True, slots=True)
class Warmup:
    """What is made ready besides weights. `autotune`: FlashInfer's tables are tuned; `stores` are
    asked for what is wanted, in this order, and given what is made; `trust_bundles`: compiled code
    is given to others and taken from them; `deadline`: seconds for all of it."""

    autotune: bool = True
    stores: tuple[str, ...] = ()
    trust_bundles: bool = False
    deadline: float = 900.0


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of a certificate and its key, and of the authorities that peers' are checked by."""

    cert: str = ""
    key: str = ""
    ca: str = ""


@dataclass(frozen=True, slots=True)
class Seeding:
    """Where this rank answers others that are to warm up, and whom it asks itself, each with the
    port of this very rank. `weights`: whether weights are fetched from there as well. `tokens` is
    the folder in which those are kept that are accepted, and the own secret; `token_file` a file
    that holds tokens as they are. No token is ever in here: settings are logged, and kept.
    `within`: seconds that a source has to answer, which may be starting itself."""

    listen: Endpoint | None = None
    source: Endpoint | None = None
    weights: bool = False
    tokens: str = ""
    token_file: str = ""
    tls: Tls | None = None
    within: float = 60.0


@dataclass(frozen=True, slots=True)
class RankSettings:
    """Everything one rank daemon needs. It makes the folder `<socket_dir>/<instance>` itself.

    `derived` says that the socket directory was found by preloadd's own search order, so that
    stricter rules hold for it (see `linux.paths`). `peers` are the other instances of the group on
    this host that have its role; `python` is the loader's interpreter, '' the rank's own; the rank
    itself fills in its `versions`. There is a `rendezvous` where the group is on several hosts.
    """

    group: str
    instance: str
    socket_dir: str
    derived: bool
    model: ModelSettings
    access: Access = field(default_factory=Access)
    deadlines: Deadlines = field(default_factory=Deadlines)
    max_connections: int = 256
    peers: tuple[str, ...] = ()
    log_level: str = "info"
    python: str = ""
    versions: Versions = Versions()
    rendezvous: Rendezvous | None = None
    warmup: Warmup = Warmup()
    seeding: Seeding | None = None

    @property
    def parsed_instance(self) -> Instance:
        """`instance` as a value."""
        return Instance.parse(self.instance)

    @property
    def labels(self) -> dict[str, str]:
        """What names this rank in every line of its log."""
        device = self.parsed_instance.device
        return {"group": self.group, "instance": self.instance, "gpu_uuid": device}


RUNNING = "running.json"
"""Name of the file beside its socket in which a rank of a service manager keeps `Running`."""


@dataclass(frozen=True, slots=True)
class Running:
    """What a rank daemon was started with; as JSON for its next life and for administrators.

    `policy` is what its access settings meant then: names may not be to be looked up later. `files`
    are those of the checkpoint that its weights are from; none if they could not be seen.
    `made_from` stands for the configuration that said so; '' if that is not known.
    """

    version: str
    pid: int
    settings: RankSettings
    policy: Policy | None = None
    files: tuple[FileIdentity, ...] = ()
    made_from: str = ""
