"""One group's file in `groups.d`: a model, the devices that hold it, and how."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field

from preloadd.config.arguments import from_table
from preloadd.config.drafts import Speculation
from preloadd.config.engine import (
    BUILDER,
    draft_faults,
    engine_faults,
    fault_in,
    has_drafts,
    layers_of,
)
from preloadd.config.faults import understood, validated
from preloadd.config.files import Document, Fault, Layers
from preloadd.config.seeding import PREFIX, Seed, bundle_faults, seed_faults
from preloadd.config.spread import BLOCKS, NOTHING, Spread, certain, spread_faults
from preloadd.config.strict import (
    GroupId,
    MaybeChunkBytes,
    MaybePath,
    MaybeText,
    Name,
    Pause,
    Seconds,
    Strict,
    Text,
    Texts,
    UserId,
    listed,
)
from preloadd.config.vllm import Division, divide
from preloadd.domain.devices import ALL
from preloadd.domain.ids import Instance, device_id, on_host
from preloadd.domain.launch import SIZES, Launch, Misfit, here_told
from preloadd.domain.nodes import Node, block, plan_node
from preloadd.domain.settings import CHUNK_BYTES, Access, Builder, Layout, Memory, resolved
from preloadd.errors import ConfigError

APPLY = "`preloadctl config apply`"

# As drivers write them: NVIDIA's, and AMD's shorter one.
_UUID = r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}"
_FULL = re.compile(rf"(?:(?:GPU|MIG)-{_UUID}|GPU-[0-9a-f]{{16}})\Z")
_AMD = re.compile(r"GPU-[0-9a-f]{16}\Z")

_KEYS = {"builder": BUILDER, "devices": "gpus", "trust_bundles": "warmup.trust_bundles"}
"""Keys by the settings they stand for, as far as these are neither of sizes nor of seeding."""


def is_full(device: str) -> bool:
    """Whether a GPU or a part of one is written with its whole UUID; true of all that is none."""
    return not device.startswith(("GPU-", "MIG-")) or bool(_FULL.match(device))


def _device(value: str) -> str:
    if value == ALL or not is_full(value):
        raise ValueError(
            f"{value!r} is no GPU's whole UUID (write it in full, as `nvidia-smi -L` does; {APPLY} "
            'does that for "all" and for the beginning of a GPU\'s)'
        )
    if value.isascii() and value.isdigit():
        raise ValueError(
            f"{value!r} is a number, and numbers of GPUs change between boots (name the device: "
            "a GPU by its UUID, CPU-0 for host memory)"
        )
    try:
        return device_id(value)
    except ConfigError as error:
        raise ValueError(f"{error} (name the device in full)") from None


def _distinct(value: tuple[str, ...]) -> tuple[str, ...]:
    twice = sorted({device for device in value if value.count(device) > 1})
    if twice:
        raise ValueError(
            f"{', '.join(twice)} is listed twice (name it once: a device holds one rank)"
        )
    return value


def _model(value: str) -> str:
    if value.startswith((".", "~")):
        raise ValueError(
            f"{value!r} depends on a current or home folder, and the service has neither of yours "
            "(give an absolute path, or an id such as org/name)"
        )
    return value


Device = Annotated[str, AfterValidator(_device)]
Devices = Annotated[
    tuple[Device, ...],
    BeforeValidator(listed),
    Field(min_length=1, max_length=1024),
    AfterValidator(_distinct),
]


class Sizes(Spread, Strict):
    """`[parallel]`: into how many ranks the model is divided, and which are on this node."""


class Draft(Strict):
    """`[draft]`: the model that guesses ahead on the same devices. With `enabled`, ranks hold it if
    it is of a kind that can be held. The rest is said here or to vLLM."""

    enabled: bool = True
    model: Annotated[MaybeText, AfterValidator(_model)] = ""
    revision: MaybeText = ""


class Allowed(Strict):
    """`[access]`: who may attach besides root and the daemon's user."""

    groups: Annotated[tuple[Annotated[Text, GroupId], ...], BeforeValidator(listed)] = ()
    users: Annotated[tuple[Annotated[Text, UserId], ...], BeforeValidator(listed)] = ()


