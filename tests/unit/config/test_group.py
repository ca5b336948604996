"""Every fault that a group's file can have, by table."""

import re
from pathlib import Path

import pytest

from preloadd.config.arguments import from_words
from preloadd.config.engine import members_of
from preloadd.config.files import Document, Fault, parse
from preloadd.config.group import Group, claims, is_full, judge
from preloadd.config.ports import Claim, ports_of
from preloadd.domain.nodes import launch_faults
from preloadd.domain.placement import ExpertPlacement
from preloadd.domain.settings import CHUNK_BYTES, Layout, Memory, Tls
from tests.placements import ROWS, launch_of
from tests.refused_placements import REFUSALS

UUID = "GPU-53b1d48b-de77-970d-5f91-576155feee6c"
MIG = UUID.replace("GPU", "MIG")
AMD = "GPU-53b1d48bde77970d"
PATH = Path("/etc/preloadd/groups.d/llama.toml")


def document(text: str) -> Document:
    table = parse(text.encode(), "x")
    assert not isinstance(table, Fault), table
    return Document(PATH, table)


def group(text: str) -> Group:
    found, faults = judge(document(text))
    assert not faults
    assert found
    return found


def faults(text: str) -> list[str]:
    found, told = judge(document(text))
    assert found is None
    assert {fault.origin for fault in told} == {str(PATH)}
    return [f"{fault.key}: {fault.text}" for fault in told]


GOOD = 'model = "/srv/m"\ngpus = ["CPU-0"]\n'


def test_model_and_devices_are_enough():
    found = group(GOOD)
    assert found.name == "llama"
    assert found.parallel.parallel.world == 1
    assert (found.chunk_bytes, found.largest_chunk) == (0, 1 << 30)
    assert found.backend is Memory.HOST
    assert [str(instance) for instance in found.instances] == ["CPU-0"]


def test_everything_that_can_be_said():
    found = group(
        """
        name = "other"
        model = "org/name"
        revision = "main"
        gpus = ["CPU-3", "CPU-1", "CPU-2", "CPU-0"]
        memory = "host"
        reader = "pread"
        python = "/opt/x/bin/python"
        digest = "full"
        chunk_bytes = "64MiB"
        engine_args = {}
        [parallel]
        tensor_parallel_size = 2
        pipeline_parallel_size = 2
        enable_expert_parallel = true
        expert_placement_strategy = "round_robin"
        [access]
        groups = ["vllm"]
        users = ["42"]
        [restart]
        interval_s = 60
        burst = 4
        pause_s = 0
        [warmup]
        flashinfer_autotune = false
        stores = []
        [seed]
        listen_host = "0.0.0.0"
        listen_port = 29700
        source_host = "[fd00::7]"
        source_port = 29800
        token_file = "/etc/preloadd/seed.token"
        tls_cert = "/c"
        tls_key = "/k"
        tls_ca = "/a"
        weights = false
        within_s = 5
        """
    )
    assert found.name == "other"
    assert found.parallel.parallel.expert_placement is ExpertPlacement.ROUND_ROBIN
    assert found.allowed.groups == ("vllm",)
    assert found.chunk_bytes == 64 << 20
    assert [str(instance) for instance in found.instances] == ["CPU-3", "CPU-1", "CPU-2", "CPU-0"]
    assert found.restart.interval_s == 60
    assert found.seed.tls == Tls("/c", "/k", "/a")
    assert [*ports_of(found)] == [
        Claim("seed.listen_port", "0.0.0.0", port, here=True) for port in range(29700, 29704)
    ]


