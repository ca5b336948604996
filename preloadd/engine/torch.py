"""Attached weights as torch tensors: mapped read-only, or copied and the daemon's freed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from preloadd.domain.ids import Role
from preloadd.domain.leases import Mode
from preloadd.domain.manifest import Manifest
from preloadd.domain.placement import Placement
from preloadd.engine.client import Attachment, Wanted, attach
from preloadd.engine.native import WHOLE, NativeCheckpoint
from preloadd.engine.options import Options
from preloadd.engine.place import Place, open_place, spot
from preloadd.engine.undisturbed import undisturbed
from preloadd.frameworks.tables import table_path
from preloadd.frameworks.torch import copies, device_name, in_use, views, whole_chunk
from preloadd.linux.owner import Owner
from preloadd.weights.checkpoint.digest_cache import cache_folder_of


class Weights(Owner):
    """One generation's tensors by the names of the checkpoint, on `device` as torch writes it.

    With `zero_copy` they are views of memory that others share: writing to one in host memory ends
    the process, on a GPU it is an error of CUDA after which the process is of no more use. The
    lease lasts until `close`, with `copy` until `take_over`.

    A lease can be neither copied nor sent: where an object that refers to these weights is, by
    `copy.deepcopy`, `pickle` or `torch.save`, the other one has None in their place.
    """

    def __init__(self, attachment: Attachment, mode: Mode, device: str = "cpu") -> None:
        self.manifest: Manifest = attachment.manifest
        self.mode = mode
        self.device = device
        self._attachment: Attachment | None = attachment
        self._in_use: list[Callable[[], bool]] = []
        self._make_tensors(attachment)

    @property
    def autotune_table(self) -> Path:
        """Where the daemon's loader puts FlashInfer's table for these weights, if this process has
        its user and environment: for `flashinfer.autotune(False, cache=str(...))`.

        There may be none, which FlashInfer takes for an empty one. ValueError for weights of
        another builder than the native one; it imports FlashInfer, and raises what that does.
        """
        return table_path(self.manifest.key, os.environ)

    def take_over(self) -> None:
        """After a copy that is good: have the daemon free its own, and give the lease back.

        Nothing happens with `zero_copy`.
        """
        if self.mode is Mode.COPY and self._attachment is not None:
            self._attachment.release()
            self._end(self._attachment)

    def chunk(self, index: int) -> torch.Tensor:
        """The bytes of one chunk, as uint8 of shape (nbytes,)."""
        return self._chunks[index]

    def shares(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in this arena, and not in memory of its own."""
        address = tensor.data_ptr()
        return any(
            chunk.data_ptr() <= address < chunk.data_ptr() + chunk.numel() for chunk in self._chunks
        )

    def close(self) -> None:
        """Give the lease back, and unmap unless others in this process use the mapping.

        BufferError while tensors of it are in use elsewhere: then everything stays as it is.
        DeviceFailed where a GPU did not finish its work: once, and the lease is given back.
        """
        self._drop_tensors()
        attachment = self._attachment
        if attachment is None:
            return
        # The mapping itself may be shared, so it cannot tell whose tensors still use it.
        if self.mode is Mode.ZERO_COPY and any(used() for used in self._in_use):
            self._make_tensors(attachment)
            raise BufferError(
                "tensors of these weights are still in use, so they stay mapped and the lease "
                "goes on: drop the tensors and the model, then close again"
            )
        self._end(attachment)

    def abandon(self) -> None:
        """Give the lease back and leave the mapping to the tensors that still use it."""
        if self._attachment is not None:
            self._attachment.abandon()
            self._attachment = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        # Its frames may hold tensors, and a lost device fails again: neither must hide how it
        # began, nor keep the lease.
        self._drop_tensors()
        self.abandon()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def __repr__(self) -> str:
        held = "held" if self._attachment is not None else "given back"
        return f"<{len(self.tensors)} tensors, {self.mode}, lease {held}>"

    def _make_tensors(self, attachment: Attachment) -> None:
        """Make tensors of the arena, beside those of it that are still in use."""
        arena = attachment.arena
        chunks = [
            whole_chunk(arena.chunk(i), self.device) for i in range(len(self.manifest.chunks))
        ]
        if self.mode is Mode.COPY:
            chunks = copies(chunks, arena.room)
        self._chunks = chunks
        self._in_use = [used for used in self._in_use if used()] + [in_use(c) for c in chunks]
        with undisturbed():
            self.tensors: dict[str, torch.Tensor] = views(self.manifest, chunks)

    def _drop_tensors(self) -> None:
        self.tensors, self._chunks = {}, []

    def _end(self, attachment: Attachment) -> None:
        """Give the lease back, now that no tensor of these weights uses the mapping."""
        self._attachment = None
        try:
            attachment.close()
        except BufferError:
            # Other weights of this process were abandoned, and tensors of theirs live.
            attachment.abandon()


def attach_checkpoint(
    folder: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    options: Mapping[str, Any] | None = None,
    revision: str = "",
    dtype: str = "auto",
    placement: Placement = WHOLE,
    role: Role = Role.TARGET,
    client: str = "torch",
) -> Weights:
    """The weights of the checkpoint in `folder`, from the daemon of the engine's device.

    That is the GPU `device` (`cuda:1`), or the one torch works on; with the option `memory: "host"`
    it is this process's host device. Options as of `Options`; `dtype` as torch names it. Raises a
    PreloadError that says why there are none: falling back is the caller's business here.
    """
    parsed = Options.parse(options or {})
    checkpoint = NativeCheckpoint(
        Path(folder), revision=revision, dtype=dtype, digest_cache=cache_folder_of(os.environ)
    )
    place = open_place(spot(parsed.memory, device_name(device)), os.environ, placement.tensor_rank)
    wanted = checkpoint.wanted(
        place.device, client=client, memory=place.spot.memory, role=role, placement=placement
    )
    weights = attach_wanted(wanted, parsed, place)
    with ExitStack() as undo:
        undo.callback(weights.abandon)
        weights.take_over()
        undo.pop_all()
    return weights


def attach_wanted(wanted: Wanted, options: Options, place: Place) -> Weights:
    """The weights that match `wanted`, as tensors; errors as of `client.attach`.

    The lease is held in either mode, so that what is built of a copy may still fail.
    """
    attachment = attach(wanted, options, place.mapper, environ=os.environ, uid=os.geteuid())
    try:
        return Weights(attachment, options.mode, place.spot.torch_device)
    except BaseException:
        attachment.abandon()
        raise
