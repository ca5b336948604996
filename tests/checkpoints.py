"""Small checkpoints for tests, written with safetensors, and an independent look at them."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from preloadd.weights.checkpoint import identify

INDEX = "model.safetensors.index.json"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
MOE: dict[str, Any] = {
    **CONFIG,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
}
"""Four experts in each layer, in two groups, so that they can be dealt in turns."""

SHARDS = tuple(f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3))


def llama(folder: Path, *, seed: int = 0, config: Mapping[str, Any] = CONFIG) -> Path:
    """A random Llama in `folder`, 280 kB of float16 in three shards with their index."""
    folder.mkdir()
    names = list(_shapes(config))
    homes = {name: SHARDS[3 * place // len(names)] for place, name in enumerate(names)}
    contents = tensors(config, seed)
    for shard in SHARDS:
        save(folder / shard, {n: contents[n] for n in names if homes[n] == shard}, config)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tensors(config: Mapping[str, Any] = CONFIG, seed: int = 0) -> dict[str, bytes]:
    """Bytes of every tensor. All are small finite numbers, so that they equal themselves."""
    rng = random.Random(seed)
    found = {}
    for name, shape in _shapes(config).items():
        data = bytearray(rng.randbytes(2 * math.prod(shape)))
        data[1::2] = b"\x3c" * math.prod(shape)
        found[name] = bytes(data)
    return found


def save(path: Path, contents: Mapping[str, bytes], config: Mapping[str, Any] = CONFIG) -> None:
    """One shard, as safetensors writes it."""
    shapes = _shapes(config)
    arrays = {
        name: np.frombuffer(data, np.float16).reshape(shapes[name])
        for name, data in contents.items()
    }
    safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})


def stored(folder: Path) -> dict[str, bytes]:
    """What safetensors itself reads from every shard of `folder`."""
    return {
        name: bytes(told["data"])
        for shard in folder.glob("*.safetensors")
        for name, told in safetensors.deserialize(shard.read_bytes())
    }


def sparse(folder: Path, nbytes: int, tensors: int = 1) -> Path:
    """A checkpoint of about `nbytes` zeros that take no room on the disk."""
    folder.mkdir()
    each = nbytes // tensors
    header = {
        f"model.layers.{n}.mlp.up_proj.weight": {
            "dtype": "U8",
            "shape": [each],
            "data_offsets": [n * each, (n + 1) * each],
        }
        for n in range(tensors)
    }
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + each * tensors)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def rewrite(path: Path, content: bytes) -> None:
    """Replace the content in place. Returns once the kernel's coarse clock shows it."""
    before = identify(path)
    while identify(path) == before:
        time.sleep(0.001)
        path.write_bytes(content)


def _shapes(config: Mapping[str, Any]) -> dict[str, list[int]]:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    values = config["num_key_value_heads"] * config["head_dim"]
    found = {"model.embed_tokens.weight": [vocabulary, hidden]}
    for n in range(config["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": [queries, hidden],
            "self_attn.k_proj": [values, hidden],
            "self_attn.v_proj": [values, hidden],
            "self_attn.o_proj": [hidden, queries],
            **_feed_forward(config),
            "input_layernorm": [hidden],
            "post_attention_layernorm": [hidden],
        }
        found |= {f"model.layers.{n}.{name}.weight": shape for name, shape in layer.items()}
    return found | {"model.norm.weight": [hidden], "lm_head.weight": [vocabulary, hidden]}


def _feed_forward(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Of one layer: a network, or several and a gate that chooses among them."""
    hidden, experts = config["hidden_size"], config.get("num_experts", 0)
    inner = config["moe_intermediate_size" if experts else "intermediate_size"]
    found = {"mlp.gate": [experts, hidden]} if experts else {}
    for place in [f"mlp.experts.{n}" for n in range(experts)] or ["mlp"]:
        found[f"{place}.gate_proj"] = [inner, hidden]
        found[f"{place}.up_proj"] = [inner, hidden]
        found[f"{place}.down_proj"] = [hidden, inner]
    return found
