"""Every tensor of a model by name: parameters, buffers, and those hidden in plain objects.

Engines find under the same name what a loader found. A hidden tensor is one that a module keeps in
an attribute of its own or in an object beside it (a kernel, an attention backend): torch does not
know it. Its name is the module's, `::`, and the way from there:
``model.layers.0.self_attn.attn::impl.scale``, ``lm_head::tables[2]``.

Out of reach are tensors in callables (a partial, a closure, the object of a method), in sets, in
objects of others than vLLM, and further away than `_DEPTH` steps. They are not shared. Of callables
`empty_beside` tells an engine whether one is left without content there; of the rest it does not.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import cache, partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, NoneType
from typing import Any, NamedTuple, cast, get_args

import torch
from torch import nn

from preloadd.domain.manifest import Kind

HIDDEN = "::"
"""Between the name of a module and the way to a tensor that is hidden in it."""

_DEPTH = 4
"""Steps from a module to a hidden tensor: an object, a container in it, an object in that, and the
tensor."""

_METHOD = "quant_method"
"""The attribute of a layer that holds how it is quantised."""

_LONGEST = 4096
"""Entries of a list or dict that are looked into."""

_STEP = re.compile(r"\.?([A-Za-z_]\w*)|\[(\d+)\]|\['([^'\\]*)'\]")

_PLAIN = frozenset(
    {
        *(NoneType, bool, int, float, complex, str, bytes, type),
        *(BuiltinFunctionType, torch.dtype, torch.device, torch.Size),
    }
)
"""Types of values that hold no tensors."""

_TORCHS_OWN = frozenset(vars(nn.Module()))
"""What every module has: its parameters, buffers and modules among it."""


class Found(NamedTuple):
    """One tensor under one of its names."""

    name: str
    kind: Kind
    tensor: torch.Tensor


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Modules under all their names: a tied one comes several times, as it must to be reached.

    In the order of `named_modules`, which for a thousand of them takes several times as long.
    """
    found: dict[str, nn.Module] = {}
    left = [("", model)]
    while left:
        name, module = left.pop()
        found[name] = module
        dot = f"{name}." if name else ""
        for leaf, inner in reversed(module._modules.items()):  # noqa: SLF001
            if inner is not None:
                left.append((dot + leaf, inner))
    return found


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


def outline(modules: dict[str, nn.Module], tensors: Iterable[Found]) -> str:
    """A digest of what a model is made of before it has weights: names, shapes and dtypes of its
    `registered` tensors, and for each layer how it is quantised and by which of the enumerated
    means."""
    dtypes: dict[torch.dtype, str] = {}
    lines = []
    for name, _, tensor in tensors:
        dtype = dtypes.get(tensor.dtype) or dtypes.setdefault(tensor.dtype, str(tensor.dtype))
        lines.append(f"{name} {tuple(tensor.shape)} {dtype}")
    for prefix, module in modules.items():
        if (method := quant_method(module)) is not None:
            chosen = [
                f"{name}={value.name}"
                for name, value in sorted(vars(method).items())
                if isinstance(value, Enum)
            ]
            lines.append(f"{prefix} {type(method).__name__} {' '.join(chosen)}")
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def quant_method(module: nn.Module) -> object | None:
    """How vLLM quantises a layer; None for what is no such layer."""
    # Most modules are none, and to be told so by `getattr` costs an exception.
    if (method := module.__dict__.get(_METHOD)) is not None:
        return cast("object", method)
    return module._modules.get(_METHOD)  # noqa: SLF001


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
    return _beside(modules, _parts)


def empty_beside(modules: dict[str, nn.Module]) -> Iterator[str]:
    """Where tensors without content are: those `beside` finds, and those that callables keep. The
    names of the latter are for people."""
    for name, tensor in _beside(modules, _enclosed):
        if tensor.is_meta:
            yield name


Plain = bool | int | float | str | None
"""Values of attributes that are written as JSON."""

_PLAIN_TYPES = frozenset(get_args(Plain))
_ADDRESS = 1 << 31
"""Numbers from here on may be addresses, and mean nothing to others."""

_LONG = 256


