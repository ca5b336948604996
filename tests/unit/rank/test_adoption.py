import dataclasses
import os

import pytest

from preloadd.domain.files import FileIdentity
from preloadd.domain.recipe import recipe_of
from preloadd.domain.settings import Builder, Layout, Versions
from preloadd.linux.fds import OwnedFd
from preloadd.linux.memfd import create, sealed_bytes
from preloadd.memory.host import HostKeeper
from preloadd.rank.adoption import adopt
from tests.unit.rank.generations import FILES, ID, PAGE, filled

OTHER = "0c" * 16


@pytest.fixture
def take(recipe):
    """Adopts out of what is parked; the generation is closed at the end."""
    adopted = []

    def take(parked, wanted=recipe):
        names = set(parked)
        found = adopt(parked, HostKeeper(), wanted)
        picked = [each for each in (found.generation, found.outdated) if each is not None]
        adopted.extend(picked)
        kept = names - set(found.dropped)
        assert all(fd.closed for name in found.dropped for fd in parked[name])
        assert len(picked) <= 1
        assert len(kept) == 3 * len(picked)
        return found

    yield take
    for generation in adopted:
        generation.close()


def test_nothing_parked_is_nothing_adopted(take):
    found = take({})
    assert (found.generation, found.dropped, found.reasons) == (None, [], [])


def test_what_matches_is_adopted_as_it_is(take, make, parked):
    original = make()
    found = take(parked(original))
    assert found.generation.manifest == original.manifest
    assert [os.fstat(fd.fileno()).st_ino for fd in found.generation.chunks] == [
        os.fstat(fd.fileno()).st_ino for fd in original.chunks
    ]
    assert (found.dropped, found.reasons) == ([], [])


def test_whatever_else_is_parked_is_dropped(take, make, parked):
    every = parked(make())
    junk = {name: [sealed_bytes("x", b"x")] for name in ("stored", f"chunk.{OTHER}.0", "chunk.")}
    found = take(every | junk)
    assert found.generation.id == ID
    assert sorted(found.dropped) == sorted(junk)
    assert found.reasons == []


def test_of_several_descriptors_under_one_name_the_first_counts(take, make, parked):
    every = parked(make())
    every[f"chunk.{ID}.0"].append(sealed_bytes("x", b"x"))
    found = take(every)
    assert found.generation.id == ID
    assert every[f"chunk.{ID}.0"][1].closed


def test_what_another_recipe_made_is_outdated_and_it_is_said_what_differs(
    take, make, parked, recipe
):
    wanted = dataclasses.replace(
        recipe,
        fields=recipe.fields | {"revision": "v2"},
        files=(dataclasses.replace(FILES[0], mtime_ns=99),),
    )
    found = take(parked(make()), wanted)
    assert (found.generation, found.outdated.id, found.may_serve) == (None, ID, False)
    assert not found.dropped
    (reason,) = found.reasons
    assert "something else: revision: was , now v2; files: was 1 changed or gone, now 1" in reason


def test_without_files_the_settings_decide(take, make, parked, recipe):
    unseen = dataclasses.replace(recipe, files=())
    assert take(parked(make()), unseen).generation.id == ID
    other = dataclasses.replace(unseen, fields=recipe.fields | {"builder": "vllm"})
    assert take(parked(make()), other).generation is None


@pytest.mark.parametrize("wanted", [ID, OTHER])
def test_of_two_generations_the_one_that_matches_is_kept(take, make, parked, recipe, wanted):
    stale = dataclasses.replace(recipe, fields=recipe.fields | {"revision": "old"})
    both = {
        **parked(make(ID, wanted=recipe if wanted == ID else stale)),
        **parked(make(OTHER, wanted=recipe if wanted == OTHER else stale)),
    }
    found = take(both)
    assert found.generation.id == wanted
    assert len(found.dropped) == 3
    assert all(wanted not in name for name in found.dropped)


def test_of_two_that_match_one_is_kept(take, make, parked):
    found = take({**parked(make(ID)), **parked(make(OTHER))})
    assert found.generation.id in {ID, OTHER}
    assert len(found.dropped) == 3
    assert all(found.generation.id not in name for name in found.dropped)


def no_manifest(every):
    every.pop(f"manifest.{ID}")[0].close()


def a_manifest_of_noise(every):
    put(every, f"manifest.{ID}", sealed_bytes("x", b"noise"))


def an_unsealed_manifest(every):
    put(every, f"manifest.{ID}", create("x"))


def a_pipe(every):
    reader, writer = os.pipe()
    os.close(writer)
    put(every, f"manifest.{ID}", OwnedFd(reader))