@pytest.mark.parametrize(
    ("more", "key", "told"),
    [
        ("modelz = 1", "modelz", "did you mean 'model'?"),
        ("tensor_parallel_size = 2", "tensor_parallel_size", "belongs under [parallel]"),
        ("tensor_parallel_sizes = 2", "tensor_parallel_sizes", "'parallel.tensor_parallel_size'"),
        ("qqqq = 2", "qqqq", "known here: name, model"),
        ('[parallel]\ndigest = "full"', "parallel.digest", "before the first [table]"),
        ("[parallelx]\nnnodes = 1", "parallelx", "did you mean 'parallel'?"),
        ("[parallel]\nnodes = 2", "parallel.nodes", "did you mean 'nnodes'?"),
        ('"a\\nb" = 1', '"a\\nb"', "no such key"),
        ('builder = "vlm"', "builder", "must be 'native' or 'vllm' (given: 'vlm')"),
        ('memory = "cuda"', "memory", 'but gpus lists CPU-0 (write "host"'),
        ('memory = "hip"', "memory", "or leave the key out)"),
        ('memory = "gpu"', "memory", "must be 'auto', 'host', 'cuda' or 'hip'"),
        ('reader = "mmap"', "reader", "must be 'pread' or 'instanttensor'"),
        ('reader = "instanttensor"', "reader", "CUDA devices only (leave the key out)"),
        ('engine_args = { dtype = "bfloat16" }', "engine_args", 'write builder = "vllm"'),
        ("engine_args = 3", "engine_args", "must be a table"),
        ('layout = "raw"', "layout", "choose the builder 'vllm')"),
        ('layout = "flat"', "layout", "must be 'auto', 'processed', 'plain' or 'raw'"),
        ("layout = []", "layout", "must be 'auto'"),
        ("memory = []", "memory", "must be 'auto'"),
        ("[parallel]\nnnodes = '2'", "parallel.nnodes", "must be a whole number"),
        ("[parallel]\nmaster_addr = 1", "parallel.master_addr", "must be text in quotes"),
        ("[parallel]\nmaster_port = 0", "parallel.master_port", "must be at least 1"),
        ('[draft]\nmodel = "/d"', "draft", 'write builder = "vllm", or leave the table out)'),
        ("[draft]\nenabled = 1", "draft.enabled", "true or false"),
        ("[warmup]\nflashinfer_autotune = 1", "warmup.flashinfer_autotune", "true or false"),
        ("[warmup]\nstores = 'mooncake'", "warmup.stores", "must be a list"),
        ("[warmup]\ntrust_bundles = 1", "warmup.trust_bundles", "true or false"),
        ("[seed]\nenabled = true", "seed.enabled", "no such key"),
        ("seed = 1", "seed", "must be a table"),
        ("[seed]\nlisten_port = '1'", "seed.listen_port", "must be a whole number"),
        ('[seed]\nlisten_host = "0.0.0.0"', "seed.listen_port", "with the host (the first port of"),
        ("[seed]\nlisten_port = 1", "seed.listen_host", "must be given with the port (this host's"),
        ('[seed]\nsource_host = "n"', "seed.source_port", "must be given with the host"),
        ("[seed]\nsource_port = 1", "seed.source_host", "with the port (the source, as"),
        ('[seed]\ntoken_file = "x"', "seed.token_file", "no absolute path"),
        ('[seed]\ntoken_file = "/x"', "seed.token_file", "no host to listen on or ask (give one"),
        ("[seed]\nweights = true", "seed.weights", "nobody to give weights to, or to fetch"),
        ("[seed]\nwithin_s = 0", "seed.within_s", "more than 0"),
        (
            '[seed]\nsource_host = "n"\nsource_port = 9\nlisten_host = "n"\nlisten_port = 9',
            "seed.source_host",
            "this group itself is asked (give the source, as this host",
        ),
        (
            "[warmup]\ntrust_bundles = true",
            "warmup.trust_bundles",
            "is for what vLLM compiles, and the builder is native, whose weights are not for it",
        ),
        (
            '[seed]\nsource_host = "n"\nsource_port = 1\ntls_key = "/k"',
            "seed.tls_key",
            "is the key of no certificate (give that",
        ),
        (
            '[seed]\nlisten_host = "n"\nlisten_port = 65536',
            "seed.listen_port",
            "65536 is past the last port, 65535 (give a lower one)",
        ),
        (
            '[seed]\nsource_host = "n"\nsource_port = 0',
            "seed.source_port",
            "is 0 (give 1 to 65535)",
        ),
        ('name = "-x"', "name", "cannot be part of a unit's name"),
        ('name = "a@b"', "name", "cannot be part of a unit's name"),
        ("name = 3", "name", "must be text in quotes (given: 3)"),
        ('python = "python3"', "python", "no absolute path"),
        ('chunk_bytes = "1KiB"', "chunk_bytes", "must be at least 65536"),
        ('chunk_bytes = "much"', "chunk_bytes", "must be a number of bytes"),
        ("chunk_bytes = true", "chunk_bytes", "must be a number of bytes"),
        ('digest = "md5"', "digest", "must be 'sampled' or 'full'"),
        ("revision = 1", "revision", "must be text in quotes"),
        ("parallel = 1", "parallel", "must be a table"),
        ("[access]\ngroups = 1", "access.groups", "must be a list"),
        ("[access]\nusers = [1]", "access.users[0]", "must be text in quotes"),
        (f'[access]\ngroups = ["{2**32 - 1}"]', "access.groups[0]", "is no number of a group: 0"),
        ('[access]\nusers = ["99999999999999999999"]', "access.users[0]", "no number of a user: 0"),
        ('[access]\nusers = [" "]', "access.users[0]", "must be text on one line"),
        ("[restart]\nburst = 0", "restart.burst", "must be at least 1"),
        ("[restart]\nburst = 1.5", "restart.burst", "must be a whole number"),
        ("[restart]\ninterval_s = 0", "restart.interval_s", "must be at least 1"),
        ("[restart]\ninterval_s = 0.0001", "restart.interval_s", "must be at least 1"),
        ("[restart]\npause_s = nan", "restart.pause_s", "finite"),
        ("[restart]\npause_s = 1e9", "restart.pause_s", "must be at most 86400"),
        (
            "[parallel]\nenable_expert_parallel = 1",
            "parallel.enable_expert_parallel",
            "true or false",
        ),
    ],
)
def test_fault_names_key_and_remedy(more, key, told):
    (fault,) = faults(GOOD + more)
    assert fault.startswith(f"{key}: ")
    assert told in fault
    assert fault.endswith(")")


