"""Stand-ins for objects of vLLM are told by the module of their class, as the real ones are."""

from collections import OrderedDict, namedtuple
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from preloadd.domain.manifest import Kind
from preloadd.frameworks.vllm import walk


class Kernel:
    """An object beside a module: what it is given are its attributes."""

    def __init__(self, **has):
        vars(self).update(has)


Kernel.__module__ = "vllm.model_executor.kernels"


class Setting(Kernel):
    pass


Setting.__module__ = "vllm.config.model"


class Stranger(Kernel):
    pass


Stranger.__module__ = "somewhere.else"


class Slotted:
    __slots__ = ("scale",)


Slotted.__module__ = "vllm.attention"


def tensor() -> torch.Tensor:
    return torch.zeros(2)


def hidden(model: nn.Module) -> dict[str, torch.Tensor]:
    """What is found beside, each name once."""
    found = list(walk.beside(walk.modules_of(model)))
    assert len({name for name, _ in found}) == len(found)
    return dict(found)


def names(model: nn.Module) -> dict[str, Kind]:
    found = list(walk.registered(walk.modules_of(model)))
    assert len({one.name for one in found}) == len(found)
    return {one.name: one.kind for one in found}


class Model(nn.Module):
    """A bias that is none, buffers of both kinds and one that is none, a tied module."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, 3, bias=False)
        self.inner = nn.Module()
        self.inner.head = self.embed
        self.inner.register_buffer("scale", torch.ones(1))
        self.inner.register_buffer("angles", torch.ones(4), persistent=False)
        self.inner.register_buffer("map", None)
        self.inner.register_buffer("passing", None, persistent=False)
        self.own = nn.Parameter(torch.ones(1))


# ---- parameters and buffers


def test_parameters_and_buffers_come_under_all_their_names():
    model = Model()
    assert names(model) == {
        "own": Kind.PARAMETER,
        "embed.weight": Kind.PARAMETER,
        "inner.head.weight": Kind.PARAMETER,
        "inner.scale": Kind.BUFFER,
        "inner.angles": Kind.NON_PERSISTENT_BUFFER,
    }
    found = {one.name: one.tensor for one in walk.registered(walk.modules_of(model))}
    assert found["embed.weight"] is found["inner.head.weight"] is model.embed.weight


def test_what_is_registered_but_none_is_told_for_each_name():
    model = Model()
    assert sorted(walk.empty_names(walk.modules_of(model))) == [
        "embed.bias",
        "inner.head.bias",
        "inner.map",
        "inner.passing",
    ]
    model.register_parameter("bias", None)
    assert "bias" in walk.empty_names(walk.modules_of(model))
    assert walk.empty_names(walk.modules_of(nn.Identity())) == []


# ---- beside


def test_attributes_lists_tuples_dicts_and_objects_of_vllm_are_looked_into():
    model = nn.Module()
    model.inner = nn.Module()
    put = {
        "::scale": tensor(),
        "::tables[0]": tensor(),
        "::tables[2]": tensor(),
        "::pair[1]": tensor(),
        "::named['a.b c']": tensor(),
        "::named['']": tensor(),
        "inner::impl.scale": tensor(),
        "inner::impl.parts[1]['x']": tensor(),
        "inner::impl.kernel.scale": tensor(),
    }
    model.scale = put["::scale"]
    model.tables = [put["::tables[0]"], None, put["::tables[2]"]]
    model.pair = (1, put["::pair[1]"])
    model.named = {"a.b c": put["::named['a.b c']"], "": put["::named['']"]}
    model.inner.impl = Kernel(
        scale=put["inner::impl.scale"],
        parts=[0, {"x": put["inner::impl.parts[1]['x']"]}],
        kernel=Kernel(scale=put["inner::impl.kernel.scale"]),
    )
    found = hidden(model)
    assert found.keys() == put.keys()
    assert all(found[name] is put[name] for name in put)


def test_containers_of_other_types_that_are_lists_dicts_or_tuples_are_looked_into():
    model = nn.Module()
    model.pair = namedtuple("Pair", "one other")(tensor(), 2)  # noqa: PYI024
    model.ordered = OrderedDict(a=tensor())
    assert list(hidden(model)) == ["::pair[0]", "::ordered['a']"]


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(Stranger(scale=tensor()), id="of-somebody-else"),
        pytest.param(Setting(scale=tensor()), id="a-configuration-of-vllm"),
        pytest.param(Kernel, id="a-class"),
        pytest.param(partial(print, tensor()), id="a-partial"),
        pytest.param({tensor()}, id="a-set"),
        pytest.param({1: tensor(), "it's": tensor(), "a\\b": tensor()}, id="keys-without-a-name"),
        pytest.param(Slotted(), id="without-attributes"),
        pytest.param(Kernel(__of_python__=tensor()), id="an-attribute-of-python-itself"),
        pytest.param([None] * walk._LONGEST + [tensor()], id="longer-than-what-is-looked-into"),
        pytest.param([[[[tensor()]]]], id="too-deep"),
        pytest.param(Kernel(a=Kernel(b=Kernel(c=Kernel(d=tensor())))), id="too-deep-objects"),
    ],
)
def test_what_is_not_looked_into(value):
    model = nn.Module()
    model.value = value
    assert hidden(model) == {}


def test_the_deepest_that_is_looked_into():
    model = nn.Module()
    model.a = Kernel(b=Kernel(c=Kernel(d=tensor())))
    model.one = [[[tensor()]]]
    assert list(hidden(model)) == ["::a.b.c.d", "::one[0][0][0]"]


def test_attributes_that_torch_gives_every_module_are_not_hidden():
    assert hidden(Model()) == {}


def test_objects_that_refer_to_each_other_end():
    model = nn.Module()
    one, other = Kernel(scale=tensor()), Kernel(scale=tensor())
    one.other, other.other = other, one
    one.self, one.layer = one, model
    model.impl = one
    assert list(hidden(model)) == ["::impl.scale", "::impl.other.scale"]


def test_a_list_that_holds_itself_ends():
    model = nn.Module()
    model.all = [tensor()]
    model.all.append(model.all)
    assert list(hidden(model)) == ["::all[0]"]


def test_a_shared_object_is_named_by_where_it_is_found_first():
    model = nn.Module()
    model.first, model.second = nn.Module(), nn.Module()
    shared = Kernel(scale=tensor())
    model.first.impl = model.second.impl = shared
    assert list(hidden(model)) == ["first::impl.scale"]


def test_a_shared_tensor_comes_under_every_name():
    model = nn.Module()
    model.one = model.other = tensor()
    model.impl = Kernel(both=[model.one])
    assert list(hidden(model)) == ["::one", "::other", "::impl.both[0]"]


def test_a_tied_module_hides_tensors_under_its_first_name_only():
    model = Model()
    model.embed.tables = [tensor()]
    assert list(hidden(model)) == ["embed::tables[0]"]


def test_modules_are_not_looked_into_from_objects_but_their_tensors_may_be_held():
    model = Model()
    model.impl = Kernel(layer=model.embed, weight=model.embed.weight, map=model.inner.scale)
    found = hidden(model)
    assert list(found) == ["::impl.weight", "::impl.map"]
    assert found["::impl.weight"] is model.embed.weight
    assert found["::impl.map"] is model.inner.scale


# ---- and back

leaves = st.builds(tensor) | st.none() | st.integers(0, 3) | st.just("text")
words = st.text("abcxyz_", min_size=1, max_size=4).filter(lambda name: name[:2] != "__")
keys = st.text(st.characters(exclude_characters="'\\", codec="utf-8"), max_size=4)


def branches(inner):
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(words, inner, max_size=3).map(lambda has: Kernel(**has))
    )


nested = st.recursive(leaves, branches, max_leaves=12)


def expected(value, path, depth):
    """Ways to tensors, without what `walk` does to find them."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    if depth == 1:
        return {}
    if isinstance(value, Kernel):
        parts = [(f".{name}", inner) for name, inner in vars(value).items()]
    elif isinstance(value, dict):
        parts = [(f"['{name}']", inner) for name, inner in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [(f"[{index}]", inner) for index, inner in enumerate(value)]
    else:
        parts = []
    found = {}
    for step, inner in parts:
        found |= expected(inner, path + step, depth - 1)
    return found


@given(st.dictionaries(words, nested, max_size=3))
def test_every_tensor_that_is_found_is_found_again_by_its_name_and_can_be_replaced(given_):
    model = nn.Module()
    model.inner = nn.Module()
    vars(model.inner).update({f"x{name}": value for name, value in given_.items()})
    found = hidden(model)
    wanted = {}
    for name, value in given_.items():
        wanted |= expected(value, f"inner::x{name}", 4)
    assert found.keys() == wanted.keys()
    modules = walk.modules_of(model)
    for name, there in found.items():
        assert there is wanted[name]
        holder, step = walk.look_up(modules, name)
        assert walk.value_at(holder, step) is there
        another = torch.ones(1)
        if isinstance(holder, tuple):
            with pytest.raises(LookupError, match="a tuple takes no tensor"):
                walk.put_hidden(holder, step, another)
            assert walk.value_at(holder, step) is there
        else:
            walk.put_hidden(holder, step, another)
            assert walk.value_at(holder, step) is another
            assert hidden(model)[name] is another


@pytest.mark.parametrize(
    "name",
    [
        *("::none.scale", "::tables[7][0]", "::named['b']['c']", "::tables.at.x", "::impl[0].x"),
        *("gone::scale", "::a..b", "::[x]", "::impl.", "::named[b]", "::-", "::", "plain"),
    ],
)
def test_ways_that_do_not_exist_are_no_ways(name):
    model = nn.Module()
    model.tables, model.named, model.impl = [tensor()], {"a": tensor()}, Kernel()
    with pytest.raises(LookupError):
        walk.look_up(walk.modules_of(model), name)


class Scaled(Kernel):
    """Has things by its class: one that is set to anything, one that is nothing yet, and code."""

    asked = ()
    late = None

    @property
    def live(self):
        type(self).asked += ("live",)

    @live.setter
    def live(self, value):
        type(self).asked += (value,)


Scaled.__module__ = Kernel.__module__


def away() -> nn.Module:
    """A module from which a daemon would like to get further."""
    model = nn.Module()
    model.inner = nn.Linear(1, 1)
    model.impl = Scaled(
        setting=Setting(flag=1),
        stranger=Stranger(flag=1),
        layer=model.inner,
        call=away,
        short=partial(print, {"a": 1}),
        by_number={0: [0]},
        far=Kernel(b=Kernel(c=Kernel(d=1))),
        many=[[0]] * (walk._LONGEST + 1),
        named={str(key): [] for key in range(walk._LONGEST + 1)},
    )
    return model


@pytest.mark.parametrize(
    "path",
    [
        *("__dict__['inner']", "__class__.late", "__class__", "impl.__class__.late"),
        *("impl.__class__", "impl.__dict__['far']", "impl.__init__.__globals__['walk']"),
        *("_parameters['weight']", "_modules", "training", "forward.__globals__['torch']"),
        *("inner.weight", "impl.layer.weight", "impl.layer.x", "impl.setting.flag"),
        *("impl.stranger.flag", "impl.call.__globals__['torch']", "impl.short.args[0]['a']"),
        *("impl.live.x", "impl.far.b.c.d", "impl.many[0]", "impl.named['0']", "impl.late.x"),
        *("impl.by_number[0]", "impl.by_number[0][0]", "impl[0]", "[0]", "impl.setting.other"),
    ],
)
def test_a_daemon_names_nothing_that_is_not_looked_into(path):
    with pytest.raises(LookupError):
        walk.look_up(walk.modules_of(away()), f"::{path}")
    assert Scaled.asked == ()


def test_what_a_class_has_is_neither_asked_nor_set():
    model = away()
    modules = walk.modules_of(model)
    holder, step = walk.look_up(modules, "::impl.live")
    assert walk.value_at(holder, step) is Scaled.live
    walk.put_hidden(holder, step, tensor())
    assert Scaled.asked == ()
    assert walk.value_at(*walk.look_up(modules, "::impl.late")) is None
    assert walk.value_at(*walk.look_up(modules, "::forward")) is nn.Module.forward
    assert walk.value_at(*walk.look_up(modules, "::inner")) is model.inner
    assert walk.value_at(*walk.look_up(modules, "inner::weight")) is model.inner.weight


# ---- left without content


def meta() -> torch.Tensor:
    return torch.empty(2, device="meta")


def enclosing(value):
    def call():
        return value

    return call


def enclosing_nothing():
    def call():
        return value

    if call is None:
        value = 1
    return call


class Bound(Kernel):
    def call(self):
        pass


Bound.__module__ = Kernel.__module__


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (meta(), ""),
        (Kernel(scale=meta()), ".scale"),
        (partial(print, 1, meta()), ".args[1]"),
        (partial(print, end=[meta()]), ".keywords['end'][0]"),
        (partial(partial(Bound(scale=meta()).call), 1), ".func.__self__.scale"),
        (enclosing(meta()), ".value"),
        ({"then": enclosing(Kernel(scale=meta()))}, "['then'].value.scale"),
        (Bound(scale=meta()).call, ".__self__.scale"),
    ],
)
def test_tensors_without_content_are_found_in_callables_as_well(value, where):
    model = nn.Module()
    model.inner = nn.Module()
    model.inner.impl = value
    assert list(walk.empty_beside(walk.modules_of(model))) == [f"inner::impl{where}"]


