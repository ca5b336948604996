"""What vLLM builds a draft with: the target's configuration, but for what a user chose for drafts.

Engines put these choices in place just before they load a draft, after memory was counted. Loader
and engine ask here, so that the key of a draft is the same whenever it is computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.config.utils import replace

from preloadd.domain.ids import Role


class Backends(NamedTuple):
    """What a model's layers are built for; each as vLLM has it, None where it has nothing."""

    moe: object
    attention: object
    kv_cache_dtype: object


def backends(config: VllmConfig, role: Role) -> Backends:
    """Those that the model of this role is built with; `config` may have a draft's in place."""
    speculative = config.speculative_config
    moe = getattr(getattr(config, "kernel_config", None), "moe_backend", None)
    attention = getattr(getattr(config, "attention_config", None), "backend", None)
    found = Backends(moe, attention, config.cache_config.cache_dtype)
    if role is Role.TARGET or speculative is None:
        return found
    if not getattr(config, "use_v2_model_runner", False):
        # The first model runner never has a draft inherit the attention backend.
        found = found._replace(attention=None)
    chosen = {
        "moe": getattr(speculative, "moe_backend", None),
        "attention": getattr(speculative, "attention_backend", None),
        "kv_cache_dtype": getattr(speculative, "kv_cache_dtype", None),
    }
    return found._replace(**{name: value for name, value in chosen.items() if value is not None})


def with_backends(config: VllmConfig, role: Role) -> VllmConfig:
    """The configuration to build the model of this role with; `config` itself is not changed."""
    is_now, wanted = backends(config, Role.TARGET), backends(config, role)
    parts = {
        "moe": ("kernel_config", "moe_backend"),
        "attention": ("attention_config", "backend"),
        "kv_cache_dtype": ("cache_config", "cache_dtype"),
    }
    for name, (part, field) in parts.items():
        value: Any = getattr(wanted, name)
        if value != getattr(is_now, name):
            changed = replace(getattr(config, part), **{field: value})
            config = replace(config, **{part: changed})
    return config
