"""The header's rules, against safetensors itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from preloadd.domain import dtypes
from preloadd.errors import CheckpointError
from preloadd.weights.checkpoint.layout import TensorInfo, parse

Content = dict[str, tuple[str, tuple[int, ...], bytes]]


def ours(file: bytes) -> Content:
    """What `parse` finds in `file`, whose length field has to be right."""
    start = 8 + int.from_bytes(file[:8], "little")
    found = parse(file[8:start], start, len(file))
    return {t.name: (t.dtype, t.shape, file[t.start : t.end]) for t in found.values()}


def theirs(file: bytes) -> Content:
    return {
        name: (info["dtype"], tuple(info["shape"]), bytes(info["data"]))
        for name, info in deserialize(file)
    }


def pack(header: bytes | object, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__"
)


@st.composite
def shapes(draw: st.DrawFn, bits: int) -> list[int]:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    return shape if bits % 8 == 0 else [*shape, 4]


@st.composite
def headers(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """The header of a valid file and the bytes its data takes."""
    header, position = {}, 0
    for name in draw(st.lists(NAMES, max_size=5, unique=True)):
        dtype = draw(st.sampled_from(dtypes.NAMES))
        shape = draw(shapes(dtypes.BITS[dtype]))
        elements = 1
        for size in shape:
            elements *= size
        end = position + dtypes.nbytes(dtype, elements)
        header[name] = entry(dtype, shape, position, end)
        position = end
    order = draw(st.permutations(list(header)))
    shuffled = {name: header[name] for name in order}
    if draw(st.booleans()):
        shuffled["__metadata__"] = draw(st.none() | st.dictionaries(NAMES, NAMES, max_size=2))
    return shuffled, position


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A valid safetensors file, written in one of the ways that JSON leaves open."""
    header, nbytes = draw(headers())
    text = json.dumps(
        header,
        ensure_ascii=draw(st.booleans()),
        indent=draw(st.sampled_from([None, 1])),
        separators=draw(st.sampled_from([(",", ":"), (" , ", " : ")])),
    )
    padding = " " * draw(st.integers(0, 9))
    return pack(text.encode() + padding.encode(), bytes(n % 251 for n in range(nbytes)))


@settings(max_examples=60)
@given(files())
def test_reads_what_safetensors_reads(file: bytes) -> None:
    assert ours(file) == theirs(file)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A valid file after a few edits of its header's bytes or of its length."""
    file = draw(files())
    start = 8 + int.from_bytes(file[:8], "little")
    header, data = bytearray(file[8:start]), file[start:]
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(header)))
        cut = draw(st.integers(0, 3))
        header[at : at + cut] = draw(
            st.sampled_from([b"", b"0", b"1", b"8", b"-", b".", b"e", b",", b":", b'"', b"\\"])
            | st.sampled_from(
                [b"{", b"}", b"[", b"]", b" ", b"\n", b"\0", b"\xff", b'"shape":[0],']
            )
            | st.binary(max_size=2)
        )
    if draw(st.booleans()):
        data = data[: draw(st.integers(0, len(data)))] + draw(st.binary(max_size=2))
    return pack(bytes(header), data)


@settings(max_examples=100)
@given(damaged())
def test_never_accepts_what_safetensors_refuses(file: bytes) -> None:
    try:
        found = ours(file)
    except CheckpointError:
        return
    assert found == theirs(file)


@settings(max_examples=60)
@given(headers(), st.data())
def test_never_accepts_other_numbers_than_safetensors(
    made: tuple[dict[str, Any], int], data: st.DataObject
) -> None:
    header, nbytes = made
    entries = [value for name, value in header.items() if name != "__metadata__"]
    for found in data.draw(st.lists(st.sampled_from(entries or [entry("U8", [], 0, 1)]))):
        numbers = found[data.draw(st.sampled_from(["shape", "data_offsets"]))]
        if numbers:
            place = data.draw(st.integers(0, len(numbers) - 1))
            numbers[place] = data.draw(st.integers(-1, 9) | st.sampled_from([1 << 63, 1 << 64]))
    file = pack(header, bytes(nbytes))
    try:
        expected = theirs(file)
    except SafetensorError:
        with pytest.raises(CheckpointError):
            ours(file)
    else:
        assert ours(file) == expected


