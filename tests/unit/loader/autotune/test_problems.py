"""Which products a shard comes down to: by name, dtype and shape of its weights."""

import pytest

from preloadd.domain.dtypes import CODES
from preloadd.domain.manifest import Tensors
from preloadd.loader.autotune.problems import MOST_ROWS, Kernel, Problem, problems

LAYER = "model.layers.0."
FP8, LT, TINY = Kernel.FP8_CUBLAS, Kernel.BF16_CUBLASLT, Kernel.BF16_TINYGEMM


def shard(*rows: tuple) -> Tensors:
    """Weights of (name, dtype, shape)."""
    names, dtypes, shapes = zip(*rows, strict=True)
    count = len(rows)
    return Tensors(
        name=list(names),
        kind=[0] * count,
        dtype=[CODES[dtype] for dtype in dtypes],
        shape=list(shapes),
        strides=[None] * count,
        storage=list(range(count)),
        skip=[0] * count,
    )


def llama(dtype: str, hidden: int = 4096, kv: int = 1024, inner: int = 14336) -> Tensors:
    """All of a Llama's weights that are matrices, and some that are not, of two layers."""
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    rows = [("model.embed_tokens.weight", "BF16", (128256, hidden))]
    for layer in range(2):
        for name, shape in shapes.items():
            rows.append((f"model.layers.{layer}.{name}.weight", dtype, shape))
            if dtype == "F8_E4M3":
                rows.append((f"model.layers.{layer}.{name}.weight_scale", "F32", ()))
        rows.append((f"model.layers.{layer}.input_layernorm.weight", "BF16", (hidden,)))
    return shard(*rows, ("lm_head.weight", "BF16", (128256, hidden)))


def test_a_llama_in_fp8_has_four_kinds_of_products_each_once() -> None:
    assert problems(llama("F8_E4M3"), "bfloat16") == tuple(
        Problem(FP8, outputs, inputs, "bfloat16")
        for outputs, inputs in ((1024, 4096), (4096, 4096), (4096, 14336), (14336, 4096))
    )


def test_one_in_bf16_has_them_for_both_kernels() -> None:
    found = problems(llama("BF16"), "bfloat16")
    assert [problem.kernel for problem in found].count(LT) == 4
    assert [problem.kernel for problem in found].count(TINY) == 4
    assert {p.rows for p in found if p.kernel is LT} == {MOST_ROWS}
    assert all(problem.rows < MOST_ROWS for problem in found if problem.kernel is TINY)


WEIGHT = LAYER + "mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("rows", "kernels"),
    [
        ([(WEIGHT, "F8_E4M3", (32, 64))], {FP8}),
        ([(WEIGHT, "BF16", (32, 256))], {LT, TINY}),
        ([(WEIGHT, "BF16", (32, 64))], {LT}),  # an odd depth for the small kernel
        ([(WEIGHT, "BF16", (24, 256))], {LT}),
        ([(WEIGHT, "BF16", (20, 256))], set()),
        ([(WEIGHT, "F8_E4M3", (24, 64))], set()),
        ([(WEIGHT, "F16", (32, 256))], set()),
        ([(WEIGHT, "F32", (32, 256))], set()),
        ([(WEIGHT, "F8_E5M2", (32, 64))], set()),
        ([(WEIGHT, "F8_E4M3", (32, 64)), (LAYER + "mlp.up_proj.weight_scale", "F32", ())], {FP8}),
        ([(WEIGHT, "F8_E4M3", (32, 64)), (LAYER + "mlp.up_proj.weight_scale", "F32", (1,))], {FP8}),
        (
            [(WEIGHT, "F8_E4M3", (32, 64)), (LAYER + "mlp.up_proj.weight_scale", "F32", (32, 1))],
            set(),
        ),
        (
            [
                (WEIGHT, "F8_E4M3", (256, 256)),
                (LAYER + "mlp.up_proj.weight_scale_inv", "F32", (2, 2)),
            ],
            set(),
        ),
        ([(LAYER + "mlp.experts.0.up_proj.weight", "BF16", (32, 256))], set()),
        ([(LAYER + "mlp.experts.gate_up_proj", "BF16", (4, 32, 256))], set()),
        ([(LAYER + "input_layernorm.weight", "BF16", (256,))], set()),
        ([(LAYER + "self_attn.rotary", "BF16", (32, 256))], set()),
        ([("model.embed_tokens.weight", "BF16", (32, 256))], set()),
        ([("lm_head.weight", "BF16", (32, 256))], set()),
    ],
)
def test_a_weight_is_of_a_kind_that_is_tuned_or_not(rows: list, kernels: set) -> None:
    assert {problem.kernel for problem in problems(shard(*rows), "bfloat16")} == kernels


@pytest.mark.parametrize(
    ("dtype", "result"),
    [("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")],
)
def test_what_comes_out_is_what_the_model_works_in(dtype: str, result: str) -> None:
    (problem,) = problems(shard((WEIGHT, "F8_E4M3", (32, 64))), dtype)
    assert problem.dtype == result


def test_no_weights_are_no_problems() -> None:
    assert problems(Tensors([], [], [], [], [], [], []), "bfloat16") == ()


def test_a_problem_is_tried_for_powers_of_two_and_told_by_its_size() -> None:
    problem = Problem(FP8, 32, 64, "bfloat16", 8)
    assert list(problem.batches) == [1, 2, 4, 8]
    assert str(problem) == "bmm_fp8 by cublas, 32 x 64"
