"""Tables as FlashInfer writes them."""

import json

import pytest

H200 = {
    "flashinfer_version": "0.7.2.post1",
    "cuda_version": "13.0",
    "cublas_version": "13.1.0",
    "cudnn_version": "91501",
    "cudnn_frontend_version": "1.31.0",
    "cutlass_dsl_version": "nvidia-cutlass-dsl==4.8.0",
    "gpu": "NVIDIA H200",
}
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