VLLM = f'{GOOD}builder = "vllm"\n'


@pytest.mark.parametrize(
    ("more", "key", "told"),
    [
        ("engine_args = { load-format = 'ipc_cache' }", "engine_args.load-format", "for engines"),
        ("engine_args = { model = 'x' }", "engine_args.model", "(leave it out: see `model`)"),
        ("engine_args = { x = 2026-11-30 }", "engine_args.x", "no argument can"),
        ("engine_args = { '-tp' = 0 }", "engine_args.-tp", "must be at least 1"),
        (f"engine_args = {{ '-tp' = {10**20} }}", "engine_args.-tp", "must be at most 1024 (given"),
        ('engine_args = { dtype = "a\\u0000b" }', "engine_args.dtype", "has a NUL character"),
        ('engine_args = { "sc.a\\u0000" = 1 }', 'engine_args."sc.a\\u0000"', "has a NUL character"),
        (
            f"engine_args = {{ 'sc.{'b.' * 15}b' = 1 }}",
            f'engine_args."sc.{"b." * 15}b"',
            "is nested more than 16 deep (flatten it)",
        ),
        ("engine_args = { '-tp' = 'x' }", "engine_args.-tp", "must be a whole number"),
        ("engine_args = { pcp = 2 }", "engine_args.pcp", "of contexts: not in this version"),
        ("engine_args = { dpn = 2 }", "engine_args.dpn", "(write data-parallel-start-rank, and"),
        (
            "engine_args = { expert-placement-strategy = 'x' }",
            "engine_args.expert-placement-strategy",
            "must be 'linear' or 'round_robin'",
        ),
        (
            "engine_args = { '-tp' = 2 }\n[parallel]\ntensor_parallel_size = 1",
            "engine_args.-tp",
            "is 2, but parallel.tensor_parallel_size is 1 (write it once)",
        ),
        ("engine_args = { '-sc' = 'x' }", "engine_args.-sc", "is no table or JSON object"),
        ("engine_args = { sc = { method = 'eagle' } }", "engine_args.sc", "names no model"),
        ('[draft]\nmodel = "/d"', "draft", "engine_args has no speculative-config ("),
        (
            "engine_args = { sc = { method = 'ngram' } }\n[draft]\nmodel = '/d'",
            "draft",
            "names method 'ngram': engines load such a draft from disk",
        ),
        (
            "engine_args = { sc = { method = 'eagle', model = '/a' } }\n[draft]\nmodel = '/b'",
            "draft.model",
            'is "/b", but engine_args.sc.model has "/a" (write it once)',
        ),
        (
            "engine_args = { sc = { method = 'eagle' } }\n[draft]\nmodel = './d'",
            "draft.model",
            "give an absolute path",
        ),
        (
            "engine_args = { sc = { method = 'eagle', model = '~/d' } }",
            "engine_args.sc.model",
            "give an absolute path",
        ),
        (
            "engine_args = { spec-method = 'eagle', spec-model = '~/d' }\n[draft]\nrevision = 'r'",
            "engine_args.spec-model",
            "give an absolute path",
        ),
        (
            "engine_args = { sc = { method = 'eagle', model = '/d', num-speculative-tokens = 0 } }",
            "engine_args.sc.num-speculative-tokens",
            "no whole number from 1 on",
        ),
        (
            'engine_args = { sc = \'{"method": "eagle", "model": "./d"}\' }',
            "engine_args.sc",
            "give an absolute path",
        ),
        ('reader = "instanttensor"', "reader", "set load-format in engine_args)"),
        ('layout = "processed"', "layout", "no layout in host memory (leave it out, or choose"),
    ],
)
def test_faults_of_what_vllm_builds(more, key, told):
    (fault,) = faults(VLLM + more)
    assert fault.startswith(f"{key}: ")
    assert told in fault
    assert fault.endswith(")")


