"""What of a checkpoint keeps vLLM from dividing it, for those who launch its loaders and want to
know before: each imports the whole of vLLM until that refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from preloadd.errors import ConfigError, PreloadError
from preloadd.weights.checkpoint import read_config

_HEADS = "num_attention_heads"
_TEXT = "text_config"
_MOST_RANKS = 1024
_ELSEWHERE = ("--config-format", "--hf-config-path", "--hf-overrides")
"""Arguments that put something else in the place of what `config.json` says."""


def require_heads(folder: Path, tensor: int, arguments: Sequence[str]) -> None:
    """ConfigError if `tensor` ranks cannot have the attention heads of the model in `folder`
    between them, as vLLM checks it. Where it may look at something else, or `config.json` cannot be
    read, it is for the ranks to complain. `arguments` are vLLM's own."""
    if any(word.startswith(_ELSEWHERE) for word in arguments):
        return
    try:
        heads = _heads(read_config(folder))
    except PreloadError:
        return
    if heads % tensor:
        sizes = range(1, min(heads, _MOST_RANKS) + 1)
        fit = ", ".join(str(size) for size in sizes if heads % size == 0)
        raise ConfigError(
            f"{heads} attention heads do not divide by {tensor} tensor-parallel ranks\n"
            f"tensor parallel sizes that divide them: {fit}"
        )


def _heads(config: Mapping[str, Any]) -> int:
    """Those of the part that writes text; 0 where only vLLM can tell which part that is."""
    text = config.get(_TEXT)
    if not isinstance(text, dict):
        parts = [part for part in config.values() if isinstance(part, dict)]
        text = {} if any(_HEADS in part for part in parts) else config
    heads = text.get(_HEADS)
    return heads if type(heads) is int and heads > 0 else 0
