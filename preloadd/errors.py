"""The exception tree, and the codes that travel on the wire and become exit statuses.

::

    PreloadError
    ├── ConfigError            a setting is wrong, or settings contradict each other
    │   ├── UnsupportedPlatformForIPCError  this engine has no GPU memory to share
    │   └── UnsupportedQuantForIPCError  vLLM cannot start from weights quantised this way
    ├── CheckpointError        files of the checkpoint cannot be loaded as they are
    ├── ModelNotFound          the model is neither a folder nor in the Hugging Face cache
    ├── UnsupportedModel       the builder does not know how to do this with this architecture
    ├── OutOfRoom              not enough memory, said before loading if it can be foreseen
    ├── NoSuchDevice           the GPU is not to be seen from here, or none is
    ├── DeviceFailed           the GPU's driver answered with an error, or the GPU is lost
    ├── OutOfDescriptors       a descriptor limit was reached
    ├── ReadFailed             the disk answered with an error
    ├── AlreadyRunning         another daemon serves this device
    ├── InsecurePath           a folder or socket that others could have planted or can open
    ├── ProtocolViolation      the peer broke the protocol, or the kernel truncated a packet
    ├── DamagedManifest        a manifest or its chunks do not add up
    ├── LoaderFailed           the loader ended without weights; carries its exit status
    ├── RendezvousFailed       the ranks of a group on several hosts did not come together
    ├── ServiceManagerError    systemd did not do, or not tell, what it was asked
    │   ├── NoServiceManager   there is no systemd to ask: a container, mostly
    │   └── ServiceManagerDenied  this user may not ask it
    └── AttachError            an engine did not get weights
        ├── Unavailable        nobody serves (yet): loading, released, incomplete, absent
        ├── Mismatch           the daemon holds weights for something else
        └── AccessDenied       the daemon does not serve this user

A class exists because some caller decides differently on it. The text of an error names the thing
and the remedy; the code is for machines and stable.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class ErrorCode(StrEnum):
    """Stable names of failures; on the wire, in JSON output and (as `EXIT_STATUS`) at exit."""

    INTERNAL = "internal"
    CONFIG = "config"
    CHECKPOINT = "checkpoint"
    NOT_FOUND = "not-found"
    UNSUPPORTED = "unsupported"
    NO_ROOM = "no-room"
    NO_DESCRIPTORS = "no-descriptors"
    NO_DEVICE = "no-device"
    DEVICE_FAILED = "device-failed"
    READ_FAILED = "read-failed"
    ALREADY_RUNNING = "already-running"
    INSECURE = "insecure"
    PROTOCOL = "protocol"
    DAMAGED = "damaged"
    LOADER = "loader"
    RENDEZVOUS = "rendezvous"
    UNAVAILABLE = "unavailable"
    MISMATCH = "mismatch"
    DENIED = "denied"


# sysexits.h where a number there says the same; 1 and 2 stay with Python and the shell.
EXIT_STATUS: dict[ErrorCode, int] = {
    ErrorCode.INTERNAL: 70,
    ErrorCode.CONFIG: 78,
    ErrorCode.CHECKPOINT: 65,
    ErrorCode.NOT_FOUND: 66,
    ErrorCode.UNSUPPORTED: 64,
    ErrorCode.NO_ROOM: 73,
    ErrorCode.NO_DESCRIPTORS: 71,
    ErrorCode.NO_DEVICE: 68,
    ErrorCode.DEVICE_FAILED: 79,
    ErrorCode.READ_FAILED: 74,
    ErrorCode.ALREADY_RUNNING: 75,
    ErrorCode.INSECURE: 77,
    ErrorCode.PROTOCOL: 76,
    ErrorCode.DAMAGED: 72,
    ErrorCode.LOADER: 70,
    ErrorCode.RENDEZVOUS: 80,
    ErrorCode.UNAVAILABLE: 69,
    ErrorCode.MISMATCH: 67,
    ErrorCode.DENIED: 77,
}


class PreloadError(Exception):
    """Base of every error preloadd raises on purpose."""

    code: ClassVar[ErrorCode] = ErrorCode.INTERNAL

    @property
    def exit_status(self) -> int:
        """The status a process ends with when this error ends it."""
        return EXIT_STATUS[self.code]


class ConfigError(PreloadError):
    """A setting is wrong. The text lists every fault found, one a line."""

    code = ErrorCode.CONFIG


class UnsupportedPlatformForIPCError(ConfigError):
    """This engine has no GPU memory to share, and did not ask for memory of the host instead."""

    code = ErrorCode.UNSUPPORTED


class UnsupportedQuantForIPCError(ConfigError):
    """A method of quantisation, or its backend, cannot start from weights already processed."""

    code = ErrorCode.UNSUPPORTED


class CheckpointError(PreloadError):
    """Files of the checkpoint cannot be loaded as they are; the text names file and tensor."""

    code = ErrorCode.CHECKPOINT


class ModelNotFound(PreloadError):
    """The model is neither a local folder nor in the Hugging Face cache."""

    code = ErrorCode.NOT_FOUND


class UnsupportedModel(PreloadError):
    """The builder cannot do this with this architecture, dtype or size."""

    code = ErrorCode.UNSUPPORTED


class OutOfRoom(PreloadError):
    """Not enough memory for the arena. `wanted` and `free` are bytes; `limit` says what bounds.

    With `part`, these bytes are not all that is wanted: a chunk, or a buffer to load with. Where
    nobody tells how many are, `failed` is the text: what could not be done, and the remedy.
    """

    code = ErrorCode.NO_ROOM

    def __init__(
        self, *, wanted: int, free: int, limit: str, part: bool = False, failed: str = ""
    ) -> None:
        self.wanted, self.free, self.limit = wanted, free, limit
        if failed:
            super().__init__(failed)
            return
        more, least = ("another ", "at least ") if part else ("", "")
        super().__init__(
            f"the weights need {more}{wanted:,} bytes but {limit} leaves {free:,}, so "
            f"{least}{wanted - free:,} are missing: free memory, raise the limit, or use a smaller "
            "model or more ranks"
        )


class OutOfDescriptors(PreloadError):
    """A descriptor limit was reached; the text names the limit and how to raise it."""

    code = ErrorCode.NO_DESCRIPTORS


class NoSuchDevice(PreloadError):
    """The GPU is not to be seen from here, cannot share memory by descriptors, or none is there."""

    code = ErrorCode.NO_DEVICE


class DeviceFailed(PreloadError):
    """The GPU's driver answered with an error, or the GPU is lost; the text has its own words."""

    code = ErrorCode.DEVICE_FAILED


