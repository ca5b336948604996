"""transformers over attached weights does token for token what it does from disk."""

import copy
import gc
import json
import logging
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from bench.demo.memory import anonymous_of
from preloadd.domain.leases import Mode
from preloadd.domain.placement import Parallel, place
from preloadd.engine.torch import attach_checkpoint
from preloadd.engine.transformers import _build, _without_warm_up, from_pretrained
from preloadd.errors import (
    AttachError,
    ConfigError,
    Mismatch,
    ModelNotFound,
    Unavailable,
    UnsupportedPlatformForIPCError,
)
from preloadd.weights.plan import Source, select

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    chats = [[{"role": "user", "content": text}] for text in (QUESTION, "Name three colours.")]
    return [
        tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        for chat in chats
    ]


def generate(model, prompts):
    return [model.generate(**p, max_new_tokens=24, do_sample=False)[0].tolist() for p in prompts]


@pytest.fixture(scope="module")
def from_disk(smollm2, prompts, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype="auto")
    tokens = generate(model, prompts)
    start = prompts[0]["input_ids"].shape[1]
    assert tokenizer.decode(tokens[0][start:], skip_special_tokens=True) == ANSWER
    return tokens


def attach(folder, sockets, **options):
    chosen = {"memory": "host", "socket_dir": sockets, "fallback": False} | options
    return from_pretrained(folder, options=chosen)


def test_every_way_to_attach_gives_the_tokens_of_a_load_from_disk(run, smollm2, prompts, from_disk):
    with run(smollm2, "--restart-ranks") as running:
        first = attach(smollm2, running.sockets)
        assert first.lm_head.weight is first.model.embed_tokens.weight
        assert all(first.preloadd.shares(parameter) for parameter in first.parameters())
        assert not any(first.preloadd.shares(buffer) for buffer in first.buffers())
        assert generate(first, prompts) == from_disk
        assert anonymous_of("/memfd:preloadd-chunk") == 0

        second = attach(smollm2, running.sockets)
        assert generate(second, prompts) == from_disk
        assert running.status().lease_count == 2

        after = running.kill_rank()
        assert (after.adopted, after.counters["bytes_read"], after.lease_count) == (True, 0, 2)
        assert generate(first, prompts) == from_disk
        third = attach(smollm2, running.sockets)
        assert generate(third, prompts) == from_disk

        del first, second, third
        gc.collect()
        running.wait(lambda: told if (told := running.status()).lease_count == 0 else None)

        copied = attach(smollm2, running.sockets, mode="copy")
        assert copied.preloadd.mode is Mode.COPY
        released = running.status()
        assert (released.state, released.arena_bytes, released.lease_count) == ("released", 0, 0)
        assert generate(copied, prompts) == from_disk
        with pytest.raises(Unavailable, match="released"):
            attach(smollm2, running.sockets, state_timeout_s=0.0)


def test_shards_of_three_ranks_put_together_are_the_model(
    run, smollm2, prompts, from_disk, monkeypatch
):
    parallel = Parallel(tensor=3)
    with run(smollm2, "--tensor-parallel-size", "3", ranks=3) as running:
        parts = []
        for rank in range(3):
            monkeypatch.setenv("PRELOADD_DEVICES", "CPU-0, CPU-1, CPU-2")
            options = {"memory": "host", "socket_dir": running.sockets}
            placement = place(parallel, rank)
            parts.append(attach_checkpoint(smollm2, options=options, placement=placement))
        whole = put_together([part.tensors for part in parts], smollm2, parallel)
        with pytest.raises(Mismatch, match="tp_size: daemon has '3', engine wants '1'"):
            attach(smollm2, running.sockets)
        for part in parts:
            part.close()
    on_disk = {}
    for path in smollm2.glob("*.safetensors"):
        on_disk |= load_file(path)
    assert whole.keys() == on_disk.keys()
    assert all(torch.equal(whole[name], on_disk[name]) for name in on_disk)
    config = AutoConfig.from_pretrained(smollm2)
    model = transformers.LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=whole, dtype=torch.bfloat16
    )
    assert generate(model, prompts) == from_disk


