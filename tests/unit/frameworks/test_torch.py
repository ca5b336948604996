import mmap
import re
from types import SimpleNamespace

import pytest
import torch

from preloadd.domain import dtypes
from preloadd.domain.manifest import Manifest, Storages, Tensors, check
from preloadd.domain.recipe import Recipe
from preloadd.errors import ConfigError, DeviceFailed, OutOfRoom, UnsupportedModel
from preloadd.frameworks.torch import (
    DTYPES,
    copies,
    device_chunk,
    device_name,
    explained,
    in_use,
    platform,
    views,
    whole_chunk,
)


def manifest(rows, storages, *, aliases=None, nbytes=8192):
    names, kinds, codes, shapes, strides, of, skip = zip(*rows, strict=True)
    made = Manifest(
        generation="a" * 32,
        layout=1,
        backend="host",
        chunks=(nbytes,),
        storages=Storages(*map(list, zip(*storages, strict=True))),
        tensors=Tensors(
            list(names),
            list(kinds),
            [dtypes.CODES[code] for code in codes],
            list(shapes),
            list(strides),
            list(of),
            list(skip),
        ),
        key={},
        recipe=Recipe({}, ()),
        aliases=aliases or {},
    )
    check(made)
    return made


def chunk(nbytes=8192):
    return torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_is_a_view_without_a_copy(dtype):
    shape = (3, 4)
    base = chunk()
    found = views(manifest([("w", 0, dtype, shape, None, 0, 0)], [(0, 512, 96)]), [base])["w"]
    assert found.dtype == DTYPES[dtype]
    assert found.shape == ((3, 2) if dtype == "F4" else shape)
    assert found.data_ptr() == base.data_ptr() + 512
    assert bytes(found.reshape(-1).view(torch.uint8).numpy()) == bytes(
        base[512 : 512 + dtypes.nbytes(dtype, 12)].numpy()
    )


def test_torch_has_every_dtype_of_safetensors_but_the_six_bit_ones():
    assert set(dtypes.NAMES) - set(DTYPES) == {"F6_E2M3", "F6_E3M2"}


def test_a_dtype_that_torch_lacks_names_the_tensor():
    with pytest.raises(UnsupportedModel, match=r"blocks.w: torch .* has no dtype for F6_E2M3"):
        views(manifest([("blocks.w", 0, "F6_E2M3", (4,), None, 0, 0)], [(0, 0, 3)]), [chunk()])


@pytest.mark.parametrize(
    ("shape", "strides"), [((2, 3), None), ((), None), ((2, 4), (4, 1))], ids=str
)
def test_half_a_pair_of_packed_values_is_refused_by_name(shape, strides):
    with pytest.raises(UnsupportedModel, match="w: torch keeps F4 values in pairs"):
        views(manifest([("w", 0, "F4", shape, strides, 0, 0)], [(0, 0, 512)]), [chunk()])


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_empty_tensors_keep_their_shape(shape):
    made = views(manifest([("w", 0, "BF16", shape, None, 0, 0)], [(0, 0, 0)]), [chunk()])["w"]
    assert (made.shape, made.dtype) == (shape, torch.bfloat16)


def test_a_scalar_has_no_dimensions():
    base = chunk()
    made = views(manifest([("w", 0, "U8", (), None, 0, 5)], [(0, 512, 8)]), [base])["w"]
    assert (made.shape, int(made)) == ((), int(base[517]))


def test_strides_offsets_and_shared_storage_are_kept():
    base = chunk()
    rows = [
        ("whole", 0, "I16", (8, 8), None, 0, 0),
        ("transposed", 0, "I16", (8, 8), (1, 8), 0, 0),
        ("column", 0, "I16", (8,), (8,), 0, 3),
    ]
    made = views(manifest(rows, [(0, 1024, 128)], aliases={"tied": "whole"}), [base])
    assert torch.equal(made["transposed"], made["whole"].T)
    assert torch.equal(made["column"], made["whole"][:, 3])
    assert made["tied"] is made["whole"]
    base[1024] = 255 - base[1024]
    assert torch.equal(made["transposed"], made["whole"].T)


