"""Tells as JSON what loaders make of the settings on its input: keys, and files that are held to.

Run with the Python of vLLM, `python -m tests.engines.vllm.keys`. Each case of the input is a model,
arguments of vLLM, variables of the environment, and a size of tensor parallelism.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.config.load import LoadConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.runai_streamer_loader import RunaiModelStreamerLoader
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
from vllm.usage.usage_lib import UsageContext

from preloadd.domain.placement import Parallel, place
from preloadd.domain.settings import Builder, Layout, Memory, ModelSettings, RankSettings
from preloadd.errors import PreloadError
from preloadd.frameworks.vllm.identity import vllm_key
from preloadd.loader.vllm.arguments import engine_config
from preloadd.loader.vllm.model import _hold_to


def main() -> int:
    """Standard input is an object: cases by name, and the files of a checkpoint."""
    asked = json.load(sys.stdin)
    answers = {name: told(**case) for name, case in asked["cases"].items()}
    answers["held"] = held([Path(file) for file in asked["files"]])
    sys.stdout.write(f"\n{json.dumps(answers)}\n")
    return 0


def told(
    model: str, args: list[str], environ: Mapping[str, str], tensor: int = 1
) -> dict[str, Any]:
    """The key, and how many tokens a batch has here and in `vllm serve`."""
    settings = RankSettings(
        group="g",
        instance="CPU-0",
        socket_dir="/s",
        derived=False,
        model=ModelSettings(
            path=model,
            name="m",
            builder=Builder.VLLM,
            memory=Memory.HOST,
            layout=Layout.PLAIN,
            engine_args=("--enforce-eager", "--max-model-len=256", *args),
            placement=place(Parallel(tensor=tensor), 0),
        ),
    )
    config, model_config = engine_config(settings)
    serving = AsyncEngineArgs(
        model=model,
        max_model_len=256,
        tensor_parallel_size=tensor,
        distributed_executor_backend="mp" if tensor > 1 else None,
    ).create_engine_config(UsageContext.OPENAI_API_SERVER)
    key = vllm_key(
        config,
        model_config,
        checkpoint="",
        placement=settings.model.placement,
        role=settings.parsed_instance.role,
        layout=Layout.PLAIN,
        environ={**os.environ, **environ},
    )
    return {
        "key": key,
        "tokens": config.scheduler_config.max_num_batched_tokens,
        "served": serving.scheduler_config.max_num_batched_tokens,
    }


class _Silent(BaseModelLoader):
    """One that tells nobody what it reads."""

    def download_model(self, model_config: object) -> None: ...

    def load_weights(self, model: object, model_config: object) -> None: ...


class _Streamer(RunaiModelStreamerLoader):
    """Without the library that its own constructor and listing need."""

    def __init__(self, files: list[str]) -> None:
        BaseModelLoader.__init__(self, LoadConfig())
        self._files = files

    def _prepare_weights(self, *_: object) -> list[str]:
        return self._files


def held(files: list[Path]) -> dict[str, str]:
    """What becomes of each loader that is held to `files`: '' if it may read on."""
    shards = frozenset(files)
    names = [str(file) for file in files]
    other = [*names[1:], str(files[0].with_name("other.safetensors"))]
    chosen = LoadConfig(
        load_format="sharded_state", model_loader_extra_config={"pattern": "v2-{rank}-{part}"}
    )
    return {
        "streamer": _outcome(_Streamer(names), shards, "_prepare_weights", "model", None),
        "streamer, one less": _outcome(_Streamer(names[1:]), shards, "_prepare_weights", "m", None),
        "streamer, another": _outcome(_Streamer(other), shards, "_prepare_weights", "m", None),
        "by rank": _outcome(_by_rank(), shards, "iterate_over_files", names),
        "by rank, its own": _outcome(_by_rank(), shards, "iterate_over_files", names[1:]),
        "by rank, another": _outcome(_by_rank(), shards, "iterate_over_files", other),
        "by rank, chosen": _outcome(
            ShardedStateLoader(chosen), shards, "iterate_over_files", names
        ),
        "silent": _outcome(_Silent(LoadConfig()), shards, "download_model", None),
    }


def _by_rank() -> ShardedStateLoader:
    return ShardedStateLoader(LoadConfig(load_format="sharded_state"))


def _outcome(loader: Any, shards: frozenset[Path], name: str, *arguments: object) -> str:
    try:
        _hold_to(loader, shards)
        read = getattr(loader, name)(*arguments)
        if name == "iterate_over_files":
            next(read)
    except PreloadError as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
