"""Where vLLM keeps FlashInfer's tables: `<root>/<configuration hash>/<a file for each rank>`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

OVERRIDE = "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"
CACHE_ROOT = "VLLM_CACHE_ROOT"

_NUMBER = r"(0|[1-9][0-9]{0,5})"
_NAME = re.compile(rf"autotune_configs_dp{_NUMBER}_rank{_NUMBER}\.json")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, order=True)
class TableName:
    """Whose table it is: the rank in its world group, and which data-parallel one that is."""

    dp_rank: int
    rank: int

    def __str__(self) -> str:
        return f"autotune_configs_dp{self.dp_rank}_rank{self.rank}.json"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The one that a file of that name is of; None if it is none of vLLM's per-rank tables."""
        found = _NAME.fullmatch(text)
        return cls(int(found[1]), int(found[2])) if found else None


def is_config_hash(text: str) -> bool:
    """Whether it is the hash of a configuration of vLLM, and so a safe name of a folder."""
    return _HASH.fullmatch(text) is not None


def chosen_root(environ: Mapping[str, str]) -> Path | None:
    """The root that an engine with this environment was told to use; None if it was told none."""
    chosen = environ.get(OVERRIDE, "")
    return _expanded(chosen, environ) if chosen else None


def versions_root(environ: Mapping[str, str]) -> Path:
    """The folder of an engine that was told no root.

    In it there is one for each version of FlashInfer, and in those a root for each set of
    architectures of the GPUs that are seen.
    """
    return cache_root(environ) / "flashinfer_autotune_cache"


def cache_root(environ: Mapping[str, str]) -> Path:
    """Where an engine with this environment keeps all that it makes for its next start."""
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = environ.get(CACHE_ROOT) or f"{cache}/vllm"
    return _expanded(root, environ)


def _expanded(text: str, environ: Mapping[str, str]) -> Path:
    home = environ.get("HOME", "")
    if home and (text == "~" or text.startswith("~/")):
        return Path(home + text[1:])
    return Path(text)
