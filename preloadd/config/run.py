"""What `preloadd run` can be told, validated and made into the settings of each rank.

Nothing deeper sees an unchecked value. The names of fields are the names of flags.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from preloadd.config.arguments import from_words
from preloadd.config.drafts import Speculation
from preloadd.config.files import shortened
from preloadd.config.seeding import Seed, bundle_faults, seed_faults, seeding
from preloadd.config.spread import Once, Spread, rendezvous, spread_faults
from preloadd.config.strict import ChunkBytes, GroupId, LogLevel, MaybeText, Seconds, UserId
from preloadd.config.vllm import Division, divide
from preloadd.domain.ids import DeviceId, Instance
from preloadd.domain.launch import Launch, flag
from preloadd.domain.nodes import Node, plan_node
from preloadd.domain.placement import peers
from preloadd.domain.settings import (
    CHUNK_BYTES,
    Access,
    Builder,
    Deadlines,
    Digest,
    Layout,
    Memory,
    ModelSettings,
    RankSettings,
    Reader,
    Source,
    Sources,
    Warmup,
    resolved,
)
from preloadd.errors import ConfigError

_Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
_PlainText = Annotated[str, StringConstraints(strip_whitespace=True)]
_EMPTY = "must not be empty: write what is meant"
_LEFT_OUT = f"{_EMPTY}, or leave the option out"
_LONGEST_PATH = 4095  # the kernel takes no longer one
_USUAL = Deadlines()
_SEED = Seed()


def _absolute(value: object) -> object:
    """Paths as a child in any folder would find them; '~' stands for the home folder."""
    if not isinstance(value, str):
        return value
    if not value:
        raise ValueError(_LEFT_OUT)  # not what `Path` has it for, which is this folder
    try:
        return Path(value).expanduser().absolute()
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"cannot be followed from here ({error}): give an absolute path"
        ) from error


def _printable(value: Path | None) -> Path | None:
    if value is not None and not str(value).isprintable():
        raise ValueError("has characters that cannot be printed: give another path, or rename")
    return value


_MaybePath = Annotated[Path | None, BeforeValidator(_absolute)]
_PrintablePath = Annotated[_MaybePath, AfterValidator(_printable)]


def _text(path: Path | None) -> str:
    return "" if path is None else str(path)


def _split(value: object) -> object:
    """Names with commas between them."""
    return tuple(value.split(",")) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class Chosen:
    """Where weights will live on this node: the memory, and the device of each rank in order.

    `told` says so to people, with the reason where nobody chose.
    """

    memory: Memory
    devices: tuple[DeviceId, ...]
    told: str


class RunOptions(Spread):
    """The flags of `preloadd run`, which arrive as text. Sizes are bytes. `engine_args` are vLLM's
    own ones in canonical form."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Annotated[_Text, Field(max_length=_LONGEST_PATH), Once]
    revision: _PlainText = ""
    builder: Builder = Builder.NATIVE
    memory: Literal["auto", "host", "cuda", "hip"] = "auto"
    gpus: Annotated[tuple[_Text, ...], BeforeValidator(_split)] = ()
    reader: Reader = Reader.PREAD
    digest: Digest = Digest.SAMPLED
    chunk_bytes: ChunkBytes | None = None
    layout: Layout = Layout.AUTO
    weight_cache_socket_dir: _PrintablePath = None
    weight_cache_health_host: _Text = "127.0.0.1"
    weight_cache_health_port: Annotated[int | None, Field(ge=0, le=65535)] = None
    access_group: tuple[Annotated[_Text, GroupId], ...] = ()
    access_user: tuple[Annotated[_Text, UserId], ...] = ()
    rendezvous_timeout: Seconds = _USUAL.rendezvous
    peer_silence_timeout: Seconds = _USUAL.peer_silence
    seed_listen_host: MaybeText = ""
    seed_listen_port: int | None = None
    seed_source_host: MaybeText = ""
    seed_source_port: int | None = None
    seed_token_file: _PrintablePath = None
    seed_tls_cert: _PrintablePath = None
    seed_tls_key: _PrintablePath = None
    seed_tls_ca: _PrintablePath = None
    seed_weights: bool = False
    seed_timeout: Seconds = _SEED.within_s
    disable_flashinfer_autotune: bool = False
    trust_bundles: bool = False
    warmup_timeout: Seconds = Warmup().deadline
    warmup_cache_stores: Annotated[tuple[_Text, ...], BeforeValidator(_split)] = ()
    no_draft: bool = False
    restart_ranks: bool = False
    python: str = ""
    log_level: LogLevel = "info"
    engine_args: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.memory == "host" and self.gpus:
            raise ValueError(
                "--memory host and --gpus contradict each other: leave out the one or the other"
            )
        if self.memory in ("host", "hip") and self.reader is Reader.INSTANTTENSOR:
            raise ValueError(
                f"--reader instanttensor and --memory {self.memory}: it reads into the memory of "
                "CUDA devices only: leave out --reader"
            )
        return self

    @model_validator(mode="after")
    def _buildable(self) -> Self:
        native = self.builder is Builder.NATIVE
        if native and self.engine_args:
            word = shortened(self.engine_args[0])
            raise ValueError(f"{word}: add --builder vllm, whose option this is")
        if not native and self.reader is not Reader.PREAD:
            raise ValueError(
                f"--reader {self.reader} and --builder vllm: vLLM reads by itself: leave out "
                "--reader, and choose with --load-format"
            )
        if native or self.memory != "auto":
            try:
                self.layout_in(Memory.HOST if self.memory == "auto" else Memory(self.memory))
            except ConfigError as error:
                raise ValueError(str(error)) from None
        return self

    def layout_in(self, memory: Memory) -> Layout:
        """The layout of weights in `memory`; ConfigError if there is none such."""
        try:
            return resolved(self.layout, self.builder, memory)
        except ConfigError as error:
            raise ConfigError(f"--layout: {error}") from None

    @property
    def speculation(self) -> Speculation | None:
        """What vLLM is told of speculative decoding."""
        return divide(from_words(self.engine_args)).speculation

    @property
    def drafted(self) -> Speculation | None:
        """What is said of the draft if there are ranks for it."""
        found = self.speculation
        return found if found is not None and found.held and not self.no_draft else None

    @property
    def placed(self) -> Launch:
        """What this node is told of ranks, while its devices are not known."""
        health = self.weight_cache_health_port or 0
        others = {"weight-cache-health-port": health}
        drafts, ports = self.drafted is not None, self.seed.ports
        return self.launch(drafts=drafts, others=others, seed_ports=ports)

    @property
    def seed(self) -> Seed:
        """What is said of seeding."""
        return Seed(
            listen_host=self.seed_listen_host,
            listen_port=self.seed_listen_port,
            source_host=self.seed_source_host,
            source_port=self.seed_source_port,
            token_file=_text(self.seed_token_file),
            tls_cert=_text(self.seed_tls_cert),
            tls_key=_text(self.seed_tls_key),
            tls_ca=_text(self.seed_tls_ca),
            weights=self.seed_weights,
            within_s=self.seed_timeout,
        )

    @property
    def ranks(self) -> range:
        """The ranks of the group that are on this node."""
        return plan_node(self.placed).ranks

    @property
    def daemons(self) -> int:
        """How many rank daemons this node has, those of drafts among them."""
        node = plan_node(self.placed)
        return len(node.ranks) + len(node.drafting)

    @property
    def share(self) -> Fraction:
        """How much of the model this node holds at least: 2 is two copies. With experts that are
        dealt, nobody knows before what part of the model these are."""
        whole = self.parallel.world if self.parallel.expert else self.parallel.replica
        return Fraction(len(self.ranks), whole)

    def node(self, chosen: Chosen) -> Node:
        """What this node launches. ConfigError if devices are too few."""
        return plan_node(replace(self.placed, devices=chosen.devices))

    def instances(self, chosen: Chosen) -> tuple[Instance, ...]:
        """The rank daemons of this node: targets in their order, then drafts."""
        return self.node(chosen).instances

    @property
    def access(self) -> Access:
        """Who may attach besides root and this user."""
        return Access(groups=self.access_group, users=self.access_user)

    @property
    def deadlines(self) -> Deadlines:
        """What the ranks are told of time."""
        return Deadlines(rendezvous=self.rendezvous_timeout, peer_silence=self.peer_silence_timeout)


