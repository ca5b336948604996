import threading

import pytest
import torch
from torch import nn

from preloadd.domain.manifest import Kind
from preloadd.engine.vllm.guard import WriteGuard
from preloadd.errors import AttachError
from tests.unit.engine.vllm.manifests import Row, manifest

PAGE = 4096


@pytest.fixture
def weights(weights_of):
    rows = [
        Row("a.weight", Kind.PARAMETER, 0, shape=(8, 4)),
        Row("b.weight", Kind.PARAMETER, 1, shape=(8, 4)),
        Row("c.scale", Kind.BUFFER, 2, shape=(4,)),
    ]
    return weights_of(manifest(rows, [(0, 0, 128), (0, 512, 128), (1, 0, 16)], (PAGE, PAGE)))


@torch.library.custom_op("preloadd_tests::scale_into", mutates_args=("target",))
def scale_into(source: torch.Tensor, target: torch.Tensor, by: float) -> None:
    target.copy_(source * by)


@torch.library.custom_op("preloadd_tests::scale_all", mutates_args=("targets",))
def scale_all(targets: list[torch.Tensor], by: float) -> None:
    for target in targets:
        target.mul_(by)


WRITES = {
    "aten.add_": lambda w: w.add_(1),
    "aten.fill_": lambda w: w.fill_(1.0),
    "aten.copy_": lambda w: w.copy_(torch.ones(8, 4)),
    "aten.copy_ of its transposed": lambda w: w[:4].copy_(w[:4].T),
    "aten.copy_ of its neighbour": lambda w: w[0].copy_(w[1]),
    "aten.add.out": lambda w: torch.add(torch.ones(8, 4), 1, out=w),
    "aten.mm.out": lambda w: torch.mm(torch.ones(8, 2), torch.ones(2, 4), out=w),
    "aten.index_put_": lambda w: w.index_put_((torch.tensor([1]),), torch.ones(4)),
    "aten.copy_ of an item": lambda w: w.__setitem__((2, 3), 0.0),
    "aten.fill_ through data": lambda w: nn.Parameter(w).data.fill_(0.0),
    "aten.zero_ of another dtype": lambda w: w.view(torch.int32).zero_(),
    "aten.normal_": nn.init.normal_,
    "aten._foreach_add_": lambda w: torch._foreach_add_([torch.ones(2), w], 1.0),
    "aten._foreach_copy_": lambda w: torch._foreach_copy_([w], [torch.ones(8, 4)]),
    "preloadd_tests.scale_into": lambda w: scale_into(torch.ones(8, 4), w, 2.0),
    "preloadd_tests.scale_into, by name": lambda w: torch.ops.preloadd_tests.scale_into(
        source=torch.ones(8, 4), target=w, by=2.0
    ),
    "preloadd_tests.scale_all": lambda w: scale_all([torch.ones(2), w], 2.0),
}


@pytest.mark.parametrize("operation", WRITES)
def test_a_write_is_refused_before_it_happens(operation, weights):
    tensor = weights.tensors["b.weight"]
    before = tensor.clone()
    told = rf"vLLM writes into b\.weight .*\({operation.partition(' ')[0].rstrip(',')}"
    with pytest.raises(AttachError, match=told):
        with WriteGuard(weights), torch.no_grad():
            WRITES[operation](tensor)
    assert torch.equal(tensor, before)


def test_every_kind_of_tensor_and_every_chunk_is_guarded(weights):
    for name, tensor in weights.tensors.items():
        with pytest.raises(AttachError, match=f"vLLM writes into {name} "), WriteGuard(weights):
            tensor.zero_()


def test_bytes_between_tensors_are_guarded_too(weights):
    with pytest.raises(AttachError, match="vLLM writes into a tensor at 0x"), WriteGuard(weights):
        weights.chunk(0)[256:300].zero_()


def test_the_tensor_that_is_written_is_the_one_that_is_named(weights):
    """Not another one that takes part."""
    ours = weights.tensors
    with pytest.raises(AttachError, match=r"into a\.weight "), WriteGuard(weights):
        torch.add(ours["b.weight"], ours["b.weight"], out=ours["a.weight"])


def test_tensors_copied_onto_themselves_pass(weights):
    tensor = weights.tensors["a.weight"]
    before = tensor.clone()
    parameter = nn.Parameter(tensor, requires_grad=False)
    with WriteGuard(weights):
        tensor.copy_(tensor)
        parameter.data.copy_(parameter.data)
        tensor[2:5].copy_(tensor[2:5])
    assert torch.equal(tensor, before)


def test_whoever_reads_may_write_elsewhere(weights):
    tensor = weights.tensors["a.weight"]
    own = torch.zeros(8, 4)
    with WriteGuard(weights):
        own.copy_(tensor)
        assert torch.equal(own, tensor)
        torch.add(tensor, 1, out=own)
        assert torch.equal(own, tensor + 1)
        own.index_put_((torch.tensor([1]),), tensor[0])
        torch._foreach_copy_([own], [tensor])
        scale_into(tensor, own, 2.0)
        assert torch.equal(own, tensor * 2)
        clone = tensor.clone()
        clone.add_(1)
        assert torch.equal(clone, tensor + 1)
        tensor.contiguous().view(-1).sum()
        torch.empty(8, 4, device="meta").copy_(tensor)


def test_copies_are_ones_own(weights):
    with WriteGuard(weights):
        for tensor in weights.tensors.values():
            tensor.clone().zero_()
            tensor.to(torch.bfloat16).zero_()
            tensor.detach().clone(memory_format=torch.contiguous_format).add_(1)


def test_after_the_block_nothing_is_guarded(weights):
    tensor = weights.tensors["a.weight"]
    with WriteGuard(weights):
        pass
    tensor.add_(1)
    with pytest.raises(AttachError), WriteGuard(weights):
        tensor.add_(1)
    tensor.add_(1)


def test_other_threads_are_not_held_up(weights):
    """What guards is of the thread that builds; others have nothing to do with its model."""
    own, done = torch.zeros(4), []

    def write():
        own.add_(1)
        done.append(True)

    with WriteGuard(weights):
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    assert done == [True]
