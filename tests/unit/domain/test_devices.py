import pytest

from preloadd.domain.devices import VISIBLE, Device, Probe, choose, further_looks, joined
from preloadd.domain.placement import Parallel
from preloadd.errors import NoSuchDevice

A, B, C = (
    f"GPU-{start}-de77-970d-5f91-576155feee6c" for start in ("53b1d48b", "53b2aaaa", "0badc0de")
)
SLICE, OTHER = (A.replace("GPU", "MIG"), B.replace("GPU", "MIG"))
PROBE = Probe(tuple(Device(uuid, "NVIDIA H200") for uuid in (A, B, C)), "580")
WORLD = "data 4 x pipeline 1 x tensor 2 = 8 ranks"


def chosen(probe, wanted, count):
    """Those of a node in the midst of a group."""
    return choose(probe, wanted, Parallel(tensor=2, data=4), range(2, 2 + count))


@pytest.mark.parametrize(
    ("wanted", "count", "found"),
    [
        ((), 1, (A,)),
        ((), 2, (A, B)),
        (("all",), 3, (A, B, C)),
        ((C,), 1, (C,)),
        ((C, A), 2, (C, A)),
        (("GPU-0", "GPU-53b2"), 2, (C, B)),
        (("gpu-0BAD",), 1, (C,)),
    ],
)
def test_gpus_are_chosen_in_the_order_they_are_named(wanted, count, found):
    assert chosen(PROBE, wanted, count) == found


@pytest.mark.parametrize(
    ("wanted", "count", "told"),
    [
        (("GPU-53b",), 1, rf"'GPU-53b' fits more than one GPU: {A}, {B}$"),
        (("GPU-9",), 1, rf"'GPU-9' fits no GPU that is seen: {A}, {B}, {C}$"),
        (
            (A,),
            2,
            rf"^1 GPUs \({A}\) are too few for the 2 ranks of this node, 2 to 3 of {WORLD}: ",
        ),
        ((A, A), 2, f"^{A} is named twice, but a device holds one rank: name it once$"),
        (("GPU-0", C), 2, f"^{C} is named twice"),
        ((A, B), 1, rf"^2 GPUs \({A}, {B}\) are too many for the 1 ranks of this node, 2 to 2 of"),
        (
            ("all",),
            2,
            rf"^3 GPUs \({A}, {B}, {C}\) are too many for.*: name 2, or change the sizes$",
        ),
        (
            ("all",),
            4,
            rf"^3 GPUs \({A}, {B}, {C}\) are too few for.*: name 4, or change the sizes$",
        ),
        ((), 4, rf"^3 GPUs .* 4 ranks of this node, 2 to 5 of {WORLD}: change the sizes$"),
    ],
)
def test_what_does_not_fit_is_said(wanted, count, told):
    with pytest.raises(NoSuchDevice, match=told):
        chosen(PROBE, wanted, count)


def test_a_whole_uuid_is_no_beginning_of_another():
    probe = Probe((Device("GPU-1", "x"), Device("GPU-12", "x")))
    assert chosen(probe, ("GPU-1",), 1) == ("GPU-1",)


def test_what_hides_gpus_is_told():
    hidden = Probe((Device(A, "x"),), hint="CUDA_VISIBLE_DEVICES=0")
    for wanted, count in (((B,), 1), ((), 2)):
        with pytest.raises(NoSuchDevice, match=r"\(CUDA_VISIBLE_DEVICES=0\)$"):
            chosen(hidden, wanted, count)
    nothing = Probe(problem="no driver", hint="CUDA_VISIBLE_DEVICES=")
    with pytest.raises(NoSuchDevice, match=r"^no driver \(CUDA_VISIBLE_DEVICES=\)$"):
        chosen(nothing, (), 1)
    with pytest.raises(NoSuchDevice, match=r"^no GPU is seen$"):
        chosen(Probe(), (), 1)


def test_a_gpu_that_cannot_share_is_refused_with_its_reason():
    probe = Probe((Device(A, "GRID", problem="no descriptors: update the driver"), Device(B, "x")))
    with pytest.raises(NoSuchDevice, match=rf"{A} \(GRID\): no descriptors: update the driver"):
        chosen(probe, (), 1)
    assert chosen(probe, (B,), 1) == (B,)


@pytest.mark.parametrize(
    ("wanted", "visible", "further"),
    [
        ((), None, ()),
        ((SLICE, OTHER), None, (OTHER,)),
        ((OTHER, A, OTHER), None, (OTHER,)),
        ((), f"{SLICE}, {OTHER}", (OTHER,)),
        ((OTHER,), SLICE, ()),
        ((OTHER,), "", ()),
        ((OTHER,), "0", ()),
    ],
)
def test_parts_of_gpus_are_looked_for_one_by_one(wanted, visible, further):
    environ = {"PATH": "/bin"} if visible is None else {"PATH": "/bin", VISIBLE: visible}
    found = further_looks(Probe((Device(SLICE, "x"),)), wanted, environ)
    assert found == [{"PATH": "/bin", "CUDA_VISIBLE_DEVICES": name} for name in further]


def test_a_device_is_described_as_far_as_it_is_known():
    assert (
        Device(A, "NVIDIA H200", total=150_110_011_392).described == f"{A} NVIDIA H200 (139.8 GiB)"
    )
    assert Device(A, "").described == A


def test_what_several_saw_is_put_together():
    first = Probe((Device(A, "x"),), driver="1", hint="h")
    assert joined([first]) == first
    both = joined([first, Probe((Device(B, "y"), Device(A, "x")), driver="2", problem="p")])
    assert both == Probe((Device(A, "x"), Device(B, "y")), driver="1", hint="h")
