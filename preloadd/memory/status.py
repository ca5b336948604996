"""What a GPU driver's status means here. HIP took its numbers from CUDA, so this is for both."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from preloadd.errors import DamagedManifest, DeviceFailed, OutOfRoom, PreloadError
from preloadd.linux.fds import exhausted, is_exhausted

OUT_OF_MEMORY = 2
DEINITIALIZED = 4

# Answers to a descriptor or a size that a peer made up: invalid value, device or handle; the call
# on the descriptor failed; not permitted; not supported; and "unknown", which is what driver 580
# says of a descriptor that is none of its own.
_FOREIGN = frozenset({1, 101, 304, 400, 800, 801, 999})

Room = Callable[[], tuple[int, str]]
"""How many bytes are free, and of what."""

HINT = "look for the GPU driver's messages in the kernel log (Xid with NVIDIA)"


def meaning_of(
    status: int,
    words: str,
    *,
    room: Room,
    wanted: int | None = None,
    foreign: bool = False,
) -> PreloadError:
    """What to raise for a status that is no success, where `words` say what failed and how.

    `wanted` is how many bytes were asked for, 0 where the driver itself needs some, None where none
    are; `foreign`, that a peer's descriptor or size was involved; `room` is asked only to say how
    many bytes were free.
    """
    if status == OUT_OF_MEMORY and wanted is not None:
        return out_of_room(room, wanted, words)
    if foreign and status in _FOREIGN:
        return DamagedManifest(f"{words}: it is no chunk of this GPU, or has another size")
    return DeviceFailed(f"{words}: {HINT}")


def out_of_room(
    room: Room,
    wanted: int,
    words: str,
    bound: str = "a limit of the driver",
    *,
    remedy: str = "give the engines there less of it (gpu_memory_utilization)",
) -> OutOfRoom:
    """What to raise where `wanted` more bytes were refused, or some for what `words` say (0).

    `bound` may be why they were although there are so many; `remedy` is what else to do than to
    free memory, where nobody tells how many were wanted.
    """
    free, limit = 0, ""
    with suppress(DeviceFailed):
        free, limit = room()
    if not wanted:
        left = f": {limit} leaves {free:,} bytes, too few for that" if limit else ""
        failed = f"{words}{left}: free memory, or {remedy}"
        return OutOfRoom(wanted=0, free=free, limit=limit, failed=failed)
    limit = limit or "the GPU"
    if free >= wanted:  # somebody has given memory back since, or there is another bound
        free, limit = 0, f"{limit} with {free:,} bytes free, by {bound},"
    return OutOfRoom(wanted=wanted, free=free, limit=limit, part=True)


def require_descriptor(doing: str) -> None:
    """OutOfDescriptors if this process can open nothing more, which drivers tell as anything."""
    try:
        os.close(os.open("/", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if is_exhausted(error):
            raise exhausted(error, doing) from error