@pytest.mark.parametrize("dtype", dtypes.NAMES)
def test_every_dtype(dtype: str) -> None:
    nbytes = dtypes.BITS[dtype]
    file = pack({"a": entry(dtype, [2, 4], 0, nbytes)}, bytes(range(nbytes)))
    assert ours(file) == theirs(file) == {"a": (dtype, (2, 4), bytes(range(nbytes)))}


def test_offsets_count_from_the_start_of_the_file() -> None:
    header = {
        "b": entry("I16", [1], 4, 6),
        "a": entry("F32", [], 0, 4),
        "c": entry("U8", [0], 6, 6),
    }
    raw = json.dumps(header).encode()
    assert list(parse(raw, 1000, 1006).values()) == [
        TensorInfo("a", "F32", (), 1000, 1004),
        TensorInfo("b", "I16", (1,), 1004, 1006),
        TensorInfo("c", "U8", (0,), 1006, 1006),
    ]
    assert parse(raw, 1000, 1006)["a"].nbytes == 4


ACCEPTED = {
    "nothing at all": (b"{}", 0),
    "space around": (b' \n{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}\t\r ', 2),
    "no metadata": ({"__metadata__": None, "a": entry("U8", [2], 0, 2)}, 2),
    "metadata": ({"__metadata__": {"format": "pt", "a:b": "::"}, "a": entry("U8", [2], 0, 2)}, 2),
    "colons in names": ({"a:b:": entry("U8", [2], 0, 2)}, 2),
    "escapes": (b'{"\\u0061\\u003a":{"dtype":"\\u00558","shape":[2],"data_offsets":[0,2]}}', 2),
    "two empty tensors in one place": (
        {"a": entry("U8", [0], 0, 0), "b": entry("U8", [0], 0, 0)},
        0,
    ),
    "an empty tensor before its neighbour": (
        {"b": entry("U8", [2], 0, 2), "a": entry("I64", [3, 0], 0, 0)},
        2,
    ),
    "a dimension saved by a zero": ({"a": entry("U8", [0, (1 << 64) - 1], 0, 0)}, 0),
    "half a byte each": ({"a": entry("F4", [2], 0, 1), "b": entry("F6_E2M3", [4], 1, 4)}, 4),
}


@pytest.mark.parametrize(("header", "nbytes"), ACCEPTED.values(), ids=ACCEPTED)
def test_accepts(header: bytes | object, nbytes: int) -> None:
    file = pack(header, bytes(range(nbytes)))
    assert ours(file) == theirs(file)


