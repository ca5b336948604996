"""One group's file in `groups.d`: a model, the devices that hold it, and how.

Keys whose feature is yet to come are known, so that a file says what it will say later; any value
but the default is refused, so that nobody counts on what does not happen.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field

from preloadd.config.faults import validated
from preloadd.config.files import Document, Fault, Layers
from preloadd.config.strict import (
    ChunkBytes,
    MaybePath,
    MaybeText,
    Name,
    Pause,
    Size,
    Strict,
    Text,
    Texts,
    later,
    listed,
)
from preloadd.domain.ids import DeviceId, Instance, device_id
from preloadd.domain.placement import ExpertPlacement, Parallel
from preloadd.domain.settings import Access
from preloadd.errors import ConfigError

ALL = "all"
APPLY = "`preloadd admin config apply`"

_UUID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\Z")


def is_full(device: str) -> bool:
    """Whether a GPU is written with its whole UUID; true of everything that is no GPU."""
    return not device.startswith("GPU-") or bool(_UUID.match(device.removeprefix("GPU-")))


def _device(value: str) -> str:
    if value == ALL or re.match(r"(?:GPU|MIG)-", value):
        raise ValueError(_not_yet(value))
    if value.isascii() and value.isdigit():
        raise ValueError(
            f"{value!r} is a number, and numbers of GPUs change between boots (name the device: "
            "CPU-0 for host memory)"
        )
    try:
        return device_id(value)
    except ConfigError as error:
        raise ValueError(f"{error} (name the device in full)") from None


def _not_yet(value: str) -> str:
    remedy = "give host devices: CPU-0, CPU-1, …"
    if value != ALL and is_full(value):
        return f"{value}: memory of GPUs: not in this version ({remedy})"
    return (
        f"{value!r} stands for GPUs that only {APPLY} can look up, and memory of GPUs: not in this "
        f"version ({remedy})"
    )


def _distinct(value: tuple[str, ...]) -> tuple[str, ...]:
    twice = sorted({device for device in value if value.count(device) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is listed twice (a device holds one rank)")
    return value


def _model(value: str) -> str:
    if value.startswith((".", "~")):
        raise ValueError(
            f"{value!r} depends on a current or home folder, and the service has neither of yours "
            "(give an absolute path, or an id such as org/name)"
        )
    return value


def _memory(value: str) -> str:
    if value == "cuda":
        raise ValueError('memory of GPUs: not in this version (write "host", or leave the key out)')
    return value


Device = Annotated[str, AfterValidator(_device)]
Devices = Annotated[
    tuple[Device, ...],
    BeforeValidator(listed),
    Field(min_length=1, max_length=1024),
    AfterValidator(_distinct),
]


class Sizes(Strict):
    """`[parallel]`: into how many ranks the model is divided, named as engines name it."""

    tensor_parallel_size: Size = 1
    pipeline_parallel_size: Size = 1
    data_parallel_size: Annotated[Size, later("data parallelism", default=1)] = 1
    enable_expert_parallel: bool = False
    expert_placement_strategy: Literal["linear", "round_robin"] = "linear"
    nodes: Annotated[Size, later("groups over several hosts", default=1)] = 1

    @property
    def parallel(self) -> Parallel:
        """The sizes as a value."""
        return Parallel(
            tensor=self.tensor_parallel_size,
            pipeline=self.pipeline_parallel_size,
            data=self.data_parallel_size,
            expert=self.enable_expert_parallel,
            expert_placement=ExpertPlacement(self.expert_placement_strategy),
        )


class Draft(Strict):
    """`[draft]`: the model that guesses ahead on the same devices."""

    model: Annotated[MaybeText, later("draft models", default="")] = ""
    revision: Annotated[MaybeText, later("draft models", default="")] = ""


class Allowed(Strict):
    """`[access]`: who may attach besides root and the daemon's user."""

    groups: Texts = ()
    users: Texts = ()


