from pathlib import Path

import msgspec
import pytest

from preloadd.config.run import Chosen, RunOptions, flag, parse_run, rank_settings
from preloadd.domain.ids import DeviceId
from preloadd.domain.placement import ExpertPlacement
from preloadd.domain.settings import Digest, Memory, RankSettings, Reader
from preloadd.errors import ConfigError
from preloadd.launcher.devices import on_host

A, B = "GPU-" + "a" * 8, "GPU-" + "b" * 8


def settings(chosen: Chosen | None = None, **given: object) -> tuple[RankSettings, ...]:
    options = parse_run({"model": "org/tiny", **given})
    return rank_settings(
        options,
        chosen or on_host(options.parallel.world),
        model=Path("/cache/snapshots/abc"),
        socket_dir=Path("/run/x"),
        derived=True,
    )


def faults(**given: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_run(given)
    return str(caught.value).splitlines()


def test_model_alone_is_enough():
    options = parse_run({"model": "org/tiny"})
    assert options.memory == "auto"
    assert options.gpus == ()
    assert options.reader is Reader.PREAD
    assert options.digest is Digest.SAMPLED
    assert options.chunk_bytes is None
    assert options.weight_cache_health_port is None
    assert options.parallel.world == 1


def test_every_fault_is_told_at_once_and_by_its_flag():
    told = faults(
        model=" ",
        tensor_parallel_size="0",
        chunk_bytes="1KiB",
        digest="md5",
        weight_cache_health_port="70000",
        access_group=("vllm", ""),
        colour="red",
    )
    assert [line.partition(":")[0] for line in told] == [
        "--model",
        "--digest",
        "--chunk-bytes",
        "--tensor-parallel-size",
        "--weight-cache-health-port",
        "--access-group",
        "--colour",
    ]
    assert "'md5'" in told[1]
    assert "no such option" in told[-1]


def test_missing_model_is_a_fault():
    assert faults() == ["--model: must be given"]


def test_too_many_ranks_names_both_flags():
    (told,) = faults(model="m", tensor_parallel_size="64", pipeline_parallel_size="64")
    assert "--tensor-parallel-size" in told
    assert "--pipeline-parallel-size" in told
    assert "4096" in told


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        ("1GiB", 1 << 30),
        ("64MiB", 64 << 20),
        ("65536", 65536),
        ("1GB", 1_000_000_000 // 4096 * 4096),
    ],
)
def test_chunk_sizes_are_read_with_units_and_rounded_down_to_pages(written, nbytes):
    assert parse_run({"model": "m", "chunk_bytes": written}).chunk_bytes == nbytes


def test_chunks_are_as_large_as_the_memory_has_them_by_default():
    gpus = Chosen(Memory.CUDA, (DeviceId(A),), "")
    assert settings()[0].model.chunk_bytes == 1 << 30
    assert settings(gpus)[0].model.chunk_bytes == 4 << 30
    assert settings(gpus, chunk_bytes="64MiB")[0].model.chunk_bytes == 64 << 20


def test_ranks_are_on_the_devices_that_were_chosen_in_their_order():
    gpus = Chosen(Memory.CUDA, (DeviceId(B), DeviceId(A)), "")
    ranks = settings(gpus, tensor_parallel_size="2", reader="instanttensor")
    assert [(rank.instance, rank.peers) for rank in ranks] == [(B, (A,)), (A, (B,))]
    assert {rank.model.memory for rank in ranks} == {Memory.CUDA}
    assert {rank.model.reader for rank in ranks} == {Reader.INSTANTTENSOR}
    assert [rank.model.placement.tensor_rank for rank in ranks] == [0, 1]


def test_gpus_are_listed_with_commas():
    assert parse_run({"model": "m", "gpus": f"{A}, {B}"}).gpus == (A, B)
    assert parse_run({"model": "m", "gpus": "all"}).gpus == ("all",)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"memory": "host", "gpus": "all"}, "--memory host and --gpus contradict each other"),
        ({"memory": "host", "reader": "instanttensor"}, "leave out --reader"),
        ({"memory": "hip", "reader": "instanttensor"}, "leave out --reader"),
        ({"gpus": "GPU-1,,GPU-2"}, "--gpus: "),
        ({"reader": "mmap"}, "--reader: "),
        ({"memory": "gpu"}, "--memory: "),
    ],
)
def test_contradictions_and_faults_of_devices(given, told):
    (fault,) = faults(model="m", **given)
    assert told in fault


def test_socket_dir_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = parse_run({"model": "m", "weight_cache_socket_dir": "sockets"})
    assert options.weight_cache_socket_dir == tmp_path / "sockets"


def test_options_are_frozen():
    options = parse_run({"model": "m"})
    with pytest.raises(ValueError, match="frozen"):
        options.model = "other"


def test_one_rank_for_each_place_in_order():
    ranks = settings(tensor_parallel_size="2", pipeline_parallel_size="2")
    assert [rank.instance for rank in ranks] == ["CPU-0", "CPU-1", "CPU-2", "CPU-3"]
    places = [rank.model.placement for rank in ranks]
    assert [(place.pipeline_rank, place.tensor_rank) for place in places] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


def test_settings_carry_what_was_asked():
    (rank,) = settings(
        revision="main",
        enable_expert_parallel=True,
        expert_placement_strategy="round_robin",
        access_user=("42",),
        access_group=("vllm",),
        digest="full",
        log_level="debug",
    )
    assert rank.group == "tiny"
    assert rank.model.path == "/cache/snapshots/abc"
    assert rank.model.name == "org/tiny"
    assert rank.model.revision == "main"
    assert rank.model.digest is Digest.FULL
    assert rank.model.placement.parallel.expert
    assert rank.model.placement.parallel.expert_placement is ExpertPlacement.ROUND_ROBIN
    assert rank.access.users == ("42",)
    assert rank.access.groups == ("vllm",)
    assert rank.log_level == "debug"
    assert rank.derived


@pytest.mark.parametrize(
    ("written", "group"),
    [("/srv/llama/", "llama"), ("org/tiny", "tiny"), (".", "abc"), ("..", "abc"), ("/", "abc")],
)
def test_group_is_called_like_the_model(written, group):
    assert settings(model=written)[0].group == group


def test_settings_survive_the_way_to_the_rank():
    (rank,) = settings(access_group=("vllm",))
    assert msgspec.json.decode(msgspec.json.encode(rank), type=RankSettings) == rank


def test_flags_are_the_field_names():
    assert flag("tensor_parallel_size") == "--tensor-parallel-size"
    assert "access_user" in RunOptions.model_fields


def test_folder_below_one_that_is_gone_is_a_fault_of_its_flag(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for written in ("sockets", "~no-such-user/sockets"):
        with pytest.raises(
            ConfigError, match=r"--weight-cache-socket-dir: .*absolute path"
        ) as told:
            parse_run({"model": "m", "weight_cache_socket_dir": written})
        assert f"(given: {written!r})" in str(told.value)