EAGLE = "engine_args = { sc = { method = 'eagle', num_speculative_tokens = 2 } }\n"


def members(more: str) -> list[str]:
    return [str(instance) for instance in group(VLLM + more).instances]


def test_a_draft_that_engines_ask_daemons_for_has_ranks_beside_those_of_the_target():
    mtp = "engine_args = { spec-method = 'deepseek_mtp', spec-tokens = 1 }\n"
    assert members(mtp) == ["CPU-0", "CPU-0.draft"]
    assert members(f"{EAGLE}[draft]\nmodel = '/d'") == ["CPU-0", "CPU-0.draft"]


@pytest.mark.parametrize(
    "more",
    [
        "[draft]",
        "engine_args = { sc = { method = 'ngram' } }",
        "engine_args = { sc = { model = '/d' } }",
        f"{EAGLE}[draft]\nmodel = '/d'\nenabled = false",
    ],
)
def test_other_drafts_have_none(more):
    assert members(more) == ["CPU-0"]


def test_vllm_is_told_of_the_draft_that_only_its_table_names():
    found = group(f"{VLLM}{EAGLE}[draft]\nmodel = 'org/d'\nrevision = 'r'")
    (word,) = found.arguments
    assert word == (
        '--speculative-config={"method": "eagle", "model": "org/d", "num_speculative_tokens": 2, '
        '"revision": "r"}'
    )
    assert found.drafted is not None
    assert (found.drafted.model, found.drafted.revision) == ("org/d", "r")


@pytest.mark.parametrize("layout", ["plain", "raw"])
def test_faults_of_layouts_of_other_memory(layout):
    (fault,) = faults(f'model = "/m"\ngpus = ["{UUID}"]\nbuilder = "vllm"\nlayout = "{layout}"')
    assert fault.startswith("layout: ")
    assert "choose 'processed')" in fault


def test_what_vllm_is_given():
    found = group(
        'model = "/m"\ngpus = ["CPU-0", "CPU-1"]\nbuilder = "vllm"\n'
        "engine_args = { dtype = 'bfloat16', '-tp' = 2, enforce_eager = true,"
        " kernel-config = { linear_backend = 'cutlass' } }"
    )
    assert found.arguments == (
        "--dtype=bfloat16",
        "--enforce-eager",
        '--kernel-config={"linear_backend": "cutlass"}',
    )
    assert found.parallel.parallel.tensor == 2
    assert found.layout_mode is Layout.PLAIN


@pytest.mark.parametrize(
    ("device", "layout", "expected"),
    [
        ("CPU-0", "auto", Layout.PLAIN),
        ("CPU-0", "raw", Layout.RAW),
        (UUID, "auto", Layout.PROCESSED),
        (AMD, "processed", Layout.PROCESSED),
    ],
)
def test_layout_is_that_of_the_memory(device, layout, expected):
    found = group(f'model = "/m"\ngpus = ["{device}"]\nbuilder = "vllm"\nlayout = "{layout}"')
    assert found.layout_mode is expected


def test_native_weights_have_no_layout():
    assert group(GOOD).layout_mode is Layout.AUTO
    assert group(GOOD).arguments == ()


@pytest.mark.parametrize(
    ("gpus", "key", "told"),
    [
        (f'["{UUID}", "CPU-0"]', "gpus", f"devices of several kinds: {UUID}, CPU-0 ("),
        (f'["{UUID}", "{AMD}"]', "gpus", "or in that of one vendor's GPUs)"),
        (f'["{UUID.upper()}"]', "gpus[0]", "preloadctl config apply"),
        ('["MIG-53b1"]', "gpus[0]", "as `nvidia-smi -L` does"),
        ('["GPU-53b1"]', "gpus[0]", "preloadctl config apply"),
        ('["all"]', "gpus[0]", "preloadctl config apply"),
        ('["0"]', "gpus[0]", "change between boots"),
        ('["cpu-0"]', "gpus[0]", "'cpu-0' is no device"),
        ("[0]", "gpus[0]", "must be text in quotes"),
        ("[]", "gpus", "must not be empty"),
        ('"CPU-0"', "gpus", "must be a list in [ ]"),
        ('["CPU-0", "CPU-0"]', "gpus", "CPU-0 is listed twice"),
    ],
)
def test_devices_that_cannot_be(gpus, key, told):
    found = faults(f'model = "/srv/m"\ngpus = {gpus}\n')
    assert found[0].startswith(f"{key}: ")
    assert told in found[0]