def put_together(parts, folder, parallel):
    """Join the ranks' shards by what the plan says of them."""
    config = json.loads((folder / "config.json").read_text())
    whole = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            source = Source(0, "BF16", tuple(tensor.shape), 0, tensor.nbytes)
            slices = [
                select({name: source}, config, place(parallel, rank))[0]
                for rank in range(parallel.tensor)
            ]
            joined = torch.full(slices[0].whole_shape, torch.nan, dtype=tensor.dtype)
            for part, piece in zip(parts, slices, strict=True):
                if piece.axis is None:
                    joined = part[name].clone()
                    continue
                rows = torch.cat([torch.arange(s.start, s.stop) for s in piece.spans])
                joined.index_copy_(piece.axis, rows, part[name])
            whole[name] = joined
    return whole


TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**TINY),
    "llama-tied": transformers.LlamaConfig(**TINY, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**TINY),
    "qwen2": transformers.Qwen2Config(**TINY),
    "qwen3": transformers.Qwen3Config(**TINY, head_dim=16),
    "phi3": transformers.Phi3Config(**TINY, pad_token_id=0),
    "gemma2": transformers.Gemma2Config(**TINY, head_dim=16),
    "mixtral": transformers.MixtralConfig(**TINY, num_local_experts=4),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **TINY, head_dim=16, num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2
    ),
    "gpt2": transformers.GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=4),
    "gpt-neox": transformers.GPTNeoXConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_any_causal_language_model_attaches(run, tmp_path, kind):
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.bfloat16)
    folder = tmp_path / kind
    made.save_pretrained(folder)
    tokens = torch.arange(1, 17)[None]
    disk = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    with run(folder) as running, torch.no_grad():
        model = attach(folder, running.sockets)
        assert torch.equal(model(tokens).logits, disk(tokens).logits)
        assert torch.equal(
            model.generate(tokens, max_new_tokens=8), disk.generate(tokens, max_new_tokens=8)
        )
        assert model.state_dict().keys() == disk.state_dict().keys()
        tied = {n for n, p in model.named_parameters(remove_duplicate=False)} - {
            n for n, p in model.named_parameters()
        }
        assert tied == {n for n, _ in disk.named_parameters(remove_duplicate=False)} - {
            n for n, _ in disk.named_parameters()
        }
        buffers = dict(disk.named_buffers())
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, buffers[name])
        if "moe" not in kind and kind != "mixtral":
            assert all(model.preloadd.shares(parameter) for parameter in model.parameters())


