from __future__ import annotations

import json
from pathlib import Path

import pytest

from preloadd.errors import CheckpointError, ReadFailed
from preloadd.weights.checkpoint import identify, identities_of, weights_identities_of
from preloadd.weights.checkpoint.folder import (
    INDEX,
    Document,
    parse_config,
    parse_index,
    pick_shards,
    read_config,
    read_document,
    survey,
)

FOLDER = Path("/models/llama")


def document(content: bytes, name: str = "config.json") -> Document:
    return Document(FOLDER / name, identify(Path("/")), content)


PICKED = {
    "the single file alone": (
        ["model.safetensors", "adapter.safetensors", "consolidated.safetensors"],
        ("model.safetensors",),
    ),
    "all others": (["b.safetensors", "a.safetensors", "a.bin"], ("a.safetensors", "b.safetensors")),
    "consolidated never": (
        ["a.safetensors", "consolidated.safetensors", "consolidated.00.safetensors"],
        ("a.safetensors",),
    ),
    "hidden ones never": (["a.safetensors", "._a.safetensors"], ("a.safetensors",)),
    "partial downloads never": (["a.safetensors", "b.safetensors.incomplete"], ("a.safetensors",)),
}


@pytest.mark.parametrize(("names", "shards"), PICKED.values(), ids=PICKED)
def test_picks_shards_without_an_index(names: list[str], shards: tuple[str, ...]) -> None:
    assert pick_shards(FOLDER, names) == shards
    assert pick_shards(FOLDER, names[::-1]) == shards


NONE = {
    "nothing": ([], "has no .safetensors files"),
    "other formats": (
        ["b.gguf", "pytorch_model.bin", "config.json"],
        "has only b.gguf, pytorch_model.bin, and only safetensors are read",
    ),
    "the other layout": (["consolidated.safetensors"], "has only consolidated.safetensors, whose"),
}


@pytest.mark.parametrize(("names", "told"), NONE.values(), ids=NONE)
def test_says_what_is_there_instead(names: list[str], told: str) -> None:
    with pytest.raises(CheckpointError, match=told) as caught:
        pick_shards(FOLDER, names)
    assert str(caught.value).startswith("/models/llama has")
    assert "download the safetensors of the model" in str(caught.value)


def test_a_long_list_is_cut() -> None:
    with pytest.raises(CheckpointError, match=r"19\.bin and 5 more, and only"):
        pick_shards(FOLDER, [f"{number:02}.bin" for number in range(25)])


def test_the_index_decides(maker) -> None:
    shards = {name: {"t": b"1"} for name in ("1.safetensors", "2.safetensors", "model.safetensors")}
    folder = maker.folder("m", shards, index={"a": "2.safetensors", "b": "1.safetensors"})
    found = survey(folder)
    assert found.shards == ("1.safetensors", "2.safetensors")
    assert found.shard_paths == (folder / "1.safetensors", folder / "2.safetensors")
    assert found.homes == {"a": "2.safetensors", "b": "1.safetensors"}
    assert found.config == folder / "config.json"
    assert found.index is not None
    assert found.index.identity == identify(folder / INDEX)


def test_every_missing_file_is_named(maker) -> None:
    homes = {str(number): f"{number}.safetensors" for number in range(4)}
    folder = maker.folder("m", {"1.safetensors": {"1": b"1"}}, index=homes)
    with pytest.raises(CheckpointError) as caught:
        survey(folder)
    told = str(caught.value)
    assert told.startswith(f"{folder / INDEX} names 3 file(s) that are not there: ")
    assert "0.safetensors, 2.safetensors, 3.safetensors. Download the rest" in told


@pytest.mark.parametrize(
    "home",
    ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a\0b", "a/", "./a"],
)
def test_an_index_that_points_elsewhere_is_refused(home: str) -> None:
    content = json.dumps({"weight_map": {"fine": "a.safetensors", "lm_head": home}}).encode()
    with pytest.raises(CheckpointError, match=r"places tensor 'lm_head' in .*only plain names"):
        parse_index(document(content, INDEX))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"weight_map": {"a": "x.safe',
        b"[]",
        b"{}",
        b'{"weight_map": {}}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"\xff": "a"}}',
        b'{"metadata": ' + b"[" * 100_000,
    ],
)
def test_a_damaged_index_is_named(content: bytes) -> None:
    with pytest.raises(
        CheckpointError, match=f"^/models/llama/{INDEX} .*download or save it again"
    ):
        parse_index(document(content, INDEX))


@pytest.mark.parametrize(
    "content",
    [b"", b'{"architectures": ["Llama', b"[1]", b"null", b'{"a": "\xff"}', b"[" * 100_000, b"{}}"],
)
def test_a_damaged_config_is_named(content: bytes) -> None:
    with pytest.raises(
        CheckpointError, match=r"^/models/llama/config.json .*download or save it a"
    ):
        parse_config(document(content))


def test_a_config_is_read_as_transformers_writes_it() -> None:
    content = '{"name": "é", "time_step_limit": [0.0, Infinity]}'.encode()
    assert parse_config(document(content)) == {"name": "é", "time_step_limit": [0.0, float("inf")]}


def test_the_config_of_a_folder(maker) -> None:
    folder = maker.folder("m", {}, config=b'{"vocab_size": 9}')
    assert read_config(folder) == {"vocab_size": 9}
    (folder / "config.json").write_bytes(b'{"vocab_size"')
    with pytest.raises(CheckpointError, match=r"m/config\.json is no valid JSON"):
        read_config(folder)


def test_a_document_is_read_whole_with_its_identity(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"{}" * 50_000)
    assert read_document(path) == Document(path, identify(path), b"{}" * 50_000)


def test_a_document_that_is_a_pointer_is_called_one(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match=r"config\.json is a Git-LFS pointer.*git lfs pull"):
        read_document(path)


def test_what_is_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        survey(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file is a file: give the folder"):
        survey(tmp_path / "file")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(ReadFailed, match="loop: Too many levels"):
        survey(loop)


def test_identities_need_no_header(maker) -> None:
    folder = maker.folder("m", {}, index={"a": "1.safetensors", "b": "2.safetensors"})
    for name in ("1.safetensors", "2.safetensors", "consolidated.safetensors", "README.md"):
        (folder / name).write_bytes(b"no header at all")
    weights = {identify(folder / name) for name in ("1.safetensors", "2.safetensors", INDEX)}
    assert weights_identities_of(folder) == tuple(sorted(weights))
    every = weights | {identify(folder / "config.json")}
    assert identities_of(folder) == tuple(sorted(every))


def test_identities_without_an_index(maker) -> None:
    folder = maker.folder("m", {"model.safetensors": {"a": b"1"}})
    assert weights_identities_of(folder) == (identify(folder / "model.safetensors"),)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        identities_of(folder)


def test_a_replaced_shard_has_another_identity(maker) -> None:
    folder = maker.folder("m", {"model.safetensors": {"a": b"1"}})
    before = identities_of(folder)
    maker.rewrite(folder / "model.safetensors", maker.pack_tensors({"a": b"2"}))
    assert len(set(before) & set(identities_of(folder))) == 1


def test_a_dangling_shard_is_named(maker) -> None:
    folder = maker.folder("m", {})
    (folder / "model.safetensors").symlink_to(folder / "blob")
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors is a link to a file that is gone"
    ):
        identities_of(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(ReadFailed, match=r"model\.safetensors: Too many levels"):
        identities_of(folder)