@pytest.mark.parametrize("model", ["./m", "../m", "~/m"])
def test_model_that_depends_on_a_folder(model):
    (fault,) = faults(f'model = "{model}"\ngpus = ["CPU-0"]')
    assert fault.startswith("model: ")
    assert "absolute path" in fault


def test_all_faults_are_told_at_once():
    found = faults(
        'gpus = ["CPU-0", "CPU-1", "x"]\ndigest = "x"\n[parallel]\nnnodes = 3\n[seed]\nz = 1'
    )
    assert [fault.partition(":")[0] for fault in found] == [
        "model",
        "gpus[2]",
        "digest",
        "seed.z",
        "parallel.node_rank",
        "parallel.nnodes",
        "parallel.master_addr",
        "parallel.weight_cache_master_port",
    ]


def test_count_of_devices_is_told_beside_other_faults():
    found = faults('gpus = ["CPU-0", "CPU-1"]\ndigest = "x"\nmodel = "/m"')
    assert [fault.partition(":")[0] for fault in found] == ["digest", "gpus"]
    assert found[1] == (
        "gpus: 2 are too many for the 1 ranks of this node, 0 to 0 of data 1 x pipeline 1 x tensor "
        "1 = 1 ranks (leave out 1, or change the sizes)"
    )


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_what_a_node_cannot_be_told_is_told_at_its_key(refusal):
    launch = launch_of(refusal.flags.split(), drafts=refusal.drafts)
    told = [fault for fault in launch_faults(launch) if fault.setting != "devices"]
    port = launch.others["weight-cache-health-port"]
    document = Document(PATH, table_of(refusal.flags, drafts=refusal.drafts))
    _, found = judge(document, {"weight-cache-health-port": port} if port else {})
    written = {f"engine_args.{key}" for key in document.table["engine_args"]}
    found = [fault for fault in found if fault.key != "gpus"]
    assert [fault.text for fault in found] == [fault.bracketed for fault in told]
    for fault, expected in zip(found, told, strict=True):
        assert fault.key in written | {f"parallel.{expected.setting}"}


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_who_cannot_judge_a_file_sees_the_same_members(row):
    table = table_of(" ".join(row.flags), drafts=row.drafts)
    table["gpus"] = [f"CPU-{number}" for number in range(len(row.ranks))]
    document = Document(PATH, table)
    group, found = judge(document)
    assert group is not None, found
    assert members_of(document) == tuple(map(str, group.instances))


def table_of(flags: str, *, drafts: bool) -> dict[str, object]:
    """A group's file that says with vLLM's arguments what a command line says."""
    words = [word for word in from_words(flags.split()) if "health" not in word.name]
    values = {one.written: one.values[0] if one.values else True for one in words}
    more = {"spec-method": "mtp", "spec-tokens": 1} if drafts else {}
    ranks = launch_of(flags.split()).parallel.world
    return {
        "model": "/m",
        "gpus": [f"CPU-{number}" for number in range(ranks)],
        "builder": "vllm",
        "engine_args": {key: _plain(value) for key, value in values.items()} | more,
    }


def _plain(value: object) -> object:
    digits = isinstance(value, str) and value.removeprefix("-").isdigit()
    return int(value) if digits else value


NODE = """
model = "/m"
gpus = ["CPU-4", "CPU-2"]
[parallel]
tensor_parallel_size = 4
nnodes = 2
master_addr = "10.0.0.1"
weight_cache_master_port = 29600
"""


def laid(*texts: str) -> Document:
    """A file with drop-ins."""
    parts = []
    for number, text in enumerate(texts):
        path = PATH if not number else PATH.with_suffix(".toml.d") / f"{number}.toml"
        parts.append((path, document(text).table))
    return Document(PATH, Document(PATH, {}, tuple(parts)).layers.values, tuple(parts))


