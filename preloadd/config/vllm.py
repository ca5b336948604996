"""vLLM's arguments: which of them are the group's, and which cannot be with shared weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from preloadd.config.arguments import Argument, Wrong, words_of
from preloadd.config.drafts import CONFIG, PIECES, Speculation, gather
from preloadd.domain.vllm import unidentified

_SPREAD = (
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    *("enable_expert_parallel", "expert_placement_strategy", "nnodes", "node_rank"),
    *("data_parallel_size_local", "data_parallel_start_rank", "master_addr"),
    *("data_parallel_address", "weight_cache_master_port", "weight_cache_draft_master_port"),
    *("master_port", "data_parallel_rpc_port"),
)

SIZES = {name.replace("_", "-"): name for name in _SPREAD}
"""What divides a model into ranks on nodes, by argument: the key of `[parallel]`, the field of a
flag. They are the fields of `config.spread`."""

_TEXTS = {"master_addr", "data_parallel_address", "expert_placement_strategy"}
"""Those that are no numbers, whatever they look like."""

_NUMBER = re.compile(r"-?[0-9]{1,600}\Z")  # Python reads as many under any limit

_LATER = {"prefill-context-parallel-size": "parallelism of contexts"}

_OF_REQUESTS = {
    *("data-parallel-backend", "data-parallel-external-lb", "data-parallel-hybrid-lb"),
    "data-parallel-multi-port-external-lb",
}
"""How requests come to engines: nothing of weights depends on it, and vLLM would not take it for
one rank alone."""

_ADAPTERS = "adapters would be wrapped around weights that all engines share (leave it out)"

_REFUSED = {
    "config": "would read more arguments from another file (write them here)",
    "data-parallel-rank": (
        "is of one engine (write data-parallel-start-rank, and data-parallel-size-local 1)"
    ),
    "default-mm-loras": _ADAPTERS,
    "enable-eplb": (
        "EPLB moves experts about in weights that all engines share (leave it out, here and with "
        "the engines)"
    ),
    "enable-lora": _ADAPTERS,
    "enable-sleep-mode": (
        "sleep mode would free weights that belong to the daemon, which needs none of it (leave it "
        "out)"
    ),
    "help": "is no argument of a model (ask `vllm serve --help`)",
    "hf-token": (
        "is a secret, and arguments are told to engines and logs (leave it out, and set HF_TOKEN, "
        "or fetch the model before)"
    ),
    "lora-modules": _ADAPTERS,
    "model": "names the model, which is said elsewhere (leave it out: see `model`)",
    "revision": "is said elsewhere, beside the model (leave it out: see `revision`)",
    "weight-transfer-config": "would write into weights that all engines share (leave it out)",
}
_NUL = "has a NUL character, which no command line can have (leave that out)"
_FOUL = "has bytes that are not UTF-8 (write it anew, or rename what it names)"

_TOKEN = "seed-token"  # noqa: S105 - the name of an argument
"""Refused, but not reserved: `--seed`, which vLLM has, is not short for it."""

_FORMAT = "load-format"

_SWITCH = "enable-expert-parallel"

_VALUED = ({*SIZES, *_LATER, _FORMAT, CONFIG, *PIECES}) - {_SWITCH}
"""Those on which something is decided here, and that have a value."""

MAX_NBYTES = 16 << 10
"""Of all arguments together: they travel in one packet."""

_RESERVED = (*SIZES, *_LATER, *_OF_REQUESTS, *_REFUSED, _FORMAT, CONFIG, *PIECES)


class Size(NamedTuple):
    """One thing of `SIZES` that was found among arguments: its key, its value, and where."""

    key: str
    value: object
    written: str


class Division(NamedTuple):
    """What becomes of arguments: `words` are vLLM's, in canonical form, `sizes` the group's.

    What they say of `speculation` is one of the words.
    """

    words: tuple[str, ...]
    sizes: tuple[Size, ...]
    wrong: tuple[Wrong, ...]
    speculation: Speculation | None = None


def divide(
    found: Iterable[Argument | Wrong], draft: Mapping[str, str] = MappingProxyType({})
) -> Division:
    """What of the arguments is vLLM's, what the group's, and what cannot be.

    `draft` is what is said of a draft elsewhere: it completes the arguments.
    """
    kept: list[Argument] = []
    sizes: list[Size] = []
    wrong: list[Wrong] = []
    for argument in found:
        if isinstance(argument, Wrong):
            wrong.append(argument)
        elif why := _refusal(argument):
            wrong.append(Wrong(argument.written, why))
        elif argument.name.removeprefix("no-") in SIZES:
            sizes.append(_size(argument))
        elif argument.name.removeprefix("no-") not in (*_LATER, *_OF_REQUESTS):
            kept.append(argument)
    kept, speculation, more = gather(kept, draft)
    wrong += more
    kept += [speculation.argument] if speculation else []
    foul = [argument for argument in kept if not _is_text(argument)]
    wrong += [Wrong(each.written, _FOUL) for each in foul]
    words = words_of(argument for argument in kept if argument not in foul)
    if (nbytes := sum(len(word.encode()) for word in words)) > MAX_NBYTES:
        text = f"have {nbytes:,} bytes together (at most {MAX_NBYTES:,}: name files instead)"
        wrong.append(Wrong("", text))
    return Division(words, tuple(sizes), tuple(wrong), speculation)


def _refusal(argument: Argument) -> str:
    """Why an argument cannot be; empty if it can."""
    name, values = argument.name.partition(".")[0], argument.values
    if name in _REFUSED:
        return _REFUSED[name]
    if why := _misshapen(argument):
        return why
    if "\0" in "".join((argument.name, *values)):
        return _NUL
    if name == _TOKEN:
        return (
            "is a secret, and arguments are told to engines and logs (leave it out: see how ranks "
            "get tokens for seeding, and replace this one)"
        )
    if name in _LATER and values != ("1",):
        return f"{_LATER[name]}: not in this version (leave it out)"
    if name == _FORMAT and [value.lower() for value in values] == ["ipc_cache"]:
        return (
            "'ipc_cache' is for engines: the daemon that they load from reads the disk itself "
            "(leave it out, or name another format)"
        )
    if name == _FORMAT and (faults := list(filter(None, map(unidentified, values)))):
        return faults[0]
    return _ambiguity(name.removeprefix("no-"))


def _misshapen(argument: Argument) -> str:
    """Why an argument on which something is decided here cannot be written like this."""
    name, dot, _ = argument.name.partition(".")
    bare = name.removeprefix("no-")
    if bare in _VALUED and name != bare:
        return "cannot be switched off (leave it out)"
    if bare in _VALUED and not argument.values:
        return "has no value (give it one, or leave it out)"
    if dot and bare != CONFIG and bare in (*_VALUED, _SWITCH, *_OF_REQUESTS):
        return "has a dot behind its name, but is no table (leave out what follows the name)"
    return ""


def _is_text(argument: Argument) -> bool:
    """Whether it can travel: a command line may have any bytes, and JSON halves of characters."""
    try:
        "".join((argument.name, *argument.values)).encode()
    except UnicodeEncodeError:
        return False
    return True


def _ambiguity(name: str) -> str:
    """Why a name cannot stay as it is: vLLM takes the beginning of one for the whole."""
    if name in _RESERVED:
        return ""
    meant = [f"--{full}" for full in _RESERVED if full.startswith(name)]
    return f"may be short for {' or '.join(meant)} (write the whole name)" if meant else ""


def _size(argument: Argument) -> Size:
    """A switch is true or false, digits are a number; whatever else there is, is for a judge."""
    key = SIZES[argument.name.removeprefix("no-")]
    text = " ".join(argument.values)
    value: object = text
    if _NUMBER.match(text) and key not in _TEXTS:
        value = int(text)
    if not argument.values:
        value = not argument.name.startswith("no-")
    return Size(key, value, argument.written)