def test_a_chunk_need_not_end_where_a_value_does():
    base = chunk(515)
    made = views(manifest([("w", 0, "C64", (64,), None, 0, 0)], [(0, 0, 512)], nbytes=515), [base])
    assert bytes(made["w"].view(torch.uint8).numpy()) == bytes(base[:512].numpy())


def test_tensors_of_many_chunks_and_storages_are_where_the_manifest_says():
    chunks = [chunk(), chunk() + 1]
    rows = [
        ("a", 0, "I32", (2, 3, 4), None, 0, 2),
        ("b", 1, "I32", (5,), None, 1, 0),
        ("c", 2, "F64", (1, 3), (0, 2), 2, 1),
    ]
    storages = [(0, 1024, 104), (1, 0, 20), (1, 512, 48)]
    names, kinds, codes, shapes, strides, of, skip = zip(*rows, strict=True)
    made = Manifest(
        generation="a" * 32,
        layout=1,
        backend="host",
        chunks=(8192, 8192),
        storages=Storages(*map(list, zip(*storages, strict=True))),
        tensors=Tensors(
            *map(list, (names, kinds, [dtypes.CODES[c] for c in codes], shapes, strides, of, skip))
        ),
        key={},
        recipe=Recipe({}, ()),
    )
    check(made)
    found = views(made, chunks)
    places = {name: (0 if name == "a" else 1, found[name].data_ptr()) for name in found}
    starts = {name: address - chunks[index].data_ptr() for name, (index, address) in places.items()}
    assert starts == {"a": 1024 + 8, "b": 0, "c": 512 + 8}
    assert found["a"].is_contiguous()
    assert (found["a"].stride(), found["c"].stride()) == ((12, 4, 1), (0, 2))
    doubles = chunks[1][512:560].view(torch.float64)
    assert torch.equal(found["c"][0].view(torch.int64), doubles[1::2].view(torch.int64)[:3])


def test_a_live_tensor_keeps_its_mapping(tmp_path):
    (tmp_path / "f").write_bytes(bytes(range(256)) * 16)
    with (tmp_path / "f").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)
    tensor = whole_chunk(memoryview(mapped), "cpu")
    with pytest.raises(BufferError):
        mapped.close()
    assert int(tensor.sum()) == 255 * 128 * 16
    del tensor
    mapped.close()


def test_whether_memory_is_in_use_is_known_without_holding_it():
    tensor = chunk()
    used = in_use(tensor)
    part = tensor.view(torch.int16)[8:16]
    del tensor
    assert used()
    as_numpy = part.numpy()
    del part
    assert used()
    del as_numpy
    assert not used()


# -- devices --


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (None, ""),
        ("cpu", "cpu"),
        ("cuda", "cuda"),
        ("cuda:1", "cuda:1"),
        (torch.device("cuda", 2), "cuda:2"),
        (3, "cuda:3"),
    ],
)
def test_a_device_is_called_as_torch_does(given, name):
    assert device_name(given) == name


@pytest.mark.parametrize("given", ["gpu", "cuda:x", "", 1.5, [0]])
def test_what_is_no_device_is_named(given):
    with pytest.raises(
        ConfigError, match=f"device {given!r} is none that torch knows".replace("[", r"\[")
    ):
        device_name(given)


def test_the_platform_is_what_torch_says_of_itself():
    found = platform()
    assert (found.torch, found.cuda, found.hip) == (
        torch.__version__,
        torch.version.cuda,
        torch.version.hip,
    )
    assert found.sees_gpu == torch.cuda.is_available()


def test_what_torch_cannot_use_is_an_error_of_ours():
    with pytest.raises(DeviceFailed, match="torch cannot use the weights mapped on cpu: "):
        device_chunk(object(), "cpu")


class Elsewhere(list):
    """Bytes that torch copies, instead of using them where they are."""

    address, nbytes = 1, 4


def test_a_silent_copy_is_noticed():
    with pytest.raises(DeviceFailed, match="torch copied mapped weights to cpu"):
        device_chunk(Elsewhere([1, 2, 3, 4]), "cpu")


GIB = 1 << 30


