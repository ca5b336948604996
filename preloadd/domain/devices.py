"""GPUs as `loader --probe` finds them, and which of them a user means. Values and rules.

Only processes with the driver's libraries can look; they say what they see as JSON.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from preloadd.domain.amounts import size
from preloadd.domain.ids import DeviceId
from preloadd.domain.launch import here_told
from preloadd.domain.placement import Parallel
from preloadd.domain.settings import Memory
from preloadd.errors import NoSuchDevice

ALL = "all"
"""Every GPU, where GPUs are named."""

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable that says which NVIDIA GPUs, and parts of them, a process sees."""

AMD_VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", VISIBLE, "GPU_DEVICE_ORDINAL")
"""The variables that say which AMD GPUs a process sees. Numbers in all others count what the first
leaves; HIP reads NVIDIA's where its own is empty."""

DEVICES = "PRELOADD_DEVICES"
"""Environment: host devices an engine may use, by rank, separated by commas; CPU-0 if unset."""

_SLICE = "MIG-"


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, or a part of one (MIG), that a process sees. `id` is its UUID with the prefix.

    `total` is its memory in bytes; `minor` is the number of its node `/dev/nvidiaN`, -1 if unknown;
    `persistence` is None where nobody tells. `problem` says why its memory cannot be shared; empty
    if it can.
    """

    id: str
    name: str
    memory: Memory = Memory.CUDA
    pci: str = ""
    minor: int = -1
    total: int = 0
    persistence: bool | None = None
    problem: str = ""

    @property
    def described(self) -> str:
        """Which one it is and what it is, for people."""
        amount = f"({size(self.total)})" if self.total else ""
        return " ".join(filter(None, (self.id, self.name, amount)))


@dataclass(frozen=True, slots=True)
class Probe:
    """All GPUs that a process sees, in the order of their numbers there.

    `problem` says why there are none, `amd_problem` why there are none of AMD's where `problem` is
    about others; `driver` is the version of NVIDIA's, `amd_driver` of AMD's; `hint` what else to
    know about what is (not) seen. `answered` is False where nobody could look: then there may be
    GPUs all the same.
    """

    devices: tuple[Device, ...] = ()
    driver: str = ""
    problem: str = ""
    hint: str = ""
    amd_problem: str = ""
    amd_driver: str = ""
    answered: bool = True


def minor_in(information: str) -> int:
    """The number of a GPU's node as NVIDIA's kernel module tells it in the GPU's `information`
    (below /proc/driver/nvidia/gpus); -1 if it does not."""
    found = re.search(r"^Device Minor:\s*(\d+)", information, re.MULTILINE)
    return int(found[1]) if found else -1


def choose(
    probe: Probe, wanted: Sequence[str], parallel: Parallel, ranks: range
) -> tuple[DeviceId, ...]:
    """A GPU for each of the `ranks`, as `wanted` names them in this order: by UUIDs or unique
    beginnings of them.

    None named means the first ones in order; `all` means every one, which must be as many.
    NoSuchDevice says what does not fit.
    """
    if not probe.devices:
        raise NoSuchDevice(f"{probe.problem or 'no GPU is seen'}{_hint(probe)}")
    if not wanted:
        found = list(probe.devices[: len(ranks)])
    elif tuple(wanted) == (ALL,):
        found = list(probe.devices)
    else:
        found = [_named(probe, text) for text in wanted]
    ids = [device.id for device in found]
    if twice := [name for name, times in Counter(ids).items() if times > 1]:
        text = "is named twice, but a device holds one rank: name it once"
        raise NoSuchDevice(f"{', '.join(twice)} {text}")
    if len(ids) != len(ranks):
        misfit = "few" if len(ids) < len(ranks) else "many"
        remedy = f"name {len(ranks)}, or change the sizes" if wanted else "change the sizes"
        raise NoSuchDevice(
            f"{len(ids)} GPUs ({', '.join(ids)}) are too {misfit} for "
            f"{here_told(parallel, ranks)}: {remedy}{_hint(probe)}"
        )
    for device in found:
        if device.problem:
            raise NoSuchDevice(f"{device.id} ({device.name}): {device.problem}")
    return tuple(DeviceId(device.id) for device in found)


def further_looks(
    first: Probe, wanted: Sequence[str], environ: Mapping[str, str]
) -> list[dict[str, str]]:
    """The environments in which to look again after `first`, which was seen in `environ`.

    Of several parts of GPUs (MIG) a process sees the first: each has to be looked for by itself.
    They are those in `wanted`, names that somebody gave, unless the environment shows others.
    """
    visible = environ.get(VISIBLE)
    names = wanted if visible is None else [name.strip() for name in visible.split(",")]
    return [
        {**environ, VISIBLE: name}
        for name in dict.fromkeys(names)
        if name.startswith(_SLICE) and not any(d.id.startswith(name) for d in first.devices)
    ]


def joined(probes: Sequence[Probe]) -> Probe:
    """What several looks saw, each device once; all else is as the first one told it."""
    devices = {device.id: device for probe in probes for device in probe.devices}
    return replace(probes[0], devices=tuple(devices.values()))


def _named(probe: Probe, text: str) -> Device:
    found = [device for device in probe.devices if device.id.lower().startswith(text.lower())]
    exact = [device for device in found if device.id.lower() == text.lower()]
    if len(exact or found) == 1:
        return (exact or found)[0]
    seen = ", ".join(device.id for device in found or probe.devices)
    which = "fits more than one GPU" if found else "fits no GPU that is seen"
    raise NoSuchDevice(f"{text!r} {which}: {seen}{_hint(probe)}")


def _hint(probe: Probe) -> str:
    return f" ({probe.hint})" if probe.hint else ""
