"""An engine of vLLM that attaches and takes tables over, though it runs on a CPU.

Run with the Python of vLLM, `python -m tests.engines.vllm.taking ARGUMENTS`, which are JSON:
`words` of the engine, what it is `attaching` with, `flashinfer`, the folder that FlashInfer is
imported from, and `settings` of a rank. It tells, as JSON, by which hash vLLM knows the
configuration, and what a loader tells.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.warmup.flashinfer_autotune_cache import flashinfer_autotune_cache_hash
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.flashinfer import has_flashinfer
from vllm.v1.engine.llm_engine import LLMEngine

from preloadd.domain.ids import Role
from preloadd.domain.manifest import Artifact
from preloadd.domain.settings import RankSettings
from preloadd.frameworks.vllm import identity, tuning
from preloadd.loader.vllm.alone import alone
from preloadd.loader.vllm.arguments import engine_config, reported
from preloadd.loader.vllm.model import build
from preloadd.loader.vllm.warmable import described, warmable


def main() -> None:
    """Do what the arguments say."""
    given = json.loads(sys.argv[1])
    # vLLM itself is to remember that there is none: none of its kernels would run here.
    assert not has_flashinfer()
    # So is the key: the daemon's loader has none either.
    identity._libraries()
    sys.path.append(given["flashinfer"])
    tuning.has_flashinfer = lambda: True
    tuning.current_platform = SimpleNamespace(
        is_cuda=lambda: True,
        has_device_capability=lambda _: True,
        update_block_size_for_backend=current_platform.update_block_size_for_backend,
    )
    load_general_plugins()
    told = {}
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    words = parser.parse_args(given["words"])
    for name, value in given["attaching"].items():
        setattr(words, name, value)
    engine = LLMEngine.from_engine_args(
        EngineArgs.from_cli_args(words), usage_context=UsageContext.OPENAI_API_SERVER
    )
    runner = SimpleNamespace(vllm_config=engine.vllm_config)
    told["engine"] = flashinfer_autotune_cache_hash(runner)
    engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    told["loader"] = by_loader(given["settings"])
    print("told", json.dumps(told))


def by_loader(settings: str) -> dict[str, Any]:
    """What a loader with such settings tells its rank."""
    rank = msgspec.json.decode(settings, type=RankSettings)
    config, model_config = engine_config(rank)
    placement = reported(config, rank.model)
    with alone(config, placement):
        shards = list(Path(rank.model.path).glob("*.safetensors"))
        build(config, model_config, rank.model.layout, shards, lambda *_: None)
        written = described(config, placement, Role.TARGET, ())
        tuning.current_platform.has_device_capability = lambda _: False
        of_older = described(config, placement, Role.TARGET, ())
    told, older = (
        warmable(SimpleNamespace(artifacts=(Artifact("config", "", b""), one)))
        for one in (written, of_older)
    )
    return msgspec.structs.asdict(told) | {"untuned on older": older.untuned}


if __name__ == "__main__":
    main()
