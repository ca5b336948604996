"""What attached weights are not for: refused by name, and loaded from disk where that is safe."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engines.vllm import harness
from tests.engines.vllm.harness import Raised, attaching
from tests.engines.vllm.test_mismatch import UNUSED_QUANTISATION

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rank(vllm_python, zoo):
    """One that serves the small Llama, to all tests of this module."""
    with harness.short_folder() as folder:
        with harness.daemon(vllm_python, zoo("llama"), Path(folder)) as made:
            yield made


# ---- what an engine asks for


def test_adapters_are_loaded_over_weights_from_disk(rank, lasting, zoo):
    also = {"enable_lora": True, "max_lora_rank": 8}
    loaded = lasting.attach(zoo("llama"), rank.sockets, also=also)
    assert "adapters (--enable-lora) cannot be combined with attached weights" in loaded.reason
    assert loaded.shared == 0
    with pytest.raises(Raised, match="AttachError: adapters"):
        lasting.attach(zoo("llama"), rank.sockets, fallback=False, also=also)
    assert rank.status().lease_count == 0


def test_wrong_options_are_errors_whatever_may_be_fallen_back_to(rank, lasting, zoo):
    with pytest.raises(Raised, match="ConfigError: unknown option 'socket': expected one of"):
        lasting.attach(zoo("llama"), rank.sockets, socket="/run/x.sock")
    with pytest.raises(Raised, match="ConfigError: option fallback: 'yes' is neither true nor"):
        lasting.attach(zoo("llama"), rank.sockets, fallback="yes")


def test_host_memory_is_only_used_when_asked_for(rank, lasting, zoo):
    given = attaching(rank.sockets)
    del given["model_loader_extra_config"]["memory"]
    with pytest.raises(Raised, match=r'UnsupportedPlatformForIPCError: .*"memory": "host"'):
        lasting.load(zoo("llama"), **given)
    assert rank.status().lease_count == 0


def test_a_draft_that_no_daemon_holds_comes_from_disk_even_without_fallback(rank, lasting, zoo):
    speculation = {
        "method": "draft_model",
        "model": str(zoo("llama", seed=2)),
        "num_speculative_tokens": 2,
    }
    also = {"speculative_config": speculation}
    lasting.load(zoo("llama"), **also)
    said = lasting.generate()
    loaded = lasting.attach(zoo("llama"), rank.sockets, fallback=False, also=also)
    assert not loaded.reason
    assert rank.status().lease_count == 1
    assert lasting.generate() == said


def test_another_switch_in_the_environment_is_a_mismatch(zoo, daemon, lasting, monkeypatch):
    with monkeypatch.context() as daemons:
        daemons.setenv("VLLM_CPU_INT4_W4A8", "0")
        rank = daemon(zoo("llama"))
    lasting.load(zoo("llama"))
    said = lasting.generate()
    rank.serving("CPU-0")
    loaded = lasting.attach(zoo("llama"), rank.sockets)
    assert "environment.VLLM_CPU_INT4_W4A8: daemon has '0', engine wants" in loaded.reason
    assert loaded.shared == 0
    assert lasting.generate() == said


# ---- weights in a form of their own


def int8(of: Path, folder: Path) -> Path:
    """The same model with linear layers of 8-bit integers, inputs quantised on the way."""
    shutil.copytree(of, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    tensors = {}
    for name, tensor in load_file(of / "model.safetensors").items():
        if "_proj." not in name:
            tensors[name] = tensor
            continue
        scale = tensor.float().abs().amax(dim=1, keepdim=True) / 127
        tensors[name] = (tensor.float() / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantised = json.loads(json.dumps(UNUSED_QUANTISATION))
    quantised["quantization_config"]["ignore"] = ["lm_head"]
    config = json.loads((of / "config.json").read_text()) | quantised
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("beside", ["consolidated.safetensors", "z_other.safetensors"])
def test_files_that_do_not_identify_a_checkpoint_are_not_loaded(zoo, group, tmp_path, beside):
    model = shutil.copytree(zoo("llama"), tmp_path / "more")
    shutil.copyfile(zoo("llama", seed=2) / "model.safetensors", model / beside)
    failing = group(model)
    assert failing.ended() == 65
    assert (
        f"vLLM reads other files of this checkpoint than those it is identified by ({beside}"
        in (failing.told)
    )


def test_a_format_that_does_not_read_what_identifies_a_checkpoint_is_refused(zoo, group):
    failing = group(zoo("llama"), "--load-format=dummy")
    assert failing.ended() == 78
    assert "--load-format: 'dummy' is no format that reads the safetensors files" in failing.told


def test_a_draft_that_is_read_in_such_a_format_is_refused_as_well(zoo, group):
    draft = {"method": "ngram", "num_speculative_tokens": 2}
    draft |= {"draft_load_config": {"load_format": "dummy"}}
    failing = group(zoo("llama"), "--speculative-config", json.dumps(draft))
    assert failing.ended() == 78
    assert "draft_load_config.load_format: 'dummy' is no format" in failing.told


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, "is of a kind that vLLM 0."),
        ({"auto_map": {"AutoConfig": "configuration_wombat.Wombat"}}, "comes with code of its own"),
    ],
)
def test_a_model_that_vllm_does_not_know_is_told_in_one_line(zoo, group, tmp_path, more, told):
    model = shutil.copytree(zoo("llama"), tmp_path / "wombat")
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "wombat", "architectures": ["WombatForCausalLM"], **more}
    (model / "config.json").write_text(json.dumps(config))
    failing = group(model)
    assert failing.ended() == 78
    last = failing.told.splitlines()[-1]
    assert last.startswith(f"stopping: CPU-0 ended with status 78: {model} {told}"), failing.told
    assert "--trust-remote-code" in last
    for word in ("pydantic", "pip install", "Traceback"):
        assert word not in failing.told


def test_weights_that_cannot_be_shared_processed_are_shared_raw(zoo, group, lasting, tmp_path):
    model = int8(zoo("llama"), tmp_path / "int8")
    refused = group(model)
    rank = group(model, "--layout", "raw")
    lasting.load(model)
    said = lasting.generate()

    assert refused.ended() != 0
    assert re.search(
        r"layer model\.layers\.0\.\S+: CompressedTensorsLinearMethod cannot start from weights "
        r'that are already processed.*: use layout = "raw"',
        refused.told,
    ), refused.told

    rank.serving("CPU-0")
    for _ in range(2):
        loaded = lasting.attach(model, rank.sockets)
        assert not loaded.reason
        assert lasting.generate() == said


# ---- a GPU that is too full, or lost

FAULTS = """
import os, torch
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from preloadd.memory.host import HostFiller

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 GiB. GPU 0 has ...")
LOST = torch.AcceleratorError("CUDA error: unspecified launch failure")
load_weights = DefaultModelLoader.load_weights

