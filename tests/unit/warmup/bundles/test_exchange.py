import os
import stat

import pytest

from preloadd.warmup.bundles.exchange import Withheld, is_kept, obtain, publish
from preloadd.warmup.bundles.index import NAME, entries, recalled
from preloadd.warmup.bundles.install import Installed
from preloadd.warmup.stores.opening import open_stores
from tests.bundles import AOT, FILES, IDENTITY, PLAIN, contents, write


@pytest.fixture
def shared(tmp_path):
    """The folder of a store."""
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


@pytest.fixture
def stores(shared):
    """That store, as the only one."""
    with open_stores([f"file:{shared}"], {}) as made:
        yield made


def given(source, stores):
    return publish(source, [AOT, PLAIN], IDENTITY, stores, now=5.0)


def taken(target, bundle, stores, *, trusted=True):
    return obtain(target, bundle, stores, trusted=trusted, now=7.0)


def bundle_file(shared, bundle):
    return shared / bundle.key


def test_it_gets_from_one_root_to_another(source, target, shared, stores, packed):
    bundle = given(source, stores)
    assert bundle == packed[0]
    assert bundle_file(shared, bundle).read_bytes() == packed[1]
    assert taken(target, bundle, stores) == Installed((PLAIN, AOT), (PLAIN, AOT))
    assert contents(target / "torch_compile_cache") == contents(source / "torch_compile_cache")
    (entry,) = entries(target)
    assert (entry.sha256, entry.made, entry.at) == (bundle.sha256, False, 7)
    assert recalled(target, IDENTITY) == (PLAIN, AOT)


def test_publishing_leaves_a_note_in_the_root_alone(source, stores):
    bundle = given(source, stores)
    assert contents(source).keys() == {*FILES, NAME}
    (entry,) = entries(source)
    assert (entry.sha256, entry.made, entry.at) == (bundle.sha256, True, 5)


def test_nothing_is_not_published(source, stores):
    assert "compiled" in publish(source, [], IDENTITY, stores, now=5.0).why


def test_twice_is_once(source, target, stores):
    assert given(source, stores) == given(source, stores)
    bundle = given(source, stores)
    taken(target, bundle, stores)
    assert taken(target, bundle, stores) == Installed((PLAIN, AOT), ())


def test_what_is_there_is_not_fetched(source, target, shared, stores):
    bundle = given(source, stores)
    bundle_file(shared, bundle).unlink()
    write(target)
    assert taken(target, bundle, stores) == Installed((PLAIN, AOT), ())


def test_code_is_not_fetched_unless_it_is_trusted(source, target, stores):
    bundle = given(source, stores)
    refused = taken(target, bundle, stores, trusted=False)
    assert "trust_bundles = true" in refused.why
    assert not target.exists()


def test_without_a_store_there_is_nothing(source, target, packed):
    with open_stores([], {}) as none:
        assert "[warmup] stores" in given(source, none).why
        assert "there are none" in taken(target, packed[0], none).why


def test_a_store_that_takes_nothing_is_told(source, shared, stores):
    (shared / "vllm-warmup-cache").write_bytes(b"in the way")
    withheld = given(source, stores)
    assert isinstance(withheld, Withheld)
    assert f"no store took it: file:{shared}" in withheld.why


def test_one_that_has_lost_it_as_well(source, target, shared, stores):
    bundle = given(source, stores)
    bundle_file(shared, bundle).unlink()
    assert f"it is in no store (file:{shared})" in taken(target, bundle, stores).why
    assert not target.exists()


DAMAGES = [lambda raw: raw[:-1], lambda raw: bytes(len(raw)), lambda raw: b"", lambda raw: raw * 2]


@pytest.mark.parametrize("change", DAMAGES)
def test_what_is_damaged_hides_no_store_that_follows(source, target, tmp_path, change):
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    with open_stores([f"file:{folder}" for folder in folders], {}) as both:
        bundle = given(source, both)
        file = bundle_file(folders[0], bundle)
        file.write_bytes(change(file.read_bytes()))
        assert taken(target, bundle, both) == Installed((PLAIN, AOT), (PLAIN, AOT))


@pytest.mark.parametrize("change", DAMAGES)
def test_what_is_damaged_is_replaced_when_it_is_given_again(source, target, shared, stores, change):
    bundle = given(source, stores)
    file = bundle_file(shared, bundle)
    whole = file.read_bytes()
    file.write_bytes(change(whole))
    assert not is_kept(bundle, stores)
    assert given(source, stores) == bundle
    assert file.read_bytes() == whole
    assert is_kept(bundle, stores)
    assert taken(target, bundle, stores) == Installed((PLAIN, AOT), (PLAIN, AOT))


@pytest.mark.parametrize("change", DAMAGES)
def test_what_somebody_else_put_there_is_not_installed(source, target, shared, stores, change):
    bundle = given(source, stores)
    file = bundle_file(shared, bundle)
    file.write_bytes(change(file.read_bytes()))
    assert "or damaged there" in taken(target, bundle, stores).why
    assert not target.exists()


def test_more_than_was_told_is_not_even_read(source, target, shared, stores):
    bundle = given(source, stores)
    os.truncate(bundle_file(shared, bundle), 1 << 20)
    assert isinstance(taken(target, bundle, stores), Withheld)
    assert not target.exists()


def test_a_cache_that_cannot_be_packed_is_told(source, stores):
    (source / AOT / "link").symlink_to("/etc/passwd")
    assert f"{AOT}/link" in given(source, stores).why


def test_engines_of_this_host_come_first(source, target, stores):
    bundle = given(source, stores)
    write(target, {f"{AOT}/rank_0_0/model": b"ours"})
    assert f"{AOT} is there already" in taken(target, bundle, stores).why
    assert entries(target) == ()


def test_what_cannot_be_written_is_told(source, tmp_path, stores):
    bundle = given(source, stores)
    (tmp_path / "file").write_bytes(b"")
    assert str(tmp_path / "file") in taken(tmp_path / "file", bundle, stores).why


def test_the_root_is_private(source, target, stores):
    taken(target, given(source, stores), stores)
    assert stat.S_IMODE(target.stat().st_mode) == 0o700