def parse_run(given: Mapping[str, object], engine: Iterable[str] = ()) -> RunOptions:
    """The options in `given`, keyed by field name, and what a command line says to the `engine`.

    ConfigError with one line for every fault.
    """
    division = divide(from_words(engine))
    faults = [
        f"{shortened(wrong.written) or flag('engine_args')}: {wrong.text}"
        for wrong in division.wrong
    ]
    options, said = None, _with_sizes(given, division)
    try:
        options = RunOptions.model_validate(said)
    except ValidationError as error:
        faults = [*map(_told, error.errors()), *faults]
    launch = options.placed if options is not None else _placed(said, division)
    faults += map(str, spread_faults(launch) if launch is not None else ())
    if options is not None:
        native = options.builder is Builder.NATIVE
        faults += map(str, seed_faults(options.seed))
        faults += map(str, bundle_faults(trusted=options.trust_bundles, native=native))
    if options is None or faults:
        raise ConfigError("\n".join(dict.fromkeys(faults)))
    return options


def _with_sizes(given: Mapping[str, object], division: Division) -> dict[str, object]:
    """`given` with the engine's arguments; each size is there as often as somebody said it."""
    said = {**given, "engine_args": division.words}
    for key in ("model", *Spread.model_fields):
        before = said.get(key)
        words = before if isinstance(before, list | tuple) else [before]
        # A switch that nobody threw says nothing.
        found = [word for word in words if word is not None and word is not False]
        found += [size.value for size in division.sizes if size.key == key]
        if found:
            said[key] = tuple(found)
    return said


