"""Every tensor of a model by name: parameters, buffers, and those hidden in plain objects.

Engines find under the same name what a loader found. A hidden
tensor is one that a module keeps in an attribute of its own or in an object beside it (a kernel, an
attention backend): torch does not know it. Its name is the module's, `::`, and the way from there:
``model.layers.0.self_attn.attn::impl.scale``, ``lm_head::tables[2]``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import Any

import torch
from torch import nn

from preloadd.domain.manifest import Kind

HIDDEN = "::"
"""Between the name of a module and the way to a tensor that is hidden in it."""

_DEPTH = 4
"""Steps from a module to a hidden tensor: an object, a container in it, an object in that, and the
tensor."""

_LONGEST = 4096
"""Entries of a list or dict that are looked into."""

_STEP = re.compile(r"\.?([A-Za-z_]\w*)|\[(\d+)\]|\['([^'\\]*)'\]")

_PLAIN = frozenset(
    {
        *(NoneType, bool, int, float, complex, str, bytes, type),
        *(FunctionType, MethodType, BuiltinFunctionType, torch.dtype, torch.device, torch.Size),
    }
)
"""Types of values that hold no tensors."""

_TORCHS_OWN = frozenset(vars(nn.Module()))
"""What every module has: its parameters, buffers and modules among it."""


@dataclass(frozen=True, slots=True)
class Found:
    """One tensor under one of its names."""

    name: str
    kind: Kind
    tensor: torch.Tensor


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Modules under all their names: a tied one comes several times, as it must to be reached."""
    return dict(model.named_modules(remove_duplicate=False))


def registered(modules: dict[str, nn.Module]) -> Iterator[Found]:
    """Parameters and buffers under all their names, among `modules_of` a model."""
    for prefix, module in modules.items():
        dot = f"{prefix}." if prefix else ""
        for leaf, parameter in module._parameters.items():  # noqa: SLF001
            if parameter is not None:
                yield Found(dot + leaf, Kind.PARAMETER, parameter)
        passing = module._non_persistent_buffers_set  # noqa: SLF001
        for leaf, buffer in module._buffers.items():  # noqa: SLF001
            if buffer is not None:
                kind = Kind.NON_PERSISTENT_BUFFER if leaf in passing else Kind.BUFFER
                yield Found(dot + leaf, kind, buffer)


def outline(modules: dict[str, nn.Module]) -> str:
    """A digest of what a model is made of before it has weights: names, shapes and dtypes of its
    tensors, and for each layer how it is quantised and by which of the enumerated means."""
    lines = [
        f"{found.name} {tuple(found.tensor.shape)} {found.tensor.dtype}"
        for found in registered(modules)
    ]
    for prefix, module in modules.items():
        if (method := getattr(module, "quant_method", None)) is not None:
            chosen = [
                f"{name}={value.name}"
                for name, value in sorted(vars(method).items())
                if isinstance(value, Enum)
            ]
            lines.append(f"{prefix} {type(method).__name__} {' '.join(chosen)}")
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def empty_names(modules: dict[str, nn.Module]) -> list[str]:
    """Names of parameters and buffers that are there but None, each once for each module."""
    return [
        f"{prefix}.{leaf}" if prefix else leaf
        for prefix, module in modules.items()
        for table in (module._parameters, module._buffers)  # noqa: SLF001
        for leaf, value in table.items()
        if value is None
    ]


