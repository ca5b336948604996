import pytest

from preloadd.engine.tables import UnfitTables, install
from preloadd.errors import InsecurePath
from preloadd.warmup import folder
from preloadd.warmup.merge import Existing, TableConflict
from preloadd.warmup.names import TableName
from preloadd.warmup.table import BadTable, Entry, Table, render
from preloadd.warmup.verdict import compare
from tests.tuned import H200

HASH = "ab" * 32
RANKS = [TableName(0, 0), TableName(0, 1)]
KEY = "('fp8_gemm', 'CublasFp8GemmRunner', ((128, 4096), (4096, 4096)), ())"


def table(tactic: int = 1, *, metadata=H200, key: str = KEY) -> Table:
    return Table({key: Entry("CublasFp8GemmRunner", tactic)}, metadata)


MORE = Table({**table().entries, **table(key=KEY.replace("fp8", "bf16")).entries}, H200)


def told(*tables: Table) -> dict[str, bytes]:
    """What a daemon hands over: a table for each rank in order."""
    return {str(name): render(one) for name, one in zip(RANKS, tables, strict=False)}


def unused(saved):
    """As FlashInfer on such a GPU."""
    found = compare(saved, H200)
    return [one.field for one in (*found.hard, *found.soft)]


def put(received, root):
    return install(received, RANKS, root, HASH, unused)


def there(root) -> list[str]:
    try:
        return [one.path.name for one in folder.tables(root, HASH)]
    except FileNotFoundError:
        return []


def test_tables_of_all_ranks_are_put_where_engines_look(tmp_path):
    received = told(table(1), table(2)) | {"autotune_configs_dp0_rank2.json": b"not for this one"}
    assert f"2 tables of FlashInfer from the daemon, in {tmp_path / HASH}" == put(
        received, tmp_path
    )
    for name in RANKS:
        assert (tmp_path / HASH / str(name)).read_bytes() == received[str(name)]
    assert there(tmp_path) == list(map(str, RANKS))


FORGED = render(table()).replace(b"NVIDIA H200", b"*")
"""A table that claims to be of any GPU since it was tuned."""


@pytest.mark.parametrize(
    ("received", "error", "why"),
    [
        (told(table()), UnfitTables, "not that of rank 1"),
        ({**told(table(), table()), str(RANKS[1]): b"[]"}, BadTable, "rank1.json"),
        ({**told(table(), table()), str(RANKS[1]): b'{"x": 5}'}, BadTable, "rank1.json"),
        (told(table(), table(metadata=H200 | {"gpu": "B200"})), UnfitTables, "gpu"),
        (told(table(), table(metadata=H200 | {"cudnn_version": None})), UnfitTables, "cudnn"),
        (told(table(), Table({}, H200)), UnfitTables, "is empty"),
        (told(table(), MORE), UnfitTables, "not of one tuning"),
        (told(table(), table(metadata=None)), UnfitTables, "not of one tuning"),
        (told(table()) | {str(RANKS[1]): FORGED}, UnfitTables, "digest"),
    ],
)
def test_if_one_is_unfit_none_is_installed(tmp_path, received, error, why):
    with pytest.raises(error, match=why):
        put(received, tmp_path)
    assert there(tmp_path) == []


def test_tables_that_engines_use_already_stay(tmp_path):
    put(told(table(1), table(1)), tmp_path)
    before = [(tmp_path / HASH / str(name)).read_bytes() for name in RANKS]
    assert "there already" in put(told(table(2), table(2)), tmp_path)
    assert [(tmp_path / HASH / str(name)).read_bytes() for name in RANKS] == before


@pytest.mark.parametrize(
    "old",
    [
        {RANKS[0]: table(7)},
        {RANKS[0]: table(7), RANKS[1]: Table({}, H200)},
        {RANKS[0]: table(7), RANKS[1]: table(7, metadata=H200 | {"gpu": "unknown"})},
    ],
    ids=["one is missing", "of several tunings", "one does not know where it was tuned"],
)
def test_tables_that_engines_would_not_use_are_replaced(tmp_path, old):
    folder.install(tmp_path, HASH, old, Existing.KEEP)
    put(told(table(1), table(2)), tmp_path)
    assert [one.table.entries[KEY].tactic for one in folder.tables(tmp_path, HASH)] == [1, 2]


def test_a_table_of_another_environment_is_never_replaced(tmp_path):
    other = table(7, metadata=H200 | {"gpu": "NVIDIA B200"})
    folder.install(tmp_path, HASH, {RANKS[1]: other}, Existing.KEEP)
    with pytest.raises(TableConflict, match="NVIDIA B200"):
        put(told(table(1), table(2)), tmp_path)
    assert there(tmp_path) == [str(RANKS[1])]


def test_a_folder_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / HASH).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InsecurePath):
        put(told(table(1), table(2)), tmp_path)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_empty_tables_are_none(tmp_path):
    empty = Table({}, H200)
    with pytest.raises(UnfitTables, match="is empty"):
        put(told(empty, empty), tmp_path)
    folder.install(tmp_path, HASH, dict.fromkeys(RANKS, empty), Existing.REPLACE)
    assert put(told(table(), table()), tmp_path).startswith("2 tables of FlashInfer from")
