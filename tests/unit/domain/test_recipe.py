from dataclasses import replace

import pytest

from preloadd.domain.files import FileIdentity
from preloadd.domain.placement import Parallel, Placement
from preloadd.domain.recipe import BUILDER_VERSIONS, Recipe, changes, recipe_of
from preloadd.domain.settings import Builder, Digest, Memory, ModelSettings, RankSettings, Reader

FILE = FileIdentity(1, 2, 3, 4, 5)
MODEL = ModelSettings(path="/m", name="m")
SETTINGS = RankSettings(group="g", instance="CPU-0", socket_dir="/s", derived=False, model=MODEL)
RECIPE = Recipe({"builder": "native", "layout": "1"}, (FILE,))


def test_an_unchanged_recipe_adopts():
    assert changes(RECIPE, Recipe(dict(RECIPE.fields), (FILE,))) == ()


def test_a_changed_setting_is_named_with_both_values():
    (found,) = changes(RECIPE, Recipe(RECIPE.fields | {"layout": "2"}, (FILE,)))
    assert (found.field, found.daemon, found.engine) == ("layout", "1", "2")


def test_any_changed_number_of_a_file_counts():
    for name in ("device", "inode", "size", "mtime_ns", "ctime_ns"):
        values = {n: getattr(FILE, n) for n in FILE.__slots__} | {name: 99}
        (found,) = changes(RECIPE, Recipe(RECIPE.fields, (FileIdentity(**values),)))
        assert found.field == "files"


def test_a_file_more_or_less_counts():
    assert changes(Recipe(RECIPE.fields, ()), RECIPE)
    assert changes(RECIPE, Recipe(RECIPE.fields, (FILE, FileIdentity(1, 9, 3, 4, 5))))


def test_where_the_files_cannot_be_seen_their_path_decides():
    parked = Recipe(RECIPE.fields, (FILE,), "/models/a")
    assert changes(parked, Recipe(RECIPE.fields, (), "/models/a")) == ()
    (found,) = changes(parked, Recipe(RECIPE.fields, (), "/models/b"))
    assert (found.field, found.daemon, found.engine) == ("model", "/models/a", "/models/b")
    # The same files under another path are the same weights.
    assert changes(parked, Recipe(RECIPE.fields, (FILE,), "/elsewhere")) == ()


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"revision": "v2"}, "revision"),
        ({"digest": Digest.FULL}, "digest"),
        ({"placement": Placement(Parallel(tensor=2), 1)}, "parallel"),
        ({"name": "other"}, None),
        ({"chunk_bytes": 1 << 20}, None),
        ({"reader": Reader.INSTANTTENSOR}, None),
        ({"memory": Memory.CUDA}, "memory"),
    ],
)
def test_what_of_the_settings_makes_other_weights(changed, field):
    found = changes(
        recipe_of(SETTINGS, (FILE,)),
        recipe_of(replace(SETTINGS, model=replace(MODEL, **changed)), (FILE,)),
    )
    assert [difference.field for difference in found] == ([field] if field else [])


def test_a_new_version_of_the_builder_is_another_recipe(monkeypatch):
    old = recipe_of(SETTINGS, (FILE,))
    monkeypatch.setitem(BUILDER_VERSIONS, Builder.NATIVE, "2")
    (found,) = changes(old, recipe_of(SETTINGS, (FILE,)))
    assert (found.field, found.daemon, found.engine) == ("builder_version", "1", "2")