def test_what_has_content_or_is_a_modules_own_is_not_missed():
    model = Model()
    model.register_buffer("none", meta())  # is told of where tensors of modules are
    model.embed.register_parameter("void", nn.Parameter(meta()))
    model.one = partial(print, tensor(), end=tensor())
    model.two = [enclosing(tensor()), enclosing_nothing(), enclosing, model.forward]
    model.three = Kernel(run=Bound(scale=tensor()).call)
    assert list(walk.empty_beside(walk.modules_of(model))) == []


def test_what_callables_keep_is_not_shared():
    model = nn.Module()
    model.value = [enclosing(tensor()), Bound(scale=tensor()).call]
    assert hidden(model) == {}


def test_the_last_step_need_not_exist():
    model = nn.Module()
    model.impl, model.named, model.tables = Kernel(), {}, []
    modules = walk.modules_of(model)
    for name in ("::impl.scale", "::named['a']", "::scale"):
        holder, step = walk.look_up(modules, name)
        assert walk.value_at(holder, step) is None
        walk.put_hidden(holder, step, tensor())
        assert isinstance(walk.value_at(holder, step), torch.Tensor)
    holder, step = walk.look_up(modules, "::tables[0]")
    assert walk.value_at(holder, step) is None
    with pytest.raises(LookupError, match="a list takes no tensor at 0"):
        walk.put_hidden(holder, step, tensor())


