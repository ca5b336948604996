"""A model's tensors into the chunks of an arena, each original freed as soon as it is copied."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import torch

from preloadd.domain import dtypes
from preloadd.domain.manifest import ALIGNMENT, Artifact, Kind, Storages, Tensors
from preloadd.errors import UnsupportedModel
from preloadd.frameworks.torch import DTYPES
from preloadd.frameworks.vllm.walk import (
    Found,
    Plain,
    beside,
    empty_names,
    modules_of,
    registered,
)
from preloadd.loader.report import Reporter, Tally
from preloadd.loader.vllm.built import Built
from preloadd.memory.api import PIECE, Filler, Rows, WritableChunk
from preloadd.weights.plan.packing import lay_out

_CODES = {dtype: dtypes.CODES[name] for name, dtype in DTYPES.items()}
_PAIRS = torch.float4_e2m1fn_x2


@dataclass(slots=True)
class _Run:
    """The part of a storage that tensors use: bytes `first` to `end`."""

    storage: torch.UntypedStorage
    first: int
    end: int


@dataclass(slots=True)
class Export:
    """What is to be stored: runs of bytes, each once, and tensors that are views of them.

    `on_host` names tensors in host memory beside weights on a GPU, `empty` those that are None,
    `gone` those that processing took away, `blank` hidden ones that are zero all over: room to
    work in, of a size that engines may choose otherwise. `state` are plain values that processing
    has set, `outline` is of the model without weights.
    """

    runs: list[_Run] = field(default_factory=list)
    tensors: Tensors = field(default_factory=lambda: Tensors([], [], [], [], [], [], []))
    aliases: dict[str, str] = field(default_factory=dict)
    on_host: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    blank: list[str] = field(default_factory=list)
    state: dict[str, Plain] = field(default_factory=dict)
    outline: str = ""

    @property
    def sizes(self) -> list[int]:
        """Bytes of each run."""
        return [run.end - run.first for run in self.runs]


def describe(built: Built) -> Export:
    """What of a model is to be stored; UnsupportedModel names a tensor that has no place there.

    Parameters come first, so that what engines copy for themselves lies together behind them.
    """
    modules = modules_of(built.model)
    export = Export(empty=empty_names(modules), state=built.state, outline=built.outline)
    export.gone = sorted(built.names - {found.name for found in registered(modules)})
    device = next(
        (found.tensor.device for found in registered(modules) if found.kind is Kind.PARAMETER),
        torch.device("cpu"),
    )
    names: dict[int, str] = {}
    places: dict[int, int] = {}
    found_rows: list[tuple[Found, int]] = []
    everything = list(registered(modules))
    everything += [Found(name, Kind.HIDDEN, tensor) for name, tensor in beside(modules)]
    for found in sorted(everything, key=lambda found: found.kind is not Kind.PARAMETER):
        if (first := names.get(id(found.tensor))) is not None:
            if first != found.name:
                export.aliases[found.name] = first
            continue
        names[id(found.tensor)] = found.name
        if found.tensor.device != device:
            if found.kind is Kind.PARAMETER:
                raise UnsupportedModel(
                    f"{found.name} is on {found.tensor.device}, apart from the rest: leave "
                    "out offloading"
                )
            export.on_host.append(found.name)
        found_rows.append((found, _place(found, export.runs, places)))
    export.blank = [found.name for found, _ in found_rows if _is_blank(found)]
    for found, run in found_rows:
        _add_row(export.tensors, found, run, export.runs[run].first)
    return export


def _is_blank(found: Found) -> bool:
    tensor = found.tensor
    if found.kind is not Kind.HIDDEN or tensor.numel() < 2 or not tensor.is_contiguous():
        return False
    return not bool(tensor.view(-1).view(torch.uint8).any())


def _place(found: Found, runs: list[_Run], places: dict[int, int]) -> int:
    """The run that a tensor lies in, which is made or grows for it."""
    tensor = found.tensor
    if tensor.layout is not torch.strided or tensor.dtype not in _CODES:
        raise UnsupportedModel(
            f"{found.name}: a tensor of {tensor.dtype} ({tensor.layout}) cannot be shared, only "
            "dense ones of a dtype that safetensors has: load this model without preloadd"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise UnsupportedModel(f"{found.name} is conjugated or negated when it is read only")
    if tensor.is_meta:
        raise UnsupportedModel(f"{found.name} has no memory: vLLM loaded nothing into it")
    storage = tensor.untyped_storage()
    start = int(tensor.storage_offset()) * tensor.itemsize
    extent = _extent(tensor) * tensor.itemsize
    first, end = start // ALIGNMENT * ALIGNMENT, start + extent
    if end > storage.nbytes():
        raise UnsupportedModel(f"{found.name} reaches past the end of its memory")
    # Storages without bytes have no address to tell them by, nor anything to share.
    known = places.get(storage.data_ptr()) if storage.nbytes() else None
    if known is None:
        runs.append(_Run(storage, first, end))
        if storage.nbytes():
            places[storage.data_ptr()] = len(runs) - 1
        return len(runs) - 1
    run = runs[known]
    run.first, run.end = min(run.first, first), max(run.end, end)
    return known


def _extent(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to its last, those between them included."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _add_row(columns: Tensors, found: Found, run: int, first: int) -> None:
    tensor = found.tensor
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    skip = int(tensor.storage_offset()) - first // tensor.itemsize
    if tensor.dtype is _PAIRS:
        # Manifests count values, torch pairs of them.
        if not tensor.is_contiguous() or not shape:
            raise UnsupportedModel(f"{found.name}: pairs of 4-bit values with gaps between them")
        shape, skip = (*shape[:-1], shape[-1] * 2), skip * 2
    columns.name.append(found.name)
    columns.kind.append(int(found.kind))
    columns.dtype.append(_CODES[tensor.dtype])
    columns.shape.append(shape)
    columns.strides.append(None if tensor.is_contiguous() else strides)
    columns.storage.append(run)
    columns.skip.append(skip if tensor.numel() else 0)


@dataclass(frozen=True, slots=True)
class Stored:
    """Where everything went."""

    chunks: tuple[int, ...]
    storages: Storages


def store(export: Export, filler: Filler, chunk_bytes: int, reporter: Reporter) -> Stored:
    """Copy every run into chunks of `filler`, hand those over, and free the originals on the way.

    No tensor of the model may be used afterwards. OutOfRoom, DeviceFailed.
    """
    chunks, storages = lay_out(export.sizes, chunk_bytes, filler.granularity)
    told = Tally(reporter, "storing", sum(export.sizes))
    told(0)
    at = 0
    for index, nbytes in enumerate(chunks):
        with filler.create(nbytes) as chunk:
            while at < len(export.runs) and storages.chunk[at] == index:
                run = export.runs[at]
                if run.end > run.first:
                    _copy(run, chunk, storages.offset[at])
                    told(run.end - run.first)
                with suppress(RuntimeError):  # of memory that is not torch's own
                    run.storage.resize_(0)
                at += 1
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                # Freed memory is to be free for the next chunk, not kept by torch.
                torch.cuda.empty_cache()
            chunk.finish()
            reporter.chunk(index, chunk)
    return Stored(chunks, storages)


def _copy(run: _Run, chunk: WritableChunk, offset: int) -> None:
    source = torch.empty(0, dtype=torch.uint8, device=run.storage.device).set_(run.storage)
    source = source[run.first : run.end]
    if hasattr(chunk, "__cuda_array_interface__"):
        target = torch.as_tensor(chunk, device=torch.device("cuda", torch.cuda.current_device()))
        target[offset : offset + len(source)].copy_(source)
        return
    for start in range(0, len(source), PIECE):
        part = source[start : start + PIECE]

        def read(window: memoryview, part: torch.Tensor = part) -> None:
            # Not through numpy, for which torch would keep the original from being freed.
            torch.frombuffer(window, dtype=torch.uint8).copy_(part)

        chunk.write(offset + start, len(part), Rows(0, len(part)), read)


def artifact(export: Export) -> Artifact:
    """What an engine has to know beside the tensors, as JSON."""
    told = {
        "on_host": export.on_host,
        "empty": export.empty,
        "gone": export.gone,
        "blank": export.blank,
        "state": export.state,
        "outline": export.outline,
    }
    return Artifact("vllm", "model.json", msgspec.json.encode(told))
