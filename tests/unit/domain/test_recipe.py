from dataclasses import replace

import pytest

from preloadd.domain.files import FileIdentity
from preloadd.domain.placement import Parallel, Placement
from preloadd.domain.recipe import BUILDER_VERSIONS, KERNELS, Recipe, changes, recipe_of
from preloadd.domain.settings import (
    Builder,
    Digest,
    Layout,
    Memory,
    ModelSettings,
    RankSettings,
    Reader,
    Source,
    Versions,
)

FILE = FileIdentity(1, 2, 3, 4, 5)
MODEL = ModelSettings(path="/m", name="m")
SETTINGS = RankSettings(group="g", instance="CPU-0", socket_dir="/s", derived=False, model=MODEL)
VLLM = replace(MODEL, builder=Builder.VLLM, layout=Layout.PLAIN, engine_args=("--dtype=float16",))
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
        ({"placement": Placement(Parallel(tensor=2), 1)}, "parallel.tensor"),
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


@pytest.mark.parametrize(
    ("changed", "field", "was", "now"),
    [
        ({"engine_args": ("--seed=1",)}, "engine_args", '["--dtype=float16"]', '["--seed=1"]'),
        ({"layout": Layout.RAW}, "weight_layout", "plain", "raw"),
    ],
)
def test_what_vllm_is_told_makes_other_weights(changed, field, was, now):
    old = replace(SETTINGS, model=VLLM)
    new = replace(SETTINGS, model=replace(VLLM, **changed))
    (found,) = changes(recipe_of(old, (FILE,)), recipe_of(new, (FILE,)))
    assert (found.field, found.daemon, found.engine) == (field, was, now)


@pytest.mark.parametrize(
    ("was", "now", "told"),
    [
        ("0.32.0", "0.32.0", None),
        ("0.32.0", "0.33.0", ("0.32.0", "0.33.0")),
        ("", "0.33.0", ("unknown", "0.33.0")),
        ("", "", None),
        # It may be in the middle of an upgrade.
        ("0.32.0", "", None),
    ],
)
@pytest.mark.parametrize("name", ["vllm", "torch", "transformers", *KERNELS])
def test_another_version_makes_other_weights_once_it_is_seen(name, was, now, told):
    old, new = (
        recipe_of(replace(SETTINGS, model=VLLM, versions=Versions(**{name: version})), (FILE,))
        for version in (was, now)
    )
    found = [(d.field, d.daemon, d.engine) for d in changes(old, new)]
    assert found == ([(name, *told)] if told else [])


@pytest.mark.parametrize(
    ("was", "now", "told"),
    [
        ('{"VLLM_USE_DEEP_GEMM":"0"}', '{"VLLM_USE_DEEP_GEMM":"0"}', None),
        ('{"VLLM_USE_DEEP_GEMM":"0"}', '{"VLLM_USE_DEEP_GEMM":"1"}', ("0", "1")),
        ("{}", '{"VLLM_USE_DEEP_GEMM":"0"}', ("(absent)", "0")),
        ('{"VLLM_USE_DEEP_GEMM":"0"}', "{}", ("0", "(absent)")),
    ],
)
def test_another_switch_makes_other_weights_and_so_does_one_that_is_gone(was, now, told):
    old, new = (
        recipe_of(replace(SETTINGS, model=VLLM, versions=Versions(environment=set_)), (FILE,))
        for set_ in (was, now)
    )
    found = [(d.field, d.daemon, d.engine) for d in changes(old, new)]
    assert found == ([("environment.VLLM_USE_DEEP_GEMM", *told)] if told else [])


def test_native_weights_depend_on_no_version():
    assert recipe_of(replace(SETTINGS, versions=Versions("1", "2", "3")), ()) == recipe_of(
        SETTINGS, ()
    )


def drafting(path: str, target: str) -> Recipe:
    model = replace(VLLM, path=path, partner=Source(target, "t"))
    return recipe_of(replace(SETTINGS, instance="CPU-0.draft", model=model), (FILE,))


def test_a_draft_is_made_for_its_target():
    assert changes(drafting("/d", "/t"), drafting("/d", "/t")) == ()
    (found,) = changes(drafting("/d", "/t"), drafting("/d", "/u"))
    assert (found.field, found.daemon, found.engine) == ("target", "/t", "/u")
    # One in the target's own checkpoint is known by its files.
    assert changes(drafting("/t", "/t"), drafting("/u", "/u")) == ()


def test_a_target_is_the_same_whatever_drafts_for_it():
    drafted = replace(SETTINGS, model=replace(VLLM, partner=Source("/d", "d")))
    plain = replace(SETTINGS, model=VLLM)
    assert recipe_of(drafted, (FILE,)) == recipe_of(plain, (FILE,))
