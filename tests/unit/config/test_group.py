"""Every fault that a group's file can have, by table."""

from pathlib import Path

import pytest

from preloadd.config.files import Document, Fault, parse
from preloadd.config.group import Group, claims, is_full, judge
from preloadd.domain.placement import ExpertPlacement
from preloadd.domain.settings import CHUNK_BYTES, Memory

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
        enabled = false
        """
    )
    assert found.name == "other"
    assert found.parallel.parallel.expert_placement is ExpertPlacement.ROUND_ROBIN
    assert found.allowed.groups == ("vllm",)
    assert found.chunk_bytes == 64 << 20
    assert [str(instance) for instance in found.instances] == ["CPU-3", "CPU-1", "CPU-2", "CPU-0"]
    assert found.restart.interval_s == 60


@pytest.mark.parametrize(
    ("more", "key", "told"),
    [
        ("modelz = 1", "modelz", "did you mean 'model'?"),
        ("tensor_parallel_size = 2", "tensor_parallel_size", "belongs under [parallel]"),
        ("tensor_parallel_sizes = 2", "tensor_parallel_sizes", "'parallel.tensor_parallel_size'"),
        ("qqqq = 2", "qqqq", "known here: name, model"),
        ('[parallel]\ndigest = "full"', "parallel.digest", "before the first [table]"),
        ("[parallelx]\nnodes = 1", "parallelx", "did you mean 'parallel'?"),
        ('"a\\nb" = 1', '"a\\nb"', "no such key"),
        ('builder = "vllm"', "builder", "not in this version"),
        ('builder = "vlm"', "builder", "must be 'native' or 'vllm' (given: 'vlm')"),
        ('memory = "cuda"', "memory", 'but gpus lists CPU-0 (write "host"'),
        ('memory = "hip"', "memory", "or leave the key out)"),
        ('memory = "gpu"', "memory", "must be 'auto', 'host', 'cuda' or 'hip'"),
        ('reader = "mmap"', "reader", "must be 'pread' or 'instanttensor'"),
        ('reader = "instanttensor"', "reader", "CUDA devices only (leave the key out)"),
        ('engine_args = { dtype = "bfloat16" }', "engine_args", "not in this version"),
        ("[parallel]\nnodes = 2", "parallel.nodes", "not in this version"),
        (
            "[parallel]\ndata_parallel_size = 2",
            "parallel.data_parallel_size",
            "not in this version",
        ),
        ('[draft]\nmodel = "x"', "draft.model", "not in this version"),
        ("[draft]", "draft", "not in this version"),
        (
            "[warmup]\nflashinfer_autotune = true",
            "warmup.flashinfer_autotune",
            "not in this version",
        ),
        ('[warmup]\nstores = ["x"]', "warmup.stores", "not in this version"),
        ("[warmup]\ntrust_bundles = true", "warmup.trust_bundles", "not in this version"),
        ("[seed]\nenabled = true", "seed.enabled", "not in this version"),
        ('[seed]\npeers = ["x"]', "seed.peers", "not in this version"),
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
        ("[parallel]\ntensor_parallel_size = 2", "gpus", "= 2 ranks"),
    ],
)
def test_fault_names_key_and_remedy(more, key, told):
    (fault,) = faults(GOOD + more)
    assert fault.startswith(f"{key}: ")
    assert told in fault
    assert fault.endswith(")")


@pytest.mark.parametrize(
    ("gpus", "key", "told"),
    [
        (f'["{UUID}", "CPU-0"]', "gpus", f"devices of several kinds: {UUID}, CPU-0 ("),
        (f'["{UUID}", "{AMD}"]', "gpus", "or in that of one vendor's GPUs)"),
        (f'["{UUID.upper()}"]', "gpus[0]", "preloadd admin config apply"),
        ('["MIG-53b1"]', "gpus[0]", "as `nvidia-smi -L` does"),
        ('["GPU-53b1"]', "gpus[0]", "preloadd admin config apply"),
        ('["all"]', "gpus[0]", "preloadd admin config apply"),
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
        'gpus = ["CPU-0", "CPU-1", "x"]\ndigest = "x"\n[parallel]\nnodes = 3\n[seed]\nz = 1'
    )
    assert [fault.partition(":")[0] for fault in found] == [
        "model",
        "gpus[2]",
        "digest",
        "parallel.nodes",
        "seed.z",
    ]


def test_count_of_devices_is_told_beside_other_faults():
    found = faults('gpus = ["CPU-0", "CPU-1"]\ndigest = "x"\nmodel = "/m"')
    assert [fault.partition(":")[0] for fault in found] == ["digest", "gpus"]
    assert "lists 2 devices, but [parallel] makes 1 (tensor) x 1 (pipeline) = 1 ranks" in found[1]


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
