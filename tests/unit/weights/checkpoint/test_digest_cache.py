from __future__ import annotations

import fcntl
import logging
import os
import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from preloadd.domain.files import FileIdentity
from preloadd.weights.checkpoint import digest_cache
from preloadd.weights.checkpoint.digest_cache import DigestCache, cache_folder_of

FILE = FileIdentity(1, 2, 3, 4, 5)
DIGEST = bytes(range(32))
OTHER = bytes(32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "below" / "digests"


@pytest.fixture
def cache(folder: Path) -> DigestCache:
    return DigestCache(folder)


def never() -> bytes:
    pytest.fail("the kept digest should have been used")


def entry(folder: Path) -> Path:
    (found,) = folder.glob("*.json")
    return found


def test_keeps_what_was_computed(cache: DigestCache, folder: Path) -> None:
    assert cache.recall(FILE, lambda: DIGEST) == DIGEST
    assert cache.recall(FILE, never) == DIGEST
    assert DigestCache(folder).recall(FILE, never) == DIGEST


def test_folder_and_files_are_ours_alone(cache: DigestCache, folder: Path) -> None:
    cache.recall(FILE, lambda: DIGEST)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("field", ["size", "mtime_ns", "ctime_ns", "inode", "device"])
def test_another_identity_is_another_file(cache: DigestCache, field: str) -> None:
    cache.recall(FILE, lambda: DIGEST)
    fields = {name: getattr(FILE, name) for name in FILE.__slots__}
    other = FileIdentity(**fields | {field: 99})
    assert cache.recall(other, lambda: OTHER) == OTHER
    assert cache.recall(other, never) == OTHER


def test_a_changed_file_replaces_its_own_entry(cache: DigestCache, folder: Path) -> None:
    for change in range(5):
        cache.recall(FileIdentity(1, 2, 3, 4, change), lambda: DIGEST)
    assert entry(folder).exists()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "no JSON": lambda path: path.write_bytes(b"\xff" * 99),
    "a short digest": lambda path: path.write_bytes(path.read_bytes().replace(b"AAEC", b"")),
    "another file's": lambda path: path.write_bytes(path.read_bytes().replace(b":5", b":6")),
    "writable by others": lambda path: path.chmod(0o666),
    "writable by a group": lambda path: path.chmod(0o660),
    "a link": lambda path: path.symlink_to(path.rename(path.with_suffix(".moved"))),
    "gone": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path, 0o600)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_bad_entry_is_as_good_as_none(
    cache: DigestCache, folder: Path, damage: Callable[[Path], object]
) -> None:
    cache.recall(FILE, lambda: DIGEST)
    before = entry(folder).read_bytes()
    damage(entry(folder))
    assert not entry_is(folder, before)
    assert cache.recall(FILE, lambda: OTHER) == OTHER


def entry_is(folder: Path, content: bytes) -> bool:
    found = list(folder.glob("*.json"))
    if not found or not found[0].is_file() or found[0].is_symlink():
        return False
    return found[0].read_bytes() == content and found[0].stat().st_mode & 0o777 == 0o600


def test_a_replaced_entry_serves_again(cache: DigestCache, folder: Path) -> None:
    cache.recall(FILE, lambda: DIGEST)
    entry(folder).write_bytes(b"")
    cache.recall(FILE, lambda: OTHER)
    assert cache.recall(FILE, never) == OTHER


def _open_to_others(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)


def _link(folder: Path) -> None:
    folder.parent.mkdir()
    (folder.parent / "real").mkdir(mode=0o700)
    folder.symlink_to("real")


def _file(folder: Path) -> None:
    folder.parent.mkdir()
    folder.touch(mode=0o600)


