from fractions import Fraction
from pathlib import Path

import msgspec
import pytest

from preloadd.config.run import Chosen, RunOptions, parse_run, rank_settings
from preloadd.domain.ids import DeviceId
from preloadd.domain.launch import flag
from preloadd.domain.placement import ExpertPlacement
from preloadd.domain.settings import (
    Deadlines,
    Digest,
    Layout,
    Memory,
    RankSettings,
    Reader,
    Rendezvous,
    Source,
)
from preloadd.errors import ConfigError
from preloadd.launcher.devices import on_host
from tests.refused_placements import REFUSALS

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


TWO_NODES = {
    "nnodes": "2",
    "master_addr": "10.0.0.1",
    "weight_cache_master_port": "29600",
}


def faults(*engine: str, **given: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_run(given, engine)
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
        "--tensor-parallel-size",
        "--model",
        "--digest",
        "--chunk-bytes",
        "--weight-cache-health-port",
        "--access-group",
        "--colour",
    ]
    assert "'md5'" in told[2]
    assert "no such option" in told[-1]


def test_a_path_that_no_file_could_name_is_a_fault_of_its_flag():
    for key in ("seed_token_file", "seed_tls_cert", "seed_tls_ca", "weight_cache_socket_dir"):
        (told,) = faults(model="m", **{key: "/a\nb"})
        name = key.replace("_", "-")
        assert told.startswith(f"--{name}: has characters that cannot be printed: give another")


@pytest.mark.parametrize(
    "key",
    [
        *("seed_token_file", "seed_tls_cert", "seed_tls_key", "seed_tls_ca"),
        "weight_cache_socket_dir",
    ],
)
def test_an_empty_path_is_not_this_folder_but_a_fault_of_its_flag(key):
    (told,) = faults(model="m", **{key: ""})
    name = key.replace("_", "-")
    assert told == (
        f"--{name}: must not be empty: write what is meant, or leave the option out (given: '')"
    )


def test_a_number_of_nobody_is_a_fault_of_its_flag():
    for key, kind in (("access_group", "group"), ("access_user", "user")):
        (told,) = faults(model="m", **{key: ("0", "4294967295")})
        assert told == (
            f"--{key.replace('_', '-')}: is no number of a {kind}: 0 to 4294967294 (write one of "
            "these, or a name) (given: '4294967295')"
        )


def test_what_is_told_of_long_values_is_short():
    for given in ({"model": "x" * 5000}, {"tensor_parallel_size": ["9x" * 5000]}):
        (told,) = faults(**{"model": "m"} | given)
        assert len(told) < 400, told
    (told,) = faults(model=["x" * 5000, "y" * 5000])
    assert len(told) < 600, told
    (told,) = faults("--x." + "a." * 990 + "a", "1", model="m", builder="vllm")
    assert len(told) < 400, told
    assert told.endswith("…: is nested more than 16 deep (flatten it)")


@pytest.mark.parametrize("key", ["model", "revision", "access_group"])
def test_what_ranks_could_not_be_told_is_a_fault_of_its_flag(key):
    value = ("\udcff",) if key == "access_group" else "\udcff"
    (told,) = faults(**({"model": "m"} | {key: value}))
    assert told.startswith(f"--{key.replace('_', '-')}: has bytes that are not UTF-8: write it")


def test_what_is_given_empty_is_a_fault_of_its_flag():
    assert faults(model=" ", gpus="") == [
        "--model: must not be empty: write what is meant (given: ' ')",
        "--gpus: must not be empty: write what is meant, or leave the option out (given: '')",
    ]


def test_sizes_need_a_value_and_what_is_no_text_does_not_travel():
    told = faults("--node-rank", "--no-nnodes", "--x", "\udcff", model="m", builder="vllm")
    assert told == [
        "--node-rank: has no value (give it one, or leave it out)",
        "--no-nnodes: cannot be switched off (leave it out)",
        "--x: has bytes that are not UTF-8 (write it anew, or rename what it names)",
    ]


def test_missing_model_is_a_fault():
    assert faults() == ["--model: must be given"]


