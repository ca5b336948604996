"""What `preloadd run` can be told, validated and made into the settings of each rank.

Nothing deeper sees an unchecked value. The names of fields are the names of flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from preloadd.config.strict import MAX_RANKS, ChunkBytes, LogLevel, Size
from preloadd.domain.ids import DeviceId, Instance
from preloadd.domain.placement import ExpertPlacement, Parallel, place
from preloadd.domain.settings import (
    CHUNK_BYTES,
    Access,
    Builder,
    Digest,
    Memory,
    ModelSettings,
    RankSettings,
    Reader,
)
from preloadd.errors import ConfigError

_Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


def _absolute(value: object) -> object:
    """Paths as a child in any folder would find them; '~' stands for the home folder."""
    if not isinstance(value, str) or not value:
        return value
    try:
        return Path(value).expanduser().absolute()
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"cannot be followed from here ({error}): give an absolute path"
        ) from error


def _split(value: object) -> object:
    """Names with commas between them."""
    return tuple(value.split(",")) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class Chosen:
    """Where the weights of a group will live: the memory, and the device of each rank in order.

    `told` says so to people, with the reason where nobody chose.
    """

    memory: Memory
    devices: tuple[DeviceId, ...]
    told: str

    @property
    def instances(self) -> tuple[Instance, ...]:
        """The rank daemons of the group, in the order of ranks: all on this host."""
        return tuple(map(Instance, self.devices))


class RunOptions(BaseModel):
    """The flags of `preloadd run`, which arrive as text. Sizes are bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: _Text
    revision: str = ""
    builder: Builder = Builder.NATIVE
    memory: Literal["auto", "host", "cuda", "hip"] = "auto"
    gpus: Annotated[tuple[_Text, ...], BeforeValidator(_split)] = ()
    reader: Reader = Reader.PREAD
    digest: Digest = Digest.SAMPLED
    chunk_bytes: ChunkBytes | None = None
    tensor_parallel_size: Size = 1
    pipeline_parallel_size: Size = 1
    enable_expert_parallel: bool = False
    expert_placement_strategy: ExpertPlacement = ExpertPlacement.LINEAR
    weight_cache_socket_dir: Annotated[Path | None, BeforeValidator(_absolute)] = None
    weight_cache_health_host: _Text = "127.0.0.1"
    weight_cache_health_port: Annotated[int | None, Field(ge=0, le=65535)] = None
    access_group: tuple[_Text, ...] = ()
    access_user: tuple[_Text, ...] = ()
    restart_ranks: bool = False
    python: str = ""
    log_level: LogLevel = "info"

    @model_validator(mode="after")
    def _placeable(self) -> Self:
        if self.parallel.world > MAX_RANKS:
            raise ValueError(
                "--tensor-parallel-size times --pipeline-parallel-size makes "
                f"{self.parallel.world} ranks: at most {MAX_RANKS}"
            )
        return self

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

    @property
    def parallel(self) -> Parallel:
        """The sizes of the group."""
        return Parallel(
            tensor=self.tensor_parallel_size,
            pipeline=self.pipeline_parallel_size,
            expert=self.enable_expert_parallel,
            expert_placement=self.expert_placement_strategy,
        )

    @property
    def access(self) -> Access:
        """Who may attach besides root and this user."""
        return Access(groups=self.access_group, users=self.access_user)


def parse_run(given: Mapping[str, object]) -> RunOptions:
    """The options in `given`, keyed by field name; ConfigError with one line for every fault."""
    try:
        return RunOptions.model_validate(given)
    except ValidationError as error:
        raise ConfigError("\n".join(_told(fault) for fault in error.errors())) from None


def flag(name: str) -> str:
    """The flag of the field `name`."""
    return f"--{name.replace('_', '-')}"


def rank_settings(
    options: RunOptions,
    chosen: Chosen,
    *,
    model: Path,
    socket_dir: Path,
    derived: bool,
    python: str = "",
) -> tuple[RankSettings, ...]:
    """The settings of every rank of the group, in the order of ranks.

    `model` is the local folder that `options.model` was resolved to, `python` the loaders'
    interpreter ('' for that of the ranks).
    """
    group = _group_name(options.model, model)
    return tuple(
        RankSettings(
            group=group,
            instance=str(instance),
            socket_dir=str(socket_dir),
            derived=derived,
            model=_model_settings(options, chosen.memory, model, rank),
            access=options.access,
            peers=tuple(str(peer) for peer in chosen.instances if peer != instance),
            log_level=options.log_level,
            python=python,
        )
        for rank, instance in enumerate(chosen.instances)
    )


def _group_name(written: str, path: Path) -> str:
    """The last part of what the user wrote (the folder of a hub id is named by a hash)."""
    last = written.rstrip("/").rpartition("/")[2]
    return path.name if last in ("", ".", "..") else last


def _model_settings(options: RunOptions, memory: Memory, model: Path, rank: int) -> ModelSettings:
    return ModelSettings(
        path=str(model),
        name=options.model,
        revision=options.revision,
        builder=options.builder,
        memory=memory,
        reader=options.reader,
        digest=options.digest,
        chunk_bytes=int(options.chunk_bytes or CHUNK_BYTES[memory]),
        placement=place(options.parallel, rank),
    )


def _told(fault: ErrorDetails) -> str:
    """One fault as a line that starts with the flag; a fault of several flags names them itself."""
    text = fault["msg"].removeprefix("Value error, ")
    if not fault["loc"]:
        return text
    name = flag(str(fault["loc"][0]))
    if fault["type"] == "extra_forbidden":
        return f"{name}: no such option"
    if fault["type"] == "missing":
        return f"{name}: must be given"
    return f"{name}: {text} (given: {fault['input']!r})"