def _foreign(folder: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a folder away")
    folder.mkdir(parents=True)
    os.chown(folder, 12345, -1)


@pytest.mark.parametrize("make", [_open_to_others, _link, _file, _foreign])
def test_a_folder_of_others_is_not_used(
    cache: DigestCache, folder: Path, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    make(folder)
    with caplog.at_level(logging.WARNING):
        for digest in (DIGEST, OTHER):
            assert cache.recall(FILE, lambda digest=digest: digest) == digest
    assert str(folder) in caplog.text
    assert "not kept" in caplog.text
    assert not folder.is_dir() or not list(folder.iterdir())


def test_a_folder_opened_later_is_not_trusted(cache: DigestCache, folder: Path) -> None:
    cache.recall(FILE, lambda: DIGEST)
    folder.chmod(0o770)
    assert cache.recall(FILE, lambda: OTHER) == OTHER


def test_leftovers_of_a_crash_are_in_nobodys_way_and_go_with_the_oldest(
    cache: DigestCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_cache, "MAX_ENTRIES", 1)
    folder.mkdir(parents=True, mode=0o700)
    for name in (".1-2.json.0123456789abcdef", "1-2.new"):
        (folder / name).write_bytes(b"half")
        os.utime(folder / name, ns=(0, 0))
    cache.recall(FILE, lambda: DIGEST)
    assert cache.recall(FILE, never) == DIGEST
    assert sorted(path.name for path in folder.iterdir()) == ["1-2.json", "lock"]


def test_an_entry_that_cannot_be_written_costs_only_time(
    cache: DigestCache, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.recall(FILE, lambda: DIGEST)
    path = entry(folder)
    path.unlink()
    path.mkdir()
    with caplog.at_level(logging.WARNING):
        assert cache.recall(FILE, lambda: OTHER) == OTHER
    assert f"the digest was not kept: [Errno 21] Is a directory: '{path}'" in caplog.text
    assert sorted(path.name for path in folder.iterdir()) == [path.name, "lock"]


def test_an_entry_of_which_the_disk_takes_a_part_is_not_kept(
    cache: DigestCache, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.recall(FILE, lambda: DIGEST)
    before = entry(folder).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        changed = FileIdentity(1, 2, 3, 4, 99)
        assert cache.recall(changed, lambda: OTHER) == OTHER
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert entry(folder).read_bytes() == before
    assert f"the digest was not kept: [Errno 27] File too large: '{entry(folder)}'" in caplog.text
    assert len(list(folder.iterdir())) == 2


def test_a_failure_is_not_kept(cache: DigestCache, folder: Path) -> None:
    def fail() -> bytes:
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        cache.recall(FILE, fail)
    assert not list(folder.glob("*.json"))
    assert cache.recall(FILE, lambda: DIGEST) == DIGEST


def test_the_oldest_entries_go(
    cache: DigestCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_cache, "MAX_ENTRIES", 3)
    files = [FileIdentity(1, inode, 3, 4, 5) for inode in range(5)]
    for age, file in enumerate(files):
        cache.recall(file, lambda: DIGEST)
        path = next(path for path in folder.glob("*.json") if path.name == f"1-{file.inode}.json")
        os.utime(path, ns=(age, age))
    assert len(list(folder.glob("*.json"))) == 3
    assert all(cache.recall(file, never) for file in files[2:])
    assert (folder / "lock").exists()


def test_who_comes_second_waits_and_computes_nothing(cache: DigestCache) -> None:
    started, go = threading.Event(), threading.Event()
    found: list[bytes] = []

    def slow() -> bytes:
        started.set()
        assert go.wait(10)
        return DIGEST

    first = threading.Thread(target=lambda: found.append(cache.recall(FILE, slow)))
    second = threading.Thread(target=lambda: found.append(cache.recall(FILE, lambda: OTHER)))
    first.start()
    assert started.wait(10)
    second.start()
    second.join(0.05)
    assert second.is_alive()
    go.set()
    first.join(10)
    second.join(10)
    assert found == [DIGEST, DIGEST]


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"CACHE_DIRECTORY": "/var/cache/p:/x", "HOME": "/h"}, "/var/cache/p/digests"),
        ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/c/preloadd/digests"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/preloadd/digests"),
        ({"HOME": "relative"}, None),
        ({}, None),
    ],
)
def test_the_folder_is_the_services_else_the_users(environ, folder):
    assert cache_folder_of(environ) == (Path(folder) if folder else None)


def test_who_waits_takes_what_was_kept_while_others_hold_the_lock(tmp_path):
    """Another process hashes one file after the other, and never lets go for long."""
    cache, identity = DigestCache(tmp_path / "digests"), FileIdentity(1, 2, 3, 4, 5)
    cache.recall(identity, lambda: DIGEST)
    (entry,) = (tmp_path / "digests").glob("*.json")
    entry.rename(tmp_path / "later")
    with (tmp_path / "digests" / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def waiting():
            with suppress(FileNotFoundError):
                (tmp_path / "later").rename(entry)

        assert cache.recall(identity, lambda: b"never", waiting=waiting) == DIGEST


def test_who_waits_for_another_process_shows_signs_of_life(tmp_path):
    cache = DigestCache(tmp_path / "digests")
    identity = FileIdentity(1, 2, 3, 4, 5)
    cache.recall(FileIdentity(9, 9, 9, 9, 9), lambda: b"x" * 32)
    with (tmp_path / "digests" / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        signs = []

        def waiting():
            signs.append(1)
            if len(signs) == 3:
                fcntl.flock(lock, fcntl.LOCK_UN)

        assert cache.recall(identity, lambda: b"d" * 32, waiting=waiting) == b"d" * 32
    assert len(signs) == 3
