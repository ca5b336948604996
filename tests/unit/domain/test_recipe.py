from preloadd.domain.files import FileIdentity
from preloadd.domain.recipe import Recipe, changes

FILE = FileIdentity(1, 2, 3, 4, 5)
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
    assert changes(RECIPE, Recipe(RECIPE.fields, ()))
    assert changes(RECIPE, Recipe(RECIPE.fields, (FILE, FileIdentity(1, 9, 3, 4, 5))))
