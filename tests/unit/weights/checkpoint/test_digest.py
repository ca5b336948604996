from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from preloadd.domain.key import digest_method
from preloadd.domain.settings import Digest
from preloadd.errors import ReadFailed
from preloadd.weights.checkpoint import content, open_checkpoint
from preloadd.weights.checkpoint.digest import BLOCK
from preloadd.weights.checkpoint.sampling import SAMPLE, windows

BOTH = pytest.mark.parametrize("method", list(Digest))
SHARDS = {
    "1.safetensors": {"a": b"first", "b": bytes(range(256)) * 600},
    "2.safetensors": {"c": b"second", "empty": b""},
}


def digest(folder: Path, method: Digest = Digest.SAMPLED) -> str:
    return content(open_checkpoint(folder), method, None)


@BOTH
def test_is_the_same_wherever_and_however_named(maker, method: Digest) -> None:
    expected = digest(maker.folder("m", SHARDS), method)
    first, second = SHARDS.values()
    renamed = {"z.safetensors": first, "y.safetensors": second}
    index = {**dict.fromkeys(first, "z.safetensors"), **dict.fromkeys(second, "y.safetensors")}
    assert digest(maker.folder("elsewhere", SHARDS, config=b"{}"), method) == expected
    assert digest(maker.folder("renamed", renamed), method) == expected
    assert digest(maker.folder("indexed", renamed, index=index), method) == expected


@BOTH
def test_names_its_method(maker, method: Digest) -> None:
    found = digest(maker.folder("m", SHARDS), method)
    assert digest_method(found) == f"{method}-1"
    assert len(bytes.fromhex(found.partition(":")[2])) == 32


CHANGES = {
    "a byte of a small tensor": SHARDS | {"2.safetensors": {"c": b"seconD", "empty": b""}},
    "a name": SHARDS | {"2.safetensors": {"d": b"second", "empty": b""}},
    "a tensor more": SHARDS | {"2.safetensors": {"c": b"second", "empty": b"", "d": b""}},
    "a tensor in another shard": {
        "1.safetensors": {"a": b"first"},
        "2.safetensors": SHARDS["2.safetensors"] | {"b": bytes(range(256)) * 600},
    },
    "two tensors swapped": SHARDS
    | {"1.safetensors": {"a": b"first", "b": bytes(range(256))[::-1] * 600}},
    "a shard less": {"1.safetensors": SHARDS["1.safetensors"]},
    "a shard twice": SHARDS | {"3.safetensors": {"c2": b"second", "empty2": b""}},
}


@BOTH
@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES)
def test_differs_with_the_weights(maker, method: Digest, changed: dict) -> None:
    assert digest(maker.folder("m", SHARDS), method) != digest(
        maker.folder("changed", changed), method
    )


