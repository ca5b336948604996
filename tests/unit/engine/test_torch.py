import copy
import io
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from preloadd.domain.ids import device_id
from preloadd.domain.leases import Mode
from preloadd.domain.lifecycle import State
from preloadd.domain.settings import Memory
from preloadd.engine.native import NativeCheckpoint
from preloadd.engine.options import Options
from preloadd.engine.place import Place, Spot
from preloadd.engine.torch import attach_checkpoint, attach_wanted
from preloadd.errors import (
    ConfigError,
    DeviceFailed,
    Mismatch,
    OutOfRoom,
    UnsupportedPlatformForIPCError,
)
from preloadd.frameworks.tables import table_path
from preloadd.memory.host import HostMapper
from preloadd.protocol import messages as m
from preloadd.warmup.names import OVERRIDE
from tests.checkout import ROOT
from tests.checkpoints import SHARDS, llama
from tests.waiting import eventually


@pytest.fixture
def get(daemon, model):
    """The daemon's weights with these options; all are closed at the end."""
    made = []

    def get(**options):
        chosen = {"memory": "host", "socket_path": daemon.socket} | options
        found = attach_checkpoint(model, options=chosen)
        made.append(found)
        return found

    yield get
    for weights in made:
        weights.close()


@pytest.fixture
def disk(model):
    """What torch reads from the files."""
    return {n: tensor for shard in SHARDS for n, tensor in load_file(model / shard).items()}


def assert_equal(tensors, disk):
    assert tensors.keys() == disk.keys()
    for name, tensor in disk.items():
        assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(tensors[name], tensor), name


def held(daemon, number):
    eventually(lambda: daemon.status().lease_count == number, lambda: f"{number} leases")


def test_zero_copy_tensors_equal_those_on_disk_and_lie_in_the_arena(get, disk, daemon):
    weights = get()
    assert_equal(weights.tensors, disk)
    assert all(weights.shares(tensor) for tensor in weights.tensors.values())
    assert not weights.shares(torch.zeros(3))
    held(daemon, 1)
    assert weights.mode is Mode.ZERO_COPY


def test_the_path_of_the_table_for_these_weights_is_told(get, monkeypatch):
    monkeypatch.setenv(OVERRIDE, "/srv/tables")
    with get() as weights:
        path = weights.autotune_table
        assert path == table_path(weights.manifest.key, {OVERRIDE: "/srv/tables"})
    assert path.parts[:3] == ("/", "srv", "tables")
    assert path.name == "autotune_configs_dp0_rank0.json"


def test_closing_gives_the_lease_back(get, daemon):
    with get() as weights:
        held(daemon, 1)
    assert weights.tensors == {}
    held(daemon, 0)


def test_tensors_in_use_keep_the_lease_and_are_told_of(get, daemon, disk):
    weights = get()
    name, tensor = next(iter(weights.tensors.items()))
    with pytest.raises(BufferError, match="drop the tensors and the model, then close again"):
        weights.close()
    assert daemon.status().lease_count == 1
    assert torch.equal(tensor, disk[name])
    assert_equal(weights.tensors, disk)
    assert weights.tensors[name].data_ptr() == tensor.data_ptr()
    assert all(weights.shares(each) for each in (tensor, *weights.tensors.values()))
    del tensor
    weights.close()
    held(daemon, 0)


def test_whoever_uses_what_a_refused_close_left_is_asked_for_as_well(get, daemon, disk):
    weights = get()
    name, first = next(iter(weights.tensors.items()))
    with pytest.raises(BufferError):
        weights.close()
    second = weights.tensors[name]
    del first
    with pytest.raises(BufferError):
        weights.close()
    assert torch.equal(second, disk[name])
    del second
    weights.close()
    held(daemon, 0)