def register():
    DefaultModelLoader.load_weights = loading
    if os.environ["FAULT"] == "no room":
        HostFiller.room = lambda self: (1000, "this test's GPU")

def loading(self, *args):
    print("loading", flush=True)
    when = os.environ["FAULT"]
    if when == "full as it is loaded":
        raise FULL
    if when == "lost as it is loaded":
        raise LOST
    load_weights(self, *args)
    if when == "lost as it is described":
        torch.Tensor.is_neg = failing(LOST)
    if when == "full as it is stored":
        torch.frombuffer = failing(FULL)

def failing(error):
    def fail(*args, **kwargs):
        raise error
    return fail
"""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """Where a plugin of vLLM lies that has it meet the fault that the environment names."""
    folder = tmp_path_factory.mktemp("faulty")
    described = folder / "faulty-1.0.dist-info"
    described.mkdir()
    (folder / "faulty.py").write_text(FAULTS)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nfaulty = faulty:register\n"
    )
    return folder


@pytest.mark.parametrize(
    ("fault", "status", "told"),
    [
        ("no room", 73, r"another [\d,]+ bytes but this test's GPU leaves 1,000, so at least"),
        ("full as it is loaded", 73, "another 1,099,511,627,776 bytes but .* are missing"),
        ("lost as it is loaded", 79, "CUDA error: unspecified launch failure: look .*Xid"),
        ("lost as it is described", 79, "CUDA error: unspecified launch failure: look .*Xid"),
        ("full as it is stored", 73, "another 1,099,511,627,776 bytes but .* are missing"),
    ],
)
def test_a_gpu_that_is_full_or_lost_is_told_as_that(
    zoo, group, faulty, monkeypatch, fault, status, told
):
    monkeypatch.setenv("PYTHONPATH", str(faulty))
    monkeypatch.setenv("FAULT", fault)
    failing = group(zoo("llama"))
    assert failing.ended() == status
    assert re.search(told, failing.told), failing.told
    assert "Traceback" not in failing.told
    assert ("loading\n" in failing.told) is (fault != "no room")


# ---- builds that fail, and what must not be built

PLUGIN = """
import json, sys, torch
from functools import partial
from types import SimpleNamespace as Config
from preloadd.engine.options import Options
from preloadd.engine.vllm import binding, loader
from preloadd.engine.vllm.request import require_unmoved
from preloadd.errors import AttachError

