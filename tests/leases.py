"""What engines hold: looked at, and let go without a word to the rank."""

from __future__ import annotations

from contextlib import suppress

from preloadd.engine.client import Attachment


def content(lease: Attachment) -> dict[str, bytes]:
    """Every tensor's bytes as an engine finds them mapped."""
    found = {}
    for name in lease.manifest.tensors.name:
        chunk, offset, nbytes = lease.manifest.locate(name)
        with lease.arena.chunk(chunk) as mapped:
            found[name] = bytes(mapped[offset : offset + nbytes])
    return found


def let_go(lease: Attachment) -> None:
    """Give up a lease whose memory a failed test may still have in use."""
    lease.abandon()
    with suppress(BufferError):
        lease.arena.close()