@pytest.fixture
def tiny(tmp_path):
    torch.manual_seed(1)
    folder = tmp_path / "tiny"
    AutoModelForCausalLM.from_config(CONFIGS["llama"], dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def other_weights(folder):
    """Replace the shards by others with the same headers, as a fine-tune has."""
    torch.manual_seed(2)
    for path in folder.glob("*.safetensors"):
        tensors = {
            name: torch.randn_like(t.float()).bfloat16() for name, t in load_file(path).items()
        }
        size = path.stat().st_size
        save_file(tensors, path, metadata={"format": "pt"})
        assert path.stat().st_size == size
    return load_file(path)


def test_a_checkpoint_replaced_on_disk_is_loaded_from_disk_and_said_so(run, tiny, caplog):
    with run(tiny) as running:
        new = other_weights(tiny)
        with caplog.at_level(logging.WARNING, "preloadd.engine"):
            options = {"memory": "host", "socket_dir": running.sockets}
            model = from_pretrained(tiny, options=options)
        assert model.preloadd is None
        assert torch.equal(model.lm_head.weight, new["lm_head.weight"])
        with pytest.raises(Mismatch, match="checkpoint: daemon has 'sampled-1:"):
            attach(tiny, running.sockets)
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "from disk: the daemon's weights do not match this engine: checkpoint" in warning.message


def test_a_copy_under_other_names_attaches(run, tiny, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    (copy / "model.safetensors").rename(copy / "renamed.safetensors")
    with run(tiny) as running:
        model = attach(copy, running.sockets)
        assert model.preloadd is not None


def test_another_rope_base_does_not_match(run, tiny, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    config = json.loads((copy / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 12345.0
    (copy / "config.json").write_text(json.dumps(config))
    with (
        run(tiny) as running,
        pytest.raises(Mismatch, match=r"rope.rope_theta: daemon has .*engine wants .*12345"),
    ):
        attach(copy, running.sockets)


@pytest.mark.parametrize(
    "wish",
    [{"dtype": torch.float32}, {"torch_dtype": "float32"}, {"torch_dtype": torch.float32}],
    ids=str,
)
def test_another_dtype_does_not_match(run, tiny, wish):
    with run(tiny) as running, pytest.raises(Mismatch, match="dtype: daemon has 'bfloat16'"):
        options = {"memory": "host", "socket_dir": running.sockets, "fallback": False}
        from_pretrained(tiny, **wish, options=options)


def test_both_names_of_the_dtype_mean_the_same(tiny):
    nobody = {"memory": "host", "socket_dir": tiny}
    with pytest.raises(ConfigError, match=r"dtype and torch_dtype .* bfloat16 and float32: leave"):
        from_pretrained(tiny, dtype="bfloat16", torch_dtype=torch.float32, options=nobody)
    alike = {"dtype": torch.float32, "torch_dtype": "float32"}
    assert from_pretrained(tiny, **alike, options=nobody).dtype is torch.float32


def test_without_a_daemon_the_paths_searched_are_told(tiny, socket_dir, caplog, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_dir))
    with caplog.at_level(logging.WARNING, "preloadd.engine"):
        assert from_pretrained(tiny, options={"memory": "host"}).preloadd is None
    (warning,) = [r for r in caplog.records if r.name.startswith("preloadd")]
    for path in ("/run/preloadd/CPU-0/rank.sock", f"{socket_dir}/preloadd/CPU-0/rank.sock"):
        assert path in warning.message
    started = time.monotonic()
    with pytest.raises(Unavailable, match="no socket at"):
        attach(tiny, socket_dir, state_timeout_s=0.6)
    assert time.monotonic() - started >= 0.6


def test_a_wrong_option_is_an_error_even_with_fallback(tiny):
    with pytest.raises(ConfigError, match="unknown option 'sockets'"):
        from_pretrained(tiny, options={"sockets": "/x"})


HOST = {"memory": "host"}


def test_arguments_that_change_the_weights_load_from_disk(tiny, socket_dir, caplog):
    spread = {"": "cpu", "lm_head": "cpu"}
    with caplog.at_level(logging.WARNING, "preloadd.engine"):
        options = HOST | {"socket_dir": socket_dir}
        model = from_pretrained(tiny, options=options, device_map=spread)
    assert model.preloadd is None
    assert "device_map cannot be combined with attached weights" in caplog.text
    for planned in (spread, "auto"):
        with pytest.raises(AttachError, match="device_map"):
            from_pretrained(tiny, options=HOST | {"fallback": False}, device_map=planned)


@pytest.mark.parametrize(
    "asked", [{"device": "cpu"}, {"device_map": "cpu"}, {"device_map": {"": torch.device("cpu")}}]
)
def test_a_device_or_a_map_that_names_just_one_is_where_the_weights_are(run, tiny, asked):
    with run(tiny) as running:
        options = HOST | {"socket_dir": running.sockets, "fallback": False}
        model = from_pretrained(tiny, options=options, **asked)
        assert model.preloadd.device == "cpu"
        assert all(model.preloadd.shares(parameter) for parameter in model.parameters())


def test_a_device_that_cannot_be_is_an_error_even_with_fallback(tiny):
    with pytest.raises(ConfigError, match="device and device_map exclude each other"):
        from_pretrained(tiny, options=HOST, device="cpu", device_map="cpu")
    with pytest.raises(ConfigError, match=r'cuda:1 contradicts the option memory: "host"'):
        from_pretrained(tiny, options=HOST, device_map=1)
    with pytest.raises(ConfigError, match="device 'gpu' is none that torch knows"):
        from_pretrained(tiny, device="gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU is needed")
def test_without_a_gpu_host_memory_must_be_asked_for_even_with_fallback(tiny):
    with pytest.raises(UnsupportedPlatformForIPCError, match=r'give options=\{"memory": "host"\}'):
        from_pretrained(tiny)


def test_a_model_built_where_its_tensors_are_copies_and_reserves_nothing(run, tiny, monkeypatch):
    """As on a GPU, where transformers would first set aside memory for all weights once more."""

    def warmed_up(*_):
        raise AssertionError("transformers set memory aside for weights that are there")

    monkeypatch.setattr(transformers.modeling_utils, "caching_allocator_warmup", warmed_up)
    with run(tiny) as running:
        options = HOST | {"socket_dir": running.sockets}
        with attach_checkpoint(tiny, options=options) as weights:
            config = AutoConfig.from_pretrained(tiny)
            built = _build(config, weights, "bfloat16", {"device_map": {"": "cpu"}})
            assert all(weights.shares(parameter) for parameter in built.parameters())
            del built
    assert transformers.modeling_utils.caching_allocator_warmup is warmed_up
    with pytest.raises(AssertionError, match="set memory aside"):
        AutoModelForCausalLM.from_pretrained(tiny, device_map="cpu")


def test_loads_of_other_threads_are_warmed_up_meanwhile(monkeypatch):
    warmed = []
    monkeypatch.setattr(transformers.modeling_utils, "caching_allocator_warmup", warmed.append)
    with _without_warm_up():
        transformers.modeling_utils.caching_allocator_warmup("ours")
        other = threading.Thread(
            target=lambda: transformers.modeling_utils.caching_allocator_warmup("theirs")
        )
        other.start()
        other.join()
    assert warmed == ["theirs"]


def test_a_transformers_that_warms_nothing_up_is_left_alone(monkeypatch):
    monkeypatch.delattr(transformers.modeling_utils, "caching_allocator_warmup")
    with _without_warm_up():
        assert not hasattr(transformers.modeling_utils, "caching_allocator_warmup")
    assert not hasattr(transformers.modeling_utils, "caching_allocator_warmup")


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled], ids=lambda f: f.__name__)
def test_a_copy_of_a_model_is_one_without_a_lease(run, tiny, copied):
    tokens = torch.arange(1, 17)[None]
    with run(tiny) as running, torch.no_grad():
        model = attach(tiny, running.sockets)
        other = copied(model)
        assert other.preloadd is None
        assert not any(model.preloadd.shares(parameter) for parameter in other.parameters())
        assert torch.equal(other(tokens).logits, model(tokens).logits)
        del model
        gc.collect()
        running.wait(lambda: told if (told := running.status()).lease_count == 0 else None)
        assert other.lm_head.weight.add_(1) is not None


def test_a_model_that_cannot_be_finished_gives_the_lease_back(run, tiny):
    (tiny / "generation_config.json").write_text("[]")
    with run(tiny) as running:
        with pytest.raises((TypeError, AttributeError, ValueError)) as kept:
            attach(tiny, running.sockets)
        running.wait(lambda: told if (told := running.status()).lease_count == 0 else None)
        assert kept.value is not None


def test_a_model_that_is_nowhere_is_named(socket_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match=r"nobody/nothing.* is neither a local folder"):
        attach("nobody/nothing", socket_dir)


ENGINE = """
import os, signal, sys
from preloadd.engine.transformers import from_pretrained
options = {"memory": "host", "socket_dir": sys.argv[2], "fallback": False}
model = from_pretrained(sys.argv[1], options=options)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_engine_that_is_killed_costs_nothing(run, tiny):
    with run(tiny) as running:
        argv = [sys.executable, "-c", ENGINE, str(tiny), str(running.sockets)]
        assert subprocess.run(argv).returncode == -signal.SIGKILL
        running.wait(lambda: told if (told := running.status()).lease_count == 0 else None)
        assert attach(tiny, running.sockets).preloadd is not None
