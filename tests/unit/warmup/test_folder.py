import os
import resource
import stat
from pathlib import Path

import pytest

from preloadd.errors import InsecurePath
from preloadd.linux.private import LOCK
from preloadd.warmup import folder
from preloadd.warmup.merge import Existing, TableConflict
from preloadd.warmup.names import TableName
from preloadd.warmup.table import BadTable, Entry, Table, parse

HASH = "ab" * 32
ONE, TWO = TableName(0, 0), TableName(0, 1)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.fixture
def table(metadata):
    return Table({"a": Entry("R", 1)}, metadata)


def contents(path):
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def put(root, *names, table, existing=Existing.KEEP):
    return folder.install(root, HASH, dict.fromkeys(names, table), existing)


def test_what_is_installed_is_found(root, table):
    assert folder.hashes(root) == []
    written = put(root, TWO, ONE, table=table)
    assert {path.name for path in written} == {str(ONE), str(TWO)}
    assert folder.hashes(root) == [HASH]
    found = folder.tables(root, HASH)
    assert [one.name for one in found] == [ONE, TWO]
    assert [one.table.entries for one in found] == [table.entries] * 2
    assert found[0].config_hash == HASH
    assert found[0].path == root / HASH / str(ONE)


def test_files_and_folders_are_private_whatever_the_mask(root, table):
    before = os.umask(0o277)
    try:
        root.mkdir(0o700)
        root.chmod(0o700)
        (root / HASH).mkdir()
        (root / HASH).chmod(0o700)
        (path,) = put(root, ONE, table=table)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_new_folder_is_private(root, table):
    put(root, ONE, table=table)
    assert stat.S_IMODE((root / HASH).stat().st_mode) == 0o700


def test_the_same_is_left_alone(root, table):
    put(root, ONE, table=table)
    before = (root / HASH / str(ONE)).stat()
    assert put(root, ONE, table=table) == []
    assert (root / HASH / str(ONE)).stat().st_ino == before.st_ino


def test_all_or_none(root, table, metadata):
    put(root, TWO, table=table)
    before = contents(root)
    other = Table({"a": Entry("R", 2)}, metadata | {"gpu": "NVIDIA B200"})
    with pytest.raises(TableConflict, match=str(TWO)):
        put(root, ONE, TWO, table=other, existing=Existing.REPLACE)
    assert contents(root) == before