def _placed(said: Mapping[str, object], division: Division) -> Launch | None:
    """What is said of ranks alone, where something else is wrong; None if that is wrong too."""
    try:
        spread = Spread.model_validate({k: v for k, v in said.items() if k in Spread.model_fields})
    except ValidationError:
        return None
    found = division.speculation
    return spread.launch(drafts=found is not None and found.held and not said.get("no_draft"))


def rank_settings(
    options: RunOptions,
    chosen: Chosen,
    *,
    model: Path,
    draft: Path | None = None,
    socket_dir: Path,
    derived: bool,
    python: str = "",
) -> tuple[RankSettings, ...]:
    """The settings of every rank of this node: targets in the order of ranks, then drafts.

    `model` is the local folder that `options.model` was resolved to, `draft` that of a draft which
    is not in it; `python` the loaders' interpreter ('' for that of the ranks).
    """
    group = _group_name(options.model, model)
    node, sources = options.node(chosen), _sources(options, model, draft)
    return tuple(
        RankSettings(
            group=group,
            instance=str(instance),
            socket_dir=str(socket_dir),
            derived=derived,
            model=_model_settings(options, chosen.memory, node, instance, sources),
            access=options.access,
            deadlines=options.deadlines,
            peers=peers(instance, node.instances),
            log_level=options.log_level,
            python=python,
            rendezvous=rendezvous(node, instance),
            warmup=Warmup(
                autotune=not options.disable_flashinfer_autotune,
                stores=options.warmup_cache_stores,
                trust_bundles=options.trust_bundles,
                deadline=options.warmup_timeout,
            ),
            seeding=seeding(options.seed, node, instance),
        )
        for instance in node.instances
    )


def _group_name(written: str, path: Path) -> str:
    """The last part of what the user wrote (the folder of a hub id is named by a hash)."""
    last = written.rstrip("/").rpartition("/")[2]
    return path.name if last in ("", ".", "..") else last


def _sources(options: RunOptions, model: Path, draft: Path | None) -> Sources:
    target, drafted = Source(str(model), options.model, options.revision), options.drafted
    if drafted is None:
        return Sources(target)
    if draft is None:
        return Sources(target, target)
    return Sources(target, Source(str(draft), drafted.model, drafted.revision))


def _model_settings(
    options: RunOptions, memory: Memory, node: Node, instance: Instance, sources: Sources
) -> ModelSettings:
    own = sources.own(instance.role)
    return ModelSettings(
        path=own.path,
        name=own.name,
        revision=own.revision,
        builder=options.builder,
        memory=memory,
        reader=options.reader,
        digest=options.digest,
        chunk_bytes=int(options.chunk_bytes or CHUNK_BYTES[memory]),
        placement=node.placement_on(instance.device),
        engine_args=options.engine_args,
        layout=options.layout_in(memory),
        partner=sources.partner(instance.role),
    )


_PLAINER = {
    "float_parsing": "must be a number",
    "int_parsing": "must be a whole number",
    "string_too_short": _LEFT_OUT,
    "string_unicode": "has bytes that are not UTF-8: write it anew, or rename what it names",
}


def _told(fault: ErrorDetails) -> str:
    """One fault as a line that starts with the flag; a fault of several flags names them itself."""
    text = _PLAINER.get(fault["type"], fault["msg"].removeprefix("Value error, "))
    if not fault["loc"]:
        return text
    name = flag(str(fault["loc"][0]))
    if fault["type"] == "extra_forbidden":
        return f"{name}: no such option"
    if fault["type"] == "missing":
        return f"{name}: must be given"
    if text == _LEFT_OUT and RunOptions.model_fields[str(fault["loc"][0])].is_required():
        text = _EMPTY
    # What was said several times is in the text already.
    if isinstance(fault["input"], tuple):
        return f"{name}: {text}"
    return f"{name}: {text} (given: {shortened(repr(fault['input']))})"
