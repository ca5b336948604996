"""One engine of vLLM that is started, asked for a token, and ended."""

from __future__ import annotations

from collections.abc import Mapping

from vllm import SamplingParams
from vllm.model_executor import model_loader
from vllm.plugins import load_general_plugins
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from preloadd.domain.settings import RankSettings
from preloadd.errors import ConfigError
from preloadd.loader.report import Reporter
from preloadd.loader.vllm.arguments import whole_config

DONE = "done"

_PROMPT = (1, 2, 3)


async def run(settings: RankSettings, changes: Mapping[str, object], reporter: Reporter) -> None:
    """An engine for all ranks of the group, with `changes` to its arguments, from start to end.

    ConfigError where vLLM refuses the arguments or has no plugin of ours; whatever vLLM raises.
    """
    _require_plugin()
    config = whole_config(settings, changes)
    # As `vllm serve` starts it, which also knows engines of several replicas.
    engine = AsyncLLM.from_vllm_config(
        config, usage_context=UsageContext.OPENAI_API_SERVER, disable_log_stats=True
    )
    try:
        if config.model_config.runner_type == "generate":
            reporter.progress("saying a token")
            sampling = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
            prompt = {"prompt_token_ids": list(_PROMPT)}
            async for _ in engine.generate(prompt, sampling, "rehearsal"):
                pass
        reporter.progress(DONE)
    finally:
        engine.shutdown()


def _require_plugin() -> None:
    """vLLM has a load format of this name of its own, which would not attach."""
    load_general_plugins()
    known = getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {})
    if getattr(known.get("ipc_cache"), "__module__", "").partition(".")[0] != "preloadd":
        raise ConfigError(
            "the plugin of preloadd is not in the environment of the group's python, or "
            "VLLM_PLUGINS leaves it out: preloadctl plugin enable PYTHON"
        )
