"""What a group's file says of its engine: sizes and draft of the group may stand in its arguments.

What stands there and under `[parallel]` or `[draft]` has to be the same, and is the group's either
way. What only `[draft]` says of the draft's model is told to vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from preloadd.config.arguments import from_table
from preloadd.config.drafts import CONFIG, Speculation
from preloadd.config.files import Document, Fault, Layers, Table, spelled
from preloadd.config.vllm import Division, Size, divide
from preloadd.domain.ids import DeviceId
from preloadd.domain.launch import Launch
from preloadd.domain.nodes import block
from preloadd.domain.placement import Parallel, instances

ENGINE_ARGS = "engine_args"
BUILDER = "builder"
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
    for size in _division(document).sizes:
        where = document.home(_key(size.written))
        layers.lay(where, {PARALLEL: {size.key: size.value}})
    document.lay_over(layers)
    return layers


def fault_in(document: Document, key: str, text: str, *beside: str) -> Fault:
    """As `Document.fault`, at the arguments that say a size where `[parallel]` does not."""
    own = _table(document, PARALLEL)
    said = {
        f"{PARALLEL}.{size.key}": _key(size.written)
        for size in _division(document).sizes
        if size.key not in own
    }
    return document.fault(said.get(key, key), text, *(said.get(one, one) for one in beside))


def engine_faults(document: Document) -> Iterator[Fault]:
    """All that is wrong with the engine's arguments."""
    arguments = _table(document, ENGINE_ARGS)
    if arguments and document.table.get("builder", "native") == "native":
        yield fault_in(document, ENGINE_ARGS, _NOT_NATIVE, BUILDER)
    found = _division(document)
    for wrong in found.wrong:
        yield fault_in(document, _key_in(arguments, wrong.written, wrong.inner), wrong.text)
    yield from _contradictions(document, found.sizes)


def draft_faults(document: Document) -> Iterator[Fault]:
    """All that is wrong between `[draft]` and what vLLM is told of speculative decoding."""
    told, said = _table(document, DRAFT), _said(document)
    found = _division(document).speculation
    wanted = bool(told) and told.get("enabled", True) is True
    if document.table.get("builder", "native") == "native":
        if wanted:
            yield fault_in(document, DRAFT, _NOT_NATIVES_DRAFT, BUILDER)
        return
    if found is None:
        if wanted:
            text = f"{ENGINE_ARGS} has no {CONFIG} ({_NO_DRAFT})"
            yield fault_in(document, DRAFT, text)
        return
    arguments = _table(document, ENGINE_ARGS)
    for key, value in said.items():
        other = found.values[key]
        if isinstance(other, str) and other != value:
            where = draft_key(arguments, found, key)
            text = f"is {_toml(value)}, but {where} has {_toml(other)} (write it once)"
            yield fault_in(document, spelled([DRAFT, key]), text, where)
    if found.model.startswith((".", "~")) and "model" not in said:
        text = f"names the model {found.model!r} (give an absolute path, or an id such as org/name)"
        yield fault_in(document, draft_key(arguments, found, "model"), text)
    if wanted and not found.held:
        where = draft_key(arguments, found, "method")
        yield fault_in(document, DRAFT, f"{where} {found.why_not_held} ({_NO_DRAFT})", where)


def draft_key(arguments: Table, found: Speculation, key: str) -> str:
    """The key of a group's file by which its engine's arguments say `key` of the draft."""
    return _key_in(arguments, found.where(key), key)


def members_of(document: Document) -> tuple[str, ...]:
    """The ranks that the group seems to have, whatever else is wrong with the file: names of
    devices as they are written, and those of drafts."""
    gpus = document.table.get("gpus")
    listed = gpus if isinstance(gpus, list) else []
    devices = [DeviceId(one) for one in listed if isinstance(one, str)]
    told, drafts = _launch_of(layers_of(document).values.get(PARALLEL)), has_drafts(document)
    found = instances(devices, told.parallel, drafts=drafts, first=block(told).start)
    return tuple(map(str, found))


def has_drafts(document: Document) -> bool:
    """Whether the file asks for ranks of a draft, whatever else is wrong with it."""
    found = _division(document).speculation
    wanted = _table(document, DRAFT).get("enabled") is not False
    return found is not None and found.held and wanted


def _launch_of(sizes: object) -> Launch:
    """What a file says of where this node's ranks begin; what it cannot say counts as 1 or 0."""

    def said(key: str, least: int) -> int:
        value = sizes.get(key) if isinstance(sizes, dict) else None
        return max(value, least) if isinstance(value, int) else least

    return Launch(
        parallel=Parallel(
            tensor=said("tensor_parallel_size", 1),
            pipeline=said("pipeline_parallel_size", 1),
            data=said("data_parallel_size", 1),
        ),
        nnodes=said("nnodes", 1),
        node_rank=said("node_rank", 0),
        data_parallel_start_rank=said("data_parallel_start_rank", 0),
    )


def _contradictions(document: Document, sizes: tuple[Size, ...]) -> Iterator[Fault]:
    own = _table(document, PARALLEL)
    said = {key: (f"{PARALLEL}.{key}", value) for key, value in own.items()}
    for size in sizes:
        where, value = said.setdefault(size.key, (_key(size.written), size.value))
        if value != size.value:
            text = f"is {_toml(size.value)}, but {where} is {_toml(value)} (write it once)"
            yield fault_in(document, _key(size.written), text, where)


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


def _key(written: str, *inner: str) -> str:
    return spelled([ENGINE_ARGS, *filter(None, [written]), *inner])


def _key_in(arguments: Table, written: str, inner: str) -> str:
    """The key of an argument, or of what is `inner` to it where that is a key of its own."""
    value = arguments.get(written)
    names = value if isinstance(value, dict) else ()
    return _key(written, *[name for name in names if name.replace("-", "_") == inner][:1])


def _toml(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool | int | str) else "no size"