def room():
    return 2 * GIB, "GPU-1 (card), where pid 7 (python) holds 130.0 GiB,"


FULL = "CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of 139.80 GiB\nmore"


def out_of_memory_by_the_driver():
    error = torch.AcceleratorError("CUDA error: out of memory\nmore")
    error.error_code = 2
    return error


@pytest.mark.parametrize(
    ("error", "wanted", "told"),
    [
        (
            torch.OutOfMemoryError(FULL.format("3.50 GiB")),
            7 * GIB // 2,
            (
                "need another 3,758,096,384 bytes but GPU-1 (card), where pid 7 (python) holds "
                "130.0 GiB, leaves 2,147,483,648, so at least 1,610,612,736 are missing"
            ),
        ),
        (
            torch.OutOfMemoryError(FULL.format("20.00 MiB")),
            20 << 20,
            (
                "GiB, with 2,147,483,648 bytes free, by a limit of torch's own, or in pieces too "
                "small, leaves 0, so at least 20,971,520 are missing"
            ),
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory."),
            0,
            (
                "CUDA out of memory.: GPU-1 (card), where pid 7 (python) holds 130.0 GiB, leaves "
                "2,147,483,648 bytes, too few for that: "
            ),
        ),
        (out_of_memory_by_the_driver(), 0, "CUDA error: out of memory: GPU-1 (card), where pid 7"),
    ],
)
def test_memory_that_torch_does_not_get_is_told_with_who_has_it(error, wanted, told):
    with pytest.raises(OutOfRoom) as caught, explained(room):
        raise error
    assert told in str(caught.value)
    assert caught.value.wanted == wanted


def test_memory_of_the_host_is_no_gpus():
    with pytest.raises(OutOfRoom, match="another 1,152,921,504,606,846,976 bytes") as caught:
        with explained(room):
            torch.empty(1 << 60, dtype=torch.uint8)
    assert "missing" in str(caught.value)
    assert "GPU" not in str(caught.value)


def test_memory_of_the_host_that_python_does_not_get_is_no_gpus_either():
    with pytest.raises(
        OutOfRoom, match=r"^MemoryError: .* leaves [\d,]+ bytes, .*`ulimit -v`"
    ) as caught:
        with explained(room):
            raise MemoryError
    assert not re.search("GPU|engines|gpu_memory_utilization", str(caught.value))


def test_a_gpu_that_fails_under_torch_names_where_to_look():
    with pytest.raises(DeviceFailed, match=r"^CUDA error: unspecified.*: look for the GPU driver"):
        with explained(room):
            raise torch.AcceleratorError("CUDA error: unspecified launch failure\nmore")


def test_what_else_torch_says_is_left_as_it_is():
    with pytest.raises(RuntimeError, match="shape"), explained(room):
        torch.empty(3).view(2, 2)


class OnGpu(SimpleNamespace):
    """A chunk on a GPU that nobody may copy."""

    is_cuda, nbytes, device = True, 2 * GIB, "cuda:0"


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with 1 GiB that is free, and as much that torch keeps."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * GIB)


@pytest.mark.usefixtures("gpu")
def test_copies_that_do_not_fit_a_gpu_are_refused_before_the_first_is_made():
    with pytest.raises(OutOfRoom) as caught:
        copies([OnGpu(clone=pytest.fail), OnGpu(clone=pytest.fail)], room)
    assert (caught.value.wanted, caught.value.free) == (4 * GIB, 2 * GIB)
    assert "need 4,294,967,296 bytes but GPU-1 (card), where pid 7 (python)" in str(caught.value)


@pytest.mark.usefixtures("gpu")
def test_a_copy_that_torch_does_not_make_is_told_as_a_part():
    def clone():
        raise torch.OutOfMemoryError(FULL.format("2.00 GiB"))

    with pytest.raises(OutOfRoom, match=r"another 2,147,483,648 .* leaves 0, so at least 2,147"):
        copies([OnGpu(clone=clone)], room)


def test_copies_are_others_with_the_same_bytes():
    one = chunk()
    (other,) = copies([one], room)
    assert torch.equal(one, other)
    assert one.data_ptr() != other.data_ptr()
