"""Against a stand-in for the library that reads with safetensors: its interface is the real one's,
of version 0.2, its tensors are in the memory of this host. So are chunks of the driver that stands
in, at the addresses that they tell."""

import ctypes
import os
import sys
from contextlib import closing
from dataclasses import replace

import pytest
import safetensors.torch
import torch

import preloadd.loader
from preloadd.domain.placement import Parallel, Placement
from preloadd.domain.settings import Memory, Reader
from preloadd.errors import ConfigError, DeviceFailed, OutOfRoom, ReadFailed
from preloadd.loader.native import Native
from preloadd.loader.pipeline import load
from preloadd.loader.report import Reporter
from preloadd.memory.host import HostFiller
from preloadd.protocol import messages as m
from preloadd.transport.blocking import Link
from tests.checkpoints import SHARDS, stored

STAND_IN = """
import contextlib, pathlib
import safetensors.torch

@contextlib.contextmanager
def safe_open(filename, framework, device, *, copy, tensor_filter, tensor_name_match_mode):
    assert (framework, str(device), copy, tensor_name_match_mode) == ("pt", "cpu", False, "exact")
    yield Opened(sorted(filename), tensor_filter)

class Opened:
    def __init__(self, files, names):
        self.files, self.names = files, names

    def tensors(self):
        buffer = None
        for file in self.files:
            for name, tensor in safetensors.torch.load(pathlib.Path(file).read_bytes()).items():
                if name in self.names:
                    if buffer is not None:
                        buffer.zero_()  # as the ring it is a view of goes on
                    buffer = tensor
                    yield name, tensor
"""


def as_tensor(chunk):
    """What torch makes of a chunk where it has CUDA: by nothing but this, and by all of it."""
    told = chunk.__cuda_array_interface__
    assert (told["typestr"], told["version"], "strides" in told) == ("|u1", 3, False)
    address, readonly = told["data"]
    assert not readonly
    (nbytes,) = told["shape"]
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)


