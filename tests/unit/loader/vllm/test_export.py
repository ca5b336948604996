"""Models of torch alone, into host memory and back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from preloadd.domain.manifest import ALIGNMENT, Kind, Manifest, check
from preloadd.domain.recipe import LAYOUT, Recipe
from preloadd.errors import UnsupportedModel
from preloadd.frameworks.torch import host_chunk, views
from preloadd.frameworks.vllm import walk
from preloadd.linux import seqpacket
from preloadd.loader.report import Reporter
from preloadd.loader.vllm.built import Built
from preloadd.loader.vllm.export import Export, artifact, describe, store
from preloadd.memory.host import HostFiller, HostKeeper, HostMapper
from preloadd.protocol import codec
from preloadd.protocol import messages as m
from preloadd.transport.blocking import Link

MIB = 1 << 20


class Kernel:
    """Stands for an object of vLLM, as which its class's module marks it."""

    def __init__(self, **has):
        vars(self).update(has)


Kernel.__module__ = "vllm.kernels"


def described(model: nn.Module) -> Export:
    modules = walk.modules_of(model)
    tensors = list(walk.registered(modules))
    names = frozenset(found.name for found in tensors)
    return describe(Built(model, walk.outline(modules, tensors), names))


@dataclass
class Stored:
    """What came of a model. `reports` is what the rank heard, `tensors` what an engine would see,
    to be used while the block lasts."""

    export: Export
    manifest: Manifest
    reports: list
    tensors: dict[str, torch.Tensor]