def another_name(every):
    every[f"manifest.{OTHER}"] = every.pop(f"manifest.{ID}")


def no_chunk(every):
    every.pop(f"chunk.{ID}.1")[0].close()


def a_short_chunk(every):
    put(every, f"chunk.{ID}.1", filled(PAGE, 1))


def an_unsealed_chunk(every):
    fd = create("x")
    os.ftruncate(fd.fileno(), 2 * PAGE)
    put(every, f"chunk.{ID}.1", fd)


def a_device(every):
    put(every, f"chunk.{ID}.1", OwnedFd(os.open("/dev/null", os.O_RDONLY)))


def chunks_swapped(every):
    one, two = f"chunk.{ID}.0", f"chunk.{ID}.1"
    every[one], every[two] = every[two], every[one]


def put(every, name, fd):
    every[name][0].close()
    every[name] = [fd]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (no_manifest, None),
        (a_manifest_of_noise, "no manifest of this version"),
        (an_unsealed_manifest, "unsealed"),
        (a_pipe, "something else than a memfd"),
        (another_name, f"parked as manifest.{OTHER}, it says generation {ID}"),
        (no_chunk, f"chunk 1 of generation {ID} is missing"),
        (a_short_chunk, f"a chunk has {PAGE} bytes instead of {2 * PAGE}"),
        (an_unsealed_chunk, "a chunk is not sealed"),
        (a_device, "something else than a memfd"),
        (chunks_swapped, f"a chunk has {2 * PAGE} bytes instead of {PAGE}"),
    ],
)
def test_a_damaged_generation_is_dropped_whole(take, make, parked, damage, why):
    every = parked(make())
    damage(every)
    found = take(every)
    assert found.generation is None
    assert sorted(found.dropped) == sorted(every)
    assert len(found.reasons) == (why is not None)
    assert why is None or why in found.reasons[0]


def test_damage_to_one_generation_does_not_harm_another(take, make, parked):
    every = parked(make(ID))
    no_chunk(every)
    found = take(every | parked(make(OTHER)))
    assert found.generation.id == OTHER
    assert sorted(found.dropped) == [f"chunk.{ID}.0", f"manifest.{ID}"]


@pytest.mark.parametrize(
    ("change", "may_serve"),
    [
        ({}, True),
        ({"layout": "99"}, False),
        ({"model": "/models/other"}, False),
    ],
    ids=["files", "settings", "model"],
)
def test_outdated_weights_may_serve_where_only_files_have_changed(
    take, make, parked, recipe, change, may_serve
):
    model = change.pop("model", recipe.model)
    wanted = dataclasses.replace(
        recipe, fields=recipe.fields | change, model=model, files=(FileIdentity(9, 9, 9, 9, 9),)
    )
    found = take(parked(make()), wanted)
    assert (found.outdated.id, found.may_serve) == (ID, may_serve)
    assert found.reasons[0].startswith("parked weights are for something else")


def test_of_two_that_are_outdated_one_is_kept(take, make, parked, recipe):
    wanted = dataclasses.replace(recipe, fields=recipe.fields | {"revision": "v3"})
    found = take({**parked(make(ID)), **parked(make(OTHER))}, wanted)
    assert len(found.dropped) == 3
    assert all(found.outdated.id not in name for name in found.dropped)


@pytest.mark.parametrize("serves", [ID, OTHER])
def test_of_two_that_are_outdated_the_one_that_may_serve_is_kept(
    take, make, parked, recipe, serves
):
    other = dataclasses.replace(recipe, fields=recipe.fields | {"revision": "old"})
    made = [make(each, wanted=recipe if each == serves else other) for each in (ID, OTHER)]
    wanted = dataclasses.replace(recipe, files=(FileIdentity(9, 9, 9, 9, 9),))
    found = take({**parked(made[0]), **parked(made[1])}, wanted)
    assert (found.outdated.id, found.may_serve) == (serves, True)


def test_another_vllm_is_a_reason_to_load_anew(take, make, parked, settings):
    model = dataclasses.replace(settings.model, builder=Builder.VLLM, layout=Layout.PLAIN)
    old, new, unseen = (
        recipe_of(dataclasses.replace(settings, model=model, versions=Versions(vllm=v)), FILES)
        for v in ("0.32.0", "0.33.0", "")
    )
    assert take(parked(make(wanted=old)), old).generation is not None
    assert take(parked(make(wanted=old)), unseen).generation is not None
    found = take(parked(make(wanted=old)), new)
    assert found.generation is None
    (reason,) = found.reasons
    assert reason == "parked weights are for something else: vllm: was 0.32.0, now 0.33.0"
