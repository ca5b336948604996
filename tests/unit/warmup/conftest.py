"""Tables as FlashInfer writes them."""

import json

import pytest

from tests.tuned import H200

KEY = "('fp8_gemm', 'CublasFp8GemmRunner', ((1, 128, 4096), (1, 4096, 1024)), (torch.bfloat16,))"
ENTRY = ["CublasFp8GemmRunner", 3, ["cuda_graph_profile_replays", None, "l2_cache_policy", "hot"]]


@pytest.fixture
def metadata():
    """Where such a table is tuned."""
    return dict(H200)


@pytest.fixture
def body():
    """A function: a table's JSON object, with `changes`; None leaves a name out."""

    def make(**changes):
        whole = {"_metadata": dict(H200), KEY: ENTRY, **changes}
        return {name: value for name, value in whole.items() if value is not None}

    return make


@pytest.fixture
def raw(body):
    """A function: the same as bytes of a file."""

    def make(**changes):
        return json.dumps(body(**changes)).encode()

    return make
