import contextlib
import json
import logging
import os
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain.strict_json import decode
from preloadd.errors import ProtocolViolation
from preloadd.linux.private import LOCK
from preloadd.warmup import folder
from preloadd.warmup.merge import Existing
from preloadd.warmup.names import TableName
from preloadd.warmup.seeding.kinds import Outcome, Unfit
from preloadd.warmup.seeding.tables import TableKind, TableWanted, install_all
from preloadd.warmup.table import Entry, Table, parse, render

HASH = "ab" * 32
NAME = TableName(0, 3)
FIELDS = {"config_hash": HASH, "dp_rank": 0, "rank": 3}


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def table(metadata) -> Table:
    return Table({"a": Entry("R", 1)}, metadata)


@pytest.fixture
def kind(root) -> TableKind:
    return TableKind([partial(folder.stored, root)])


@pytest.fixture
def wanted(metadata) -> TableWanted:
    return TableWanted(HASH, NAME, metadata)


def put(root, table, name=NAME):
    folder.install(root, HASH, {name: table}, Existing.KEEP)
    return root / HASH / str(name)


def test_a_table_goes_from_one_root_to_another(root, table, kind, wanted, tmp_path):
    path = put(root, table)
    payload = kind.resolve(wanted.fields)
    assert payload == b'{"autotune_configs_dp0_rank3.json": ' + path.read_bytes() + b"}"
    judged = wanted.judged(decode(payload))
    assert judged.intact
    there = tmp_path / "there"
    assert install_all(there, HASH, {NAME: judged}).outcome is Outcome.INSTALLED
    assert (there / HASH / str(NAME)).read_bytes() == path.read_bytes()


def test_what_is_not_there_is_a_miss(root, table, kind):
    assert kind.resolve(FIELDS) is None
    put(root, table)
    assert kind.resolve(FIELDS | {"rank": 2}) is None
    assert kind.resolve(FIELDS | {"config_hash": "cd" * 32}) is None


def test_tiers_are_asked_in_order(root, table, metadata):
    other = render(Table({"b": Entry("R", 2)}, metadata))
    kind = TableKind([partial(folder.stored, root), lambda *_: other])
    assert kind.resolve(FIELDS) == b'{"%s": %s}' % (str(NAME).encode(), other)
    path = put(root, table)
    assert path.read_bytes() in kind.resolve(FIELDS)


@pytest.mark.parametrize("bad", [b"", b"[]", b'{"a": 5}', b"\xff", b"[" * 60_000])
def test_a_table_that_no_engine_survives_is_given_to_nobody(root, table, kind, bad, caplog):
    put(root, table).write_bytes(bad)
    assert kind.resolve(FIELDS) is None
    assert kind.resolve(FIELDS) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(NAME) in record.getMessage()


def test_links_and_what_is_no_file_are_not_followed(root, table, kind, tmp_path, caplog):
    path = put(root, table)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert kind.resolve(FIELDS) is None
    path.unlink()
    os.mkfifo(path)
    assert kind.resolve(FIELDS) is None
    assert "symbolic link" in caplog.text
    assert "no regular file" in caplog.text


def test_a_folder_that_is_a_link_is_not_followed(root, table, kind, tmp_path):
    put(root, table)
    (root / HASH).rename(tmp_path / "elsewhere")
    (root / HASH).symlink_to(tmp_path / "elsewhere")
    assert kind.resolve(FIELDS) is None


BAD = [
    ("config_hash", value)
    for value in [None, 5, "..", "../" + HASH, HASH[:-1], HASH + "\n", HASH.upper(), f"{HASH}/..",
                  "/" + HASH, [HASH], {"a": 1}, HASH[:-1] + "\0"]
] + [
    (name, value)
    for name in ("dp_rank", "rank")
    for value in [None, "0", "0/../../x", -1, 1_000_000, 10**19, True, 0.0, [0], {}]
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_field_that_is_wrong_is_refused_before_any_tier_is_asked(field, value):
    def never(*_):
        raise AssertionError

    with pytest.raises(ProtocolViolation):
        TableKind([never]).resolve(FIELDS | {field: value})
    with pytest.raises(ProtocolViolation):
        TableKind([never]).resolve({n: v for n, v in FIELDS.items() if n != field})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from([*FIELDS, "x"]), JSON))
