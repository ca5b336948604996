"""Filling an arena with the library instanttensor, for hosts whose disks outrun our own reader.

It reads whole tensors past the page cache into a buffer of its own on the GPU; they are cut and
copied to their places there. So it suits a rank that holds most of its files' tensors whole, and
disks only: what the page cache holds our own reader brings many times faster. Importing this module
needs the library.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

import instanttensor
import torch  # noqa: TID253

from preloadd.domain.settings import Memory
from preloadd.errors import ConfigError, DeviceFailed, ReadFailed
from preloadd.frameworks.torch import explained
from preloadd.loader.filling import LOADING, Filled
from preloadd.loader.native import Native
from preloadd.loader.report import Reporter, Tally
from preloadd.loader.source import OpenFile
from preloadd.memory.api import Filler, WritableChunk
from preloadd.memory.status import out_of_room


def fill(native: Native, filler: Filler, reporter: Reporter) -> Filled:
    """As `filling.fill`, for chunks in CUDA memory; ConfigError for other memory."""
    if native.model.memory is not Memory.CUDA:
        raise ConfigError(
            f'reader = "instanttensor" reads into CUDA memory, not {native.model.memory.value}: '
            'set reader = "pread"'
        )
    started = time.monotonic()
    told = Tally(reporter, LOADING, native.plan.tensor_nbytes)
    told(0)
    with native.opened() as files, ExitStack() as undo:
        chunks = [undo.enter_context(filler.create(nbytes)) for nbytes in native.plan.chunks]
        arena = [_bytes_of(chunk) for chunk in chunks]
        with _translated(filler):
            nbytes_read = _copy_all(native, files, arena, told)
        for index, chunk in enumerate(chunks):
            chunk.finish()
            reporter.chunk(index, chunk)
    return Filled(nbytes_read, nbytes_read, time.monotonic() - started)


def _copy_all(
    native: Native, files: Sequence[OpenFile], arena: list[torch.Tensor], told: Tally
) -> int:
    """Every tensor to its place, and all is there; bytes that were read for it."""
    rows, device = _rows(native), arena[0].device
    nbytes_read = 0
    with closing(_read(native, files, list(rows), device)) as tensors:
        for name, tensor in tensors:
            nbytes_read += tensor.nbytes
            told(_place(native, rows[name], tensor, arena))
    if device.type == "cuda":
        # These are torch's copies, of which the chunks know nothing.
        torch.cuda.synchronize(device)
    return nbytes_read


def _bytes_of(chunk: WritableChunk) -> torch.Tensor:
    """A chunk as a tensor of bytes that shares its memory; ConfigError if torch has no CUDA."""
    try:
        tensor = torch.as_tensor(chunk)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f'reader = "instanttensor" needs a torch that can use CUDA, not {torch.__version__} '
            f'({_first_line(error)}): install one, or set reader = "pread"'
        ) from error
    if tensor.dtype != torch.uint8 or tensor.nbytes != chunk.nbytes:
        raise DeviceFailed(f"torch sees {tensor.nbytes} bytes in a chunk of {chunk.nbytes}")
    return tensor


def _rows(native: Native) -> dict[str, int]:
    """Rows of the plan that have bytes, by the names of their tensors.

    ConfigError if a file of those besides the right one has such a name too: the library would read
    both.
    """
    slices = native.plan.slices
    rows = {each.name: row for row, each in enumerate(slices) if each.runs}
    for shard in native.checkpoint.shards:
        for name in shard.tensors.keys() & rows.keys():
            home = native.checkpoint.tensors[name].shard
            if home is not shard:
                raise ConfigError(
                    f"tensor {name!r} is both in {home.path} and in {shard.path}, which "
                    f'instanttensor cannot tell apart: set reader = "pread"'
                )
    return rows


def _read(
    native: Native, files: Sequence[OpenFile], names: list[str], device: torch.device
) -> Generator[tuple[str, torch.Tensor]]:
    """Tensors by name, each valid until the next one."""
    used = {run.file for each in native.plan.slices for run in each.runs}
    # By descriptor, so that these are the files whose identities are checked.
    paths = [f"/proc/self/fd/{files[number].fd}" for number in sorted(used)]
    with warnings.catch_warnings():
        # It warns that a tensor is not to be kept for longer than we do.
        warnings.simplefilter("ignore")
        with instanttensor.safe_open(
            paths,
            "pt",
            device,
            copy=False,
            tensor_filter=names,
            tensor_name_match_mode="exact",
        ) as opened:
            yield from opened.tensors()


def _place(native: Native, row: int, tensor: torch.Tensor, arena: list[torch.Tensor]) -> int:
    """Copy what the rank wants of a tensor to its place; bytes that are now there."""
    storages, part = native.plan.storages, native.plan.slices[row]
    start = native.checkpoint.tensors[part.name].info.start
    source = tensor.reshape(-1).view(arena[0].dtype)
    target = arena[storages.chunk[row]]
    place = storages.offset[row]
    for run in part.runs:
        shape, strides = (run.rows, run.row_nbytes), (run.stride, 1)
        offset = source.storage_offset() + run.offset - start
        wanted = source.as_strided(shape, strides, offset)
        target[place : place + run.nbytes].view(shape).copy_(wanted)
        place += run.nbytes
    return part.nbytes


def buffer_nbytes(native: Native) -> int:
    """Bytes of GPU memory that the library needs besides the chunks, at least: its buffer holds the
    largest tensor whole."""
    tensors = native.checkpoint.tensors
    return max(
        (tensors[each.name].info.nbytes for each in native.plan.slices if each.runs), default=0
    )


@contextmanager
def _translated(filler: Filler) -> Iterator[None]:
    """Give errors of the library, which has no kinds of its own, their meaning."""
    try:
        with explained(filler.room):
            yield
    except (RuntimeError, ValueError, OSError) as error:
        words = _first_line(error)
        if "device memory budget" in words.lower():
            raise out_of_room(filler.room, 0, f"instanttensor: {words}") from error
        raise ReadFailed(
            f'instanttensor: {words}: check disk and files, or set reader = "pread"'
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