def test_too_many_ranks_are_told_with_the_sizes():
    (told,) = faults(model="m", tensor_parallel_size="64", pipeline_parallel_size="64")
    sizes = "data 1 x pipeline 64 x tensor 64 = 4096 ranks"
    most = "but a group has at most 1024: give smaller sizes"
    assert told == f"--tensor-parallel-size: makes {sizes}, {most}"
    (told,) = faults(model="m", tensor_parallel_size="32", data_parallel_size="4")
    assert told == (
        "--nnodes: is not given, so this node has 128 ranks (0 to 127 of data 4 x pipeline 1 x "
        "tensor 32 = 128 ranks), but one has at most 64: use more nodes"
    )


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_what_a_node_cannot_be_told_is_told_by_its_flag(refusal):
    mine = {"builder": "vllm", "model": "m"}
    words = refusal.flags.split()
    if "--weight-cache-health-port" in words:
        at = words.index("--weight-cache-health-port")
        mine["weight_cache_health_port"] = words[at + 1]
        del words[at : at + 2]
    draft = ["--spec-method=mtp", "--spec-tokens=1"] if refusal.drafts else []
    told = [line for line in refusal.text.splitlines() if not line.startswith("--gpus")]
    assert faults(*words, *draft, **mine) == told


def test_faults_of_nodes_are_told_beside_others():
    told = faults("-n", "2", digest="x", builder="vllm")
    assert [line.partition(":")[0] for line in told] == [
        *("--model", "--digest"),
        *("--node-rank", "--nnodes", "--master-addr", "--weight-cache-master-port"),
    ]


def test_drafts_that_could_not_meet_are_refused():
    draft = ["--spec-method=mtp", "--spec-tokens=1"]
    apart = {"pipeline_parallel_size": "2", "tensor_parallel_size": "4", **TWO_NODES, "nnodes": "4"}
    (told,) = faults(*draft, model="m", builder="vllm", node_rank="1", **apart)
    assert told == (
        "--pipeline-parallel-size: is 2, so ranks 4 and up have the last layers and drafts beside "
        "them, on several nodes, but not on the first, with ranks 0 to 1, where drafts meet: leave "
        "the draft out, or let the first node hold a whole replica"
    )
    options = parse_run({"model": "m", "builder": "vllm", "node_rank": "1", **apart})
    assert options.ranks == range(2, 4)


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
        warmup_cache_stores="file:/srv/cache,mooncake",
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
    assert rank.warmup.stores == ("file:/srv/cache", "mooncake")
    assert rank.warmup.autotune
    assert rank.derived


def test_tuning_can_be_switched_off():
    (rank,) = settings(disable_flashinfer_autotune=True)
    assert not rank.warmup.autotune


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


def test_what_vllm_is_told_is_canonical_and_sizes_are_the_groups():
    engine = ["-tp", "2", "--max_model_len", "4096", "-ep", "--load-format=auto"]
    options = parse_run({"model": "m", "builder": "vllm", "memory": "host"}, engine)
    assert options.engine_args == ("--load-format=auto", "--max-model-len=4096")
    assert (options.parallel.tensor, options.parallel.expert) == (2, True)
    ranks = rank_settings(
        options, on_host(2), model=Path("/m"), socket_dir=Path("/run/x"), derived=True
    )
    assert {rank.model.engine_args for rank in ranks} == {options.engine_args}
    assert {rank.model.layout for rank in ranks} == {Layout.PLAIN}


def test_layout_is_that_of_the_memory_that_was_chosen():
    gpus = Chosen(Memory.CUDA, (DeviceId(A),), "")
    assert settings(gpus, builder="vllm")[0].model.layout is Layout.PROCESSED
    assert settings(builder="vllm", layout="raw")[0].model.layout is Layout.RAW
    assert settings(gpus)[0].model.layout is Layout.AUTO
    with pytest.raises(ConfigError, match="--layout: 'raw' is no layout in cuda memory"):
        settings(gpus, builder="vllm", layout="raw")


def test_what_is_said_twice_counts_if_it_is_the_same():
    given = {"model": ["m", "m"], "builder": "vllm", "tensor_parallel_size": ["2", "2"]}
    assert parse_run(given, ["-tp=2"]).parallel.tensor == 2
    assert parse_run({**given, "enable_expert_parallel": True}, ["-ep"]).parallel.expert