def test_a_block_that_fails_tells_its_own_error_and_gives_the_lease_back(get, daemon, disk):
    with pytest.raises(ZeroDivisionError), get() as weights:
        name, kept = next(iter(weights.tensors.items()))
        held(daemon, 1)
        raise ZeroDivisionError
    held(daemon, 0)
    assert weights.tensors == {}
    assert torch.equal(kept, disk[name])


def mapped() -> int:
    """How many chunks this process has mapped."""
    return Path("/proc/self/maps").read_text().count("/memfd:preloadd-chunk")


def test_a_second_attachment_has_a_lease_of_its_own_and_the_same_memory(get, daemon, disk):
    before = mapped()
    one, other = get(), get()
    assert mapped() == before + len(one.manifest.chunks)
    held(daemon, 2)
    for name, tensor in one.tensors.items():
        assert other.tensors[name].data_ptr() == tensor.data_ptr()
    del tensor
    one.close()
    held(daemon, 1)
    assert_equal(other.tensors, disk)
    other.close()
    held(daemon, 0)
    assert mapped() == before


def test_each_attachment_answers_for_its_own_tensors(get, daemon, disk):
    one, other = get(), get()
    name, kept = next(iter(one.tensors.items()))
    with pytest.raises(BufferError):
        one.close()
    other.close()
    held(daemon, 1)
    assert torch.equal(kept, disk[name])
    del kept
    one.close()
    held(daemon, 0)


def attached(daemon, model, mapper=None, **options):
    """Weights before anything is taken over, as an engine has them while it builds a model."""
    device = device_id("CPU-0")
    wanted = NativeCheckpoint(model).wanted(device, client="torch")
    parsed = Options.parse({"memory": "host", "socket_path": daemon.socket} | options)
    place = Place(Spot(Memory.HOST, "cpu"), device, mapper or HostMapper())
    return attach_wanted(wanted, parsed, place)


@pytest.mark.parametrize("mode", ["zero_copy", "copy"])
def test_tensors_that_other_weights_abandoned_hinder_nobody(get, daemon, model, disk, mode):
    before = mapped()
    other, weights = attached(daemon, model), attached(daemon, model, mode=mode)
    name, kept = next(iter(other.tensors.items()))
    other.abandon()
    del other
    held(daemon, 1)
    weights.close()
    held(daemon, 0)
    assert torch.equal(kept, disk[name])
    with get() as again:
        assert_equal(again.tensors, disk)
    assert mapped() > before
    del kept
    assert mapped() == before


def test_a_device_that_is_lost_is_told_once_and_gives_the_lease_back(daemon, model, lost):
    weights = attached(daemon, model, lost)
    with pytest.raises(DeviceFailed, match="the GPU is lost"):
        weights.close()
    held(daemon, 0)
    weights.close()
    assert repr(weights) == "<0 tensors, zero_copy, lease given back>"


class Model:
    """An engine's object over weights, as it is copied."""

    def __init__(self, weights):
        self.weights = weights
        self.tensor = torch.nn.Parameter(weights.tensors["model.norm.weight"], requires_grad=False)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved], ids=lambda f: f.__name__)
def test_a_copy_of_what_refers_to_weights_has_tensors_of_its_own_and_no_lease(get, daemon, copied):
    weights = get()
    model = Model(weights)
    other = copied(model)
    held(daemon, 1)
    assert (other.weights, model.weights) == (None, weights)
    assert torch.equal(other.tensor, model.tensor)
    assert not weights.shares(other.tensor)
    other.tensor.add_(1)


