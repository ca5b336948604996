import json
import os

import pytest

from preloadd.admin import cache
from preloadd.admin.cache import (
    NoSuchCache,
    caches_in,
    pick,
    prunable,
    roots_of,
    sources,
    target_of,
)
from preloadd.errors import ConfigError, InsecurePath
from preloadd.warmup import folder
from preloadd.warmup.merge import Existing, TableConflict
from preloadd.warmup.names import TableName
from preloadd.warmup.table import BadTable, Entry, Table
from preloadd.warmup.verdict import FIELDS

H = "ab" * 32
OTHER = "abcd" + "0" * 60
METADATA = dict.fromkeys(FIELDS, "1") | {"flashinfer_version": "0.7.2"}


@pytest.fixture
def environ(tmp_path):
    return {"HOME": str(tmp_path), "VLLM_CACHE_ROOT": "~/vllm"}


@pytest.fixture
def root(tmp_path):
    return tmp_path / "vllm/flashinfer_autotune_cache/0.7.2/90a"


@pytest.fixture
def fill():
    """A function: put tables of ranks into a root."""

    def put(root, *counts, config_hash=H, metadata=METADATA):
        new = {
            TableName(0, rank): Table({f"k{n}": Entry("R", n) for n in range(count)}, metadata)
            for rank, count in enumerate(counts)
        }
        folder.install(root, config_hash, new, Existing.REPLACE)

    return put


def test_roots_are_those_of_an_engine(tmp_path, environ, root, fill):
    assert roots_of(environ, None) == []
    fill(root, 1)
    assert roots_of(environ, None) == [root]
    told = environ | {"VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "/t"}
    assert list(map(str, roots_of(told, None))) == ["/t"]
    assert roots_of(told, tmp_path) == [tmp_path]


def test_one_is_picked_by_its_first_letters(root, fill):
    fill(root, 1, 1)
    fill(root, 1, config_hash=OTHER)
    assert len(caches_in([root])) == 2
    assert pick([root], "abab").config_hash == H
    assert pick([root], OTHER).config_hash == OTHER
    with pytest.raises(NoSuchCache, match=rf"'abc0' in {root}: those there are: abab.*, abcd"):
        pick([root], "abc0")
    with pytest.raises(NoSuchCache, match=r"any folder of vLLM's cache.*none"):
        pick([], "abab")


def test_the_same_in_two_places_is_not_picked(tmp_path, root, fill):
    fill(root, 1)
    fill(tmp_path / "other", 1)
    with pytest.raises(ConfigError, match="--root"):
        pick([root, tmp_path / "other"], H)


def test_what_is_exported_can_be_imported(tmp_path, root, fill):
    fill(root, 2, 2)
    written = cache.export(pick([root], H), tmp_path / "out")
    assert [path.parent for path in written] == [tmp_path / "out" / H] * 2
    for source in (tmp_path / "out", tmp_path / "out" / H):
        (one,) = sources(source)
        target = tmp_path / source.name
        assert len(cache.put(one, target, Existing.KEEP)) == (2 if source.name == H else 0)
        assert [t.table for t in folder.tables(target, H)] == [t.table for t in one.tables]


def test_nothing_is_exported_over_other_tables(tmp_path, root, fill):
    fill(root, 2)
    fill(tmp_path / "out", 3)
    with pytest.raises(TableConflict, match="is there already"):
        cache.export(pick([root], H), tmp_path / "out")


def test_nothing_malformed_is_taken(tmp_path, root, fill):
    fill(root, 1, 1)
    (root / H / str(TableName(0, 1))).write_text('{"bad": 5}')
    one = pick([root], H)
    assert len(one.faults) == 1
    for attempt in (
        lambda: sources(root),
        lambda: cache.export(one, tmp_path / "out"),
        lambda: cache.put(one, tmp_path / "out", Existing.KEEP),
    ):
        with pytest.raises(BadTable, match=r"rank1\.json: entry bad"):
            attempt()
    assert not (tmp_path / "out").exists()


def test_sources_need_something(tmp_path):
    with pytest.raises(NoSuchCache, match=r"cache export"):
        sources(tmp_path)


def test_tables_go_to_the_only_root_of_their_version(tmp_path, root, fill):
    fill(tmp_path, 1)
    one = pick([tmp_path], H)
    other = root.parent.parent / "0.8/90a"
    assert target_of(one, [root]) == root
    assert target_of(one, [root, other]) == root
    for roots in ([root, root.parent / "90a_100a"], [other, other.parent / "x"], []):
        with pytest.raises(ConfigError, match=r"--root"):
            target_of(one, roots)


def test_notes_tell_why_tables_are_not_used(root, fill):
    fill(root, 1, 2, metadata=METADATA | {"gpu": "unknown"})
    fill(root, 1, config_hash=OTHER)
    path = root / OTHER / str(TableName(0, 0))
    body = json.loads(path.read_text())
    path.write_text(json.dumps(body | {"k9": ["CudnnR", 1]}))
    text = "\n".join(pick([root], H).notes)
    assert "rank0.json: gpu not known" in text
    assert "ranks of dp0 differ" in text
    text = "\n".join(pick([root], OTHER).notes)
    assert "digest" in text
    assert "1 entries have plans of cuDNN" in text


def test_prunable_are_old_named_and_not_kept(root, fill):
    fill(root, 1)
    fill(root, 1, config_hash=OTHER)
    os.utime(root / H / str(TableName(0, 0)), (100, 100))
    caches = caches_in([root])

    def hashes(before=None, only=(), keep=()):
        return [one.config_hash for one in prunable(caches, before=before, only=only, keep=keep)]

    assert hashes(before=101) == [H]
    assert hashes(before=100) == []
    assert hashes(only=["abab", "abcd"]) == [H, OTHER]
    assert hashes(before=101, only=["abcd"]) == []
    assert hashes(before=1e12, keep=["abcd"]) == [H]
    for wrong in ({"only": ["abc"]}, {"keep": ["ffff"]}):
        with pytest.raises(NoSuchCache, match="nothing was removed"):
            hashes(**wrong)


def test_pruned_tables_are_gone_and_others_stay(root, fill):
    fill(root, 1, 1)
    fill(root, 1, config_hash=OTHER)
    cache.prune(pick([root], H))
    assert [one.config_hash for one in caches_in([root])] == [OTHER]
    assert not (root / H).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who must not write there")
def test_root_writes_nothing_of_others(tmp_path, root, fill):
    fill(root, 1)
    one = pick([root], H)
    os.chown(root / H, 1234, 1234)
    with pytest.raises(InsecurePath, match="setpriv --reuid 1234"):
        cache.prune(one)
    os.chown(tmp_path, 1234, 1234)
    for attempt in (cache.export, lambda c, t: cache.put(c, t, Existing.KEEP)):
        with pytest.raises(InsecurePath, match="setpriv --reuid 1234"):
            attempt(one, tmp_path / "new/folder")
    assert not (tmp_path / "new").exists()