def test_a_node_launches_its_own_ranks_and_knows_where_all_meet():
    found = group(f"{NODE}node_rank = 1")
    assert (found.node.ranks, found.node.number, found.node.count) == (range(2, 4), 1, 2)
    assert [str(instance) for instance in found.instances] == ["CPU-4", "CPU-2"]
    assert [*ports_of(found)] == [
        Claim("parallel.weight_cache_master_port", "10.0.0.1", 29600, here=False)
    ]
    assert not [*ports_of(group(GOOD))]


def test_a_drop_in_says_what_is_of_this_node_alone():
    said = laid(NODE, 'gpus = ["CPU-0", "CPU-1"]', "[parallel]\nnode_rank = 1")
    found, told = judge(said)
    assert not told
    assert (found.gpus, found.node.ranks) == (("CPU-0", "CPU-1"), range(2, 4))


def test_faults_are_told_at_the_drop_in_that_has_them():
    said = laid(NODE, 'gpus = ["CPU-0"]\nmodelz = 1', "[parallel]\nnode_rank = 2")
    _, told = judge(said)
    folder = PATH.with_suffix(".toml.d")
    assert [(fault.origin, fault.key) for fault in told] == [
        (f"{folder}/1.toml", "modelz"),
        (f"{folder}/2.toml", "parallel.node_rank"),
    ]
    assert told[1].text == f"is 2, but nnodes is 2 (give 0 to 1; parallel.nnodes is in {PATH})"
    _, (told,) = judge(laid(NODE, 'digest = "full"'))
    assert (told.origin, told.key) == (str(PATH), "parallel.node_rank")


BUILT = 'builder = "vllm"\n'
HEAD = '{ method = "eagle", model = "/a", num_speculative_tokens = 2 }'
LISTENS = 'listen_host = "10.0.0.1"\nlisten_port = 9000\n'


@pytest.mark.parametrize(
    ("says", "other", "key", "beside"),
    [
        ('memory = "cuda"', 'gpus = ["CPU-0"]', "memory", ["gpus"]),
        (
            'layout = "processed"',
            f'{BUILT}gpus = ["CPU-0"]',
            "layout",
            ["builder", "gpus"],
        ),
        ('reader = "instanttensor"', BUILT, "reader", ["builder"]),
        ('reader = "instanttensor"', 'gpus = ["CPU-0"]', "reader", ["gpus"]),
        ("engine_args = { a = 1 }", 'builder = "native"', "engine_args", ["builder"]),
        ('draft = { model = "/a" }', 'builder = "native"', "draft", ["builder"]),
        (
            f"{BUILT}engine_args = {{ tp = 2 }}",
            "parallel = { tensor_parallel_size = 1 }",
            "engine_args.tp",
            ["parallel.tensor_parallel_size"],
        ),
        ('gpus = ["CPU-0"]', f"{BUILT}engine_args = {{ tp = 2 }}", "gpus", ["engine_args.tp"]),
        (
            'draft = { model = "/b" }',
            f"{BUILT}engine_args = {{ speculative-config = {HEAD} }}",
            "draft.model",
            ["engine_args.speculative-config.model"],
        ),
        (
            'draft = { model = "/b" }',
            f'{BUILT}engine_args = {{ spec-method = "eagle", spec-model = "/a" }}',
            "draft.model",
            ["engine_args.spec-model"],
        ),
        (
            'draft = { model = "/b" }',
            f'{BUILT}engine_args = {{ spec-method = "odd" }}',
            "draft",
            ["engine_args.spec-method"],
        ),
        (
            'engine_args = { spec-method = "eagle3", spec-model = "./x", spec-tokens = 3 }',
            f'{BUILT}engine_args = {{ dtype = "bfloat16" }}',
            "engine_args.spec-model",
            [],
        ),
        (
            'engine_args = { speculative-config = { method = "eagle", model = "./x" } }',
            f"{BUILT}engine_args = {{ speculative-config = {{ num_speculative_tokens = 3 }} }}",
            "engine_args.speculative-config.model",
            [],
        ),
        (
            'engine_args = { speculative-config = { method = "eagle", model = 7 } }',
            f"{BUILT}engine_args = {{ speculative-config = {{ num_speculative_tokens = 3 }} }}",
            "engine_args.speculative-config.model",
            [],
        ),
        (
            "parallel = { node_rank = 2 }",
            "parallel = { nnodes = 2 }",
            "parallel.node_rank",
            ["parallel.nnodes"],
        ),
        (
            "parallel = { nnodes = 2 }",
            "parallel = { tensor_parallel_size = 3 }",
            "parallel.nnodes",
            ["parallel.tensor_parallel_size"],
        ),
        (
            "parallel = { data_parallel_start_rank = 2 }",
            "parallel = { data_parallel_size = 2 }",
            "parallel.data_parallel_start_rank",
            ["parallel.data_parallel_size"],
        ),
        (
            "parallel = { weight_cache_master_port = 9000 }",
            "parallel = { master_port = 9000 }",
            "parallel.weight_cache_master_port",
            ["parallel.master_port"],
        ),
        (
            "[seed]\nweights = true",
            f'[seed]\n{LISTENS}tls_cert = "/c"\ntls_key = "/k"',
            "seed.weights",
            ["seed.tls_cert", "seed.tls_key"],
        ),
        (
            "warmup = { trust_bundles = true }",
            'builder = "native"',
            "warmup.trust_bundles",
            ["builder"],
        ),
        # Of a key that nobody says, the other end of the contradiction is the place.
        ("[seed]\nlisten_port = 1", "[seed]\nweights = true", "seed.listen_host", []),
        ("parallel = { nnodes = 2 }", "parallel = { master_port = 1 }", "parallel.node_rank", []),
    ],
)
def test_each_key_that_a_fault_names_is_told_with_the_file_that_has_it(says, other, key, beside):
    dropped = PATH.with_suffix(".toml.d") / "1.toml"
    for texts, here, there in (((says, other), PATH, dropped), ((other, says), dropped, PATH)):
        [fault] = [one for one in judge(laid(*texts))[1] if one.key == key]
        assert fault.origin == str(here)
        assert {*re.findall(r"(\S+) is in (\S+)[,)]", fault.text)} == {
            (one, str(there)) for one in beside
        }


