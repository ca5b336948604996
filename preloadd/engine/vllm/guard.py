"""Finds writes into shared weights before they happen.

Shared weights are mapped read-only on a GPU, where a write ends the process some time later with an
error that names nothing; on a CPU it goes to a copy of the page, which nobody sees. Both are told
here by the name of the tensor and of the operation, while there is still another way to load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from preloadd.engine.torch import Weights
from preloadd.errors import AttachError


class WriteGuard(TorchDispatchMode):
    """A block in which an operation that would write into `weights` raises AttachError."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = weights

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Let the operation pass unless it writes where it must not."""
        given = kwargs or {}
        written = _written(func)
        for position, name in written:
            value = args[position] if position < len(args) else given.get(name)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                    self._check(func, tensor, args)
        return func(*args, **given)

    def _check(self, func: Any, tensor: torch.Tensor, args: Sequence[Any]) -> None:  # noqa: ANN401
        if self._weights.shares(tensor) and not _is_same(func, tensor, args):
            raise AttachError(
                f"vLLM writes into {self._name(tensor)} while it prepares this model ({func}), "
                "which is shared"
            )

    def _name(self, tensor: torch.Tensor) -> str:
        storage = tensor.untyped_storage().data_ptr()
        for name, ours in self._weights.tensors.items():
            if ours.data_ptr() == tensor.data_ptr() or (
                ours.data_ptr() <= tensor.data_ptr() < ours.data_ptr() + ours.nbytes
            ):
                return name
        return f"a tensor at {storage:#x}"


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:  # noqa: ANN401
    """Position and name of the arguments that the operation's schema says it writes."""
    schema = getattr(func, "_schema", None)
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments if schema is not None else ())
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _is_same(func: Any, tensor: torch.Tensor, args: Sequence[Any]) -> bool:  # noqa: ANN401
    """Whether a tensor is copied onto itself, which torch does not carry out."""
    return (
        func is torch.ops.aten.copy_.default
        and len(args) > 1
        and isinstance(args[1], torch.Tensor)
        and args[1].data_ptr() == tensor.data_ptr()
        and args[1].dtype == tensor.dtype
        and args[1].shape == tensor.shape
        and args[1].stride() == tensor.stride()
    )
