"""Tiny models of the kinds that vLLM loads in different ways, made of random numbers.

One kind and seed is always the same model, byte for byte. The spread of the weights keeps the most
likely token well ahead of the next.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from preloadd.linux.owner import Owner

VOCABULARY = 1024
SPECIAL = ("<unk>", "<s>", "</s>")

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.06,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "norm_topk_prob": True}

KINDS: dict[str, PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**_SIZES),
    "llama-tied": transformers.LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**_SIZES, head_dim=32),
    "mixtral": transformers.MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **_SIZES, **_EXPERTS, head_dim=32, num_experts=8, moe_intermediate_size=128
    ),
    "deepseek-v2": transformers.DeepseekV2Config(
        **_SIZES
        | {"num_hidden_layers": 3, "num_key_value_heads": 8}
        | {"q_lora_rank": None, "kv_lora_rank": 512}
        | {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
        | {"first_k_dense_replace": 1, "moe_intermediate_size": 128, "n_shared_experts": 1}
        | {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        | {"topk_method": "greedy", "norm_topk_prob": False}
    ),
}

ARCHITECTURES = [
    transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__ for config in KINDS.values()
]


class Zoo(Owner):
    """The folders of models made so far; they go away with it."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="preloadd-zoo-"))

    def __call__(self, kind: str, *, seed: int = 1) -> Path:
        """The model of a kind, another one for every seed; all of one kind have equal headers."""
        folder = self._folder / f"{kind}-{seed}"
        if not folder.exists():
            _make(KINDS[kind], seed, folder)
        return folder

    def variant(self, of: Path, name: str, config: Mapping[str, object]) -> Path:
        """A model with the very files of `of`, but for what its config.json says besides."""
        folder = self._folder / f"{of.name}-{name}"
        if not folder.exists():
            shutil.copytree(of, folder, copy_function=os.link)
            told = json.loads((of / "config.json").read_text())
            (folder / "config.json").unlink()
            (folder / "config.json").write_text(json.dumps(told | dict(config)))
        return folder

    def close(self) -> None:
        """Remove all of them."""
        shutil.rmtree(self._folder)


def _make(config: PretrainedConfig, seed: int, folder: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def _tokenizer() -> PreTrainedTokenizerFast:
    """One word a token: t3, t4 and so on."""
    words = [*SPECIAL, *(f"t{number}" for number in range(len(SPECIAL), VOCABULARY))]
    numbers = {word: number for number, word in enumerate(words)}
    made = Tokenizer(WordLevel(numbers, unk_token=SPECIAL[0]))
    made.pre_tokenizer = WhitespaceSplit()
    unknown, first, last = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token=unknown, bos_token=first, eos_token=last, pad_token=last
    )
