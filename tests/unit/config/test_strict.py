import pytest
from pydantic import ValidationError

from preloadd.config.strict import (
    AbsolutePath,
    ChunkBytes,
    Name,
    Seconds,
    Strict,
    Texts,
    fields_of,
    tables_of,
)


class Inner(Strict):
    seconds: Seconds = 1.0


class Outer(Strict):
    path: AbsolutePath = "/x"
    name: Name = "n"
    texts: Texts = ()
    chunk: ChunkBytes | None = None
    inner: Inner = Inner()


def refused(**given: object) -> str:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(given)
    return str(caught.value)


def test_lists_become_tuples_and_sizes_whole_pages():
    found = Outer.model_validate({"texts": ["a"], "chunk": "1MB"})
    assert found.texts == ("a",)
    assert found.chunk == 1_000_000 // 4096 * 4096


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"path": "x"}, "no absolute path"),
        ({"path": "/x\n"}, "on one line"),
        ({"name": "a/b"}, "unit's name"),
        ({"texts": [""]}, "on one line"),
        ({"inner": {"seconds": True}}, "valid number"),
        ({"other": 1}, "other"),
    ],
)
def test_refused(given, told):
    assert told in refused(**given)


def test_places_of_settings_and_tables():
    assert [key for key, _ in fields_of(Outer)] == [
        ("path",),
        ("name",),
        ("texts",),
        ("chunk",),
        ("inner", "seconds"),
    ]
    assert list(tables_of(Outer)) == [("inner",)]


def test_values_never_change():
    with pytest.raises(ValidationError, match="frozen"):
        Outer().name = "m"