REFUSED = {
    "no JSON": (b"", 0, "cannot be read"),
    "half of it": (b'{"a":{"dtype":"U8","sha', 2, "cannot be read"),
    "no object": (b"[]", 0, "cannot be read"),
    "no UTF-8 in a name": (b'{"\xff":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', 2, "UTF-8"),
    "half a surrogate": (b'{"\\ud800":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', 2, "read"),
    "nested without end": (b'{"a":' + b"[" * 100_000, 0, "nested"),
    "zero padding": (b"{}\0\0", 0, "cannot be read"),
    "metadata that is no text": ({"__metadata__": {"a": 1}}, 0, "cannot be read"),
    "an entry that is no object": ({"a": ["U8", [2], [0, 2]]}, 2, "'a'"),
    "a field too few": ({"a": {"dtype": "U8", "shape": [2]}}, 2, "'a'.*data_offsets"),
    "a field too many": ({"a": entry("U8", [2], 0, 2) | {"x": 1}}, 2, "'a'.*`x`"),
    "three offsets": ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1, 2]}}, 2, "'a'"),
    "a fraction": ({"a": {"dtype": "U8", "shape": [2.0], "data_offsets": [0, 2]}}, 2, "'a'"),
    "an unknown dtype": ({"a": entry("F7", [2], 0, 2)}, 2, "'a'.*dtype 'F7'"),
    "a negative dimension": ({"a": entry("U8", [-2], 0, 2)}, 2, "'a'.*negative"),
    "minus nothing": (b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}', 0, "negative"),
    "a negative offset": ({"a": entry("U8", [2], -2, 0)}, 2, "'a'.*negative"),
    "a dimension over 64 bits": ({"a": entry("U8", [0, 1 << 64], 0, 0)}, 0, "'a'.*impossible"),
    "a number without end": (b'{"a":{"dtype":"U8","shape":[' + b"9" * 4299 + b"]}}", 0, "'a'"),
    "a product over 64 bits": ({"a": entry("U8", [1 << 63, 2, 0], 0, 0)}, 0, "'a'.*impossible"),
    "bits over 64 bits": ({"a": entry("U8", [1 << 62], 0, 1 << 62)}, 0, "'a'.*impossible"),
    "half a byte": ({"a": entry("F4", [3], 0, 2)}, 2, "'a'.*whole bytes"),
    "a byte too many": ({"a": entry("I16", [2], 0, 5)}, 5, r"'a'.*I16.*\[2\] needs 4 bytes"),
    "a byte too few": ({"a": entry("I16", [2], 0, 3)}, 3, "'a'.*needs 4 bytes"),
    "end before start": (
        {"b": entry("U8", [2], 0, 2), "a": entry("U8", [2], 2, 0)},
        2,
        "'a' takes bytes 2 to 0",
    ),
    "a hole": ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 3, 5)}, 5, "'b'.*hole"),
    "a hole at the start": ({"a": entry("U8", [2], 1, 3)}, 3, "'a'.*hole"),
    "overlap": ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, 3, "'b'.*overlaps"),
    "the same place": ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 0, 2)}, 2, "overlaps"),
    "an empty tensor in the middle of another": (
        {"a": entry("U8", [2], 0, 2), "b": entry("U8", [0], 1, 1)},
        2,
        "'b'.*overlaps",
    ),
    "missing data": ({"a": entry("U8", [4], 0, 4)}, 3, "truncated.* 4 bytes, 3 are there"),
    "trailing data": ({"a": entry("U8", [4], 0, 4)}, 6, "2 trailing bytes"),
    "data without tensors": (b"{}", 1, "1 trailing bytes"),
    "metadata twice": (b'{"__metadata__":{},"__metadata__":{}}', 0, "'__metadata__' twice"),
    "a field twice": (
        b'{"a":{"dtype":"U8","shape":[9],"shape":[2],"data_offsets":[0,2]}}',
        2,
        "'shape' twice",
    ),
}
WHOLE = json.dumps(entry("U8", [2], 0, 2)).encode()
STRICTER = {
    "a tensor twice": (
        b'{"a":%b,"\\u0061":%b}' % (WHOLE, WHOLE),
        2,
        "'a' twice",
    ),
    "a tensor twice behind an escaped colon": (
        b'{"\\u003a":%b,"\\u003a":%b}' % (WHOLE, WHOLE),
        2,
        "':' twice",
    ),
}


@pytest.mark.parametrize(
    ("header", "nbytes", "told"), (REFUSED | STRICTER).values(), ids=REFUSED | STRICTER
)
def test_refuses(header: bytes | object, nbytes: int, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        ours(pack(header, bytes(nbytes)))


@pytest.mark.parametrize(
    "name",
    [name for name in REFUSED if name not in ("a field too many", "an entry that is no object")],
)
def test_safetensors_refuses_the_same(name: str) -> None:
    header, nbytes, _ = REFUSED[name]
    with pytest.raises(SafetensorError):
        theirs(pack(header, bytes(nbytes)))
