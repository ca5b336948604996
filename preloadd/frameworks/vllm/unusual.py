"""Ways to run a model in which weights do not stay where, or what, they are when it was loaded."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig


def unusual(config: VllmConfig) -> list[str]:
    """Those that `config` asks for, as arguments of vLLM."""
    parallel: Any = config.parallel_config
    offload: Any = getattr(config, "offload_config", None) or config.cache_config
    uva, prefetch = getattr(offload, "uva", offload), getattr(offload, "prefetch", None)
    asked = {
        "--cpu-offload-gb": getattr(uva, "cpu_offload_gb", 0),
        "--offload-group-size": getattr(prefetch, "offload_group_size", 0),
        "--decode-context-parallel-size": _more_than_one(parallel, "decode_context_parallel_size"),
        "--prefill-context-parallel-size": _more_than_one(
            parallel, "prefill_context_parallel_size"
        ),
    }
    return [name for name, value in asked.items() if value]


def _more_than_one(parallel: Any, size: str) -> bool:  # noqa: ANN401
    return int(getattr(parallel, size, 1) or 1) > 1