ERRORS = [RuntimeError("of its own"), AttachError("nothing in x.weight"), AttachError("in a copy")]
ERRORS.append("a tensor that is left")
complete, load_model = binding._Binding.complete, loader.PreloaddLoader.load_model

def register():
    binding._Binding.complete = failing
    loader.PreloaddLoader.load_model = counting
    print("asked", json.dumps(asked()), file=sys.stderr)

def failing(self):
    if ERRORS and ERRORS[0] == "a tensor that is left":
        self._model.scaled = partial(print, torch.empty(1, device="meta"))
        ERRORS.clear()
    complete(self)
    if ERRORS:
        raise ERRORS.pop(0)

def counting(self, vllm_config, model_config, prefix=""):
    # As vLLM's worker for GPUs asks before it measures memory.
    counted = loader.PreloaddLoader(self.load_config).get_external_weight_memory(vllm_config)
    print("counted", counted, file=sys.stderr)
    model = load_model(self, vllm_config, model_config, prefix)
    kept = sorted(model.state_dict().keys() & dict(model.named_buffers()).keys())
    print("kept buffers", kept, file=sys.stderr)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    print("empty", [name for name, tensor in tensors if tensor.is_meta], file=sys.stderr)
    return model

def asked():
    transfer = {"weight_transfer_config": Config(backend="nccl")}
    offload = {"offload_config": Config(uva=Config(cpu_offload_gb=4))}
    older = {"cache_config": Config(cpu_offload_gb=4)}
    eplb = {"parallel_config": Config(enable_eplb=True)}
    lora = {"lora_config": Config()}
    return {
        "nothing": refusal(), "sleep": refusal(sleep=True), "transfer": refusal(**transfer),
        "offload": refusal(**offload), "older": refusal(**older), "eplb": refusal(**eplb),
        "two": refusal(sleep=True, **offload), "sleep of a copy": refusal("copy", sleep=True),
        "transfer to a copy": refusal("copy", **transfer),
        "offload of a copy": refusal("copy", **offload),
        "eplb of a copy": refusal("copy", **eplb), "lora over a copy": refusal("copy", **lora),
    }