class Warmup(Strict):
    """`[warmup]`: what is made ready besides weights."""

    flashinfer_autotune: Annotated[bool, later("tuning of FlashInfer", default=False)] = False
    stores: Annotated[Texts, later("shared stores", default=())] = ()
    trust_bundles: Annotated[bool, later("compiled bundles", default=False)] = False


class Seed(Strict):
    """`[seed]`: whether other hosts may fetch tables from this group, and where it fetches."""

    enabled: Annotated[bool, later("seeding", default=False)] = False
    peers: Annotated[Texts, later("seeding", default=())] = ()


class Restart(Strict):
    """`[restart]`: how often systemd brings the group back: `burst` starts within `interval_s`, the
    first one `pause_s` after a failure."""

    interval_s: Annotated[float, Field(ge=1, le=86400, allow_inf_nan=False)] = 300.0
    burst: Annotated[int, Field(ge=1, le=1000)] = 10
    pause_s: Pause = 0.5


class Group(Strict):
    """A file in `groups.d`. Sizes are bytes."""

    name: Name
    model: Annotated[Text, AfterValidator(_model)]
    revision: MaybeText = ""
    gpus: Devices
    builder: Annotated[Literal["native", "vllm"], later("the builder 'vllm'", default="native")] = (
        "native"
    )
    memory: Annotated[Literal["auto", "host", "cuda"], AfterValidator(_memory)] = "auto"
    python: MaybePath = ""
    engine_args: Annotated[
        dict[str, object],
        later("arguments of an engine, which the builder 'vllm' needs", default={}),
    ] = Field(default_factory=dict)
    digest: Literal["sampled", "full"] = "sampled"
    chunk_bytes: ChunkBytes = ByteSize(1 << 30)
    parallel: Sizes = Sizes()
    draft: Draft = Draft()
    access: Allowed = Allowed()
    warmup: Warmup = Warmup()
    seed: Seed = Seed()
    restart: Restart = Restart()

    @property
    def instances(self) -> tuple[Instance, ...]:
        """The rank daemons of the group, in the order of ranks."""
        return tuple(Instance(DeviceId(device)) for device in self.gpus)

    @property
    def allowed(self) -> Access:
        """Who may attach, as a value."""
        return Access(groups=self.access.groups, users=self.access.users)


def judge(document: Document) -> tuple[Group | None, list[Fault]]:
    """The group that a file describes, or all that is wrong with the file."""
    origin = str(document.path)
    layers = Layers()
    layers.lay(origin, {"name": document.path.stem, **document.table})
    group, faults = validated(Group, layers, origin)
    faults += [fault for fault in (_miscounted(document), _drafted(document)) if fault]
    return (None if faults else group), faults


def claims(document: Document) -> tuple[str, list[str]]:
    """The name and the devices that a file lays claim to, however wrong the rest of it is."""
    name, gpus = document.table.get("name", document.path.stem), document.table.get("gpus")
    devices = gpus if isinstance(gpus, list) else [gpus]
    return str(name), [device for device in devices if isinstance(device, str) and device != ALL]


def _miscounted(document: Document) -> Fault | None:
    """The fault of sizes that do not make as many ranks as there are devices, if both are known."""
    gpus, sizes = document.table.get("gpus"), document.table.get("parallel", {})
    if not isinstance(gpus, list) or not isinstance(sizes, dict) or ALL in gpus:
        return None
    layers = Layers()
    layers.lay("", sizes)
    found, _ = validated(Sizes, layers, "")
    if found is None or not gpus or found.parallel.world == len(gpus):
        return None
    parts = f"{found.tensor_parallel_size} (tensor) x {found.pipeline_parallel_size} (pipeline)"
    return Fault(
        str(document.path),
        "gpus",
        f"lists {len(gpus)} devices, but [parallel] makes {parts} = {found.parallel.world} ranks "
        "(list one device for each rank, or change the sizes)",
    )


def _drafted(document: Document) -> Fault | None:
    """The fault of a [draft] without a key in it, which systemd would start ranks for."""
    if document.table.get("draft") != {}:
        return None
    return Fault(
        str(document.path), "draft", "draft models: not in this version (remove the table)"
    )
