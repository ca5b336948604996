"""Drafts of speculative decoding in daemons of their own, beside those of their targets."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engines.vllm.zoo import VOCABULARY

pytestmark = pytest.mark.slow

RANKS = ("CPU-0", "CPU-0.draft")
COUNTING = {"disable_log_stats": False}
HIDDEN = 256
LAYERS = 4


def eagle(target: Path, folder: Path, *, own: bool = False, seed: int = 3) -> Path:
    """A head that guesses that every token comes once more, and with a tied target often is right.

    The embedding is its `own`, or the target's.
    """
    given = load_file(target / "model.safetensors")
    layer = {
        name.removeprefix("model."): tensor / 8
        for name, tensor in given.items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    noise = _random(HIDDEN, 2 * HIDDEN, seed=seed) / 50
    fc = {"fc.weight": torch.eye(HIDDEN, 2 * HIDDEN, dtype=torch.bfloat16) + noise}
    words = {"embed_tokens.weight": given["model.embed_tokens.weight"] * 2} if own else {}
    return _saved(target, folder, layer | fc | words)


def eagle3(target: Path, folder: Path) -> Path:
    """A head of random numbers with an embedding and a head. It looks at the target's last layer
    alone: vLLM's engine for CPUs hands over no others."""
    shapes = {"lm_head": (VOCABULARY, HIDDEN), "embed_tokens": (VOCABULARY, HIDDEN)}
    shapes |= {f"midlayer.self_attn.{one}_proj": (HIDDEN // 2, 2 * HIDDEN) for one in "kv"}
    shapes |= {"midlayer.self_attn.q_proj": (HIDDEN, 2 * HIDDEN)}
    shapes |= {"midlayer.self_attn.o_proj": (HIDDEN, HIDDEN)}
    shapes |= {f"midlayer.mlp.{one}_proj": (512, HIDDEN) for one in ("gate", "up")}
    shapes |= {"midlayer.mlp.down_proj": (HIDDEN, 512)}
    tensors = {
        f"{name}.weight": _random(*shape, seed=number) / 16
        for number, (name, shape) in enumerate(shapes.items())
    }
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    tensors["norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    return _saved(target, folder, tensors, eagle_config={"use_aux_hidden_state": False})


def ernie(tokenizer_of: Path, folder: Path) -> Path:
    """A model whose checkpoint has a layer that guesses the token after the next."""
    config = transformers.Ernie4_5_MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        moe_layer_start_index=LAYERS,  # none has experts
        max_position_embeddings=512,
        initializer_range=0.06,
        num_nextn_predict_layers=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shutil.copytree(tokenizer_of, folder, ignore=shutil.ignore_patterns("*.safetensors", "config*"))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    layer = "model.layers.0."
    tensors |= {
        f"model.mtp_block.0.{name.removeprefix(layer)}": tensor / 8
        for name, tensor in tensors.items()
        if name.startswith(layer)
    }
    for name in ("emb", "hidden"):
        tensors[f"model.mtp_{name}_norm.0.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    same = torch.eye(HIDDEN, 2 * HIDDEN, dtype=torch.bfloat16)
    tensors["model.mtp_linear_proj.0.weight"] = same + _random(HIDDEN, 2 * HIDDEN, seed=5) / 50
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _random(*shape: int, seed: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=chance).to(torch.bfloat16)


def _saved(target: Path, folder: Path, tensors: dict[str, torch.Tensor], **more: object) -> Path:
    """A checkpoint of one layer that has the sizes of its target."""
    told = {"num_hidden_layers": 1, "tie_word_embeddings": False, **more}
    config = json.loads((target / "config.json").read_text()) | told
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def guessing(draft: Path, method: str = "eagle") -> dict[str, object]:
    return {"method": method, "model": str(draft), "num_speculative_tokens": 2}


def flag(speculation: dict[str, object]) -> tuple[str, str]:
    return "--speculative-config", json.dumps(speculation)


HEADS = {
    "eagle": lambda target, folder: guessing(eagle(target, folder)),
    "eagle-own-words": lambda target, folder: guessing(eagle(target, folder, own=True)),
    "eagle3": lambda target, folder: guessing(eagle3(target, folder), "eagle3"),
}


@pytest.mark.parametrize(
    ("head", "layout"), [*((head, "plain") for head in HEADS), ("eagle-own-words", "raw")]
)
def test_target_and_draft_from_daemons_say_what_they_say_from_disk(
    head, layout, zoo, group, lasting, tmp_path
):
    model = zoo("llama-tied")
    told = HEADS[head](model, tmp_path / "draft")
    ranks = group(model, "--layout", layout, *flag(told))
    lasting.load(model, speculative_config=told, **COUNTING)
    said, counted = lasting.generate(), lasting.speculated()
    assert counted["right"] if told["method"] == "eagle" else counted["guessed"]

    target, draft = ranks.serving(*RANKS)
    assert (target.role, draft.role) == ("target", "draft")
    assert (target.model, draft.model) == (str(model), told["model"])
    assert (target.key["role"], draft.key["role"]) == ("target", "draft")
    assert "target" not in target.key
    loaded = lasting.attach(
        model, ranks.sockets, fallback=False, also={"speculative_config": told, **COUNTING}
    )
    assert not loaded.reason
    assert [ranks.status(rank).lease_count for rank in RANKS] == [1, 1]
    assert (lasting.generate(), lasting.speculated()) == (said, counted)


def test_a_draft_in_the_checkpoint_of_its_target(zoo, group, lasting, tmp_path):
    model = ernie(zoo("llama"), tmp_path / "ernie")
    told = {"method": "mtp", "num_speculative_tokens": 1}
    ranks = group(model, *flag(told))
    lasting.load(model, speculative_config=told, **COUNTING)
    said, counted = lasting.generate(), lasting.speculated()
    assert counted["right"]
    target, draft = ranks.serving(*RANKS)
    assert (target.model, draft.model) == (str(model), str(model))
    assert draft.tensor_bytes < target.tensor_bytes
    also = {"speculative_config": told, **COUNTING}
    assert not lasting.attach(model, ranks.sockets, fallback=False, also=also).reason
    assert [ranks.status(rank).lease_count for rank in RANKS] == [1, 1]
    assert (lasting.generate(), lasting.speculated()) == (said, counted)


def test_every_rank_of_a_target_has_a_draft_beside_it(zoo, group, engine, tmp_path):
    model = zoo("llama-tied")
    told = guessing(eagle(model, tmp_path / "draft"))
    both = {"speculative_config": told, "tensor_parallel_size": 2}
    ranks = group(model, "--tensor-parallel-size", "2", *flag(told))
    one = engine()
    one.load(model, **both)
    said = one.generate()
    names = ("CPU-0", "CPU-1", "CPU-0.draft", "CPU-1.draft")
    ranks.serving(*names)
    assert not one.attach(model, ranks.sockets, fallback=False, also=both).reason
    assert [ranks.status(rank).lease_count for rank in names] == [1, 1, 1, 1]
    assert one.generate() == said


def test_both_may_be_copied(zoo, group, lasting, tmp_path):
    """The first copy releases the target before the engine asks for the draft."""
    model = zoo("llama-tied")
    told = guessing(eagle(model, tmp_path / "draft"))
    ranks = group(model, *flag(told))
    lasting.load(model, speculative_config=told)
    said = lasting.generate()
    ranks.serving(*RANKS)
    also = {"speculative_config": told}
    copied = lasting.attach(model, ranks.sockets, mode="copy", fallback=False, also=also)
    assert not copied.reason
    assert {ranks.status(rank).state for rank in RANKS} == {"released"}
    assert lasting.generate() == said


def test_an_engine_without_a_draft_takes_the_target_alone(zoo, group, lasting, tmp_path):
    model = zoo("llama")
    ranks = group(model, *flag(guessing(eagle(model, tmp_path / "draft"))))
    ranks.serving(*RANKS)
    assert not lasting.attach(model, ranks.sockets).reason
    assert [ranks.status(rank).lease_count for rank in RANKS] == [1, 0]


def test_a_daemon_of_the_other_role_is_refused_and_so_is_another_draft(
    zoo, group, lasting, tmp_path
):
    model = zoo("llama")
    told = guessing(eagle(model, tmp_path / "draft"))
    ranks = group(model, *flag(told))
    lasting.load(model, speculative_config=told)
    said = lasting.generate()
    ranks.serving(*RANKS)
    misrouted = lasting.attach(
        model, ranks.sockets, socket_path=str(ranks.sockets / "CPU-0.draft/rank_draft.sock")
    )
    assert "role: daemon has 'draft', engine wants 'target'" in misrouted.reason

    other = guessing(eagle(model, tmp_path / "other", seed=4))
    mixed = lasting.attach(model, ranks.sockets, also={"speculative_config": other})
    (reason,) = mixed.reason.splitlines()
    assert f"loading {other['model']} from disk" in reason
    assert "checkpoint: daemon has" in reason
    assert [ranks.status(rank).lease_count for rank in RANKS] == [1, 0]

    chosen = told | {"kv_cache_dtype": "fp8"}
    differing = lasting.attach(model, ranks.sockets, also={"speculative_config": chosen})
    assert "kv_cache_dtype: daemon has 'auto', engine wants 'fp8'" in differing.reason
    assert [ranks.status(rank).lease_count for rank in RANKS] == [1, 0]
    assert len(lasting.generate()) == len(said)


def test_a_draft_that_is_killed_comes_back_with_its_weights(zoo, daemon, lasting, tmp_path):
    model = zoo("llama")
    told = guessing(eagle(model, tmp_path / "draft", own=True))
    ranks = daemon(model, *flag(told))
    lasting.load(model, speculative_config=told)
    said = lasting.generate()
    (target, draft) = ranks.serving(*RANKS)
    ranks.instance = RANKS[1]
    assert ranks.kill_rank().bytes_read == 0
    assert ranks.status().generation == draft.generation
    assert ranks.status(RANKS[0]).pid == target.pid
    loaded = lasting.attach(model, ranks.sockets, fallback=False, also={"speculative_config": told})
    assert not loaded.reason
    assert lasting.generate() == said