def test_a_hidden_tensor_of_a_module_stays_one():
    """Torch would refuse a plain tensor where it has a parameter, and register a parameter."""
    model = nn.Module()
    holder, step = walk.look_up(walk.modules_of(model), "::scale")
    walk.put_hidden(holder, step, nn.Parameter(torch.ones(1)))
    assert names(model) == {}
    assert list(hidden(model)) == ["::scale"]


def test_a_hidden_tensor_takes_the_place_of_a_registered_one():
    """As where vLLM deletes a parameter and sets a plain tensor; it must not go with the former."""
    model = Model()
    holder, step = walk.look_up(walk.modules_of(model), "::own")
    assert walk.value_at(holder, step) is model.own
    walk.put_hidden(holder, step, put := tensor())
    assert model.own is put
    assert "own" not in names(model)


def test_an_object_that_takes_no_such_attribute_takes_no_tensor():
    with pytest.raises(LookupError, match="a Slotted takes no tensor at 'other'"):
        walk.put_hidden(Slotted(), "other", tensor())


# ---- put and remove


@pytest.mark.parametrize("before", ["weight", "scale", "plain", "absent"])
@pytest.mark.parametrize(
    ("made", "persistent", "kind"),
    [
        (nn.Parameter(torch.ones(1)), True, Kind.PARAMETER),
        (torch.ones(1), True, Kind.BUFFER),
        (torch.ones(1), False, Kind.NON_PERSISTENT_BUFFER),
    ],
    ids=["parameter", "buffer", "non-persistent"],
)
def test_a_tensor_takes_the_place_of_whatever_was_there(before, made, persistent, kind):
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(3, device="meta"))
    module.register_buffer("scale", torch.empty(2, device="meta"), persistent=not persistent)
    module.plain = 7
    walk.put(module, before, made, persistent=persistent)
    assert getattr(module, before) is made
    assert names(module)[before] is kind
    saved = {name for name, kind in names(module).items() if kind in (0, 1)}
    assert set(module.state_dict()) == saved


