"""Checkpoints for vLLM with random weights: `python -m bench.gpu.vllm_models FOLDER NAME...`.

`llama`: 5.8 GB in few large tensors. `many`: over a thousand small ones. `mixtral` and `deepseek`:
experts, and multi-head latent attention with experts. Those of `vllm_quantised` by their names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.gpu.vllm_quantised import QUANTISED, Tensors

Shapes = Iterator[tuple[str, tuple[int, ...]]]

_BASE: dict[str, Any] = {
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def _llama(layers: int, hidden: int, intermediate: int, vocabulary: int) -> dict[str, Any]:
    return _BASE | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": 128,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": hidden // 128,
        "num_hidden_layers": layers,
        "num_key_value_heads": max(hidden // 512, 1),
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "vocab_size": vocabulary,
    }


_SMALL = {"hidden_size": 1024, "num_hidden_layers": 3, "vocab_size": 4096}

MODELS: dict[str, dict[str, Any]] = {
    "llama": _llama(12, 4096, 14336, 32000),
    "many": _llama(160, 1024, 2816, 32000),
    "small": _llama(3, 1024, 2816, 4096),
    "mixtral": _BASE
    | _SMALL
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "head_dim": 128,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "sliding_window": None,
    },
    "deepseek": _BASE
    | _SMALL
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "intermediate_size": 2048,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 256,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
        "v_head_dim": 128,
    },
}


def _attention(config: dict[str, Any], prefix: str) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if config["model_type"] == "deepseek_v2":
        latent = config["kv_lora_rank"]
        yield f"{prefix}q_proj", (heads * 192, hidden)
        yield f"{prefix}kv_a_proj_with_mqa", (latent + 64, hidden)
        yield f"{prefix}kv_a_layernorm", (latent,)
        yield f"{prefix}kv_b_proj", (heads * 256, latent)
        yield f"{prefix}o_proj", (hidden, heads * 128)
        return
    head = config["head_dim"]
    for name, count in (("q", heads), ("k", config["num_key_value_heads"])):
        yield f"{prefix}{name}_proj", (count * head, hidden)
    yield f"{prefix}v_proj", (config["num_key_value_heads"] * head, hidden)
    yield f"{prefix}o_proj", (hidden, heads * head)


def _dense(prefix: str, hidden: int, inner: int, names: tuple[str, str, str]) -> Shapes:
    gate, up, down = names
    yield f"{prefix}{gate}", (inner, hidden)
    yield f"{prefix}{up}", (inner, hidden)
    yield f"{prefix}{down}", (hidden, inner)


_NAMES = ("gate_proj", "up_proj", "down_proj")


def _feed_forward(config: dict[str, Any], layer: int, prefix: str) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kind = config["model_type"]
    if kind == "mixtral":
        experts = config["num_local_experts"]
        yield f"{prefix}block_sparse_moe.gate", (experts, hidden)
        for expert in range(experts):
            place = f"{prefix}block_sparse_moe.experts.{expert}."
            yield from _dense(place, hidden, inner, ("w1", "w3", "w2"))
    elif kind == "deepseek_v2" and layer >= config["first_k_dense_replace"]:
        experts, inner = config["n_routed_experts"], config["moe_intermediate_size"]
        yield f"{prefix}mlp.gate", (experts, hidden)
        for expert in range(experts):
            yield from _dense(f"{prefix}mlp.experts.{expert}.", hidden, inner, _NAMES)
        yield from _dense(f"{prefix}mlp.shared_experts.", hidden, inner, _NAMES)
    else:
        yield from _dense(f"{prefix}mlp.", hidden, inner, _NAMES)


def _layer(config: dict[str, Any], layer: int) -> Shapes:
    prefix = f"model.layers.{layer}."
    yield f"{prefix}input_layernorm", (config["hidden_size"],)
    yield f"{prefix}post_attention_layernorm", (config["hidden_size"],)
    yield from _attention(config, f"{prefix}self_attn.")
    yield from _feed_forward(config, layer, prefix)


def _ends(config: dict[str, Any]) -> Shapes:
    yield "model.embed_tokens", (config["vocab_size"], config["hidden_size"])
    yield "model.norm", (config["hidden_size"],)
    yield "lm_head", (config["vocab_size"], config["hidden_size"])


def make(folder: Path, name: str) -> Path:
    """The checkpoint `name` below `folder`, unless it is there; the same weights every time."""
    place = folder / name.replace(", ", "-").replace(" ", "-")
    if (place / "config.json").exists():
        return place
    place.mkdir(parents=True, exist_ok=True)
    quantised = QUANTISED.get(name)
    config = dict(MODELS[quantised.base if quantised else name])
    if quantised is not None and quantised.config is not None:
        config["quantization_config"] = quantised.config
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(7)
    layers = config["num_hidden_layers"]
    files = [list(_ends(config))]
    for start in range(0, layers, 4):
        block = range(start, min(start + 4, layers))
        files.append([shape for layer in block for shape in _layer(config, layer)])
    index = {}
    for number, shapes in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors: Tensors = {}
        for one, shape in shapes:
            for suffix, tensor in _stored(one, _random(shape, generator), name).items():
                tensors[f"{one}.{suffix}"] = tensor.cpu().contiguous()
        save_file(tensors, place / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file))
    document = {"metadata": {}, "weight_map": index}
    (place / "model.safetensors.index.json").write_text(json.dumps(document))
    _tokenizer(place, config["vocab_size"])
    (place / "config.json").write_text(json.dumps(config))
    return place


def _stored(layer: str, weight: torch.Tensor, name: str) -> Tensors:
    """What the checkpoint has for a layer: its weight, or what quantising makes of one."""
    convert = QUANTISED[name].convert if name in QUANTISED else None
    linear = weight.ndim == 2 and not layer.endswith(("embed_tokens", "lm_head", ".gate"))
    return convert(weight) if convert is not None and linear else {"weight": weight}


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Norms are ones; spread such that the most likely token is so by far."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    device = generator.device
    drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    return drawn * 0.03


def _tokenizer(folder: Path, vocabulary: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "<s>": 1, "</s>": 2}
    words |= {f"t{number}": number for number in range(3, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    told |= {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


if __name__ == "__main__":
    for wanted in sys.argv[2:]:
        print(make(Path(sys.argv[1]), wanted))
