import pytest

from preloadd.config.arguments import from_table, from_words
from preloadd.config.spread import Spread
from preloadd.config.vllm import MAX_NBYTES, SIZES, Division, divide


def of(*words: str) -> Division:
    return divide(from_words(words))


def test_what_is_vllms_stays_in_canonical_form():
    found = of("--trust-remote-code", "--dtype", "bfloat16", "--load-format=fastsafetensors")
    assert found.words == (
        "--dtype=bfloat16",
        "--load-format=fastsafetensors",
        "--trust-remote-code",
    )
    assert (found.sizes, found.wrong) == ((), ())


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["-tp", "2"], "tensor_parallel_size", 2),
        (["--tensor_parallel_size=2"], "tensor_parallel_size", 2),
        (["-pp=3"], "pipeline_parallel_size", 3),
        (["-ep"], "enable_expert_parallel", True),
        (["--no-enable-expert-parallel"], "enable_expert_parallel", False),
        (
            ["--expert-placement-strategy", "round_robin"],
            "expert_placement_strategy",
            "round_robin",
        ),
        # Whether it can be is for a judge.
        (["-tp", "two"], "tensor_parallel_size", "two"),
        (["-tp", "-1"], "tensor_parallel_size", -1),
        (["-tp", "9" * 5000], "tensor_parallel_size", "9" * 5000),
        (["-dp", "2"], "data_parallel_size", 2),
        (["-dpl=4"], "data_parallel_size_local", 4),
        (["-dpr", "8"], "data_parallel_start_rank", 8),
        (["-dpa", "10.0.0.1"], "data_parallel_address", "10.0.0.1"),
        (["-dpp", "1"], "data_parallel_rpc_port", 1),
        (["-n", "2"], "nnodes", 2),
        (["-r", "0"], "node_rank", 0),
        (["--master-addr=0"], "master_addr", "0"),
    ],
)
def test_sizes_are_the_groups(words, key, value):
    found = of(*words)
    (size,) = found.sizes
    assert (size.key, size.value, size.written) == (key, value, words[0].partition("=")[0])
    assert (found.words, found.wrong) == ((), ())


@pytest.mark.parametrize(
    "words",
    [["-pcp=1"], ["-dpb", "mp"], ["-dph"], ["--no-data-parallel-external-lb"], ["-dpm"]],
)
def test_what_is_as_it_is_or_of_requests_alone_is_left_out(words):
    assert of(*words) == Division((), (), ())


def test_all_that_spreads_a_group_is_the_groups():
    assert [*SIZES.values()] == [*Spread.model_fields]
    for name, key in SIZES.items():
        (size,) = of(f"--{name}=1").sizes
        text = key.endswith(("addr", "address", "strategy"))
        assert (size.key, size.value) == (key, "1" if text else 1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model", "x"], "see `model`"),
        (["--revision=x"], "see `revision`"),
        (["--load-format", "ipc_cache"], "for engines"),
        (["--load_format=IPC_CACHE"], "for engines"),
        (["--load-format", "nosuch"], "'nosuch' is no format that reads the safetensors files"),
        (["--load_format=dummy"], "sharded_state)"),
        (["-dpn", "2"], "write data-parallel-start-rank, and data-parallel-size-local 1"),
        (["-pcp", "2"], "not in this version"),
        (["--enable-eplb"], "EPLB moves experts"),
        (["--enable-sleep-mode"], "sleep mode"),
        (["--enable-lora"], "adapters"),
        (["--lora-modules", "a=/b"], "adapters"),
        (["--weight-transfer-config={}"], "engines share"),
        (["--hf-token", "hf_x"], "secret"),
        (["--seed_token", "plt_x"], "secret"),
        (["--config", "x.yaml"], "write them here"),
        (["--weight-transfer-config.backend", "nccl"], "engines share"),
        (["--default-mm-loras.image=/a"], "adapters"),
        # What would count as 1, or as 0.
        (["-tp"], "has no value (give it one"),
        (["-r"], "has no value"),
        (["--no-node-rank"], "cannot be switched off"),
        (["--no-speculative-config"], "cannot be switched off"),
        (["--load-format"], "has no value"),
        (["-tp.x=2"], "is no table (leave out what follows"),
        (["--spec-method.model=/d"], "is no table"),
        (["--enable-expert-parallel.x=1"], "is no table"),
        (["--x", "a", "\udcff"], "bytes that are not UTF-8"),
        (["--x.\udcff=1"], "bytes that are not UTF-8"),
        # vLLM takes the beginning of a name for the whole.
        (["--load-form", "ipc_cache"], "may be short for --load-format"),
        (["--tensor-parallel", "4"], "may be short for --tensor-parallel-size"),
        (["--speculative.method", "mtp"], "may be short for --speculative-config"),
        (["--spec", "x"], "--speculative-config or --spec-method or --spec-model or --spec-tokens"),
        (["--master"], "--master-addr or --master-port"),
        (["--enable-e"], "--enable-expert-parallel or --enable-eplb"),
        (["--no-enable-expert"], "--enable-expert-parallel"),
    ],
)
def test_what_cannot_be_is_told_by_its_name_with_the_remedy(words, told):
    found = of(*words)
    (wrong,) = found.wrong
    assert wrong.written == words[0].partition("=")[0]
    assert told in wrong.text
    assert wrong.text.endswith(")")
    assert "hf_x" not in wrong.text
    assert (found.words, found.sizes) == ((), ())


def test_a_table_cannot_say_either_that_a_size_has_no_value():
    found = divide(from_table({"tensor-parallel-size": True, "nnodes": False}))
    assert [(wrong.written, wrong.text.partition(" (")[0]) for wrong in found.wrong] == [
        ("tensor-parallel-size", "has no value"),
        ("nnodes", "cannot be switched off"),
    ]


def test_half_a_character_in_what_is_said_of_a_draft_is_told():
    found = of(r'-sc={"method": "mtp", "model": "\ud800"}')
    assert [wrong.text.partition(" (")[0] for wrong in found.wrong] == [
        "has bytes that are not UTF-8"
    ]
    assert found.words == ()


@pytest.mark.parametrize(
    "word",
    ["--no-enable-eplb", "--eplb-config={}", "--load-format=auto", "--load-format=SafeTensors"],
)
def test_what_only_resembles_that_is_passed_on(word):
    assert of(word) == Division((word,), (), ())


def test_a_draft_is_told_in_one_argument_with_what_is_said_of_it_elsewhere():
    words = ["--spec-method", "eagle", "--dtype=auto", "--spec-tokens=2"]
    found = divide(from_words(words), {"model": "/d"})
    assert found.words == (
        "--dtype=auto",
        '--speculative-config={"method": "eagle", "model": "/d", "num_speculative_tokens": 2}',
    )
    assert found.speculation is not None
    assert (found.speculation.method, found.speculation.held) == ("eagle", True)
    assert of("--dtype=auto").speculation is None


def test_every_fault_is_told():
    assert len(of("x", "--enable-eplb", "--enable-lora", "--dtype=auto").wrong) == 3


def test_arguments_fit_into_one_packet():
    assert not of("--x", "y" * (MAX_NBYTES - 4)).wrong
    (wrong,) = of("--x", "y" * (MAX_NBYTES - 3)).wrong
    assert f"at most {MAX_NBYTES:,}" in wrong.text
