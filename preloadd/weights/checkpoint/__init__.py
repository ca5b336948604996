"""Checkpoints as they lie on disk: where, which files, what is in them, and whether it is the same.

Nothing here needs torch or safetensors, because rank, loader and engine all ask.
"""

from preloadd.weights.checkpoint.code import code_of
from preloadd.weights.checkpoint.digest import content
from preloadd.weights.checkpoint.folder import (
    config_of,
    identities_of,
    read_config,
    weights_identities_of,
)
from preloadd.weights.checkpoint.header import ShardHeader, read_header
from preloadd.weights.checkpoint.identity import identify
from preloadd.weights.checkpoint.index import Checkpoint, StoredTensor, open_checkpoint
from preloadd.weights.checkpoint.layout import TensorInfo
from preloadd.weights.checkpoint.locate import locate

__all__ = [
    "Checkpoint",
    "ShardHeader",
    "StoredTensor",
    "TensorInfo",
    "code_of",
    "config_of",
    "content",
    "identify",
    "identities_of",
    "locate",
    "open_checkpoint",
    "read_config",
    "read_header",
    "weights_identities_of",
]
