"""Quantised checkpoints for vLLM: what a linear layer's weight becomes in each of them.

Formats are those that vLLM 0.33 reads: `quant_method` "fp8" and "modelopt" in `config.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]

_FP8_MAX = 448.0
_FP4_MAX = 6.0
_BLOCK = 128
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""What the lower three bits of a packed value stand for; the fourth is the sign."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """A checkpoint: `base` of `vllm_models`, its `quantization_config`, what becomes of a weight
    (by suffix of its layer's name), and what daemon and engine are told beside it."""

    base: str
    config: Mapping[str, Any] | None = None
    convert: Callable[[torch.Tensor], Tensors] | None = None
    arguments: Mapping[str, Any] | None = None


def _per_tensor(weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().max() / _FP8_MAX
    return {"weight": _fp8(weight.float() / scale), "weight_scale": scale}


def _static(weight: torch.Tensor) -> Tensors:
    return {**_per_tensor(weight), "input_scale": torch.tensor(0.05)}


def _per_channel(weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().amax(1) / _FP8_MAX
    return {"weight": _fp8(weight.float() / scale[:, None]), "weight_scale": scale}


def _by_block(weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    blocks = weight.float().reshape(rows // _BLOCK, _BLOCK, columns // _BLOCK, _BLOCK)
    scale = blocks.abs().amax((1, 3)) / _FP8_MAX
    scaled = (blocks / scale[:, None, :, None]).reshape(rows, columns)
    return {"weight": _fp8(scaled), "weight_scale_inv": scale}


def _mxfp8(weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    groups = weight.float().reshape(rows, columns // 32, 32)
    exponent = torch.ceil(torch.log2(groups.abs().amax(2) / _FP8_MAX)).clamp(-127, 127)
    scaled = (groups / torch.exp2(exponent)[:, :, None]).reshape(rows, columns)
    return {"weight": _fp8(scaled), "weight_scale": (exponent + 127).to(torch.uint8)}


def _nvfp4(weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    whole = weight.float().abs().max() / (_FP8_MAX * _FP4_MAX)
    groups = weight.float().reshape(rows, columns // 16, 16)
    scale = _fp8(groups.abs().amax(2) / _FP4_MAX / whole)
    scaled = groups / (scale.float() * whole).clamp_min(1e-12)[:, :, None]
    nearest = (scaled.abs()[..., None] - _FP4.to(weight.device)).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8).reshape(rows, columns // 2, 2)
    return {
        "weight": codes[..., 0] | codes[..., 1] << 4,
        "weight_scale": scale,
        "weight_scale_2": whole,
        "input_scale": torch.tensor(0.01),
    }


def _fp8(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)


def _fp8_config(activation: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": activation, **more}


def _modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    told = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}
    return told | {"producer": {"name": "modelopt", "version": "0.35"}}


_BLOCKS = _fp8_config("dynamic", weight_block_size=[_BLOCK, _BLOCK])
_CUTLASS = {"kernel_config": {"linear_backend": "cutlass"}}

QUANTISED: dict[str, Quantised] = {
    "fp8, per tensor": Quantised("small", _fp8_config("static"), _static),
    "fp8, activations per token": Quantised("small", _fp8_config("dynamic"), _per_tensor),
    "fp8, by block": Quantised("small", _BLOCKS, _by_block),
    "fp8 experts, per tensor": Quantised("mixtral", _fp8_config("static"), _static),
    "fp8 experts, by block": Quantised("mixtral", _BLOCKS, _by_block),
    "modelopt mxfp8": Quantised("small", _modelopt("MXFP8"), _mxfp8),
    "modelopt nvfp4": Quantised("small", _modelopt("NVFP4", group_size=16), _nvfp4),
    "modelopt fp8": Quantised("small", _modelopt("FP8"), _static, _CUTLASS),
    "modelopt fp8, per channel": Quantised(
        "small", _modelopt("FP8_PER_CHANNEL_PER_TOKEN"), _per_channel, _CUTLASS
    ),
    "online fp8_per_tensor": Quantised("small", arguments={"quantization": "fp8_per_tensor"}),
    "online fp8_per_block": Quantised("small", arguments={"quantization": "fp8_per_block"}),
    "online mxfp8": Quantised("small", arguments={"quantization": "mxfp8"}),
    "online experts": Quantised("mixtral", arguments={"quantization": "fp8_per_tensor"}),
}