def plain_values(modules: dict[str, nn.Module]) -> dict[str, Plain]:
    """What attributes of quantised layers, and of what quantises them, say that is no tensor, by
    names as of hidden tensors. Such numbers are set by processing as well: the size of a layer
    before it was padded. None longer than others can make use of."""
    found: dict[str, Plain] = {}
    seen: set[int] = set()
    for prefix, module in modules.items():
        method = quant_method(module)
        if method is None or id(module) in seen:
            continue
        seen.add(id(module))
        _gather(_own(module), f"{prefix}{HIDDEN}", 1, seen, found)
        if not isinstance(method, nn.Module):
            _gather({_METHOD: method}, f"{prefix}{HIDDEN}", _DEPTH, seen, found)
    for prefix, module in modules.items():
        if prefix.rpartition(".")[2] == _METHOD and id(module) not in seen:
            seen.add(id(module))
            _gather(_own(module), f"{prefix}{HIDDEN}", _DEPTH, seen, found)
    return found


def _gather(
    attributes: dict[str, object], path: str, depth: int, seen: set[int], found: dict[str, Plain]
) -> None:
    """Add plain values among `attributes`, and of objects among them as deep as that."""
    for name, value in attributes.items():
        kind: type = type(value)
        if _is_magic(name):
            continue
        if kind in _PLAIN_TYPES:
            if _is_meant_for_others(value):
                found[path + name] = cast("Plain", value)
        elif depth > 1 and id(value) not in seen and _is_looked_into(kind):
            seen.add(id(value))
            _gather(vars(value), f"{path}{name}.", depth - 1, seen, found)


def _own(module: nn.Module) -> dict[str, object]:
    """Attributes that are not torch's."""
    return {name: value for name, value in vars(module).items() if name not in _TORCHS_OWN}