def test_a_copy_beside_tensors_in_use_in_this_process_leaves_them(get, daemon, disk):
    one = get()
    copied = get(mode="copy")
    held(daemon, 1)
    assert_equal(copied.tensors, disk)
    assert_equal(one.tensors, disk)
    assert not any(one.shares(tensor) for tensor in copied.tensors.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU is needed")
def test_host_memory_is_only_used_when_asked_for(daemon, model):
    with pytest.raises(UnsupportedPlatformForIPCError, match=r'give options=\{"memory": "host"\}'):
        attach_checkpoint(model, options={"socket_path": daemon.socket})
    with pytest.raises(UnsupportedPlatformForIPCError, match="device cpu has no GPU memory"):
        attach_checkpoint(model, device="cpu", options={"socket_path": daemon.socket})


def test_a_device_that_contradicts_the_options_is_an_error(daemon, model):
    options = {"memory": "host", "socket_path": daemon.socket}
    with pytest.raises(ConfigError, match="device cuda:1 contradicts"):
        attach_checkpoint(model, device="cuda:1", options=options)
    with attach_checkpoint(model, device="cpu", options=options) as weights:
        assert weights.device == "cpu"


def test_an_abandoned_lease_leaves_the_tensors(get, daemon, disk):
    weights = get()
    tensors = dict(weights.tensors)
    weights.abandon()
    held(daemon, 0)
    assert_equal(tensors, disk)


def test_a_copy_is_ones_own_and_frees_the_daemons(get, own_daemon, disk):
    weights = get(mode="copy", socket_path=own_daemon.socket)
    assert own_daemon.status().state is State.RELEASED
    assert_equal(weights.tensors, disk)
    for tensor in weights.tensors.values():
        tensor.add_(1)
    assert not torch.equal(weights.tensors["model.norm.weight"], disk["model.norm.weight"])
    assert own_daemon.ask(m.Load()) == m.Done()
    eventually(lambda: own_daemon.status().state is State.SERVING, lambda: "another load")
    assert_equal(get(socket_path=own_daemon.socket).tensors, disk)


def test_a_copy_that_there_is_no_memory_for_is_told_and_leaves_all_as_it_was(
    get, daemon, monkeypatch
):
    def full(tensor):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 GiB. GPU 0")

    before = daemon.status().lease_count
    monkeypatch.setattr(torch.Tensor, "clone", full)
    with pytest.raises(OutOfRoom, match=r"another 1,099,511,627,776 bytes but .* are missing"):
        get(mode="copy")
    eventually(lambda: daemon.status().lease_count == before, lambda: repr(daemon.status()))
    assert daemon.status().state == State.SERVING


def test_a_copy_beside_another_engine_frees_nothing(get, daemon, disk):
    other = get()
    copied = get(mode="copy")
    held(daemon, 1)
    assert daemon.status().state is State.SERVING
    assert_equal(copied.tensors, disk)
    assert_equal(other.tensors, disk)


def test_a_mismatch_and_a_wrong_option_are_errors(daemon, tmp_path):
    other = llama(tmp_path / "other", seed=1)
    with pytest.raises(Mismatch, match="checkpoint"):
        attach_checkpoint(other, options={"memory": "host", "socket_path": daemon.socket})
    with pytest.raises(ConfigError, match="unknown option 'socket'"):
        attach_checkpoint(other, options={"socket": daemon.socket})


def test_the_device_comes_from_the_environment(daemon, model, monkeypatch):
    monkeypatch.setenv("PRELOADD_DEVICES", "CPU-3")
    with pytest.raises(Mismatch, match="device: daemon has 'CPU-0', engine wants 'CPU-3'"):
        attach_checkpoint(model, options={"memory": "host", "socket_path": daemon.socket})


WRITING = """
import sys
from pathlib import Path
from preloadd.engine.torch import attach_checkpoint
options = {"memory": "host", "socket_path": sys.argv[2]}
weights = attach_checkpoint(Path(sys.argv[1]), options=options)
print("attached", flush=True)
weights.tensors["model.norm.weight"].add_(1)
"""


@pytest.mark.slow
def test_writing_to_shared_weights_ends_the_writer_and_harms_nobody(get, daemon, model, disk):
    done = subprocess.run(
        [sys.executable, "-c", WRITING, str(model), str(daemon.socket)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, b"attached\n"), done.stderr
    held(daemon, 0)
    assert_equal(get().tensors, disk)
