from __future__ import annotations

import json
from pathlib import Path

import pytest

from preloadd.errors import CheckpointError
from preloadd.weights.checkpoint import (
    Checkpoint,
    identities_of,
    open_checkpoint,
    weights_identities_of,
)


def stored(checkpoint: Checkpoint) -> dict[str, tuple[str, bytes]]:
    """Every tensor's file and bytes."""
    return {
        name: (
            place.shard.path.name,
            place.shard.path.read_bytes()[place.info.start : place.info.end],
        )
        for name, place in checkpoint.tensors.items()
    }


def test_a_single_file(maker) -> None:
    folder = maker.folder("m", {"model.safetensors": {"a": b"12", "b": b"345"}})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.folder == folder
    assert checkpoint.config == {"architectures": ["LlamaForCausalLM"]}
    assert checkpoint.config_bytes == (folder / "config.json").read_bytes()
    assert stored(checkpoint) == {
        "a": ("model.safetensors", b"12"),
        "b": ("model.safetensors", b"345"),
    }


def test_adds_up_bytes_of_the_tensors_that_count(maker) -> None:
    folder = maker.folder(
        "m", {"1.safetensors": {}}, index={"a": "1.safetensors", "b": "1.safetensors"}
    )
    header = {
        "a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]},
        "b": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [4, 6]},
        "left out": {"dtype": "BF16", "shape": [2], "data_offsets": [6, 10]},
    }
    (folder / "1.safetensors").write_bytes(maker.pack(header, bytes(10)))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.nbytes == 6
    assert checkpoint.nbytes_by_dtype() == {"BF16": 4, "F8_E4M3": 2}


def test_a_tensor_comes_only_from_where_the_index_says(maker) -> None:
    folder = maker.folder(
        "m",
        {
            "1.safetensors": {"a": b"11", "b": b"12", "left out": b"0"},
            "2.safetensors": {"a": b"21", "b": b"22"},
            "consolidated.safetensors": {"a": b"31", "c": b"32"},
            "model.safetensors": {"a": b"41"},
        },
        index={"b": "1.safetensors", "a": "2.safetensors"},
    )
    assert stored(open_checkpoint(folder)) == {
        "b": ("1.safetensors", b"12"),
        "a": ("2.safetensors", b"21"),
    }


def test_shards_without_an_index(maker) -> None:
    folder = maker.folder(
        "m",
        {
            "x.safetensors": {"a": b"1"},
            "y.safetensors": {"b": b"2"},
            "consolidated.safetensors": {"a": b"3"},
        },
    )
    found = stored(open_checkpoint(folder))
    assert found == {"a": ("x.safetensors", b"1"), "b": ("y.safetensors", b"2")}


def test_identities_are_those_found_without_opening(maker) -> None:
    shards = {"1.safetensors": {"a": b"1"}, "2.safetensors": {"b": b"2"}}
    index = {"a": "1.safetensors", "b": "2.safetensors"}
    for folder in (maker.folder("with", shards, index=index), maker.folder("without", shards)):
        checkpoint = open_checkpoint(folder)
        assert checkpoint.identities() == identities_of(folder)
        assert checkpoint.weights_identities() == weights_identities_of(folder)
        assert set(checkpoint.identities()) - set(checkpoint.weights_identities())


def test_a_snapshot_of_links(maker, tmp_path: Path) -> None:
    index = {"a": "1.safetensors", "b": "2.safetensors"}
    plain = maker.folder(
        "blobs", {"1.safetensors": {"a": b"1"}, "2.safetensors": {"b": b"2"}}, index=index
    )
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in plain.iterdir():
        (snapshot / path.name).symlink_to(f"../blobs/{path.name}")
    assert stored(open_checkpoint(snapshot)) == stored(open_checkpoint(plain))
    assert identities_of(snapshot) == identities_of(plain)


def test_a_tensor_in_two_shards_names_both(maker) -> None:
    folder = maker.folder(
        "m", {"x.safetensors": {"a": b"1", "w": b"2"}, "y.safetensors": {"w": b"2", "b": b"1"}}
    )
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    told = str(caught.value)
    assert told.startswith(f"tensor 'w' is both in {folder}/x.safetensors and in {folder}/y.")
    assert "remove the file" in told


def test_a_tensor_that_its_shard_lacks_is_named(maker) -> None:
    folder = maker.folder(
        "m",
        {"x.safetensors": {"a": b"1"}, "y.safetensors": {"b": b"1"}},
        index={"a": "x.safetensors", "b": "x.safetensors"},
    )
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    told = str(caught.value)
    assert told.startswith(f"{folder}/model.safetensors.index.json places tensor 'b' in x.safe")
    assert "download the index and the shards again" in told


def test_a_shard_without_tensors_is_fine_but_a_checkpoint_is_not(maker) -> None:
    folder = maker.folder("m", {"x.safetensors": {}, "y.safetensors": {"b": b"1"}})
    assert list(open_checkpoint(folder).tensors) == ["b"]
    (folder / "y.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"x\.safetensors holds no tensors"):
        open_checkpoint(folder)


def test_all_pointers_are_named(maker) -> None:
    index = {str(number): f"{number}.safetensors" for number in range(3)}
    folder = maker.folder("m", {"1.safetensors": {"1": b"1"}}, index=index)
    for name in ("0.safetensors", "2.safetensors"):
        (folder / name).write_text("version https://git-lfs.github.com/spec/v1\nsize 9\n")
    with pytest.raises(CheckpointError, match=r"0\.safetensors, 2\.safetensors are .* lfs pull"):
        open_checkpoint(folder)


def test_a_damaged_shard_is_named(maker) -> None:
    folder = maker.folder("m", {"x.safetensors": {"a": b"123"}, "y.safetensors": {"b": b"456"}})
    path = folder / "y.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"y\.safetensors: the file is truncated.*download"):
        open_checkpoint(folder)


def test_the_configuration_must_be_there_and_whole(maker) -> None:
    folder = maker.folder("m", {"model.safetensors": {"a": b"1"}}, config=None)
    with pytest.raises(CheckpointError, match=r"config\.json is missing: download"):
        open_checkpoint(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 1})[:-3])
    with pytest.raises(
        CheckpointError, match=r"config\.json is no valid JSON.*download or save it"
    ):
        open_checkpoint(folder)


def test_a_large_checkpoint_opens_in_order(maker) -> None:
    shards = {f"{s:02}.safetensors": {f"{s}.{t}": b"1" for t in range(24)} for s in range(30)}
    checkpoint = open_checkpoint(maker.folder("m", shards))
    assert [shard.path.name for shard in checkpoint.shards] == sorted(shards)
    assert len(checkpoint.tensors) == 720
