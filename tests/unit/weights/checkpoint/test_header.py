from __future__ import annotations

import os
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open

from preloadd.errors import CheckpointError, ReadFailed
from preloadd.weights.checkpoint import identify
from preloadd.weights.checkpoint.header import MAX_HEADER, read_header, read_headers


def test_reads_a_shard(maker, tmp_path: Path) -> None:
    file = maker.pack_tensors({"b": b"12345", "a": b"678"})
    path = tmp_path / "x.safetensors"
    path.write_bytes(file)
    shard = read_header(path)
    assert shard.path == path
    assert shard.identity == identify(path)
    assert shard.data_start == len(file) - 8
    assert shard.digest == blake3(file[:-8]).digest()
    assert {t.name: file[t.start : t.end] for t in shard.tensors.values()} == {
        "a": b"678",
        "b": b"12345",
    }
    with safe_open(path, "np") as oracle:
        assert set(oracle.keys()) == set(shard.tensors)


def test_a_header_as_large_as_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((2).to_bytes(8, "little") + b"{}")
    assert read_header(path).tensors == {}


FAULTS = {
    "empty": (b"", "the file is empty"),
    "4 bytes": (b"\x08\0\0\0", "has 4 bytes"),
    "7 bytes": (b"\x08\0\0\0\0\0\0", "has 7 bytes"),
    "no header": (b"\x08" + bytes(7), "truncated: its header ends at byte 16, the file at 8"),
    "half a header": (b"\x08" + bytes(7) + b"{}", "truncated: its header ends at byte 16"),
    "length 2^64-1": (
        b"\xff" * 8 + b"{}",
        "18,446,744,073,709,551,615 bytes, over the 100,000,000",
    ),
    "length 2^63": (bytes(7) + b"\x80{}", "over the 100,000,000"),
    "one above the limit": ((MAX_HEADER + 1).to_bytes(8, "little"), "100,000,001 bytes, over"),
    "a web page": (b"<!DOCTYPE html><html></html>", "this is no safetensors file"),
    "header of zero bytes": (bytes(8), "cannot be read"),
    "invalid UTF-8": (b"\x04" + bytes(7) + b'{"\xff"', "cannot be read"),
}


@pytest.mark.parametrize(("content", "told"), FAULTS.values(), ids=FAULTS)
def test_a_fault_names_file_and_remedy(content: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "model-00002-of-00003.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=told) as caught:
        read_header(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "download or save it again" in str(caught.value)
    with pytest.raises(SafetensorError):
        deserialize(content)


def test_the_largest_header_length_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(MAX_HEADER.to_bytes(8, "little") + b"{}")
        file.truncate(MAX_HEADER + 7)
    with pytest.raises(CheckpointError, match="truncated"):
        read_header(path)


def test_a_fault_inside_names_the_tensor_too(maker, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(maker.pack_tensors({"model.norm": b"12345"})[:-1])
    with pytest.raises(CheckpointError, match=r"x\.safetensors: the file is truncated"):
        read_header(path)
    path.write_bytes(
        maker.pack({"model.norm": {"dtype": "Q8", "shape": [], "data_offsets": [0, 1]}}, b"1")
    )
    with pytest.raises(CheckpointError, match=r"x\.safetensors: .*'model\.norm'.*'Q8'.*download"):
        read_header(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere\.safetensors is missing"):
        read_header(tmp_path / "nowhere.safetensors")


def test_a_file_the_system_refuses_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.symlink_to(path)
    with pytest.raises(ReadFailed, match=r"x\.safetensors: Too many levels of symbolic links"):
        read_header(path)


def test_many_headers_in_order(maker, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.safetensors" for number in range(20)]
    for path in paths:
        path.write_bytes(maker.pack_tensors({path.name: b"1"}))
    shards = read_headers(paths)
    assert [shard.path for shard in shards] == paths
    assert [list(shard.tensors) for shard in shards] == [[path.name] for path in paths]
    assert read_headers(paths[:1]) == shards[:1]


def test_one_damaged_shard_among_many_is_named(maker, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.safetensors" for number in range(9)]
    for path in paths:
        path.write_bytes(maker.pack_tensors({path.name: b"1"}))
    paths[7].write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"/7\.safetensors: the file is empty"):
        read_headers(paths)


def test_every_pointer_is_named(maker, tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 99\n"
    paths = [tmp_path / f"{number}.safetensors" for number in range(4)]
    for path in paths:
        path.write_bytes(pointer)
    paths[2].write_bytes(maker.pack_tensors({"a": b"1"}))
    with pytest.raises(CheckpointError) as caught:
        read_headers(paths)
    told = str(caught.value)
    assert "0.safetensors, 1.safetensors, 3.safetensors are Git-LFS pointers" in told
    assert "git lfs pull" in told
    with pytest.raises(CheckpointError, match=r"0\.safetensors is a Git-LFS pointer"):
        read_header(paths[0])


@settings(max_examples=50)
@given(
    st.sampled_from([b"", b"\x02" + bytes(7), b"\x40" + bytes(7), b"{}", b'{"a":', b"\0" * 3]),
    st.binary(max_size=80),
)
def test_any_bytes_are_refused_or_read_as_safetensors_reads_them(head: bytes, rest: bytes) -> None:
    fd = os.memfd_create("shard")
    try:
        os.write(fd, head + rest)
        found = set(read_header(Path(f"/proc/self/fd/{fd}")).tensors)
    except CheckpointError:
        return
    finally:
        os.close(fd)
    assert found == {name for name, _ in deserialize(head + rest)}
