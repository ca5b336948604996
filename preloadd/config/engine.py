"""What a group's file says of its engine: sizes and draft of the group may stand in its arguments.

What stands there and under `[parallel]` or `[draft]` has to be the same, and is the group's either
way. What only `[draft]` says of the draft's model is told to vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from preloadd.config.arguments import from_table
from preloadd.config.drafts import CONFIG
from preloadd.config.files import Document, Fault, Layers, Table, spelled
from preloadd.config.vllm import Division, Size, divide
from preloadd.domain.ids import DeviceId, Instance, Role

ENGINE_ARGS = "engine_args"
PARALLEL = "parallel"
DRAFT = "draft"

_NOT_NATIVE = 'are vLLM\'s, and the builder is "native" (write builder = "vllm", or leave them out)'

_NOT_NATIVES_DRAFT = (
    'drafts are for vLLM\'s engines, and the builder is "native" (write builder = "vllm", or leave '
    "the table out)"
)
_NO_DRAFT = "name another method and its model there, or leave the table out"


def layers_of(document: Document) -> Layers:
    """What the file says, with the sizes that only its engine's arguments tell."""
    layers = Layers()
    origin = str(document.path)
    if sizes := _division(document).sizes:
        layers.lay(origin, {PARALLEL: {size.key: size.value for size in sizes}})
    layers.lay(origin, document.table)
    return layers


def where_written(fault: Fault, document: Document) -> Fault:
    """The same, at the argument that said a size where `[parallel]` does not."""
    own = _table(document, PARALLEL)
    for size in _division(document).sizes:
        if fault.key == f"{PARALLEL}.{size.key}" and size.key not in own:
            return replace(fault, key=_key(size.written))
    return fault


def engine_faults(document: Document) -> Iterator[Fault]:
    """All that is wrong with the engine's arguments."""
    origin = str(document.path)
    if _table(document, ENGINE_ARGS) and document.table.get("builder", "native") == "native":
        yield Fault(origin, ENGINE_ARGS, _NOT_NATIVE)
    found = _division(document)
    for wrong in found.wrong:
        yield Fault(origin, _key(wrong.written), wrong.text)
    for size, text in _contradictions(found.sizes, _table(document, PARALLEL)):
        yield Fault(origin, _key(size.written), text)


def draft_faults(document: Document) -> Iterator[Fault]:
    """All that is wrong between `[draft]` and what vLLM is told of speculative decoding."""
    origin, told = str(document.path), _table(document, DRAFT)
    found = _division(document).speculation
    wanted = bool(told) and told.get("enabled", True) is True
    if document.table.get("builder", "native") == "native":
        if wanted:
            yield Fault(origin, DRAFT, _NOT_NATIVES_DRAFT)
        return
    for key, value in _said(document).items():
        if found is not None and (other := found.values.get(key)) != value:
            where = f"{ENGINE_ARGS}.{CONFIG}"
            text = f"is {_toml(value)}, but {where} has {_toml(other)} (write it once)"
            yield Fault(origin, spelled([DRAFT, key]), text)
    if found is not None and found.model.startswith((".", "~")) and not _said(document):
        text = f"names the model {found.model!r} (give an absolute path, or an id such as org/name)"
        yield Fault(origin, _key(CONFIG), text)
    if wanted and not (found and found.held):
        why = found.why_not_held if found else f"{ENGINE_ARGS} has no {CONFIG}"
        yield Fault(origin, DRAFT, f"{why} ({_NO_DRAFT})")


def members_of(document: Document) -> tuple[str, ...]:
    """The ranks that the group seems to have, whatever else is wrong with the file: names of
    devices as they are written, and those of drafts."""
    listed = document.table.get("gpus")
    devices = [one for one in listed if isinstance(one, str)] if isinstance(listed, list) else []
    found = _division(document).speculation
    if found is None or not found.held or _table(document, DRAFT).get("enabled") is False:
        return tuple(devices)
    sizes = layers_of(document).values.get(PARALLEL)
    stages = sizes.get("pipeline_parallel_size", 1) if isinstance(sizes, dict) else 1
    drafting = len(devices) // stages if isinstance(stages, int) and stages > 0 else 0
    drafts = devices[len(devices) - drafting :]
    return (*devices, *(str(Instance(DeviceId(device), Role.DRAFT)) for device in drafts))


def _contradictions(sizes: tuple[Size, ...], own: Table) -> Iterator[tuple[Size, str]]:
    said = {key: (f"{PARALLEL}.{key}", value) for key, value in own.items()}
    for size in sizes:
        where, value = said.setdefault(size.key, (_key(size.written), size.value))
        if value != size.value:
            yield size, f"is {_toml(size.value)}, but {where} is {_toml(value)} (write it once)"


def _division(document: Document) -> Division:
    """What becomes of the engine's arguments in a file that may have some."""
    if document.table.get("builder") != "vllm":
        return Division((), (), ())
    return divide(from_table(_table(document, ENGINE_ARGS)), _said(document))


def _said(document: Document) -> dict[str, str]:
    """What `[draft]` says that vLLM is to be told."""
    found = _table(document, DRAFT)
    return {k: v for k in ("model", "revision") if (v := found.get(k)) and isinstance(v, str)}


def _table(document: Document, name: str) -> Table:
    found = document.table.get(name)
    return found if isinstance(found, dict) else {}


def _key(written: str) -> str:
    return spelled([ENGINE_ARGS, *filter(None, [written])])


def _toml(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool | int | str) else "no size"
