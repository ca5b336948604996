import pytest

from preloadd.domain.switches import switches


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_USE_DEEP_GEMM",
        "VLLM_USE_DEEP_GEMM_E8M0",
        "VLLM_USE_TRITON_AWQ",
        "VLLM_CPU_MOE_PREPACK",
        "VLLM_ZENTORCH_WEIGHT_PREPACK",
        "VLLM_XPU_FORCE_N_CONTIG_WEIGHT",
        "VLLM_HAS_FLASHINFER_CUBIN",
        "VLLM_MLA_DISABLE",
        "VLLM_DISABLED_KERNELS",
        "VLLM_PP_LAYER_PARTITION",
        "VLLM_ROCM_USE_AITER_MOE",
        "VLLM_TEST_FORCE_FP8_MARLIN",
        "VLLM_WHAT_NOBODY_KNOWS_YET",
    ],
)
def test_what_may_choose_a_kernel_counts(name):
    assert switches({name: "1", "PATH": "/bin"}) == {name: "1"}


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_HOST_IP",
        "VLLM_PORT",
        # What Kubernetes makes of a service with that name.
        "VLLM_SERVICE_HOST",
        "VLLM_PORT_8000_TCP_ADDR",
        "VLLM_LOGGING_LEVEL",
        "VLLM_NO_USAGE_STATS",
        "VLLM_API_KEY",
        "VLLM_CACHE_ROOT",
        "VLLM_DP_RANK",
        "VLLM_PLUGINS",
        "VLLM_ENGINE_READY_TIMEOUT_S",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_WORKER_MULTIPROC_METHOD",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
        "VLLM_DEEP_GEMM_WARMUP",
        "VLLM_MARLIN_USE_ATOMIC_ADD",
        "VLLM_DISTRIBUTED_USE_SPLIT_GROUP",
        "MY_VLLM_KERNEL",
        "PATH",
    ],
)
def test_what_speaks_of_something_else_does_not(name):
    assert switches({name: "1"}) == {}


def test_words_count_as_a_whole():
    assert switches({"VLLM_SHIP": "1", "VLLM_IMPORTANT": "2", "VLLM_IP": "3"}) == {
        "VLLM_SHIP": "1",
        "VLLM_IMPORTANT": "2",
    }
