"""vLLM's own words on which preloadd decides before vLLM is asked."""

from __future__ import annotations

DRAFT_METHODS = frozenset({"mtp", "eagle", "eagle3"})
"""Methods of speculation whose drafts have daemons of their own; engines load others from disk."""

MODEL_FREE_METHODS = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Methods of speculation that guess from what was said, without a model."""

LOAD_FORMATS = (
    *("auto", "fastsafetensors", "hf", "instanttensor", "runai_streamer"),
    *("runai_streamer_sharded", "safetensors", "sharded_state"),
)
"""Load formats that read the safetensors files by which a checkpoint is identified."""


def unidentified(load_format: str) -> str:
    """Why no weights may be read in this format, with the remedy; '' if they may."""
    if load_format.lower() in LOAD_FORMATS:
        return ""
    return (
        f"{load_format!r} is no format that reads the safetensors files by which a checkpoint is "
        f"identified (leave it out, or name one of {', '.join(LOAD_FORMATS)})"
    )
