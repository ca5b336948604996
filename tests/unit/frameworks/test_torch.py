import mmap

import pytest
import torch

from preloadd.domain import dtypes
from preloadd.domain.manifest import Manifest, Storages, Tensors, check
from preloadd.domain.recipe import Recipe
from preloadd.errors import UnsupportedModel
from preloadd.frameworks.torch import DTYPES, host_chunk, view, views


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
        view(chunk(), 0, name="w", dtype="F4", shape=shape, strides=strides)


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


def test_a_live_tensor_keeps_its_mapping(tmp_path):
    (tmp_path / "f").write_bytes(bytes(range(256)) * 16)
    with (tmp_path / "f").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)
    tensor = host_chunk(memoryview(mapped))
    with pytest.raises(BufferError):
        mapped.close()
    assert int(tensor.sum()) == 255 * 128 * 16
    del tensor
    mapped.close()
