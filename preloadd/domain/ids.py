"""Names of things: devices, roles, instances, generations, leases, and how they are written.

An *instance* is one rank daemon: a device and a role, written `GPU-…` or `GPU-….draft`. There is
no ':' in it anywhere: that would break systemd's FDNAME, `$RUNTIME_DIRECTORY` and container mounts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Self

from preloadd.errors import ConfigError

DeviceId = NewType("DeviceId", str)
"""A GPU or MIG UUID as the driver writes it, or `CPU-n` for host memory."""

GenerationId = NewType("GenerationId", str)
"""32 hexadecimal digits: 128 random bits drawn when an arena was filled."""

LeaseId = NewType("LeaseId", str)
"""16 hexadecimal digits, unique among the leases of one rank."""

_DEVICE = re.compile(r"(?:CPU-[0-9]{1,4}|(?:GPU|MIG)-[0-9A-Za-z-]{1,90})\Z")
_GENERATION = re.compile(r"[0-9a-f]{32}\Z")
_LEASE = re.compile(r"[0-9a-f]{16}\Z")
_CLIENT = re.compile(r"[A-Za-z0-9_@+=,-]{1,64}\Z")
_DRAFT_SUFFIX = ".draft"


class Role(StrEnum):
    """What the model on a device is for: the target, or a draft of speculative decoding."""

    TARGET = "target"
    DRAFT = "draft"


def device_id(text: str) -> DeviceId:
    """`text` as a device, or ConfigError."""
    if not _DEVICE.match(text):
        raise ConfigError(f"{text!r} is no device: expected CPU-0, GPU-<uuid> or MIG-<uuid>")
    return DeviceId(text)


def on_host(device: str) -> bool:
    """Whether a device stands for host memory, and not for a GPU."""
    return device.startswith("CPU-")


def generation_id(text: str) -> GenerationId:
    """`text` as a generation id, or ValueError."""
    if not _GENERATION.match(text):
        raise ValueError(f"{text!r} is no generation id")
    return GenerationId(text)


def lease_id(text: str) -> LeaseId:
    """`text` as a lease id, or ValueError."""
    if not _LEASE.match(text):
        raise ValueError(f"{text!r} is no lease id")
    return LeaseId(text)


def client_name(text: str) -> str:
    """`text` reduced to what a client may be called (it becomes part of an FDNAME); never empty."""
    cleaned = "".join(c if _CLIENT.match(c) else "_" for c in text[:64])
    return cleaned or "unnamed"


@dataclass(frozen=True, slots=True)
class Instance:
    """One rank daemon: the device it serves and the role of the model there."""

    device: DeviceId
    role: Role = Role.TARGET

    @classmethod
    def parse(cls, text: str) -> Self:
        """The instance that `text` names, as `str()` writes it; ConfigError otherwise."""
        if text.endswith(_DRAFT_SUFFIX):
            return cls(device_id(text.removesuffix(_DRAFT_SUFFIX)), Role.DRAFT)
        return cls(device_id(text))

    def __str__(self) -> str:
        return f"{self.device}{_DRAFT_SUFFIX if self.role is Role.DRAFT else ''}"

    @property
    def socket_name(self) -> str:
        """The socket's file name inside the instance's folder."""
        return "rank_draft.sock" if self.role is Role.DRAFT else "rank.sock"