def test_of_a_draft_each_key_is_told_by_the_argument_that_says_it():
    told = faults(
        f'{BUILT}{GOOD}engine_args = {{ spec-model = "./x", speculative-config = "{{bad" }}'
    )
    assert [line.partition(": ")[0] for line in told] == [
        "engine_args.speculative-config",
        "engine_args.spec-model",
    ]


@pytest.mark.parametrize("key", ["engine_args.hf-overrides", "draft"])
def test_of_a_table_all_files_are_told_that_have_a_part_of_it(key):
    more = 'draft = { revision = "r" }\nengine_args = { hf-overrides = { b = 1 } }'
    first = (
        f"{BUILT}draft = {{ model = '/d' }}\nengine_args = {{ hf-overrides = {{ a = 12:00:00 }} }}"
    )
    dropped = PATH.with_suffix(".toml.d") / "1.toml"
    [fault] = [one for one in judge(laid(first, more))[1] if one.key == key]
    assert fault.origin == str(dropped)
    assert fault.text.endswith(f"; {key} is also in {PATH})")


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (
            "[seed]\nwithin_s = 0\nlisten_host = 'h'\nlisten_port = 70000",
            ["within_s", "listen_port"],
        ),
        (
            "[seed]\ntoken_file = 't'\nlisten_host = 'h'\nsource_port = 1\ntls_key = '/k'",
            ["token_file", "listen_port", "source_host", "tls_key"],
        ),
        # What may follow from a value that is wrong itself is told once that is right.
        ("[seed]\nlisten_host = 'h'\nlisten_port = 'x'", ["listen_port"]),
        ("[seed]\nlisten_host = 3\ntoken_file = '/t'\nweights = true", ["listen_host"]),
        (
            "[seed]\ntls_cert = 'c'\ntls_key = '/k'\nlisten_host = 'h'\nlisten_port = 1",
            ["tls_cert"],
        ),
        # What nobody knows may be a key that is not there.
        (
            "[seed]\ntokn_file = '/t'\nlisten_host = 'h'\ntls_key = '/k'",
            ["tokn_file", "listen_port", "tls_key"],
        ),
        ("[seed]\nzzz = 1\nlisten_host = 'h'\nsource_port = 0", ["zzz", "source_port"]),
        (
            "[seed]\nlisten_host = 'h'\nlisten_prt = 9000\nsource_port = 0",
            ["listen_prt", "source_port", "source_host"],
        ),
        ("seed = 3", [""]),
    ],
)
def test_an_ill_formed_key_of_seeding_hides_no_other(text, keys):
    found = faults(f"{GOOD}{text}")
    assert [line.partition(": ")[0] for line in found] == [
        f"seed.{key}".rstrip(".") for key in keys
    ]