def refusal(mode="zero_copy", sleep=False, **more):
    given = {"lora_config": None, "parallel_config": Config(), "cache_config": Config()} | more
    try:
        require_unmoved(
            Config(**given), Config(enable_sleep_mode=sleep), Options.parse({"mode": mode})
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
"""


@pytest.fixture(scope="module")
def spoiled(vllm_python, tmp_path_factory):
    """An engine with a plugin of vLLM that lets the first four builds fail when they are done,
    and tells what it would be refused."""
    folder = tmp_path_factory.mktemp("plugin")
    described = folder / "spoiling-1.0.dist-info"
    described.mkdir()
    (folder / "spoiling.py").write_text(PLUGIN)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: spoiling\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nspoiling = spoiling:register\n"
    )
    with harness.Engine(vllm_python, folder / "log", PYTHONPATH=str(folder)) as made:
        yield made


def lines(told: str, word: str) -> list[str]:
    return [line.removeprefix(word).strip() for line in told.splitlines() if line.startswith(word)]


def test_a_build_that_fails_leaves_nothing_behind_and_the_next_one_attaches(
    rank, lasting, spoiled, zoo
):
    model = zoo("llama")
    lasting.load(model)
    said = lasting.generate()
    lasting.drop()

    fallen = spoiled.attach(model, rank.sockets)
    assert "vLLM cannot build the model over attached weights: RuntimeError: of its own" in (
        fallen.reason
    )
    assert fallen.shared == 0
    assert spoiled.generate() == said
    assert rank.status().lease_count == 0

    with pytest.raises(Raised, match=r"AttachError: nothing in x\.weight"):
        spoiled.attach(model, rank.sockets, fallback=False)
    assert rank.status().lease_count == 0

    # A copy that never came to be used frees nothing of the daemon's.
    copied = spoiled.attach(model, rank.sockets, mode="copy")
    assert "in a copy" in copied.reason
    assert spoiled.generate() == said
    told = rank.status()
    assert (told.state, told.lease_count) == ("serving", 0)

    empty = spoiled.attach(model, rank.sockets)
    assert "left without content, as the daemon has none for it: ::scaled.args[0]" in empty.reason
    assert empty.shared == 0
    assert spoiled.generate() == said

    loaded = spoiled.attach(model, rank.sockets)
    assert not loaded.reason
    assert loaded.shared > 10 * loaded.private
    assert spoiled.generate() == said
    assert rank.status().lease_count == 1

    # What a mapping uses is counted as the daemon's; what is loaded from disk after all is not,
    # unless that comes out too late.
    nbytes = rank.status().arena_bytes
    assert lines(loaded.told, "counted") == [str(nbytes)]
    for late in (fallen, empty):
        assert lines(late.told, "counted") == [str(nbytes)]
        assert re.search(
            rf"vLLM has counted {nbytes:,} bytes for the daemon's weights already, .*"
            "restart the engine once this is mended",
            late.reason,
        )
    assert lines(copied.told, "counted") == ["0"]
    assert "has counted" not in copied.reason
    other = spoiled.attach(model, rank.sockets, also={"dtype": "float32"})
    assert "dtype: daemon has" in other.reason
    assert lines(other.told, "counted") == ["0"]
    assert "has counted" not in other.reason

    # Nothing is saved that a model from disk would not save, and nothing lacks content.
    assert lines(loaded.told, "kept buffers") == lines(fallen.told, "kept buffers") != []
    assert lines(loaded.told, "empty") == ["[]"]


def test_engines_that_would_change_shared_weights_are_told_how_they_can(spoiled, zoo):
    """By configurations as vLLM makes them for GPUs: for a CPU it refuses most of them itself."""
    spoiled.load(zoo("llama"))
    told = json.loads(lines(spoiled.told, "asked")[0])
    for case in ("nothing", "sleep of a copy", "transfer to a copy"):
        assert told[case] == ""
    changing = {"sleep": "--enable-sleep-mode", "transfer": "--weight-transfer-config"}
    for case, flag in changing.items():
        assert told[case].startswith(f"AttachError: {flag} would change weights"), told[case]
        assert 'mode: "copy"' in told[case]
    for case in ("offload", "older", "two", "offload of a copy"):
        assert told[case].startswith("AttachError: --cpu-offload-gb cannot be combined"), told[case]
    for case in ("eplb", "eplb of a copy"):
        assert told[case].startswith("ConfigError: --enable-eplb"), told[case]
    assert told["lora over a copy"].startswith("AttachError: adapters")
