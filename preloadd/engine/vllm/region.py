"""The engine's own copy of what vLLM writes into: buffers, and tensors hidden in plain objects.

There are several for each layer, of a few bytes each. Builders put them side by side, so that all
are copied at once, which on a GPU takes no longer than one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from preloadd.domain.manifest import Kind, Manifest
from preloadd.engine.torch import Weights


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes of a chunk from `first` on, copied."""

    first: int
    copy: torch.Tensor


class Region:
    """Copies of all tensors of `weights` that are no parameters, made when it is."""

    def __init__(self, weights: Weights) -> None:
        manifest = weights.manifest
        self._where = {
            name: manifest.storages.chunk[storage]
            for name, storage in zip(manifest.tensors.name, manifest.tensors.storage, strict=True)
        }
        self._spans = {
            chunk: _Span(first, weights.chunk(chunk)[first:end].clone())
            for chunk, first, end in spans(manifest)
        }

    def copy_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The same view as `tensor`, named so in the manifest, of the engine's own memory."""
        span = self._spans.get(self._where[name])
        start = int(tensor.storage_offset()) * tensor.itemsize
        if span is None or start < span.first or not tensor.numel():
            # A view of a parameter's bytes.
            return tensor.clone()
        whole = span.copy[: len(span.copy) - len(span.copy) % tensor.itemsize].view(tensor.dtype)
        return whole.as_strided(
            tensor.shape, tensor.stride(), (start - span.first) // tensor.itemsize
        )


def spans(manifest: Manifest) -> Iterator[tuple[int, int, int]]:
    """Chunk, first and last byte of what lies behind its last parameter, if anything does."""
    shared = {
        storage
        for kind, storage in zip(manifest.tensors.kind, manifest.tensors.storage, strict=True)
        if kind == Kind.PARAMETER
    }
    storages = manifest.storages
    found: dict[int, tuple[int, int]] = {}
    rows = zip(storages.chunk, storages.offset, storages.nbytes, strict=True)
    for number, (chunk, offset, nbytes) in enumerate(rows):
        if number in shared:
            found.pop(chunk, None)
        elif nbytes:
            first, _ = found.get(chunk, (offset, 0))
            found[chunk] = (first, offset + nbytes)
    for chunk, (first, end) in found.items():
        yield chunk, first, end
