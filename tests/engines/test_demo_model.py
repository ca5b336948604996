"""The demo model is an ordinary checkpoint, is made whole or not at all, and knows France."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.demo import model as maker
from bench.demo.model import default_folder, make_model

SHARDS = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def test_three_shards_hold_272_tensors_of_bf16(smollm2):
    assert sorted(path.name for path in smollm2.glob("*.safetensors")) == SHARDS
    assert max(path.stat().st_size for path in smollm2.glob("*.safetensors")) <= 100_000_000
    weight_map = json.loads((smollm2 / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for shard in SHARDS:
        with safe_open(smollm2 / shard, framework="pt") as opened:
            names = list(opened.keys())
            found |= dict.fromkeys(names, shard)
            assert {opened.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert len(found) == 272
    assert found == weight_map


@pytest.mark.slow
def test_it_loads_like_any_checkpoint_and_answers(smollm2):
    model, told = AutoModelForCausalLM.from_pretrained(smollm2, output_loading_info=True)
    assert not any(told.values())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert answer(model, smollm2, "What is the capital of France?") == (
        "The capital of France is Paris."
    )


def answer(model, folder: Path, question: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    tokens = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0]
    return tokenizer.decode(tokens[prompt["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.slow
def test_two_makers_at_once_replace_an_outdated_model_once(smollm2, tmp_path):
    out = tmp_path / "model"
    out.mkdir()
    (out / maker.STAMP).write_text('{"recipe": 0, "files": {}}')
    (out / "leftover.safetensors").touch()
    command = [sys.executable, maker.__file__, "--out", out]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(text.count("making") for text in told) == [0, 1]
    assert sorted(tmp_path.iterdir()) == [tmp_path / ".model.lock", out]
    assert {path.name: path.stat().st_size for path in out.iterdir()} == {
        path.name: path.stat().st_size for path in smollm2.iterdir()
    }


@pytest.mark.parametrize("stamp", ["{", "{}", '{"recipe": 1, "files": {"gone": 1}}'])
def test_a_model_that_is_not_whole_is_not_used(stamp, tmp_path):
    (tmp_path / maker.STAMP).write_text(stamp)
    assert not maker._is_made(tmp_path)


def test_a_truncated_shard_is_noticed(smollm2, tmp_path):
    for path in smollm2.iterdir():
        (tmp_path / path.name).symlink_to(path)
    assert maker._is_made(tmp_path)
    (tmp_path / SHARDS[0]).unlink()
    (tmp_path / SHARDS[0]).write_bytes(b"short")
    assert not maker._is_made(tmp_path)


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match=f"{tmp_path} holds something else"):
        make_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_cache_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "preloadd/models/SmolLM2-135M-Instruct"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache/preloadd/models/SmolLM2-135M-Instruct"
