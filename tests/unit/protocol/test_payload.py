import dataclasses
import hashlib

import msgspec
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from preloadd.domain.files import FileIdentity
from preloadd.domain.manifest import Artifact, Manifest, Storages, Tensors, check
from preloadd.domain.recipe import Recipe
from preloadd.errors import DamagedManifest
from preloadd.protocol import payload

MANIFEST = Manifest(
    generation="a" * 32,
    layout=1,
    backend="host",
    chunks=(4096, 1 << 40),
    storages=Storages(chunk=[0, 1], offset=[0, 512], nbytes=[96, 4]),
    tensors=Tensors(
        name=["model.embed", "schräg"],
        kind=[0, 2],
        dtype=[17, 17],
        shape=[(4, 6), ()],
        strides=[(1, 4), None],
        storage=[0, 1],
        skip=[0, 0],
    ),
    key={"checkpoint": "sampled:00ff", "tensor_parallel": "2"},
    recipe=Recipe({"dtype": "bfloat16"}, (FileIdentity(1, 2, 3, 4, 5),)),
    aliases={"lm_head": "model.embed"},
    attributes={"model.scale": 0.5, "model.tied": True, "model.kind": "x", "model.n": 3},
    artifacts=(Artifact("table", "gemm", b"\0\xff"),),
    counters={"bytes_read": 100},
)
ENCODED = payload.encode(MANIFEST)
BODY = len(payload.MAGIC) + payload.DIGEST_BYTES


def seal(body: bytes) -> bytes:
    """A payload around `body` whose digest is right, as only a faulty loader would make it."""
    digest = hashlib.blake2b(body, digest_size=payload.DIGEST_BYTES).digest()
    return payload.MAGIC + digest + body


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_manifest_comes_back_as_it_was(kind):
    assert payload.decode(kind(ENCODED)) == MANIFEST


@given(st.integers(0, len(ENCODED) - 1))
def test_a_manifest_cut_anywhere_is_damaged(length):
    with pytest.raises(DamagedManifest):
        payload.decode(ENCODED[:length])


@given(st.integers(0, len(ENCODED) - 1), st.binary(max_size=4), st.integers(0, 4))
def test_a_changed_manifest_is_damaged_or_the_same(position, new, dropped):
    changed = ENCODED[:position] + new + ENCODED[position + dropped :]
    if changed == ENCODED:
        assert payload.decode(changed) == MANIFEST
    else:
        with pytest.raises(DamagedManifest, match=r"digest|no manifest"):
            payload.decode(changed)


@given(st.integers(BODY, len(ENCODED) - 1), st.binary(max_size=4), st.integers(0, 4))
def test_a_manifest_changed_under_its_digest_is_damaged_or_sound(position, new, dropped):
    """Nothing but DamagedManifest comes out, and what is accepted has passed every check."""
    try:
        decoded = payload.decode(seal(ENCODED[BODY:position] + new + ENCODED[position + dropped :]))
    except DamagedManifest:
        event("damaged")
        return
    event("sound")
    check(decoded)


@given(st.binary(max_size=200))
def test_anything_under_a_right_digest_is_damaged(body):
    with pytest.raises(DamagedManifest):
        payload.decode(seal(body))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "0 bytes that are no manifest"),
        (b"preloadd manifest 2\n" + ENCODED[len(payload.MAGIC) :], "no manifest of this version"),
        (ENCODED + b"\0", "digest"),
        (seal(ENCODED[BODY:] + b"\0"), "trailing"),
        (seal(msgspec.msgpack.encode({"generation": 1})), r"\$\.generation"),
        (seal(b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"), "recursion"),
        (seal(b"\x81\xa6chunks\xdd\xff\xff\xff\xff"), "truncated"),
    ],
    ids=["empty", "version", "longer", "trailing", "type", "nested", "announced"],
)
def test_the_error_says_what_is_wrong(data, text):
    with pytest.raises(DamagedManifest, match=text):
        payload.decode(data)


@pytest.mark.slow
def test_a_payload_nobody_makes_is_not_looked_at():
    data = bytearray(payload.MAX_NBYTES + 1)
    data[: len(payload.MAGIC)] = payload.MAGIC
    with pytest.raises(DamagedManifest, match=f"{len(data)} bytes that are no manifest"):
        payload.decode(data)


def test_equal_manifests_have_equal_bytes():
    assert payload.encode(payload.decode(ENCODED)) == ENCODED


def test_columns_are_checked_on_the_way_in():
    lying = dataclasses.replace(MANIFEST, chunks=(4096, 512))
    with pytest.raises(DamagedManifest, match="storage 1 at 512"):
        payload.decode(payload.encode(lying))
