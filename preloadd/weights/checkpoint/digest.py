"""The content of a checkpoint as a short text: equal texts of one method mean equal weights.

A digest covers header and data of every shard and, where an index leaves tensors of a shard out,
which ones. It does not depend on the folder, on file names or on the order of shards, so renamed
shards and copies that keep the sharding have the same one.

`full` hashes every byte. `sampled` hashes the headers, the sizes and a few windows of every tensor,
at places that depend on the tensor's name and size. It tells apart checkpoints that were trained
differently, because training touches every tensor nearly everywhere. **It is blind between its
windows**: whoever edits single values of a large tensor can leave the sampled digest unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from blake3 import blake3

from preloadd.domain.settings import Digest
from preloadd.weights.checkpoint.digest_cache import DigestCache
from preloadd.weights.checkpoint.header import ShardHeader
from preloadd.weights.checkpoint.index import Checkpoint
from preloadd.weights.checkpoint.layout import TensorInfo
from preloadd.weights.checkpoint.reading import read_into, unchanged
from preloadd.weights.checkpoint.sampling import SAMPLE, windows

METHODS = {Digest.SAMPLED: "sampled-1", Digest.FULL: "full-1"}
"""How each method signs its digests. Its number is raised when equal files would give another."""

BLOCK = 16 << 20
"""Bytes of a shard held in memory while it is hashed whole."""

_THREADS = 8
_BATCH = 32


def _ignore(_: int) -> None:
    pass


def content(
    checkpoint: Checkpoint,
    method: Digest,
    cache_dir: Path | None,
    *,
    progress: Callable[[int], None] = _ignore,
) -> str:
    """The digest of `checkpoint` as `<method>:<hex>`.

    Under `full`, digests of whole files are kept in `cache_dir` (None: nowhere), so that a file is
    hashed once per host; `progress` is then told the bytes of every block, from this thread, of
    whole files that another process has hashed, and of 0 bytes while one does.
    ReadFailed names a file that cannot be read or that changed since `checkpoint` was opened.
    """
    if method is Digest.SAMPLED:
        shards = _sampled(checkpoint.shards)
    else:
        shards = _full(checkpoint.shards, cache_dir, progress)
    parts = [
        blake3(digest + _left_out(checkpoint, shard)).digest()
        for shard, digest in zip(checkpoint.shards, shards, strict=True)
    ]
    return f"{METHODS[method]}:{blake3(b''.join(sorted(parts))).hexdigest()}"


def _left_out(checkpoint: Checkpoint, shard: ShardHeader) -> bytes:
    """The names of tensors in `shard` that the index takes from elsewhere or nowhere."""
    tensors = checkpoint.tensors
    names = [
        name for name in shard.tensors if name not in tensors or tensors[name].shard is not shard
    ]
    return b"".join(blake3(name.encode()).digest() for name in sorted(names))


def _sampled(shards: Sequence[ShardHeader]) -> list[bytes]:
    hashers = {
        shard.path: blake3(shard.digest + shard.identity.size.to_bytes(8, "little"))
        for shard in shards
    }
    batches = list(_batches(shards))
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="digest") as pool:
        samples = pool.map(lambda batch: _sample(*batch), batches)
        for (shard, _), digests in zip(batches, samples, strict=True):
            hashers[shard.path].update(digests)
    return [hasher.digest() for hasher in hashers.values()]


def _batches(shards: Sequence[ShardHeader]) -> Iterator[tuple[ShardHeader, Sequence[TensorInfo]]]:
    for shard in shards:
        tensors = list(shard.tensors.values())
        for first in range(0, len(tensors), _BATCH):
            yield shard, tensors[first : first + _BATCH]


def _sample(shard: ShardHeader, tensors: Sequence[TensorInfo]) -> bytes:
    """The digests of these tensors' samples, one after the other."""
    with unchanged(shard.path, shard.identity) as fd, memoryview(bytearray(SAMPLE)) as room:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return b"".join(_sample_of(fd, shard.path, tensor, room) for tensor in tensors)


def _sample_of(fd: int, path: Path, tensor: TensorInfo, room: memoryview) -> bytes:
    filled = 0
    for offset, nbytes in windows(tensor):
        read_into(fd, room[filled : filled + nbytes], offset, path)
        filled += nbytes
    return blake3(room[:filled]).digest()


def _full(
    shards: Sequence[ShardHeader], cache_dir: Path | None, progress: Callable[[int], None]
) -> list[bytes]:
    if cache_dir is None:
        return [_hash(shard, progress) for shard in shards]
    cache = DigestCache(cache_dir)
    return [_recalled(cache, shard, progress) for shard in shards]


def _recalled(cache: DigestCache, shard: ShardHeader, progress: Callable[[int], None]) -> bytes:
    """The digest that is kept, or one that will be. Its bytes are progress either way: who waits
    for others to hash a large checkpoint does not hang."""
    told = 0

    def tell(nbytes: int) -> None:
        nonlocal told
        told += nbytes
        progress(nbytes)

    digest = cache.recall(shard.identity, partial(_hash, shard, tell), waiting=partial(progress, 0))
    if not told:
        progress(shard.identity.size)
    return digest


def _hash(shard: ShardHeader, progress: Callable[[int], None]) -> bytes:
    """BLAKE3 of the whole file, block by block on every processor."""
    hasher = blake3(max_threads=blake3.AUTO)
    size = shard.identity.size
    with (
        unchanged(shard.path, shard.identity) as fd,
        memoryview(bytearray(min(BLOCK, size))) as room,
    ):
        for offset in range(0, size, BLOCK):
            with room[: min(BLOCK, size - offset)] as block:
                read_into(fd, block, offset, shard.path)
                hasher.update(block)
                progress(len(block))
    return hasher.digest()
