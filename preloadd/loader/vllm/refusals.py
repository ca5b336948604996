"""Why vLLM refuses a model or arguments, in one line of ours: its own words are many, and long."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from preloadd.domain.lines import one_line
from preloadd.domain.settings import RankSettings, Source

TRUST = "--trust-remote-code"

_LONGEST = 600
"""Characters of vLLM's words in a line: enough for a list of what is possible."""

_KIND = re.compile(
    r"trust_remote_code|recognize this architecture|Model architectures? |Unrecognized model"
)
"""What vLLM and transformers say of a model whose kind they do not know."""

_DECORATION = re.compile(
    r"\d+ validation errors? for \w+\n|\[type=[^\n]*\](?:\n\s*For further information[^\n]*)?"
)
"""What pydantic puts around its words."""

_TALKERS = ("vllm.transformers_utils.repo_utils", "vllm.transformers_utils.dynamic_module")
"""Loggers that tell at length, and several times, what is raised afterwards."""


def plain(text: str) -> str:
    """vLLM's words in one line, without what pydantic puts around them."""
    words = " ".join(_DECORATION.sub("", text).split())
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}…"


def told(error: Exception, settings: RankSettings, *, trusted: bool) -> str:
    """Why there is no configuration, with the remedy where that is known.

    `trusted`: code that comes with the model may be run.
    """
    text = str(error)
    if not _KIND.search(text):
        return f"vLLM refuses the model or its arguments: {plain('; '.join(_words(error)))}"
    source, config = _meant(text, settings)
    if config.get("auto_map") and not trusted:
        return (
            f"{one_line(source.name)} comes with code of its own (auto_map in its config.json), "
            f"which vLLM runs only if it is trusted: read that code, then give {TRUST}, here and "
            "to the engines"
        )
    kind = ", ".join(
        f"{key} {config[key]!r}" for key in ("model_type", "architectures") if key in config
    )
    libraries = {"vLLM": settings.versions.vllm, "transformers": settings.versions.transformers}
    asked = " and ".join(f"{name} {version}".strip() for name, version in libraries.items())
    return (
        f"{one_line(source.name)} is of a kind that {asked} do not know "
        f"({kind or 'no model_type'} in its config.json): correct that file, or name the "
        "interpreter of an engine that knows it (--python, or `python` in the group's file); where "
        f"code of its own comes with the model, give {TRUST}"
    )


@contextmanager
def quiet(*, unless: bool) -> Iterator[None]:
    """Have vLLM not tell people what it raises as well; `unless` somebody wants to see it."""
    talkers = [] if unless else [logging.getLogger(name) for name in _TALKERS]
    # Not by their levels, which vLLM sets anew when it makes a configuration.
    for talker in talkers:
        talker.addFilter(_nothing)
    try:
        yield
    finally:
        for talker in talkers:
            talker.removeFilter(_nothing)


def _nothing(_record: logging.LogRecord) -> bool:
    return False


def _words(error: Exception) -> Iterator[str]:
    """The first line of each fault."""
    faults: Sequence[dict[str, Any]] = error.errors() if hasattr(error, "errors") else ()
    for fault in faults:
        where = ".".join(map(str, fault["loc"]))
        text = re.sub(r"^(Value error|Assertion failed), ", "", fault["msg"])
        given = f" (given: {fault['input']!r})" if where else ""
        yield f"{where}: {text}{given}" if where else _first(text)
    if not faults:
        yield _first(str(error)) or type(error).__name__


def _first(text: str) -> str:
    return text.strip().partition("\n")[0]


def _meant(text: str, settings: RankSettings) -> tuple[Source, dict[str, Any]]:
    """Which of the models of a speculation vLLM speaks of, and its configuration."""
    model = settings.model
    own = Source(model.path, model.name, model.revision)
    found = [(one, _config(one)) for one in (own, model.partner) if one is not None]
    for one, config in found:
        architectures = config.get("architectures")
        named = [one.path, config.get("model_type")]
        named += architectures if isinstance(architectures, list) else []
        if any(isinstance(name, str) and name and _speaks_of(text, name) for name in named):
            return one, config
    return found[0]


def _speaks_of(text: str, name: str) -> bool:
    """Whether a text has this name as a whole: a path may begin with that of another model."""
    return re.search(rf"(?<![\w/.-]){re.escape(name)}(?![\w/-])", text) is not None


def _config(source: Source) -> dict[str, Any]:
    try:
        config = json.loads(Path(source.path, "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