def _is_meant_for_others(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _LONG
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or abs(value) < _ADDRESS


_Parts = Callable[[object], Iterator[tuple[str, object]]]


def _beside(modules: dict[str, nn.Module], parts: _Parts) -> Iterator[tuple[str, torch.Tensor]]:
    firsts = {id(module): prefix for prefix, module in reversed(modules.items())}
    seen = dict.fromkeys(firsts, _DEPTH + 1)
    for prefix, module in modules.items():
        if firsts[id(module)] != prefix:
            continue
        for name, value in vars(module).items():
            if type(value) not in _PLAIN and name not in _TORCHS_OWN and not _is_magic(name):
                for path, tensor in _within(value, name, _DEPTH, seen, parts):
                    yield f"{prefix}{HIDDEN}{path}", tensor


def _within(
    value: object, path: str, depth: int, seen: dict[int, int], parts: _Parts
) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if depth <= 1 or seen.get(id(value), 0) >= depth:
        return
    for name, inner in parts(value):
        if type(inner) not in _PLAIN:
            # Not marked before it is known to be looked into, as small integers are everywhere.
            # By the steps that were left: a shorter way there sees more of it.
            seen[id(value)] = depth
            yield from _within(inner, path + name, depth - 1, seen, parts)


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """What `value` holds, with the step that leads there, if its kind is looked into."""
    contents = _contents(value)
    if isinstance(contents, dict):
        for name, inner in list(contents.items()):
            if contents is not value:
                if type(inner) not in _PLAIN and not _is_magic(name):
                    yield f".{name}", inner
            elif isinstance(name, str) and "'" not in name and "\\" not in name:
                yield f"['{name}']", inner
    elif contents is not None:
        for index, inner in enumerate(contents):
            yield f"[{index}]", inner


def _enclosed(value: object) -> Iterator[tuple[str, object]]:
    """As `_parts`, and what a callable keeps for when it is called."""
    match value:
        case partial():
            yield ".func", value.func
            for index, inner in enumerate(value.args):
                yield f".args[{index}]", inner
            for name, inner in value.keywords.items():
                yield f".keywords['{name}']", inner
        case MethodType():
            yield ".__self__", value.__self__
        case FunctionType():
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                if cell != _EMPTY_CELL:
                    yield f".{name}", cell.cell_contents
        case _:
            yield from _parts(value)


_EMPTY_CELL = CellType()
"""Only others that are empty are equal to it. Whatever they hold is not compared."""


def _contents(value: object) -> list[Any] | tuple[Any, ...] | dict[Any, Any] | None:
    """Where `value` keeps what it holds, if its kind is looked into: itself, or its attributes."""
    if isinstance(value, (list, tuple, dict)):
        return value if len(value) <= _LONGEST else None
    return vars(value) if _is_looked_into(type(value)) else None  # type: ignore[arg-type]


@cache
def _is_looked_into(kind: type) -> bool:
    """Objects of vLLM's may hold tensors, but for its configuration and enumerations."""
    module = kind.__module__
    return (
        module.startswith("vllm.")
        and not module.startswith("vllm.config")
        and not issubclass(kind, (type, nn.Module, Enum))
        and kind.__dictoffset__ != 0
    )


def _is_magic(name: str) -> bool:
    """Whether an attribute belongs to Python itself."""
    return name.startswith("__") and name.endswith("__")


def look_up(modules: dict[str, nn.Module], name: str) -> tuple[Any, str | int]:
    """What holds the hidden tensor `name`, and under which attribute, index or key.

    Names come from a daemon: only steps are made that `beside` makes to find tensors. LookupError
    for others, and if the way there does not exist in this model. The last step need not.
    """
    prefix, _, path = name.partition(HIDDEN)
    holder: Any = modules[prefix]
    contents: Any = vars(holder)
    step, *others = _steps(path)
    if step in _TORCHS_OWN or len(others) >= _DEPTH:
        raise LookupError(f"{name} is no way to a hidden tensor")
    for following in others:
        _require_plain(holder, contents, step, name)
        try:
            holder = contents[step]
        except (LookupError, TypeError) as error:
            raise LookupError(f"{name}: no {step}") from error
        contents, step = _contents(holder), following
    _require_plain(holder, contents, step, name)
    return holder, step


def _require_plain(holder: object, contents: object, step: str | int, name: str) -> None:
    """LookupError unless `step` may be made from `holder`, whether anything is there or not."""
    by_index = isinstance(contents, (list, tuple))
    if contents is None or isinstance(step, int) is not by_index:
        raise LookupError(f"{name}: {step} is not looked for in a {type(holder).__name__}")
    if contents is not holder and _is_magic(str(step)):
        raise LookupError(f"{name}: {step} is Python's own")


def value_at(holder: Any, step: str | int) -> object:  # noqa: ANN401
    """What is there; None if nothing is. Of a module that may be something registered, of an object
    what its class has under that name. Nothing is called to find out."""
    if not _is_attribute(holder):
        try:
            return cast("object", holder[step])
        except (LookupError, TypeError):
            return None
    tables = [getattr(holder, "__dict__", {})]
    if isinstance(holder, nn.Module):
        tables += [holder._parameters, holder._buffers, holder._modules]  # noqa: SLF001
    for table in tables:
        if step in table:
            return cast("object", table[step])
    return cast("object", getattr(type(holder), str(step), None))


def put_hidden(holder: Any, step: str | int, tensor: torch.Tensor) -> None:  # noqa: ANN401
    """Put a hidden tensor there; LookupError where that cannot be done, as in a tuple.

    It takes the place of what a module has registered under the name.
    """
    if isinstance(holder, nn.Module):
        remove(holder, str(step))
    try:
        # Not by way of the class, which may make something else of it.
        contents = vars(holder) if _is_attribute(holder) else holder
        contents[step] = tensor
    except (IndexError, TypeError) as error:
        raise LookupError(f"a {type(holder).__name__} takes no tensor at {step!r}") from error


def put_plain(holder: Any, step: str | int, value: Plain) -> None:  # noqa: ANN401
    """Set an attribute that is no tensor; LookupError where `step` is none."""
    if not _is_attribute(holder) or not hasattr(holder, "__dict__"):
        raise LookupError(f"a {type(holder).__name__} has no attribute {step!r}")
    vars(holder)[str(step)] = value


def put(module: nn.Module, leaf: str, tensor: torch.Tensor, *, persistent: bool) -> None:
    """Make `tensor` the parameter or buffer `leaf` of a module, whatever was there before."""
    # Data of a parameter without memory cannot be assigned, so the object is another one. What
    # torch checks when one is registered is known here.
    is_parameter = isinstance(tensor, nn.Parameter)
    table: dict[str, Any] = module._parameters if is_parameter else module._buffers  # noqa: SLF001
    if leaf not in table:
        remove(module, leaf)
    table[leaf] = tensor
    if not is_parameter:
        passing = module._non_persistent_buffers_set  # noqa: SLF001
        (passing.discard if persistent else passing.add)(leaf)


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
