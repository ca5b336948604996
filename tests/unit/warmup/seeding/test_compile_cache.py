import io
import json
from dataclasses import replace

import pytest

from preloadd.errors import ProtocolViolation
from preloadd.warmup.bundles.manifest import BadBundle
from preloadd.warmup.bundles.pack import pack
from preloadd.warmup.seeding import messages
from preloadd.warmup.seeding.compile_cache import CompileKind, CompileWanted
from preloadd.warmup.seeding.kinds import Kind, Unfit, Wanted
from tests.bundles import AOT, IDENTITY, PLAIN, write

HASH = "ab" * 32
_: type[Kind] = CompileKind


@pytest.fixture
def bundle(tmp_path):
    write(tmp_path)
    return pack(tmp_path, [AOT, PLAIN], IDENTITY, io.BytesIO())


@pytest.fixture
def kind(bundle):
    made = CompileKind()
    made.offer(HASH, bundle)
    return made


@pytest.fixture
def wanted():
    made: Wanted = CompileWanted(HASH, IDENTITY)
    return made


@pytest.fixture
def payload(kind):
    """A function: what the source answers, with changes."""
    whole = json.loads(kind.resolve({"config_hash": HASH}))
    return lambda **changes: whole | changes


def test_what_is_offered_arrives_over_the_wire(kind, wanted, bundle):
    sent = messages.request(wanted.kind, wanted.fields, "secret")
    asked = messages.parse_request(sent)
    assert asked.kind == kind.name == "compile_cache"
    answer = messages.parse_answer(messages.found(kind.resolve(asked.fields)))
    assert wanted.judged(answer.payload) == bundle


def test_the_bundle_itself_does_not(kind, bundle):
    assert len(kind.resolve({"config_hash": HASH})) < bundle.nbytes


def test_nothing_is_told_of_other_configurations(kind):
    assert kind.resolve({"config_hash": "cd" * 32}) is None
    assert CompileKind().resolve({"config_hash": HASH}) is None


@pytest.mark.parametrize("config_hash", [None, 5, "", "../x", "AB" * 32, HASH + "\n"])
def test_a_request_without_a_hash_is_refused(kind, config_hash):
    with pytest.raises(ProtocolViolation, match="config_hash"):
        kind.resolve({"config_hash": config_hash})


def test_what_was_compiled_for_others_is_told_with_both_values(payload):
    here = IDENTITY | {"cuda": "12.8"}
    with pytest.raises(Unfit, match=r"other engines: cuda: there '13\.0', here '12\.8'"):
        CompileWanted(HASH, here).judged(payload())


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"more": 1}, "does not tell"),
        ({"sha256": "x"}, "digest"),
        ({"sha256": 5}, "digest"),
        ({"sha256": "cd" * 32}, "name in stores"),
        ({"key": "vllm-warmup-cache/compile_cache/../bundle.tar"}, "name in stores"),
        ({"nbytes": 1}, "manifest is that of"),
        ({"nbytes": True}, "manifest is that of"),
        ({"manifest": {}}, "format 1"),
        ({"manifest": None}, "format 1"),
    ],
)
def test_what_does_not_add_up_is_unfit(payload, wanted, changes, match):
    with pytest.raises(Unfit, match=match):
        wanted.judged(payload(**changes))


@pytest.mark.parametrize("other", [None, [], "x", {}])
def test_what_is_no_such_answer_is_unfit(wanted, other):
    with pytest.raises(Unfit, match="does not tell"):
        wanted.judged(other)


def test_paths_elsewhere_are_unfit(payload, wanted):
    manifest = payload()["manifest"]
    manifest["files"][0]["path"] = "torch_compile_cache/0123456789/../../../x"
    with pytest.raises(Unfit, match="no compiler"):
        wanted.judged(payload(manifest=manifest))


def test_the_largest_manifest_fits_into_an_answer(bundle, wanted):
    """As many files as there may be, with names such as compilers give them."""
    member = bundle.manifest.members[0]
    places = [f"{PLAIN}/{'x' * 150}/{number:08}.py" for number in range(1 << 14)]
    members = tuple(replace(member, path=path) for path in places)
    manifest = replace(bundle.manifest, members=members)
    kind = CompileKind()
    kind.offer(HASH, replace(bundle, manifest=manifest, nbytes=manifest.bundle_nbytes))
    found = messages.found(kind.resolve({"config_hash": HASH}))
    assert found is not None
    try:
        judged = wanted.judged(messages.parse_answer(found).payload)
    except BadBundle as error:  # pragma: no cover
        pytest.fail(str(error))
    assert len(judged.manifest.members) == 1 << 14


def test_what_is_withdrawn_is_not_told_of_but_asked_for(kind, bundle):
    assert kind.offered(HASH) == bundle
    kind.withdraw(HASH)
    assert kind.resolve({"config_hash": HASH}) is kind.offered(HASH) is None
    assert kind.asked() == {HASH}
    kind.offer(HASH, bundle)
    assert kind.resolve({"config_hash": HASH})


def test_who_asked_is_told_once_and_only_of_what_there_was(kind):
    assert kind.asked() == set()
    for config_hash in (HASH, HASH, "cd" * 32):
        kind.resolve({"config_hash": config_hash})
    assert kind.asked() == {HASH}
    assert kind.asked() == set()