class Warmup(Strict):
    """`[warmup]`: what is made ready besides weights."""

    flashinfer_autotune: bool = True
    stores: Texts = ()
    trust_bundles: bool = False
    deadline_s: Seconds = 900.0


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
    builder: Literal["native", "vllm"] = "native"
    memory: Literal["auto", "host", "cuda", "hip"] = "auto"
    reader: Literal["pread", "instanttensor"] = "pread"
    python: MaybePath = ""
    engine_args: dict[str, object] = Field(default_factory=dict)
    layout: Literal["auto", "processed", "plain", "raw"] = "auto"
    digest: Literal["sampled", "full"] = "sampled"
    chunk_bytes: MaybeChunkBytes = ByteSize(0)
    parallel: Sizes = Sizes()
    draft: Draft = Draft()
    access: Allowed = Allowed()
    warmup: Warmup = Warmup()
    seed: Seed = Seed()
    restart: Restart = Restart()

    @property
    def backend(self) -> Memory:
        """Where the weights live; "auto" is what the devices have."""
        if self.memory != "auto":
            return Memory(self.memory)
        return _memory_of(self.gpus[0])

    @property
    def largest_chunk(self) -> int:
        """The largest single allocation."""
        return int(self.chunk_bytes) or CHUNK_BYTES[self.backend]

    @property
    def arguments(self) -> tuple[str, ...]:
        """vLLM's own arguments, in canonical form."""
        return self._division.words

    @property
    def speculation(self) -> Speculation | None:
        """What vLLM is told of speculative decoding."""
        return self._division.speculation

    @property
    def drafted(self) -> Speculation | None:
        """The same if there are ranks for the draft."""
        found = self.speculation
        return found if found is not None and found.held and self.draft.enabled else None

    @property
    def _division(self) -> Division:
        said = {"model": self.draft.model, "revision": self.draft.revision}
        return divide(from_table(self.engine_args), {k: v for k, v in said.items() if v})

    @property
    def layout_mode(self) -> Layout:
        """The layout of vLLM's weights; "auto" is the first that the memory can hold."""
        return resolved(Layout(self.layout), Builder(self.builder), self.backend)

    @property
    def instances(self) -> tuple[Instance, ...]:
        """The rank daemons of the group: its targets in the order of ranks, then its drafts."""
        return self.node.instances

    @property
    def node(self) -> Node:
        """What of the group this host launches."""
        return plan_node(self.parallel.launch(self.gpus, drafts=self.drafted is not None))

    @property
    def allowed(self) -> Access:
        """Who may attach, as a value."""
        return Access(groups=self.access.groups, users=self.access.users)


def judge(
    document: Document, ports: Mapping[str, int] = NOTHING
) -> tuple[Group | None, list[Fault]]:
    """The group that a file describes, or all that is wrong with the file. `ports` are in use for
    something else, by what people call them."""
    origin = str(document.path)
    layers = Layers()
    layers.lay(origin, {"name": document.path.stem})
    layers.lay(origin, layers_of(document).values)
    group, faults = validated(Group, layers, origin)
    faults = [fault_in(document, fault.key, fault.text) for fault in faults]
    checks = (_contradicting, _misread, _laid_out)
    faults += [fault for check in checks if (fault := check(document))]
    faults += [*_misplaced(document, ports), *_seeded(document)]
    faults += [*engine_faults(document), *draft_faults(document)]
    return (None if faults else group), faults


def claims(document: Document) -> tuple[str, list[str]]:
    """The name and the devices that a file lays claim to, however wrong the rest of it is."""
    name, gpus = document.table.get("name", document.path.stem), document.table.get("gpus")
    devices = gpus if isinstance(gpus, list) else [gpus]
    return str(name), [device for device in devices if isinstance(device, str) and device != ALL]


def _misplaced(document: Document, ports: Mapping[str, int]) -> Iterator[Fault]:
    """What is wrong with ranks, nodes and devices, as far as they are known."""
    sizes, unknown = understood(Sizes, layers_of(document).values.get("parallel", {}))
    gpus = document.table.get("gpus")
    devices = None
    if isinstance(gpus, list) and gpus and ALL not in gpus:
        # Those that are there twice are told of elsewhere.
        devices = list(dict.fromkeys(map(str, gpus)))
    seed, _ = understood(Seed, document.table.get("seed", {}))
    launch = sizes.launch(
        devices,
        drafts=has_drafts(document),
        others=ports,
        seed_ports=seed.ports,
    )
    misfits = spread_faults(launch, unknown)
    if unknown.union(misfit.setting for misfit in misfits).isdisjoint((*BLOCKS, "devices")):
        misfits += _left_over(launch)
    for misfit in misfits:
        yield _told(misfit, document)