def beside(modules: dict[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in attributes and plain objects of `modules_of` a model, under every name that leads
    to one; those of modules are among them, where such an object holds one too."""
    firsts = {id(module): prefix for prefix, module in reversed(modules.items())}
    seen = dict.fromkeys(firsts, _DEPTH + 1)
    for prefix, module in modules.items():
        if firsts[id(module)] != prefix:
            continue
        for name, value in vars(module).items():
            if type(value) not in _PLAIN and name not in _TORCHS_OWN:
                for path, tensor in _within(value, name, _DEPTH, seen):
                    yield f"{prefix}{HIDDEN}{path}", tensor


def _within(
    value: object, path: str, depth: int, seen: dict[int, int]
) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if depth <= 1 or seen.get(id(value), 0) >= depth:
        return
    for name, inner in _parts(value):
        if type(inner) not in _PLAIN:
            # Not marked before it is known to be looked into, as small integers are everywhere.
            # By the steps that were left: a shorter way there sees more of it.
            seen[id(value)] = depth
            yield from _within(inner, path + name, depth - 1, seen)


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """What `value` holds, with the step that leads there, if its kind is looked into."""
    match value:
        case list() | tuple() if len(value) <= _LONGEST:
            for index, inner in enumerate(value):
                yield f"[{index}]", inner
        case dict() if len(value) <= _LONGEST:
            for key, inner in value.items():
                if isinstance(key, str) and "'" not in key and "\\" not in key:
                    yield f"['{key}']", inner
        case _:
            if _is_looked_into(value):
                for name, inner in list(vars(value).items()):
                    yield f".{name}", inner


def _is_looked_into(value: object) -> bool:
    """An object of vLLM's that may hold tensors; its configuration never does."""
    module = type(value).__module__
    return (
        module.startswith("vllm.")
        and not module.startswith("vllm.config")
        and not isinstance(value, (type, nn.Module))
        and hasattr(value, "__dict__")
    )


def look_up(modules: dict[str, nn.Module], name: str) -> tuple[Any, str | int]:
    """What holds the hidden tensor `name`, and under which attribute, index or key.

    LookupError if the way there does not exist in this model. The last step need not.
    """
    prefix, _, path = name.partition(HIDDEN)
    holder: Any = modules[prefix]
    *before, last = _steps(path)
    for step in before:
        try:
            holder = getattr(holder, str(step)) if _is_attribute(holder) else holder[step]
        except (AttributeError, TypeError) as error:
            raise LookupError(f"{name}: no {step}") from error
    return holder, last


def value_at(holder: Any, step: str | int) -> object:  # noqa: ANN401
    """What is there; None if nothing is."""
    try:
        return getattr(holder, str(step)) if _is_attribute(holder) else holder[step]
    except (AttributeError, LookupError, TypeError):
        return None


def put_hidden(holder: Any, step: str | int, tensor: torch.Tensor) -> None:  # noqa: ANN401
    """Put a hidden tensor there; LookupError where that cannot be done, as in a tuple."""
    try:
        if _is_attribute(holder):
            object.__setattr__(holder, str(step), tensor)
        else:
            holder[step] = tensor
    except (AttributeError, IndexError, TypeError) as error:
        raise LookupError(f"a {type(holder).__name__} takes no tensor at {step!r}") from error


def put(module: nn.Module, leaf: str, tensor: torch.Tensor, *, persistent: bool) -> None:
    """Make `tensor` the parameter or buffer `leaf` of a module, whatever was there before."""
    # Data of a parameter without memory cannot be assigned, so it is dropped and registered.
    remove(module, leaf)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(leaf, tensor)
    else:
        module.register_buffer(leaf, tensor, persistent=persistent)


def remove(module: nn.Module, leaf: str) -> None:
    """Take the parameter, buffer or plain attribute `leaf` from a module, if there is one."""
    for table in (module._parameters, module._buffers, module.__dict__):  # noqa: SLF001
        table.pop(leaf, None)
    module._non_persistent_buffers_set.discard(leaf)  # noqa: SLF001


def _is_attribute(holder: object) -> bool:
    return not isinstance(holder, (list, tuple, dict))


def _steps(path: str) -> list[str | int]:
    """The way to a hidden tensor as names, keys and indices; LookupError if it is none."""
    steps: list[str | int] = []
    at = 0
    while at < len(path):
        match = _STEP.match(path, at)
        if match is None:
            raise LookupError(f"{path!r} is no way to a tensor")
        name, index, key = match.groups()
        steps.append(int(index) if index is not None else name if name is not None else key)
        at = match.end()
    if not steps:
        raise LookupError("no way to a tensor")
    return steps