@BOTH
def test_covers_the_header(maker, method: Digest) -> None:
    folder = maker.folder("m", {"model.safetensors": {"a": b"1234"}})
    found = set()
    for dtype, shape in (("U8", [4]), ("I8", [4]), ("U8", [2, 2])):
        header = {"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, 4]}}
        (folder / "model.safetensors").write_bytes(maker.pack(header, b"1234"))
        found.add(digest(folder, method))
    assert len(found) == 3


@BOTH
def test_covers_which_tensors_the_index_takes(maker, method: Digest) -> None:
    shards = {"1.safetensors": {"a": b"1", "b": b"2"}, "2.safetensors": {"a": b"3", "c": b"4"}}
    rest = {"b": "1.safetensors", "c": "2.safetensors"}
    found = {
        digest(maker.folder(home, shards, index={"a": home, **rest}), method)
        for home in ("1.safetensors", "2.safetensors")
    }
    found.add(digest(maker.folder("none", shards, index=rest), method))
    assert len(found) == 3


def test_sampling_sees_every_window_and_nothing_else(maker) -> None:
    data = os.urandom(8 * SAMPLE)
    folder = maker.folder("m", {"model.safetensors": {"big": data}})
    path = folder / "model.safetensors"
    tensor = open_checkpoint(folder).tensors["big"].info
    sampled, full = digest(folder), digest(folder, Digest.FULL)
    places = windows(tensor)
    seen = {at for place, nbytes in places for at in (place, place + nbytes - 1)}
    blind = {place + nbytes for place, nbytes in places[:-1]}
    original = path.read_bytes()
    for at in seen | blind:
        changed = bytearray(original)
        changed[at] ^= 1
        path.write_bytes(changed)
        assert (digest(folder) != sampled) == (at in seen)
        assert digest(folder, Digest.FULL) != full


@BOTH
def test_means_the_same_in_every_version(maker, method: Digest) -> None:
    known = {
        Digest.SAMPLED: "b1af4e6ba685b09ade4eb8c7d70eed728987abb7e20de369f6af0943b5b54e58",
        Digest.FULL: "7de9cbe96d37285b4443da95bfbd66b32cc771264ca2768d368ddc2fac297fce",
    }
    assert digest(maker.folder("m", SHARDS), method) == f"{method}-1:{known[method]}"


@BOTH
def test_a_file_changed_since_it_was_opened_is_named(maker, method: Digest, tmp_path: Path) -> None:
    folder = maker.folder("m", SHARDS)
    checkpoint = open_checkpoint(folder)
    path = folder / "2.safetensors"
    maker.rewrite(path, path.read_bytes())
    with pytest.raises(ReadFailed, match=r"2\.safetensors changed while .* load again"):
        content(checkpoint, method, tmp_path / "cache")


@pytest.mark.parametrize("cut", [0, 1])
def test_a_file_changed_while_it_is_hashed_is_named(maker, tmp_path: Path, cut: int) -> None:
    folder = maker.folder("m", {"model.safetensors": {"a": bytes(BLOCK + 1)}})
    path = folder / "model.safetensors"

    def change(_: int) -> None:
        maker.rewrite(path, path.read_bytes()[: BLOCK if cut else None])

    with pytest.raises(ReadFailed, match=r"model\.safetensors (changed|ends at byte)"):
        content(open_checkpoint(folder), Digest.FULL, tmp_path / "cache", progress=change)
    assert not list((tmp_path / "cache").glob("*.json"))


def test_progress_is_told_every_block(maker) -> None:
    folder = maker.folder("m", {"model.safetensors": {"a": bytes(BLOCK + 1)}})
    told: list[int] = []
    content(open_checkpoint(folder), Digest.FULL, None, progress=told.append)
    size = (folder / "model.safetensors").stat().st_size
    assert told == [BLOCK, size - BLOCK]


def test_a_file_is_hashed_once(maker, tmp_path: Path) -> None:
    folder, cache = maker.folder("m", SHARDS), tmp_path / "cache"
    told: list[int] = []
    fresh = content(open_checkpoint(folder), Digest.FULL, cache, progress=told.append)
    assert len(told) == 2
    link = maker.folder("links", {})
    for name in SHARDS:
        (link / name).symlink_to(folder / name)
    assert content(open_checkpoint(link), Digest.FULL, cache, progress=told.append) == fresh
    # Recalling is progress as well.
    assert told[2:] == told[:2]
    maker.rewrite(folder / "2.safetensors", maker.pack_tensors({"c": b"SECOND", "empty": b""}))
    assert content(open_checkpoint(folder), Digest.FULL, cache, progress=told.append) != fresh
    assert len(told) == 6
    assert digest(folder, Digest.FULL) == content(open_checkpoint(folder), Digest.FULL, cache)


def test_a_large_checkpoint_is_quick(maker) -> None:
    folder = maker.folder("m", {})
    for shard in range(30):
        header, position = {}, 0
        for tensor in range(24):
            end = position + (190 << 20)
            header[f"{shard}.{tensor}"] = {
                "dtype": "BF16",
                "shape": [95 << 20],
                "data_offsets": [position, end],
            }
            position = end
        raw = json.dumps(header).encode()
        with (folder / f"{shard:02}.safetensors").open("wb") as file:
            file.write(maker.pack(raw))
            file.truncate(8 + len(raw) + position)  # sparse: 130 GiB that take no room
    checkpoint = open_checkpoint(folder)
    start = time.monotonic()
    content(checkpoint, Digest.SAMPLED, None)
    assert time.monotonic() - start < 1.0
