import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.warmup.table import MAX_KEY, BadTable, Entry, Table, from_json, parse, render

SCALARS = st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.text(max_size=8)
TACTICS = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=6)
TEXTS = st.text(min_size=1, max_size=8)
TABLES = st.builds(
    Table,
    st.dictionaries(
        TEXTS.filter(lambda key: key not in ("_metadata", "_records", "_generation")),
        st.builds(
            lambda runner, tactic, rest: Entry(runner, tactic, tuple(rest)),
            TEXTS,
            TACTICS,
            st.lists(st.lists(SCALARS, max_size=2), max_size=1),
        ),
        max_size=4,
    ),
    st.none() | st.dictionaries(TEXTS, st.none() | TEXTS, max_size=4),
    st.none()
    | st.dictionaries(TEXTS.filter(lambda name: name[0] != "_"), st.just({"a": 1}), min_size=1),
)


@given(TABLES)
def test_what_is_rendered_is_parsed(table):
    raw = render(table)
    again = parse(raw, "t.json")
    assert again.intact
    assert (again.entries, again.metadata, again.records) == (
        table.entries,
        table.metadata,
        table.records,
    )
    assert raw.isascii()
    assert render(again) == raw


def test_a_table_has_what_the_file_has(raw, metadata):
    table = parse(raw(_records={"product": {"a": 1}}), "t.json")
    (entry,) = table.entries.values()
    assert (entry.runner, entry.tactic, len(entry.rest)) == ("CublasFp8GemmRunner", 3, 1)
    assert table.metadata == metadata
    assert table.records == {"product": {"a": 1}}
    assert table.ops == {"fp8_gemm": 1}
    assert table.intact is None


def test_the_digest_is_that_of_the_rest(raw, body):
    whole = json.dumps(body(), sort_keys=True, separators=(",", ":")).encode()
    digest = hashlib.sha256(whole).hexdigest()
    assert parse(raw(_generation=digest), "t").intact is True
    assert parse(raw(_generation=digest, other=["R", 1]), "t").intact is False


def test_old_and_new_forms_are_tables_too(raw):
    assert parse(b"{}", "t").entries == {}
    assert parse(raw(_metadata=None), "t").metadata is None
    assert parse(b'{"_metadata": null}', "t").metadata is None
    newer = parse(raw(k=["R", [[1, 2], "x"], ["hot"], {"selection": {}}]), "t").entries["k"]
    assert newer == Entry("R", [[1, 2], "x"], (["hot"], {"selection": {}}))


@pytest.mark.parametrize(
    ("entry", "ignored"),
    [
        (Entry("CudnnGemm", 0), True),
        (Entry("CudnnGemm", -1), False),
        (Entry("CudnnGemm", [1]), False),
        (Entry("Cublas", 0), False),
    ],
)
def test_plans_of_cudnn_by_number_are_ignored(entry, ignored):
    assert entry.ignored is ignored


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (5, "no list"),
        ({"runner": "x"}, "no list"),
        ("Runner", "no list"),
        ([], "no list"),
        (["R"], "no list"),
        (["R", 0, ["hot"], *[0] * 20], "no list"),
        ([None, 0], "runner"),
        (["", 0], "runner"),
        (["R" * 1000, 0], "runner"),
        (["R", {"a": 1}], "tactic"),
        (["R", [1, [{}]]], "tactic"),
        (["R", 0, None], "policy"),
        (["R", 0, {"a": 1}], "policy"),
        (["R", 0, [{}]], "policy"),
    ],
)
def test_an_entry_that_is_none_is_named_with_its_file(raw, value, why):
    with pytest.raises(BadTable) as caught:
        parse(raw(**{"the-key": value}), "/cache/t.json")
    text = str(caught.value)
    assert text.startswith("/cache/t.json: entry the-key")
    assert why in text
    assert "remove the file" in text


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"_metadata": []}, "_metadata"),
        ({"_metadata": {"gpu": 5}}, "_metadata: gpu"),
        ({"_metadata": {"gpu": "x" * 5000}}, "_metadata: gpu"),
        ({"_records": []}, "_records"),
        ({"_records": {"p": 1}}, "_records: p"),
        ({"_records": {"_p": {}}}, "_records: _p"),
        ({"_generation": 5}, "_generation"),
        ({"_schema": "v3"}, "entry _schema"),
        ({"": ["R", 0]}, "entry"),
        ({"k" * (MAX_KEY + 1): ["R", 0]}, "entry kkk"),
        ({"line\nbreak": 5}, r"entry line\\nbreak"),
    ],
)
def test_what_else_can_be_wrong_is_named(raw, changes, named):
    with pytest.raises(BadTable, match=named):
        parse(raw(**changes), "t.json")


@pytest.mark.parametrize(
    ("raw", "harmless"),
    [
        (b'{"_metadata": []}', True),
        (b'{"_metadata": "x", "a": 5}', True),
        (b'{"a": ["R", NaN]}', True),
        (b'{"a": ["R", 1], "a": ["R", 1e999]}', True),
        (b'{"a": ["R", NaN], "b": 5}', False),
        (b'{"_metadata": {}, "_records": [], "b": ["R", NaN]}', False),
        (b'{"a": ["R", ' + b"9" * 5000 + b"]}", False),
        (b'{"_metadata": [], "a": ' + b"[" * 3000 + b"]" * 3000 + b"}", False),
        (b"[NaN]", False),
        (b"\xef\xbb\xbf{}", False),
        (b'{"a": "\xff"}', False),
    ],
)
def test_what_flashinfer_survives_is_refused_in_other_words(raw, harmless):
    with pytest.raises(BadTable) as caught:
        parse(raw, "t.json")
    assert caught.value.harmless is harmless
    assert ("no engine ends by it" in str(caught.value)) is harmless
    assert ("an engine could end" in str(caught.value)) is not harmless


@pytest.mark.parametrize("raw", [b"[]", b"null", b"5", b'"x"', b"", b"{", b'{"_records": null}'])
def test_what_is_no_table_at_all(raw):
    with pytest.raises(BadTable, match=r"^t\.json: "):
        parse(raw, "t.json")


def test_what_vllm_compares_between_ranks(raw):
    one, other = (parse(raw(a=["R", tactic]), "t") for tactic in (1, 2))
    assert one.fingerprint == other.fingerprint
    assert parse(raw(), "t").fingerprint != one.fingerprint
    assert parse(raw(_generation="x"), "t").fingerprint == (one.fingerprint[0], 2)
    assert parse(raw(a=["R", 1], _metadata={}), "t").fingerprint != one.fingerprint


def test_a_table_within_more_json_is_judged_the_same(raw, body):
    assert from_json(body(), "t") == parse(raw(), "t")
    for bad in ([], None, {"a": 5}):
        with pytest.raises(BadTable, match=r"^t: "):
            from_json(bad, "t")