@pytest.mark.parametrize(
    ("engine", "given", "told"),
    [
        (["-tp", "2"], {"tensor_parallel_size": ["4"]}, "--tensor-parallel-size: is given with"),
        ([], {"pipeline_parallel_size": ["4", "2"]}, "different values, 4 and 2: keep one"),
        (["--no-enable-expert-parallel"], {"enable_expert_parallel": True}, "True and False"),
        ([], {"model": ["", "n"]}, "--model: is given with different values, '' and n: keep one"),
        ([], {"model": ["m", "n"]}, "--model: is given with different values, m and n"),
        ([], {"model": ["m", "\udcff"]}, r"different values, m and \udcff: keep one"),
        (["-tp", "\udcff"], {"tensor_parallel_size": ["2"]}, r"values, 2 and \udcff: keep one"),
        ([], {"master_addr": ["a", "\udcff"]}, r"different values, a and \udcff: keep one"),
        (["-tp", "x"], {}, "--tensor-parallel-size: "),
        (["--model", "x"], {}, "--model: names the model"),
        (["--enable-eplb"], {}, "--enable-eplb: EPLB"),
        (["--load-format", "ipc_cache"], {}, "--load-format: 'ipc_cache' is for engines"),
        (["--dtype=auto"], {"builder": "native"}, "--dtype=auto: add --builder vllm"),
        ([], {"builder": "native", "layout": "raw"}, "--layout: 'raw' is a layout of vLLM's"),
        ([], {"memory": "host", "layout": "processed"}, "--layout: 'processed' is no layout in"),
        ([], {"reader": "instanttensor"}, "choose with --load-format"),
        ([], {"layout": "flat"}, "--layout: "),
        (["--x", "y" * 20_000], {}, "--engine-args: have 20,"),
    ],
)
def test_faults_of_what_vllm_builds(engine, given, told):
    (fault,) = faults(*engine, **{"model": "m", "builder": "vllm", **given})
    assert told in fault
    assert "(given: (" not in fault


def test_faults_of_engine_and_options_are_told_at_once():
    assert len(faults("--enable-eplb", "--enable-lora", builder="vllm", digest="x")) == 4


def test_ranks_are_those_of_this_node():
    second = settings(on_host(2), tensor_parallel_size="4", node_rank="1", **TWO_NODES)
    assert [rank.instance for rank in second] == ["CPU-0", "CPU-1"]
    assert [rank.model.placement.tensor_rank for rank in second] == [2, 3]
    assert [rank.peers for rank in second] == [("CPU-1",), ("CPU-0",)]
    assert second[1].rendezvous == Rendezvous(
        address="10.0.0.1", port=29600, rank=3, world=4, node=1, nodes=2
    )


def test_deadlines_of_meetings_can_be_given_and_are_the_usual_ones_otherwise():
    assert {rank.deadlines for rank in settings(tensor_parallel_size="2")} == {Deadlines()}
    (rank,) = settings(rendezvous_timeout="90.5", peer_silence_timeout="3")
    assert rank.deadlines == Deadlines(rendezvous=90.5, peer_silence=3.0)
    told = faults(model="m", rendezvous_timeout="0", peer_silence_timeout="inf")
    assert [line.partition(":")[0] for line in told] == [
        "--rendezvous-timeout",
        "--peer-silence-timeout",
    ]


def test_replicas_that_are_here_begin_where_it_is_said():
    local = {"data_parallel_size_local": "2", "data_parallel_start_rank": "6"}
    meeting = {"data_parallel_address": "[fd00::1]", "weight_cache_master_port": "29600"}
    ranks = settings(
        on_host(4), tensor_parallel_size="2", data_parallel_size="8", **local, **meeting
    )
    places = [(rank.model.placement.data_rank, rank.model.placement.tensor_rank) for rank in ranks]
    assert places == [(6, 0), (6, 1), (7, 0), (7, 1)]
    assert [rank.rendezvous.rank for rank in ranks] == [12, 13, 14, 15]
    assert {rank.rendezvous.address for rank in ranks} == {"fd00::1"}


def test_nobody_has_to_meet_on_one_node():
    assert {rank.rendezvous for rank in settings(tensor_parallel_size="2")} == {None}
    port = {"weight_cache_master_port": "29600"}
    assert {rank.rendezvous for rank in settings(data_parallel_size="2", **port)} == {None}


def test_too_few_devices_are_told_with_the_ranks():
    options = parse_run({"model": "m", "tensor_parallel_size": "8", "node_rank": "1", **TWO_NODES})
    with pytest.raises(ConfigError, match=r"--gpus: 3 are too few for the 4 ranks of this node"):
        options.instances(on_host(3))


@pytest.mark.parametrize(
    ("given", "share"),
    [
        ({}, 1),
        ({"tensor_parallel_size": "4"}, 1),
        ({"data_parallel_size": "3"}, 3),
        ({"data_parallel_size": "4", "enable_expert_parallel": True}, 1),
        ({"tensor_parallel_size": "4", "node_rank": "1", **TWO_NODES}, Fraction(1, 2)),
    ],
)
def test_how_much_of_the_model_is_here(given, share):
    assert parse_run({"model": "m", **given}).share == share