def test_what_is_removed_is_not_there_any_more():
    module = Model()
    module.plain = 7
    for leaf in ("own", "plain", "never-there"):
        walk.remove(module, leaf)
        assert not hasattr(module, leaf)
    walk.remove(module.inner, "angles")
    assert list(names(module)) == ["embed.weight", "inner.scale", "inner.head.weight"]
    # Nor does it make one that comes later non-persistent.
    module.inner.register_buffer("angles", torch.ones(1))
    assert names(module)["inner.angles"] is Kind.BUFFER


def quantised(**has) -> nn.Module:
    model = nn.Module()
    model.quant_method = Kernel(**has)
    return model


def test_plain_values_of_quantised_layers_are_found_by_the_names_of_hidden_tensors():
    model = nn.Module()
    model.proj = quantised(size=48, ratio=0.5, whole=True, none=None, kernel=Kernel(pad=16))
    model.proj.quant_method.kernel.back = model.proj.quant_method
    model.proj.quant_method.away = Stranger(size=1)
    model.proj.quant_method.config = Setting(size=1)
    model.proj.name, model.proj.other = "proj", Kernel(size=1)
    model.other, model.size = Kernel(size=1), 2
    assert walk.plain_values(walk.modules_of(model)) == {
        "proj::name": "proj",
        "proj::quant_method.size": 48,
        "proj::quant_method.ratio": 0.5,
        "proj::quant_method.whole": True,
        "proj::quant_method.none": None,
        "proj::quant_method.kernel.pad": 16,
    }