def test_whatever_is_asked_is_a_miss_or_refused(fields):
    with contextlib.suppress(ProtocolViolation):
        assert TableKind([]).resolve(fields) is None


@given(JSON, JSON)
def test_whatever_is_sent_is_a_table_or_unfit(payload, table):
    wanted = TableWanted(HASH, NAME, {})
    for sent in (payload, {str(NAME): table}):
        try:
            judged = wanted.judged(sent)
        except Unfit:
            continue
        assert parse(render(judged), "").entries == judged.entries


def named(body, name=str(NAME)):
    return {name: body}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("autotune_configs_dp0_rank2.json", "not the one table"),
        ("../autotune_configs_dp0_rank3.json", "not the one table"),
        ("autotune_configs_x", "not the one table"),
    ],
)
def test_another_name_is_refused(wanted, body, name, why):
    with pytest.raises(Unfit, match=why):
        wanted.judged(named(body(), name))


@pytest.mark.parametrize("payload", [None, [], "x", {}, {str(NAME): 1}, {str(NAME): {}, "b": {}}])
def test_another_shape_is_refused(wanted, payload):
    with pytest.raises(Unfit):
        wanted.judged(payload)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"x": 5}, "entry x is no list"),
        ({"x": ["R"]}, "entry x is no list"),
        ({"_records": []}, "_records is no object"),
        ({"_metadata": None}, "does not say where it was tuned"),
        ({"_metadata": {}}, "another environment"),
        ({"_generation": "00" * 32}, "digest"),
    ],
)
def test_what_vllm_takes_and_an_engine_may_not_survive_is_refused(wanted, body, changes, why):
    with pytest.raises(Unfit, match=why):
        wanted.judged(named(body(**changes)))


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("gpu", "*", "fit any gpu"),
        ("gpu", "NVIDIA B200", "gpu is 'NVIDIA B200' there and 'NVIDIA H200' here"),
        ("cudnn_version", "unknown", "cudnn_version"),
        ("cudnn_version", None, "cudnn_version"),
    ],
)
def test_a_table_of_another_environment_is_refused(wanted, body, metadata, field, value, why):
    with pytest.raises(Unfit, match=why.replace("*", r"\*")):
        wanted.judged(named(body(_metadata=metadata | {field: value})))


def test_a_hard_conflict_on_the_disk_stays_as_it_is(root, table, metadata):
    other = Table({"b": Entry("R", 2)}, metadata | {"gpu": "NVIDIA B200"})
    path = put(root, other, TableName(0, 1))
    before = path.read_bytes()
    seeded = install_all(root, HASH, {NAME: table, TableName(0, 1): table})
    assert seeded.outcome is Outcome.INCOMPATIBLE
    assert str(path) in seeded.why
    assert path.read_bytes() == before
    assert sorted(path.parent.iterdir()) == [path.with_name(LOCK), path]


def test_entries_of_before_are_not_left_over(root, table, metadata):
    path = put(root, Table({"stale": Entry("R", 2)}, metadata))
    assert install_all(root, HASH, {NAME: table}).outcome is Outcome.INSTALLED
    assert "stale" not in json.loads(path.read_bytes())
    assert install_all(root, HASH, {NAME: table}).outcome is Outcome.INSTALLED


def test_a_table_that_would_be_too_much_in_a_file_is_unfit(root, wanted, metadata):
    """As it comes it is small: written, each of its numbers has a line of its own."""
    large = Table({"a": Entry("R", [0] * 1_000_000)}, metadata)
    body = {"_metadata": dict(metadata), "a": ["R", large.entries["a"].tactic]}
    raw = json.dumps({str(NAME): body}, separators=(",", ":")).encode()
    with pytest.raises(Unfit, match="bytes"):
        wanted.judged(decode(raw))
    assert install_all(root, HASH, {NAME: large}).outcome is Outcome.INCOMPATIBLE
    assert not (root / HASH / str(NAME)).exists()