@pytest.mark.parametrize("short", ["-ep", "--no-enable-expert-parallel"])
def test_a_switch_that_nobody_threw_says_nothing(short):
    given = {"model": "m", "builder": "vllm", "enable_expert_parallel": False}
    assert parse_run(given, [short]).parallel.expert is (short == "-ep")


EAGLE = "--speculative-config.method=eagle", "--spec-model=org/d", "--spec-tokens=2"


def drafted(*engine: str, **given: object) -> tuple[RankSettings, ...]:
    options = parse_run({"model": "org/tiny", "builder": "vllm", "memory": "host", **given}, engine)
    return rank_settings(
        options,
        on_host(len(options.ranks)),
        model=Path("/cache/tiny"),
        draft=Path("/cache/d") if options.drafted and options.drafted.model else None,
        socket_dir=Path("/run/x"),
        derived=True,
    )


def test_drafts_meet_apart_from_their_targets():
    ranks = drafted(*EAGLE, tensor_parallel_size="4", node_rank="1", **TWO_NODES)
    assert [(r.instance, r.rendezvous.port, r.rendezvous.rank) for r in ranks] == [
        *(("CPU-0", 29600, 2), ("CPU-1", 29600, 3)),
        *(("CPU-0.draft", 29601, 2), ("CPU-1.draft", 29601, 3)),
    ]
    assert {r.rendezvous.world for r in ranks} == {4}


def test_drafts_are_numbered_among_themselves_and_meet_only_if_some_are_elsewhere():
    stages = {"pipeline_parallel_size": "2", "tensor_parallel_size": "2", **TWO_NODES}
    first = drafted(*EAGLE, node_rank="0", **stages)
    assert [rank.instance for rank in first] == ["CPU-0", "CPU-1"]
    second = drafted(*EAGLE, node_rank="1", **stages)
    assert [rank.rendezvous is None for rank in second] == [False, False, True, True]
    replicas = drafted(*EAGLE, node_rank="1", data_parallel_size="2", **stages)
    met = [rank.rendezvous for rank in replicas if rank.instance.endswith(".draft")]
    assert [(each.rank, each.world) for each in met] == [(2, 4), (3, 4)]


@pytest.mark.parametrize(
    ("sizes", "daemons"),
    [
        ({"tensor_parallel_size": "3"}, 6),
        ({"pipeline_parallel_size": "3"}, 4),
        ({"pipeline_parallel_size": "2", "node_rank": "0", **TWO_NODES}, 1),
        ({"pipeline_parallel_size": "2", "node_rank": "1", **TWO_NODES}, 2),
    ],
)
def test_daemons_are_counted_before_devices_are_known(sizes, daemons):
    options = parse_run({"model": "org/tiny", "builder": "vllm", **sizes}, EAGLE)
    assert options.daemons == daemons == len(options.instances(on_host(len(options.ranks))))
    alone = parse_run({"model": "org/tiny", **sizes})
    assert alone.daemons == len(alone.ranks)


def test_a_draft_has_a_rank_beside_every_one_of_the_target():
    ranks = drafted(*EAGLE, tensor_parallel_size="2")
    assert [rank.instance for rank in ranks] == ["CPU-0", "CPU-1", "CPU-0.draft", "CPU-1.draft"]
    assert [rank.model.placement.tensor_rank for rank in ranks] == [0, 1, 0, 1]
    assert {rank.group for rank in ranks} == {"tiny"}
    target, draft = ranks[1], ranks[3]
    assert (target.peers, draft.peers) == (("CPU-0",), ("CPU-0.draft",))
    assert (draft.model.path, draft.model.name) == ("/cache/d", "org/d")
    assert (target.model.partner, draft.model.partner) == (
        Source("/cache/d", "org/d"),
        Source("/cache/tiny", "org/tiny"),
    )


def test_a_draft_in_the_targets_checkpoint_is_loaded_from_there():
    target, draft = drafted("--spec-method=mtp", "--spec-tokens=1", revision="r")
    assert draft.model.partner == target.model.partner == Source("/cache/tiny", "org/tiny", "r")
    assert (draft.model.path, draft.model.revision) == ("/cache/tiny", "r")


@pytest.mark.parametrize(
    ("engine", "given"),
    [(EAGLE, {"no_draft": "true"}), (("--spec-method=ngram", "--spec-tokens=2"), {}), ((), {})],
)
def test_a_target_without_a_held_draft_is_alone(engine, given):
    (only,) = drafted(*engine, **given)
    assert (only.instance, only.model.partner, only.peers) == ("CPU-0", None, ())