class ReadFailed(PreloadError):
    """The disk answered with an error, or a file changed while it was read."""

    code = ErrorCode.READ_FAILED


class AlreadyRunning(PreloadError):
    """Another live daemon holds the lock of this device. `pid` is None when it left no number."""

    code = ErrorCode.ALREADY_RUNNING

    def __init__(self, instance: str, path: str, pid: int | None) -> None:
        self.instance, self.path, self.pid = instance, path, pid
        owner = f"process {pid}" if pid is not None else "another process"
        super().__init__(
            f"{instance} is already served by {owner} (lock {path}): stop that daemon first, "
            "or give this one another socket directory"
        )


class InsecurePath(PreloadError):
    """A folder or socket that others could have planted or can open; the text says why."""

    code = ErrorCode.INSECURE


class ProtocolViolation(PreloadError):
    """The peer broke the protocol, or the kernel truncated a packet or its descriptors."""

    code = ErrorCode.PROTOCOL


class DamagedManifest(PreloadError):
    """A manifest cannot be trusted: digest, columns or chunk sizes do not add up."""

    code = ErrorCode.DAMAGED


class LoaderFailed(PreloadError):
    """The loader ended without weights. Its exit status (128 + n for signal n) is preserved."""

    code = ErrorCode.LOADER

    def __init__(self, message: str, status: int) -> None:
        self.status = status
        super().__init__(message)

    @property
    def exit_status(self) -> int:
        """The loader's own status, so that it reaches whoever watches the rank."""
        return self.status


class RendezvousFailed(PreloadError):
    """The ranks of a group on several hosts did not come together, or lost one while loading.

    The text names rank and node, and what they disagree in.
    """

    code = ErrorCode.RENDEZVOUS


class ServiceManagerError(PreloadError):
    """systemd did not do, or not tell, what it was asked; the text has its own words."""

    code = ErrorCode.UNAVAILABLE


class NoServiceManager(ServiceManagerError):
    """There is no systemd to ask. Ranks may serve all the same."""


class ServiceManagerDenied(ServiceManagerError):
    """This user may not ask this of systemd."""

    code = ErrorCode.DENIED


class AttachError(PreloadError):
    """An engine did not get weights from a daemon; with fallback it now loads from disk."""

    code = ErrorCode.UNAVAILABLE


class Unavailable(AttachError):
    """Nobody serves the weights (yet). `reason`: one of `protocol.messages.Reason`, or `absent`."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        super().__init__(detail)


class Mismatch(AttachError):
    """The daemon holds weights for something else; `fields` are (name, daemon's, engine's)."""

    code = ErrorCode.MISMATCH

    def __init__(self, fields: tuple[tuple[str, str, str], ...]) -> None:
        self.fields = fields
        told = "; ".join(
            f"{name}: daemon has {theirs!r}, engine wants {ours!r}" for name, theirs, ours in fields
        )
        super().__init__(f"the daemon's weights do not match this engine: {told}")


class AccessDenied(AttachError):
    """The daemon does not serve this user."""

    code = ErrorCode.DENIED