def test_plain_values_of_a_method_that_is_a_module_are_found():
    class Method(nn.Module):
        pass

    model = nn.Module()
    model.experts, model.quant_method = quantised(), Method()
    model.experts.quant_method = Method()
    model.experts.quant_method.kernel = Kernel(pad=16)
    model.quant_method.size = 3
    assert walk.plain_values(walk.modules_of(model)) == {
        "experts.quant_method::kernel.pad": 16,
        "quant_method::size": 3,
    }


@pytest.mark.parametrize("value", [1 << 40, float("nan"), float("inf"), "x" * 300, [1], b"bytes"])
def test_values_that_mean_nothing_to_others_are_left_out(value):
    assert walk.plain_values(walk.modules_of(quantised(value=value))) == {}


@pytest.mark.parametrize("name", ["::size", "::quant_method.size", "::quant_method.kernel.pad"])
def test_a_plain_value_is_set_where_it_was_found(name):
    model = quantised(size=2, kernel=Kernel(pad=3))
    model.size = 1
    modules = walk.modules_of(model)
    assert name in walk.plain_values(modules)
    holder, step = walk.look_up(modules, name)
    walk.put_plain(holder, step, 48)
    assert walk.value_at(holder, step) == walk.plain_values(modules)[name] == 48


def test_a_list_has_no_plain_value():
    with pytest.raises(LookupError, match="list"):
        walk.put_plain([1], 0, 2)
