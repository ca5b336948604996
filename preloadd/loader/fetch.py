"""Fetching a model from the hub, as the engine's own libraries would, before anything is loaded."""

from __future__ import annotations

from preloadd.errors import ModelNotFound
from preloadd.loader.needs import PLACES, lacks

WANTED = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
"""Weights, configuration and tokenizer; no other formats of the same weights."""


def fetch(model: str, revision: str) -> str:
    """Download `model` into the Hugging Face cache unless it is there; the snapshot's folder.

    ModelNotFound with what the hub said. Needs the engine environment's huggingface_hub.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise ModelNotFound(
            f"{model} is not in the Hugging Face cache, and to download it {lacks(error)}: install "
            f"it there, name another interpreter ({PLACES}), or give a local folder"
        ) from error
    try:
        return str(snapshot_download(model, revision=revision or None, allow_patterns=list(WANTED)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        first = str(error).strip().splitlines()
        raise ModelNotFound(
            f"{model} is not in the Hugging Face cache and could not be downloaded: "
            f"{first[0] if first else type(error).__name__}. Check the name, the network and the "
            "access token, or give a local folder"
        ) from error
