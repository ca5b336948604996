"""How much a rank's weights take at least, as far as it is known before vLLM makes them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from preloadd.domain.dtypes import BITS
from preloadd.domain.ids import Role
from preloadd.domain.settings import RankSettings

_WIDE = ("F64", "F32", "BF16", "F16")
"""Dtypes of which vLLM may make narrower ones."""

_QUANTISED_BITS = 4
"""The fewest that vLLM makes of a value of those while it loads."""

_UNUSED = 2
"""Less than one part in so many of a checkpoint is for what may be left out of a model: layers that
draft, a head, towers for images."""


def least(stored: Mapping[str, int], settings: RankSettings, model_config: Any) -> int:  # noqa: ANN401
    """Bytes that are needed in any case, of so many that are `stored` in each dtype.

    `model_config` is vLLM's. 0 where nobody can tell: a draft may lie in its target's checkpoint,
    and a model or a stage of it may be cut at will.
    """
    cut = model_config.hf_overrides or "VLLM_PP_LAYER_PARTITION" in os.environ
    if cut or settings.parsed_instance.role is Role.DRAFT:
        return 0
    quantised = getattr(model_config.hf_config, "quantization_config", None)
    by_vllm = model_config.quantization is not None and quantised is None
    bits = _QUANTISED_BITS if by_vllm else 8 * model_config.dtype.itemsize
    total = sum(
        nbytes * min(bits, BITS[dtype]) // BITS[dtype] if dtype in _WIDE else nbytes
        for dtype, nbytes in stored.items()
    )
    return int(total // settings.model.placement.parallel.world // _UNUSED)
