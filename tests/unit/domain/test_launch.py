import pytest

from preloadd.domain.launch import Launch, Misfit, refusal
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


def test_a_refusal_has_a_line_for_every_misfit_by_its_flag():
    error = refusal([Misfit("node_rank", "is 2: give 0"), Misfit("devices", "are few: add one")])
    assert str(error).splitlines() == ["--node-rank: is 2: give 0", "--gpus: are few: add one"]


def test_the_remedy_of_a_misfit_is_what_stands_behind_its_last_colon():
    misfit = Misfit("master_addr", "'::1' is this host: 29600: give another one")
    assert misfit.bracketed == "'::1' is this host: 29600 (give another one)"