@contextmanager
def stored(model: nn.Module, chunk_bytes: int = MIB) -> Iterator[Stored]:
    """The model in chunks; nothing of it may be used any more."""
    with ExitStack() as undo:
        ours, theirs = seqpacket.pair()
        rank = Link(ours)
        undo.callback(rank.close)
        export = described(model)
        with theirs:
            done = store(export, HostFiller(), chunk_bytes, Reporter(Link(theirs), clock=lambda: 0))
        reports, fds = [], []
        while not (packet := rank.receive()).eof:
            reports.append(codec.decode_report(packet.data))
            fds += packet.fds
        for fd in fds:
            undo.callback(fd.close)
        manifest = Manifest(
            generation="a" * 32,
            layout=LAYOUT,
            backend="host",
            chunks=done.chunks,
            storages=done.storages,
            tensors=export.tensors,
            key={},
            recipe=Recipe({}, ()),
            aliases=export.aliases,
        )
        check(manifest)
        for fd, nbytes in zip(fds, done.chunks, strict=True):
            HostKeeper().seal(fd.fileno(), nbytes)
        mapping = HostMapper().map(list(zip(fds, done.chunks, strict=True)))
        undo.callback(mapping.close)
        chunks = [host_chunk(mapping.chunk(index)) for index in range(len(fds))]
        made = Stored(export, manifest, reports, views(manifest, chunks))
        del chunks
        yield made
        made.tensors.clear()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its values, whatever their type."""
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    modules = walk.modules_of(model)
    found = {one.name: one.tensor for one in walk.registered(modules)}
    return found | dict(walk.beside(modules))


def kinds(manifest: Manifest) -> dict[str, Kind]:
    columns = manifest.tensors
    return {name: Kind(kind) for name, kind in zip(columns.name, columns.kind, strict=True)}


def parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def test_a_model_comes_back_by_name_and_kind():
    model = nn.Module()
    model.proj = nn.Linear(3, 5)
    model.register_buffer("scale", torch.tensor(2.5))
    model.register_buffer("angles", torch.rand(4, dtype=torch.float64), persistent=False)
    model.proj.impl = Kernel(tables=[torch.arange(6)])
    model.proj.register_parameter("zero_point", None)
    wanted = {name: bits(tensor) for name, tensor in everything(model).items()}
    with stored(model) as made:
        assert kinds(made.manifest) == {
            "proj.weight": Kind.PARAMETER,
            "proj.bias": Kind.PARAMETER,
            "scale": Kind.BUFFER,
            "angles": Kind.NON_PERSISTENT_BUFFER,
            "proj::impl.tables[0]": Kind.HIDDEN,
        }
        assert {name: bits(one).tolist() for name, one in made.tensors.items()} == {
            name: one.tolist() for name, one in wanted.items()
        }
        assert made.tensors["proj.weight"].shape == (5, 3)
        assert made.tensors["scale"].shape == ()
        assert made.manifest.aliases == {}
        told = artifact(made.export)
        assert (told.kind, told.name) == ("vllm", "model.json")
        found = json.loads(told.data)
        assert len(found.pop("outline")) == 32
        assert found == {
            "on_host": [],
            "empty": ["proj.zero_point"],
            "gone": [],
            "blank": [],
            "state": {},
        }


def test_room_to_work_in_is_told_by_its_zeros():
    model = nn.Module()
    model.room, model.used = torch.zeros(4, 2), torch.tensor([0.0, 1.0])
    model.impl = Kernel(more=torch.zeros(2), one=torch.zeros(()), turned=torch.zeros(2, 3).t())
    model.register_buffer("buffer", torch.zeros(2))
    model.weight = parameter(torch.zeros(2))
    assert described(model).blank == ["::room", "::impl.more"]


def test_originals_are_freed():
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(1 << 16), requires_grad=False)
    model.register_buffer("view", model.weight.data[7:])
    model.impl = Kernel(scale=torch.ones(9))
    storages = [t.untyped_storage() for t in (model.weight, model.view, model.impl.scale)]
    with stored(model):
        assert [storage.nbytes() for storage in storages] == [0, 0, 0]


def test_what_is_no_plain_memory_is_refused_by_name():
    freed, lazy = nn.Module(), nn.Module()
    freed.w = nn.Parameter(torch.ones(8), requires_grad=False)
    freed.w.untyped_storage().resize_(0)
    lazy.register_buffer("c", torch.tensor([1 + 2j], dtype=torch.complex64).conj())
    with pytest.raises(UnsupportedModel, match=r"^w reaches past"):
        described(freed)
    with pytest.raises(UnsupportedModel, match=r"^c is conjugated"):
        described(lazy)


def test_parameters_come_before_all_that_engines_copy():
    model = nn.Module()
    model.scale = torch.ones(3)
    model.register_buffer("first", torch.ones(3))
    model.inner = nn.Linear(2, 2)
    model.inner.register_buffer("second", torch.ones(3))
    model.last = nn.Linear(2, 2)
    with stored(model) as made:
        found = list(kinds(made.manifest).values())
        assert found == sorted(found)
        assert found.count(Kind.PARAMETER) == 4
        assert made.manifest.tensors.storage == sorted(made.manifest.tensors.storage)


def test_tied_modules_and_tensors_are_stored_once():
    model = nn.Module()
    model.embed = nn.Linear(4, 8, bias=False)
    model.head = model.embed
    model.other = nn.Module()
    model.other.weight = model.embed.weight
    model.impl = Kernel(weight=model.embed.weight)
    with stored(model) as made:
        assert made.manifest.tensors.name == ["embed.weight"]
        assert made.manifest.aliases == {
            "head.weight": "embed.weight",
            "other.weight": "embed.weight",
            "::impl.weight": "embed.weight",
        }
        assert made.export.sizes == [128]


def test_a_parameter_that_is_also_hidden_or_a_buffer_is_a_parameter():
    model = nn.Module()
    model.inner = nn.Module()
    one = parameter(torch.rand(3))
    model.register_buffer("first", one)
    model.inner.weight = one
    with stored(model) as made:
        assert kinds(made.manifest) == {"inner.weight": Kind.PARAMETER}
        assert made.manifest.aliases == {"first": "inner.weight"}


def test_views_of_one_storage_are_stored_as_one():
    """As attention with latent keys leaves them: three tensors in one, none of them all of it."""
    base = torch.arange(64 * 40, dtype=torch.bfloat16).view(64, 40)
    model = nn.Module()
    model.whole = parameter(base[8:])
    model.turned = parameter(base[8:40].T)
    model.padded = parameter(base[8:, 3:20])
    model.register_buffer("row", base[9])
    model.spread = base[10].expand(3, 40)
    wanted = {name: (bits(one), one.stride()) for name, one in everything(model).items()}
    assert len(wanted) == 5
    with stored(model) as made:
        (size,) = made.export.sizes
        # From where the first begins, down to a multiple of what storages are aligned to.
        assert size == base.nbytes - 8 * 80 // ALIGNMENT * ALIGNMENT
        for name, (content, strides) in wanted.items():
            assert made.tensors[name].stride() == strides
            assert torch.equal(bits(made.tensors[name]), content), name
        columns = dict(zip(made.manifest.tensors.name, made.manifest.tensors.strides, strict=True))
        assert columns == {
            "whole": None,
            "turned": (1, 40),
            "padded": (40, 1),
            "row": None,
            "::spread": (0, 1),
        }


def test_only_the_part_of_a_storage_that_is_used_is_stored():
    base = torch.arange(4096, dtype=torch.int32)
    model = nn.Module()
    model.late = parameter(base[1030:1034])
    content = bits(model.late)
    with stored(model) as made:
        assert made.export.sizes == [4 * 1034 - 4096]
        assert torch.equal(bits(made.tensors["late"]), content)
        assert made.manifest.tensors.skip == [6]


def test_tensors_of_other_types_may_share_a_storage():
    base = torch.randint(0, 255, (64,), dtype=torch.uint8)
    model = nn.Module()
    model.packed = parameter(base[:48])
    model.register_buffer("scales", base[48:].view(torch.float16))
    wanted = {name: bits(one) for name, one in everything(model).items()}
    with stored(model) as made:
        assert made.export.sizes == [64]
        assert made.tensors["scales"].dtype is torch.float16
        assert all(torch.equal(bits(made.tensors[name]), wanted[name]) for name in wanted)


def test_pairs_of_4_bit_values():
    model = nn.Module()
    base = torch.randint(0, 255, (6, 8), dtype=torch.uint8)
    pairs = torch.float4_e2m1fn_x2
    model.weight = parameter(base.view(pairs))
    model.part = parameter(base[2:].view(pairs))
    wanted = {name: bits(one.view(torch.uint8)) for name, one in everything(model).items()}
    with stored(model) as made:
        assert dict(zip(made.manifest.tensors.name, made.manifest.tensors.shape, strict=True)) == {
            "weight": (6, 16),
            "part": (4, 16),
        }
        assert made.manifest.tensors.skip == [0, 32]
        for name, content in wanted.items():
            assert made.tensors[name].dtype is pairs
            assert torch.equal(bits(made.tensors[name].view(torch.uint8)), content)


def test_tensors_without_elements_or_storage():
    model = nn.Module()
    model.none = parameter(torch.empty(0, 3))
    model.gone = parameter(torch.empty(0))
    model.weight = parameter(torch.ones(4))
    model.register_buffer("slice", model.weight.data[4:])
    with stored(model) as made:
        assert made.tensors["none"].shape == (0, 3)
        assert made.tensors["gone"].shape == made.tensors["slice"].shape == (0,)
        assert made.tensors["weight"].tolist() == [1.0] * 4


def test_a_model_without_tensors_still_has_a_chunk():
    with stored(nn.Identity()) as made:
        assert len(made.manifest.chunks) == 1
        assert made.tensors == {}


# ---- what is refused


def _meta():
    return parameter(torch.empty(3, device="meta"))


REFUSED = {
    "without-memory": (_meta, "no memory: vLLM loaded nothing into it"),
    "complex": (
        lambda: parameter(torch.zeros(2, dtype=torch.complex128)),
        r"a tensor of torch\.complex128",
    ),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        r"a tensor of torch\.qint8",
    ),
    "sparse": (lambda: torch.eye(3).to_sparse(), r"a tensor of torch\.float32 \(torch\.sparse_coo"),
    "pairs with gaps": (
        lambda: torch.zeros(4, 6, dtype=torch.uint8)[:, :4].view(torch.float4_e2m1fn_x2),
        "pairs of 4-bit values with gaps",
    ),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("where", ["registered", "hidden"])
def test_what_has_no_place_in_an_arena_is_refused_by_name(what, where):
    made, told = REFUSED[what]
    model = nn.Module()
    model.fine = parameter(torch.ones(2))
    model.layer = nn.Module()
    if where == "registered":
        model.layer.register_buffer("bad", made())
        name = r"layer\.bad"
    else:
        model.layer.impl = Kernel(bad=made())
        name = r"layer::impl\.bad"
    with pytest.raises(UnsupportedModel, match=f"^{name}.*{told}"):
        described(model)
    assert model.fine.tolist() == [1.0, 1.0]


# ---- chunks


def test_what_goes_into_several_chunks():
    model = nn.Module()
    for number in range(6):
        model.register_parameter(f"w{number}", parameter(torch.full((1500,), float(number))))
    model.register_buffer("large", torch.arange(5000, dtype=torch.int32))
    with stored(model, chunk_bytes=16384) as made:
        assert made.manifest.chunks == (12288, 12288, 12288, 20480)
        assert [made.manifest.locate(f"w{number}")[0] for number in range(6)] == [0, 0, 1, 1, 2, 2]
        assert made.tensors["large"].tolist() == list(range(5000))
        assert all(made.tensors[f"w{number}"].unique().tolist() == [number] for number in range(6))
        filled = [one for one in made.reports if isinstance(one, m.ChunkFilled)]
        assert filled == [
            m.ChunkFilled(index=index, nbytes=nbytes)
            for index, nbytes in enumerate(made.manifest.chunks)
        ]
        told = [one for one in made.reports if isinstance(one, m.Progress)]
        total = 6 * 6000 + 20000
        assert (told[0].phase, told[0].done, told[0].total) == ("storing", 0, total)
        assert told[-1].done == total


def test_originals_that_are_not_torchs_own_stay():
    content = bytearray(range(64))
    model = nn.Module()
    model.weight = parameter(torch.frombuffer(content, dtype=torch.uint8))
    with stored(model) as made:
        assert made.tensors["weight"].tolist() == list(range(64))
    assert content == bytearray(range(64))


# ---- any model

TYPES = [torch.uint8, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64]


@st.composite
def tensors(draw):
    """Views of a few storages: of any type and strides, some of them without elements."""
    seed = draw(st.integers(0, 1 << 16))
    chance = torch.Generator().manual_seed(seed)
    bases = [
        torch.randint(0, 2, (8 * draw(st.integers(0, 400)),), dtype=torch.uint8, generator=chance)
        for _ in range(draw(st.integers(1, 3)))
    ]
    made = []
    for _ in range(draw(st.integers(1, 6))):
        base = draw(st.sampled_from(bases))
        dtype = draw(st.sampled_from(TYPES))
        seen = base.view(dtype)
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        strides = tuple(draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape))))
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if 0 in shape or extent > len(seen):
            made.append(seen)
        else:
            skip = draw(st.integers(0, len(seen) - extent))
            made.append(seen.as_strided(shape, strides, skip))
    return made


@st.composite
def models(draw):
    model = nn.Module()
    inner = [model]
    for number in range(draw(st.integers(0, 3))):
        module = nn.Module()
        setattr(draw(st.sampled_from(inner)), f"m{number}", module)
        inner.append(module)
    if len(inner) > 1 and draw(st.booleans()):
        model.tied = inner[-1]
    for number, tensor in enumerate(draw(tensors())):
        home = draw(st.sampled_from(inner))
        for copy in range(draw(st.integers(1, 2))):
            leaf = f"t{number}_{copy}"
            match draw(st.sampled_from(["parameter", "buffer", "passing", "plain", "object"])):
                case "parameter":
                    home.register_parameter(leaf, parameter(tensor))
                case "buffer":
                    home.register_buffer(leaf, tensor)
                case "passing":
                    home.register_buffer(leaf, tensor, persistent=False)
                case "plain":
                    vars(home)[leaf] = [tensor]
                case "object":
                    vars(home)[leaf] = Kernel(x=tensor)
    return model


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(1, 4096))
def test_every_tensor_of_any_model_comes_back_as_it_was(model, chunk_bytes):
    before = everything(model)
    wanted = {name: bits(one) for name, one in before.items()}
    looks = {name: (one.dtype, one.shape, one.stride()) for name, one in before.items()}
    places = {name: one.untyped_storage().data_ptr() for name, one in before.items() if one.numel()}
    same = {name: id(one) for name, one in before.items()}
    held = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in before.values()}
    most = sum(storage.nbytes() for storage in held.values())
    with stored(model, chunk_bytes) as made:
        assert made.tensors.keys() == wanted.keys()
        for name, tensor in made.tensors.items():
            dtype, shape, strides = looks[name]
            assert (tensor.dtype, tensor.shape) == (dtype, shape)
            assert tensor.is_contiguous() or tensor.stride() == strides
            assert torch.equal(bits(tensor), wanted[name]), name
        assert sum(made.export.sizes) <= most
        rows = made.manifest.tensors
        of = dict(zip(rows.name, rows.storage, strict=True))
        of |= {alias: of[name] for alias, name in made.manifest.aliases.items()}
        pairs = {(places[name], of[name]) for name in places}
        assert max(Counter(place for place, _ in pairs).values(), default=0) <= 1
        assert max(Counter(run for _, run in pairs).values(), default=0) <= 1
        for alias, name in made.manifest.aliases.items():
            assert same[alias] == same[name]
        assert len(rows.name) == len(set(same.values()))
        del tensor