@pytest.fixture
def instant(tmp_path, monkeypatch):
    (tmp_path / "instanttensor.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    _forget()
    from preloadd.loader import instant

    yield instant
    _forget()


def _forget():
    for name in ("preloadd.loader.instant", "instanttensor"):
        sys.modules.pop(name, None)
    vars(preloadd.loader).pop("instant", None)


@pytest.fixture
def on_gpu(settings):
    """Settings of a rank whose model is on a GPU."""
    model = replace(settings.model, memory=Memory.CUDA, reader=Reader.INSTANTTENSOR)
    return replace(settings, model=model)


@pytest.fixture
def with_cuda(monkeypatch):
    """A torch that can use the memory of GPUs."""
    monkeypatch.setattr(torch, "as_tensor", as_tensor)


@pytest.fixture
def filled(instant, ends, on_device):
    """Fills; bytes by the names of tensors, and the cost."""
    rank, sock = ends

    def filled(settings, filler=on_device):
        native = Native(settings, 4096)
        link = Link(sock)
        try:
            cost = instant.fill(native, filler, Reporter(link, clock=lambda: 0.0))
        finally:
            link.close()
        heard = rank.heard()
        assert sum(isinstance(each, m.ChunkFilled) for each in heard) == len(native.plan.chunks)
        last = [each for each in heard if isinstance(each, m.Progress)][-1]
        assert last.done == last.total == native.plan.tensor_nbytes
        places = native.plan.storages
        tensors = {
            name: os.pread(
                rank.fds[places.chunk[row]].fileno(), places.nbytes[row], places.offset[row]
            )
            for row, name in enumerate(native.plan.tensors.name)
        }
        return tensors, cost

    return filled


@pytest.mark.usefixtures("with_cuda")
def test_a_whole_model_is_in_its_place(filled, on_gpu, model):
    tensors, cost = filled(on_gpu)
    assert tensors == stored(model)
    assert cost.bytes_read == cost.bytes_direct == sum(map(len, tensors.values()))


@pytest.mark.usefixtures("with_cuda")
def test_a_rank_gets_its_slices_of_whole_tensors(filled, on_gpu, model):
    whole = stored(model)
    placement = Placement(Parallel(tensor=2), tensor_rank=1)
    tensors, cost = filled(replace(on_gpu, model=replace(on_gpu.model, placement=placement)))
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.norm.weight"):
        assert whole[name].endswith(tensors[name])
    name, width = "model.layers.1.self_attn.o_proj.weight", 128
    rows = [whole[name][start : start + width] for start in range(0, len(whole[name]), width)]
    assert tensors[name] == b"".join(row[width // 2 :] for row in rows)
    assert cost.bytes_read > sum(map(len, tensors.values()))


def test_other_memory_is_refused(filled, settings):
    with pytest.raises(ConfigError, match=r'CUDA memory, not host: set reader = "pread"'):
        filled(settings, HostFiller())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch can use GPUs")
def test_a_torch_without_cuda_is_said(filled, on_gpu):
    with pytest.raises(ConfigError, match=r"needs a torch that can use CUDA, not .*\"pread\""):
        filled(on_gpu)


@pytest.mark.usefixtures("with_cuda")
def test_a_name_in_two_files_is_refused(filled, on_gpu, model):
    # The index knows which is meant, the library does not read it.
    extra = safetensors.torch.load_file(model / SHARDS[0])
    extra["model.norm.weight"] = torch.zeros(64, dtype=torch.float16)
    safetensors.torch.save_file(extra, model / SHARDS[0])
    with pytest.raises(ConfigError, match=rf"'model\.norm\.weight' is both in .*{SHARDS[0]}"):
        filled(on_gpu)


@pytest.mark.usefixtures("with_cuda")
def test_a_device_that_fails_names_where_to_look(filled, on_gpu, instant):
    def refuses(*_, **__):
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error\nmore")

    instant.instanttensor.safe_open = refuses
    with pytest.raises(DeviceFailed, match=r"uncorrectable ECC error: look for the GPU driver's"):
        filled(on_gpu)


@pytest.mark.usefixtures("with_cuda")
def test_what_the_library_says_names_the_way_out(filled, on_gpu, instant):
    def refuses(*_, **__):
        raise RuntimeError("io_setup failed: EAGAIN\nmore")

    instant.instanttensor.safe_open = refuses
    with pytest.raises(ReadFailed, match=r'instanttensor: io_setup failed: EAGAIN: .*"pread"'):
        filled(on_gpu)


@pytest.mark.usefixtures("with_cuda")
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 TiB or so.\nmore"),
        RuntimeError("buffer_size (9 B) exceeds device memory budget (5 B)"),
        RuntimeError("Device memory budget (5 B) is too small for one I/O operation"),
    ],
)
def test_a_gpu_without_room_for_the_librarys_buffer_is_no_bad_disk(filled, on_gpu, instant, error):
    def refuses(*_, **__):
        raise error

    instant.instanttensor.safe_open = refuses
    with pytest.raises(OutOfRoom) as caught:
        filled(on_gpu)
    told = str(caught.value)
    assert str(error).partition("\n")[0] in told
    assert "GPU-" in told
    assert "too few for that" in told


@pytest.mark.parametrize("frees", [None, 0, 1000])
@pytest.mark.usefixtures("instant")
def test_room_for_the_librarys_buffer_is_looked_for_before_anything_is_given_up(
    on_gpu, on_device, ends, monkeypatch, frees
):
    native = Native(on_gpu, 4096)
    largest = max(stored.info.nbytes for stored in native.checkpoint.tensors.values())
    room = native.plan.arena_nbytes + largest
    free = room - 1 - (frees or 0)
    monkeypatch.setattr(type(on_device), "room", lambda self: (free, "this GPU"))
    monkeypatch.setattr(type(on_device), "create", pytest.fail)
    rank, sock = ends
    with closing(Link(sock)) as link:
        reporter = Reporter(link, clock=lambda: 0.0)
        reporter.frees = frees
        with pytest.raises(OutOfRoom, match=f"need {room:,} bytes but this GPU.* so 1 are missing"):
            load(on_gpu, on_device, reporter, digest_cache=None)
    assert [type(report) for report in rank.heard()] == [m.Progress]