def test_a_disk_without_room_leaves_all_as_it_was(root, table):
    put(root, ONE, TWO, table=table)
    before = contents(root)
    new = {ONE: Table({"b": Entry("R", 1)}), TWO: Table({"x" * 10_000: Entry("R", 1)})}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limits[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '{root}/{HASH}/{TWO}'"):
            folder.install(root, HASH, new, Existing.REPLACE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(root) == before


def test_what_is_no_table_is_replaced(root, table):
    put(root, ONE, table=table)
    (root / HASH / str(ONE)).write_bytes(b'{"a": 5}')
    assert folder.tables(root, HASH)[0].table is None
    assert "entry a" in folder.tables(root, HASH)[0].fault
    put(root, ONE, table=table)
    assert folder.tables(root, HASH)[0].table.entries == table.entries


def test_tables_are_merged(root, table, metadata):
    put(root, ONE, table=table)
    put(root, ONE, table=Table({"b": Entry("R", 2)}, metadata), existing=Existing.MERGE)
    found = parse((root / HASH / str(ONE)).read_bytes(), "t")
    assert set(found.entries) == {"a", "b"}
    assert found.intact


def test_no_link_is_followed(root, table, tmp_path):
    put(root, ONE, table=table)
    outside = tmp_path / "outside"
    (root / HASH / str(ONE)).rename(outside)
    before = outside.read_bytes()
    (root / HASH / str(ONE)).symlink_to(outside)
    (found,) = folder.tables(root, HASH)
    assert found.table is None
    assert "symbolic link" in found.fault
    with pytest.raises(InsecurePath, match=f"{ONE} is a symbolic link.*remove it"):
        put(root, ONE, table=Table({}), existing=Existing.REPLACE)
    assert folder.remove(root, HASH) == [root / HASH / str(ONE)]
    assert outside.read_bytes() == before


def test_no_link_to_a_folder_is_followed(root, table, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    put(elsewhere, ONE, table=table)
    root.mkdir()
    (root / HASH).symlink_to(elsewhere / HASH)
    assert folder.hashes(root) == []
    for attempt in (folder.tables, folder.remove):
        with pytest.raises(InsecurePath, match="is a symbolic link"):
            attempt(root, HASH)
    with pytest.raises(InsecurePath, match="is a symbolic link"):
        put(root, ONE, table=Table({}), existing=Existing.REPLACE)
    assert folder.tables(elsewhere, HASH)[0].table


def test_a_folder_that_others_can_write_is_refused(root, table):
    (root / HASH).mkdir(parents=True)
    (root / HASH).chmod(0o777)
    with pytest.raises(InsecurePath, match="chmod go-w"):
        put(root, ONE, table=table)


def test_what_is_no_file_does_not_hang_and_hides_nothing(root, table):
    three, four = TableName(0, 2), TableName(0, 3)
    put(root, ONE, table=table)
    os.mkfifo(root / HASH / str(TWO))
    (root / HASH / str(three)).mkdir()
    os.mknod(root / HASH / str(four), stat.S_IFSOCK | 0o600)
    faults = [one.fault for one in folder.tables(root, HASH)]
    assert faults == ["", *["is no regular file"] * 3]
    gone = [path.name for path in folder.remove(root, HASH)]
    assert gone == [str(ONE), str(TWO), str(four)]
    assert [path.name for path in (root / HASH).iterdir() if path.is_dir()] == [str(three)]


def test_a_file_without_end_is_not_read_to_it(root):
    (root / HASH).mkdir(parents=True)
    with (root / HASH / str(ONE)).open("wb") as file:
        file.truncate(1 << 40)
    assert "bytes" in folder.tables(root, HASH)[0].fault


def test_only_tables_are_removed(root, table):
    put(root, ONE, TWO, table=table)
    other = root / HASH / "pcie_ipc_allreduce_tp_0_1.json"
    other.write_text("{}")
    assert len(folder.remove(root, HASH)) == 2
    assert sorted(path.name for path in (root / HASH).iterdir()) == [LOCK, other.name]
    other.unlink()
    assert folder.remove(root, HASH) == []
    assert folder.hashes(root) == []


def test_looking_is_no_use(root, table):
    (path,) = put(root, ONE, table=table)
    os.utime(path, (1e9, 1e9))
    for _ in range(2):
        assert folder.tables(root, HASH)[0].used == 1e9
    os.utime(path, (2e9, 1e9))
    assert folder.tables(root, HASH)[0].used == 2e9


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else for a while")
def test_what_a_user_may_not_do_is_told_with_the_whole_path(socket_dir, table):
    path, _ = put(socket_dir, ONE, TWO, table=table)
    for one in (socket_dir, socket_dir / HASH):
        one.chmod(0o755)
    os.seteuid(65534)
    try:
        found = folder.tables(socket_dir, HASH)
        with pytest.raises(PermissionError, match=f"'{socket_dir}/{HASH}/autotune"):
            folder.stored(socket_dir, HASH, ONE)
    finally:
        os.seteuid(0)
    assert [(one.fault, one.table, one.ends) for one in found] == [(folder.CLOSED, None, False)] * 2
    for one in (socket_dir / HASH).iterdir():
        one.chmod(0o644)
    os.seteuid(65534)
    try:
        assert folder.tables(socket_dir, HASH)[0].table.entries == table.entries
        with pytest.raises(PermissionError, match=f"'{socket_dir}/{HASH}/autotune"):
            folder.remove(socket_dir, HASH)
    finally:
        os.seteuid(0)
    assert path.exists()


@pytest.mark.parametrize("name", ["..", "", "x" * 64, "../" + "a" * 61])
def test_nothing_but_a_hash_names_a_folder(root, table, name):
    for attempt in (
        lambda: folder.tables(root, name),
        lambda: folder.remove(root, name),
        lambda: folder.install(root, name, {ONE: table}, Existing.KEEP),
    ):
        with pytest.raises(ValueError, match="no hash"):
            attempt()
    assert not Path(root).exists()


def test_one_table_is_read_as_it_is_stored(root, table):
    assert folder.stored(root, HASH, ONE) is None
    (path,) = put(root, ONE, table=table)
    assert folder.stored(root, HASH, ONE) == path.read_bytes()
    assert folder.stored(root, HASH, TWO) is None
    path.write_bytes(b"no table")
    assert folder.stored(root, HASH, ONE) == b"no table"


def test_of_one_table_no_link_is_followed(root, table, tmp_path):
    (path,) = put(root, ONE, table=table)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InsecurePath, match="symbolic link"):
        folder.stored(root, HASH, ONE)
    with pytest.raises(ValueError, match="no hash"):
        folder.stored(root, "..", ONE)


def test_lock_is_no_table_and_goes_with_the_folder(root, table):
    put(root, ONE, table=table)
    assert (root / HASH / LOCK).exists()
    assert [one.name for one in folder.tables(root, HASH)] == [ONE]
    folder.remove(root, HASH)
    assert folder.hashes(root) == []


def test_what_is_too_much_once_it_is_written_is_not(root, metadata):
    large = Table({"a": Entry("R", [0] * 1_000_000)}, metadata)
    with pytest.raises(BadTable):
        put(root, ONE, table=large)
    assert folder.tables(root, HASH) == []
