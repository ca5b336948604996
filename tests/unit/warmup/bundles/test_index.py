import io
import json
import os
import shutil
from dataclasses import replace

import pytest

from preloadd.warmup.bundles import index, tree
from preloadd.warmup.bundles.identity import digest
from preloadd.warmup.bundles.index import NAME, Entry, entries, listing, recalled, remember
from preloadd.warmup.bundles.install import install
from preloadd.warmup.bundles.usage import Use, judge
from tests.bundles import AOT, FILES, IDENTITY, PLAIN, write

ONE = Entry("ab" * 32, digest(IDENTITY), 100, 3, (PLAIN, AOT), made=True, at=1_700_000_000)


@pytest.fixture
def root(tmp_path):
    return tmp_path


def test_what_was_installed_is_told(packed):
    bundle, raw = packed
    entry = Entry.of(bundle, made=False, now=5.9)
    assert entry == replace(
        ONE, sha256=bundle.sha256, nbytes=len(raw), files=len(FILES), made=False, at=5
    )


def test_the_last_one_is_first(root):
    assert entries(root) == ()
    two = replace(ONE, sha256="ef" * 32)
    remember(root, ONE)
    remember(root, two)
    assert entries(root) == (two, ONE)
    remember(root, ONE)
    assert entries(root) == (ONE, two)
    assert (root / NAME).stat().st_mode & 0o777 == 0o600


def test_older_ones_are_forgotten(root):
    for number in range(index.MAX_ENTRIES + 2):
        remember(root, replace(ONE, sha256=f"{number:064x}", at=number))
    assert len(entries(root)) == index.MAX_ENTRIES
    assert entries(root)[-1].at == 2


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[",
        b"[]",
        b"\xff",
        b"{}",
        b'{"format": 2}',
        b'{"format": 1, "bundles": 5}',
        b'{"format": 1, "bundles": [5]}',
        b'{"format": 1, "bundles": [{"folders": []}]}',
    ],
)
def test_what_nobody_wrote_is_nothing(root, raw):
    (root / NAME).write_bytes(raw)
    (root / NAME).chmod(0o600)
    assert entries(root) == ()
    remember(root, ONE)
    assert entries(root) == (ONE,)


def test_folders_elsewhere_are_not_believed(root):
    remember(root, ONE)
    body = json.loads((root / NAME).read_bytes())
    body["bundles"][0]["folders"] = ["../x"]
    (root / NAME).write_text(json.dumps(body))
    assert entries(root) == ()


def test_nor_is_what_others_can_write_or_a_link(root, tmp_path):
    remember(root, ONE)
    (root / NAME).chmod(0o666)
    assert entries(root) == ()
    (root / NAME).rename(root / "other")
    (root / NAME).symlink_to("other")
    assert entries(root) == ()


def test_a_root_that_is_not_there_has_nothing(tmp_path):
    assert listing(tmp_path / "none") == {}
    assert listing(tmp_path) == {}


def test_files_are_listed_by_folder(source):
    (source / "torch_compile_cache/torch_aot_compile/other").mkdir()
    (source / "torch_compile_cache/9876543210").mkdir()
    found = listing(source)
    assert {f"{folder}/{name}" for folder, files in found.items() for name in files} == set(FILES)
    assert {s.nbytes for files in found.values() for s in files.values()} == {
        len(data) for data in FILES.values()
    }


def test_links_among_them_are_listed_like_files(source):
    (source / AOT / "link").symlink_to("x")
    assert "link" in listing(source)[AOT]


def test_an_engine_may_be_writing(source, monkeypatch):
    """Files and folders go away between the moment they are seen and that they are looked at."""
    real = tree.passing

    def passing(name):
        if name == "inductor_cache":
            shutil.rmtree(source / AOT / name)
        return real(name)

    monkeypatch.setattr(tree, "passing", passing)
    assert set(listing(source)) == {AOT, PLAIN}
    assert set(listing(source)[AOT]) == {"rank_0_0/model"}


def test_an_engine_that_compiles_anew_is_seen(packed, target):
    """As vLLM does it: a new file, renamed to the place of the old one, even of equal content."""
    bundle, raw = packed
    installed = install(target, bundle, io.BytesIO(raw)).folders
    before = listing(target)
    assert judge(installed, before, listing(target)).use is Use.UNTOUCHED
    model = target / AOT / "rank_0_0/model"
    model.with_suffix(".1.tmp").write_bytes(model.read_bytes())
    os.utime(model.with_suffix(".1.tmp"), ns=(0, model.stat().st_mtime_ns))
    model.with_suffix(".1.tmp").replace(model)
    assert judge(installed, before, listing(target)).use is Use.REPLACED


def test_so_is_one_that_looks_elsewhere(packed, target):
    bundle, raw = packed
    installed = install(target, bundle, io.BytesIO(raw)).folders
    before = listing(target)
    write(target, {"torch_compile_cache/9876543210/rank_0_0/backbone/a": b"x"})
    verdict = judge(installed, before, listing(target))
    assert (verdict.use, verdict.folders) == (Use.BYPASSED, ("torch_compile_cache/9876543210",))


@pytest.mark.parametrize(
    "change",
    [
        {"sha256": "x"},
        {"identity": 5},
        {"nbytes": "5"},
        {"folders": [5]},
        {"made": 1},
        {"at": None},
    ],
)
def test_entries_of_another_form_are_not_believed(root, change):
    remember(root, ONE)
    body = json.loads((root / NAME).read_bytes())
    body["bundles"][0] |= change
    (root / NAME).write_text(json.dumps(body))
    assert entries(root) == ()


def test_folders_are_recalled_while_they_are_there(source):
    assert recalled(source, IDENTITY) == ()
    remember(source, ONE)
    assert recalled(source, IDENTITY) == (PLAIN, AOT)
    assert recalled(source, IDENTITY | {"vllm": "0.34.0"}) == ()
    shutil.rmtree(source / AOT)
    assert recalled(source, IDENTITY) == ()


def test_the_same_code_is_known_for_each_identity_that_has_it(root):
    """Engines of two configurations may compile the same: neither is to forget it for the other."""
    other = IDENTITY | {"engine_args": "others"}
    write(root)
    remember(root, ONE)
    remember(root, replace(ONE, identity=digest(other), made=False))
    assert recalled(root, IDENTITY) == recalled(root, other) == ONE.folders
    remember(root, ONE)
    assert [one.made for one in entries(root)] == [True, False]
