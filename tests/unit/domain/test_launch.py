import pytest

from preloadd.domain.launch import Fault, Launch, refusal
from preloadd.domain.placement import Parallel


@pytest.mark.parametrize(
    ("said", "spans"),
    [
        ({}, False),
        ({"nnodes": 1}, False),
        ({"nnodes": 2}, True),
        ({"data_parallel_size_local": 4}, False),
        ({"data_parallel_size_local": 3}, True),
        ({"data_parallel_size_local": 0}, False),
        ({"data_parallel_size_local": 4, "nnodes": 2}, True),
    ],
)
def test_ranks_span_nodes(said, spans):
    assert Launch(parallel=Parallel(data=4), **said).spans is spans


def test_a_refusal_has_a_line_for_every_fault_by_its_flag():
    error = refusal([Fault("node_rank", "is 2"), Fault("devices", "are too few")])
    assert str(error).splitlines() == ["--node-rank: is 2", "--gpus: are too few"]
