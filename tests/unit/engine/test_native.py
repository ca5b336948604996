import json

import pytest

from preloadd.domain.ids import Role, device_id
from preloadd.domain.placement import Parallel, Placement
from preloadd.domain.settings import Digest
from preloadd.engine.native import NativeCheckpoint
from preloadd.errors import CheckpointError
from preloadd.weights.checkpoint import content, open_checkpoint, weights_identities_of
from tests.checkpoints import CONFIG, SHARDS, llama

CPU = device_id("CPU-0")


@pytest.fixture
def model(tmp_path):
    return llama(tmp_path / "model")


def key(folder, checkpoint="", **more):
    options = {name: more.pop(name) for name in ("revision", "dtype") if name in more}
    return NativeCheckpoint(folder, **options).wanted(CPU, client="e", **more).key(checkpoint)


def test_it_wants_what_lies_in_the_folder(model):
    wanted = NativeCheckpoint(model).wanted(CPU, client="engine")
    assert (wanted.device, wanted.role, wanted.client) == (CPU, Role.TARGET, "engine")
    assert wanted.files == weights_identities_of(model)
    found = wanted.key("sampled-1:00")
    assert found["checkpoint"] == "sampled-1:00"
    assert (found["architecture"], found["dtype"]) == ("LlamaForCausalLM", "float16")
    assert (found["tp_size"], found["role"], found["revision"]) == ("1", "target", "")


def test_no_weights_are_read_for_that(model):
    for shard in SHARDS:
        (model / shard).write_bytes(b"no shard at all")
    assert NativeCheckpoint(model).wanted(CPU, client="engine").key("")


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"role": Role.DRAFT}, "role", "draft"),
        ({"revision": "v2"}, "revision", "v2"),
        ({"dtype": "bfloat16"}, "dtype", "bfloat16"),
        ({"placement": Placement(Parallel(tensor=2), tensor_rank=1)}, "tp_rank", "1"),
    ],
)
def test_whatever_makes_other_weights_makes_another_key(model, change, field, value):
    plain, changed = key(model), key(model, **change)
    assert changed[field] == value
    assert plain[field] != value


def test_what_config_says_of_rope_is_compared_by_value(model, tmp_path):
    same = llama(tmp_path / "same", config=CONFIG | {"rope_theta": 10000})
    other = llama(tmp_path / "other", config=CONFIG | {"rope_theta": 20000.0})
    assert key(model) == key(same)
    assert key(model)["rope"] != key(other)["rope"]


def test_a_dtype_that_config_does_not_tell_is_that_of_most_bytes(tmp_path):
    silent = {name: value for name, value in CONFIG.items() if name != "torch_dtype"}
    assert key(llama(tmp_path / "silent", config=silent))["dtype"] == "float16"


def test_content_is_read_with_the_method_the_daemon_names(model, tmp_path):
    cache = tmp_path / "digests"
    wanted = NativeCheckpoint(model, digest_cache=cache).wanted(CPU, client="e")
    opened = open_checkpoint(model)
    assert wanted.digest("sampled-1") == content(opened, Digest.SAMPLED, None)
    assert not cache.exists()
    assert wanted.digest("full-1") == content(opened, Digest.FULL, None)
    assert len(list(cache.glob("*.json"))) == len(SHARDS)
    for unknown in ("sampled-2", "", "full"):
        with pytest.raises(ValueError, match="a newer daemon identifies content by"):
            wanted.digest(unknown)


def test_what_is_missing_is_named(model):
    (model / SHARDS[1]).unlink()
    with pytest.raises(CheckpointError, match=SHARDS[1]):
        NativeCheckpoint(model).wanted(CPU, client="e")
    (model / "config.json").write_text(json.dumps(CONFIG)[:30])
    with pytest.raises(CheckpointError, match=r"config\.json is no valid JSON"):
        NativeCheckpoint(model)
