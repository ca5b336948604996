"""Manifests as bytes: a magic, a digest, then msgpack. They travel in sealed memfds."""

from __future__ import annotations

import hashlib

import msgspec

from preloadd.domain.manifest import Manifest, check
from preloadd.errors import DamagedManifest

MAGIC = b"preloadd manifest 1\n"
DIGEST_BYTES = 32
MAX_NBYTES = 256 << 20
"""Bytes of an encoded manifest a receiver looks at; a million tensors need about 100 MiB."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def encode(manifest: Manifest) -> bytes:
    """The manifest as bytes: MAGIC, BLAKE2b-256 of the body, body."""
    body = _encoder.encode(manifest)
    return MAGIC + hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest() + body


def decode(data: bytes | bytearray | memoryview) -> Manifest:
    """The manifest in `data`, checked so that offsets need no further look; or DamagedManifest."""
    view = memoryview(data)
    start = len(MAGIC) + DIGEST_BYTES
    if len(view) > MAX_NBYTES or len(view) < start or view[: len(MAGIC)] != MAGIC:
        raise DamagedManifest(f"{len(view)} bytes that are no manifest of this version")
    body = view[start:]
    if hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest() != view[len(MAGIC) : start]:
        raise DamagedManifest("the manifest's digest does not match its content")
    try:
        manifest = _decoder.decode(body)
    # RecursionError: msgspec lets it out for deep nesting inside of fields that it skips.
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DamagedManifest(f"the manifest cannot be read: {error}") from error
    check(manifest)
    return manifest
