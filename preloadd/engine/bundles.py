"""Compiled code that a daemon has for an engine: it has to fit, and is installed where vLLM looks.

It is code. A daemon gives it only where its group says that bundles are trusted, and engines trust
their daemon: see `engine.discovery`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path

from preloadd.domain.strict_json import Malformed, decode
from preloadd.errors import ProtocolViolation
from preloadd.warmup.bundles.install import install, missing
from preloadd.warmup.bundles.manifest import MAX_BUNDLE, MAX_MANIFEST
from preloadd.warmup.seeding.compile_cache import ANSWER, BUNDLE, KIND, WHOLE, CompileWanted

Ask = Callable[[str, int], Mapping[str, bytes]]
"""What the daemon has of a kind, each of at most so many bytes."""

_ARGUMENTS = "engine_args"


def take(ask: Ask, config_hash: str, identity: Callable[[], Mapping[str, str]]) -> str:
    """Have the bundle in the cache root that the `identity` names; what was done, for people, and
    '' if there is none: then nobody is asked for the identity either, which costs engines time.

    How an engine was told its configuration is its own affair: the hash says what came of it.
    ProtocolViolation, Unfit, BadBundle, InTheWay, InsecurePath, OSError: nothing was changed.
    """
    told = ask(KIND, MAX_MANIFEST).get(ANSWER)
    if told is None:
        return ""
    try:
        answer = decode(told, MAX_MANIFEST)
    except Malformed as error:
        raise ProtocolViolation(f"what the daemon tells of its bundle: {error}") from None
    here = identity()
    bundle = CompileWanted(config_hash, {**here, _ARGUMENTS: _arguments(answer)}).judged(answer)
    root = Path(here["cache_root"])
    if not missing(root, bundle.manifest):
        return f"compiled code of the daemon is there already, in {root}"
    content = ask(WHOLE, MAX_BUNDLE).get(BUNDLE)
    if content is None:
        raise ProtocolViolation("the daemon has no such bundle any more")
    installed = install(root, bundle, io.BytesIO(content))
    return f"compiled code from the daemon: {len(installed.new)} new folders in {root}"


def _arguments(answer: object) -> str:
    """What the answer says of it; '' if that is no text."""
    match answer:
        case {"manifest": {"identity": {"engine_args": str(found)}}}:
            return found
        case _:
            return ""
