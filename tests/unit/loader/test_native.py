import os
from dataclasses import replace

import pytest

from preloadd.domain.ids import Role
from preloadd.domain.placement import Parallel, Placement
from preloadd.engine.native import NativeCheckpoint
from preloadd.errors import CheckpointError, ConfigError, ReadFailed, UnsupportedModel
from preloadd.loader.native import Native
from preloadd.loader.pieces import Part
from preloadd.loader.source import opened_direct
from tests.checkpoints import CONFIG, SHARDS, llama, rewrite, stored

PAGE = 4096


def assembled(native: Native) -> dict[str, bytes]:
    """Every tensor as the pieces of all chunks put it together."""
    chunks = [bytearray(nbytes) for nbytes in native.plan.chunks]
    with native.opened() as files:
        for index, chunk in enumerate(chunks):
            for piece in native.pieces_of(index, 5000):
                data = os.pread(files[piece.file].fd, piece.span, piece.offset)
                rows, parts = piece.rows, piece.parts
                starts = [(row * rows.stride, row * rows.nbytes) for row in range(rows.count)]
                for part in parts or [Part(start, rows.nbytes, at) for start, at in starts]:
                    place = piece.target + part.place
                    chunk[place : place + part.nbytes] = data[part.start :][: part.nbytes]
    storages = native.plan.storages
    return {
        name: bytes(chunks[storages.chunk[row]][storages.offset[row] :][: storages.nbytes[row]])
        for row, name in enumerate(native.plan.tensors.name)
    }


def test_all_chunks_together_hold_every_tensor(settings, model):
    native = Native(settings, PAGE)
    assert len(native.plan.chunks) > 3
    assert assembled(native) == stored(model)


def test_the_shards_of_all_ranks_make_the_whole(settings, model):
    whole = stored(model)
    ranks = []
    for rank in range(2):
        placement = Placement(Parallel(tensor=2), tensor_rank=rank)
        divided = replace(settings, model=replace(settings.model, placement=placement))
        ranks.append(assembled(Native(divided, PAGE)))
    queries = "model.layers.1.self_attn.q_proj.weight"
    assert ranks[0][queries] + ranks[1][queries] == whole[queries]
    outputs = "model.layers.1.self_attn.o_proj.weight"
    width = 2 * CONFIG["hidden_size"] // 2
    rows = zip(*(_rows(rank[outputs], width) for rank in ranks), strict=True)
    assert b"".join(left + right for left, right in rows) == whole[outputs]
    assert ranks[0]["model.norm.weight"] == ranks[1]["model.norm.weight"]


def _rows(data: bytes, nbytes: int) -> list[bytes]:
    return [data[start : start + nbytes] for start in range(0, len(data), nbytes)]


def test_neighbours_are_read_as_one(settings):
    native = Native(settings, PAGE)
    assert len(native.plan.slices) > 30
    assert sum(len(list(native.pieces_of(n))) for n in range(len(native.plan.chunks))) < 12


def test_pieces_of_one_chunk_are_in_the_order_of_the_files(settings):
    native = Native(settings, PAGE)
    for index in range(len(native.plan.chunks)):
        places = [(piece.file, piece.offset) for piece in native.pieces_of(index)]
        assert places == sorted(places)


@pytest.mark.parametrize("instance", ["CPU-0", "CPU-0.draft"])
def test_its_key_is_that_of_an_engine_with_the_same_files(settings_of, model, instance):
    settings = settings_of(model, instance=instance, revision="v1")
    native = Native(settings, PAGE)
    engine = NativeCheckpoint(model, revision="v1")
    role = Role.DRAFT if instance.endswith("draft") else Role.TARGET
    assert native.key("sampled-1:00") == engine.wanted("CPU-0", client="e", role=role).key(
        "sampled-1:00"
    )


def test_any_replica_of_a_dense_model_is_that_of_every_engine(settings_of, model):
    replicas = [Placement(Parallel(data=2), data_rank=rank) for rank in range(2)]
    keys = []
    for placement in replicas:
        native = Native(settings_of(model, placement=placement), PAGE)
        assert assembled(native) == stored(model)
        keys.append(native.key("sampled-1:00"))
    engine = NativeCheckpoint(model)
    for placement in (*replicas, Placement(Parallel())):
        wanted = engine.wanted("CPU-0", client="e", placement=placement)
        keys.append(wanted.key("sampled-1:00"))
    assert all(key == keys[0] for key in keys)


def test_files_are_open_only_in_the_block(settings):
    native = Native(settings, PAGE)
    with native.opened() as files:
        assert [file.path.name for file in files] == list(SHARDS)
        assert all(os.fstat(file.fd).st_size for file in files)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(files[0].fd)


def test_files_are_opened_past_the_page_cache_where_that_is_asked_for(settings):
    native = Native(settings, PAGE)
    with native.opened() as files:
        assert not any(file.direct for file in files)
    with native.opened(direct=True) as files:
        with opened_direct(files[0].fd) as direct:
            possible = direct is not None
        assert {file.direct for file in files} == {possible}


def test_a_shard_that_changes_while_it_is_read_is_named_at_the_end(settings, model):
    native = Native(settings, PAGE)
    shard = model / SHARDS[1]
    with pytest.raises(ReadFailed, match=SHARDS[1]), native.opened():
        rewrite(shard, shard.read_bytes())


def test_what_cannot_be_loaded_is_said_before_anything_is_read(settings_of, model, tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        Native(settings_of(tmp_path / "none"), PAGE)
    uneven = Placement(Parallel(tensor=3), tensor_rank=0)
    with pytest.raises(ConfigError, match="attention heads"):
        Native(settings_of(model, placement=uneven), PAGE)
    with pytest.raises(ConfigError, match="chunk size"):
        Native(settings_of(model, chunk_bytes=0), PAGE)
    unknown = CONFIG | {"architectures": ["NovelForCausalLM"]}
    novel = llama(tmp_path / "novel", config=unknown)
    assert Native(settings_of(novel), PAGE)
    even = Placement(Parallel(tensor=2), tensor_rank=0)
    with pytest.raises(UnsupportedModel, match="NovelForCausalLM"):
        Native(settings_of(novel, placement=even), PAGE)