def _seeded(document: Document) -> Iterator[Fault]:
    """What is wrong between the keys of `[seed]`, and with bundles."""
    seed, unknown = understood(Seed, document.table.get("seed", {}))
    for misfit in certain(seed_faults(seed), frozenset(PREFIX + key for key in unknown)):
        yield _told(misfit, document)
    warmup, builder = document.table.get("warmup"), document.table.get("builder", Builder.NATIVE)
    trusted = isinstance(warmup, dict) and warmup.get("trust_bundles") is True
    for misfit in bundle_faults(trusted=trusted, native=builder == Builder.NATIVE):
        yield _told(misfit, document)


def _told(misfit: Misfit, document: Document) -> Fault:
    """The same as a fault of a file, at the keys that stand for the flags."""
    keys = map(_key, misfit.beside)
    return fault_in(document, _key(misfit.setting), misfit.bracketed, *keys)


def _key(setting: str) -> str:
    """The key that stands for a flag."""
    if setting.startswith(PREFIX):
        return f"seed.{setting.removeprefix(PREFIX)}"
    return _KEYS.get(setting, f"parallel.{setting}")


def _left_over(launch: Launch) -> Iterator[Misfit]:
    """Devices that would have no rank."""
    here, devices = block(launch), launch.devices or ()
    if len(devices) > len(here):
        text = f"{len(devices)} are too many for {here_told(launch.parallel, here)}"
        more = f"leave out {len(devices) - len(here)}, or change the sizes"
        yield Misfit("devices", f"{text}: {more}", SIZES)


def _memory_of(device: str) -> Memory:
    if on_host(device):
        return Memory.HOST
    return Memory.HIP if _AMD.match(device) else Memory.CUDA


def _contradicting(document: Document) -> Fault | None:
    """The fault of devices and memory that do not belong together, as far as they are known."""
    memory, kinds = document.table.get("memory", "auto"), _kinds(document)
    named = ", ".join(claims(document)[1])
    if len(kinds) > 1:
        return document.fault(
            "gpus",
            f"lists devices of several kinds: {named} (list those of one: all ranks hold their "
            "weights in host memory, or in that of one vendor's GPUs)",
        )
    if kinds and memory in [kind for kind in Memory if kind not in kinds]:
        remedy = f'write "{min(kinds)}", or leave the key out'
        return document.fault("memory", f"is {memory!r}, but gpus lists {named} ({remedy})", "gpus")
    return None


def _misread(document: Document) -> Fault | None:
    """The fault of a reader that cannot fill the memory of the devices, or has nothing to read."""
    if document.table.get("builder") == "vllm" and document.table.get("reader", "pread") != "pread":
        text = "vLLM reads by itself (leave the key out, and set load-format in engine_args)"
        return document.fault("reader", text, BUILDER)
    if document.table.get("reader") != "instanttensor" or _kinds(document) <= {Memory.CUDA}:
        return None
    text = "'instanttensor' reads into the memory of CUDA devices only (leave the key out)"
    return document.fault("reader", text, "gpus")


def _laid_out(document: Document) -> Fault | None:
    """The fault of a layout that the builder or the memory of the devices does not have."""
    layout = str(document.table.get("layout", "auto"))
    builder = str(document.table.get("builder", "native"))
    kinds = _kinds(document)
    if layout not in set(Layout) or builder not in set(Builder) or len(kinds) != 1:
        return None
    try:
        resolved(Layout(layout), Builder(builder), kinds.pop())
    except ConfigError as error:
        return document.fault("layout", str(error), BUILDER, "gpus")
    return None


def _kinds(document: Document) -> set[Memory]:
    """The kinds of memory that the devices have, as far as they are known."""
    return {_memory_of(device) for device in claims(document)[1] if _is_device(device)}


def _is_device(text: str) -> bool:
    try:
        return bool(device_id(text)) and is_full(text)
    except ConfigError:
        return False
