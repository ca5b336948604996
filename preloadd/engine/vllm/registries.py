"""What vLLM writes down outside of a model while it builds one, and how that is undone.

Without it a second build in the same process, such as that of a fallback, fails on names that are
taken, or finds modules of the first one, which have no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers import rotary_embedding

_OF_COMPILATION = (
    "static_forward_context",
    "static_all_moe_layers",
    "enabled_custom_ops",
    "disabled_custom_ops",
)
"""Attributes of the compilation's configuration: layers and operators by name."""


@contextmanager
def undone_on_error(config: VllmConfig) -> Iterator[None]:
    """A block that builds a model. If it fails, nothing is known of that model any more."""
    registries = [
        registry
        for registry in (
            *(getattr(config.compilation_config, name, None) for name in _OF_COMPILATION),
            getattr(rotary_embedding, "_ROPE_DICT", None),
        )
        if registry is not None
    ]
    before = [copy(registry) for registry in registries]
    try:
        yield
    except BaseException:
        for registry, was in zip(registries, before, strict=True):
            _restore(registry, was)
        raise


def _restore(registry: Any, was: Any) -> None:  # noqa: ANN401 - a list, dict or Counter of vLLM
    registry.clear()
    if isinstance(registry, list):
        registry.extend(was)
    else:
        registry.update(was)