SPANS = "nnodes = 2\nnode_rank = 0\ntensor_parallel_size = 2\n"
MEETS = 'master_addr = "10.0.0.1"\nweight_cache_master_port = 9000\n'


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (
            "master_port = -5\nweight_cache_master_port = 70000",
            ["master_port", "weight_cache_master_port"],
        ),
        (
            "tensor_parallel_size = 0\nweight_cache_master_port = 70000",
            ["tensor_parallel_size", "weight_cache_master_port"],
        ),
        (f"{SPANS}master_addr = 3", ["master_addr", "weight_cache_master_port"]),
        (
            f"{SPANS}{MEETS}data_parallel_rpc_port = 0\nmaster_port = 9000",
            ["data_parallel_rpc_port", "weight_cache_master_port"],
        ),
        ("master_port = 0\nnode_rank = 1", ["master_port", "node_rank"]),
        # What may follow from a value that is wrong itself is told once that is right.
        (
            f"{SPANS}master_addr = '10.0.0.1'\nweight_cache_master_port = 'x'",
            ["weight_cache_master_port"],
        ),
        (f"{MEETS}nnodes = 'x'\nnode_rank = 1", ["nnodes"]),
        (f"{MEETS}tensor_parallel_size = 'x'\nnnodes = 2", ["tensor_parallel_size"]),
        (f"{MEETS}tensor_parallel_sise = 2\nnnodes = 2", ["tensor_parallel_sise"]),
    ],
)
def test_an_ill_formed_size_or_port_hides_no_other(text, keys):
    found = faults(f"{GOOD}[parallel]\n{text}")
    assert [line.partition(": ")[0] for line in found] == [f"parallel.{key}" for key in keys]


def test_ports_and_the_number_of_devices_do_not_hide_each_other():
    text = 'gpus = ["CPU-0", "CPU-1"]\nmodel = "/m"\n[parallel]\nweight_cache_master_port = 70000'
    assert [line.partition(": ")[0] for line in faults(text)] == [
        "parallel.weight_cache_master_port",
        "gpus",
    ]


def test_a_group_has_no_more_ranks_than_can_be():
    many = "[parallel]\ntensor_parallel_size = 1024\ndata_parallel_size = 2"
    (told,) = faults(f"{GOOD}{many}")
    sizes = "data 2 x pipeline 1 x tensor 1024 = 2048 ranks"
    assert told == (
        f"parallel.tensor_parallel_size: makes {sizes}, but a group has at most 1024 (give smaller "
        "sizes)"
    )
    gpus = [f"CPU-{number}" for number in range(65)]
    (told,) = faults(f'model = "/m"\ngpus = {gpus}\n[parallel]\ntensor_parallel_size = 65')
    assert told.startswith(
        "parallel.nnodes: is not given, so this node has 65 ranks (0 to 64 of data 1"
    )


@pytest.mark.parametrize(
    ("device", "memory", "backend"),
    [
        (UUID, "auto", Memory.CUDA),
        (UUID, "cuda", Memory.CUDA),
        (MIG, "auto", Memory.CUDA),
        (AMD, "auto", Memory.HIP),
        (AMD, "hip", Memory.HIP),
        ("CPU-7", "host", Memory.HOST),
    ],
)
def test_memory_is_that_of_the_devices(device, memory, backend):
    found = group(f'model = "/srv/m"\ngpus = ["{device}"]\nmemory = "{memory}"')
    assert found.backend is backend
    assert found.largest_chunk == CHUNK_BYTES[backend]
    assert [str(instance) for instance in found.instances] == [device]


def test_another_reader_fills_cuda_memory():
    assert group(f'model = "/m"\ngpus = ["{UUID}"]\nreader = "instanttensor"').reader


def test_claims_are_read_from_files_that_are_wrong():
    assert claims(document('gpus = ["CPU-0", 1, "all"]\nmodelz = 1')) == ("llama", ["CPU-0"])
    assert claims(document('name = "n"\ngpus = "CPU-1"')) == ("n", ["CPU-1"])
    assert claims(document("")) == ("llama", [])


@pytest.mark.parametrize(
    ("device", "full"),
    [
        (UUID, True),
        (MIG, True),
        (AMD, True),
        ("GPU-53b1", False),
        (f"{AMD}0", False),
        ("MIG-1", False),
        ("CPU-0", True),
    ],
)
def test_full_uuids_are_told_from_beginnings(device, full):
    assert is_full(device) is full
