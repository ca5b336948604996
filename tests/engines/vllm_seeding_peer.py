"""vLLM's own seeding code in a process of its own, without the rest of vLLM.

    vllm_seeding_peer.py TREE source HOST PORT TOKEN CACHE        serves until its input ends
    vllm_seeding_peer.py TREE target HOST PORT TOKEN CACHE RANK   fetches once

TREE is a folder with vLLM's package. Read from it, and run as they are: `seed.py`,
`warmup_cache.py`, `flashinfer_autotune_cache.py` and, of `protocol.py`, the functions for JSON.
What those import besides is empty here, and there is no FlashInfer: vLLM then takes tables unseen.
"""

import ast
import dataclasses
import json
import logging
import re
import socket
import struct
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

CACHES = "vllm.model_executor.model_loader.weight_cache"
WARMUP = "vllm.model_executor.warmup"
JSON_PARTS = {"_LEN_STRUCT", "MAX_JSON_MSG_SIZE", "send_json", "recv_json", "_recv_exact"}
FINGERPRINT = "0123456789"
"""What vLLM's configuration would hash to; the hash on the wire is the SHA-256 of that."""


def main(tree: str, side: str, host: str, port: str, token: str, cache: str, rank: str = "0"):
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    stand_in(Path(tree), cache, int(rank))
    from vllm.model_executor.model_loader.weight_cache.seed import SeedConfig, SeedTransport
    from vllm.model_executor.model_loader.weight_cache.warmup_cache import FlashInferWarmupCache

    seedable, place = FlashInferWarmupCache(), (host, int(port))
    if side == "source":
        SeedTransport([seedable], SeedConfig(place, None, token)).start_listener()
        print("listening", flush=True)
        sys.stdin.read()
    else:
        SeedTransport([seedable], SeedConfig(None, place, token)).adopt(seedable, runner())


def stand_in(tree: Path, cache: str, rank: int) -> None:
    for name in ("vllm", "vllm.utils", "vllm.distributed", "vllm.model_executor"):
        module(name, __path__=[])
    module("vllm.model_executor.model_loader", __path__=[])
    for name in (CACHES, WARMUP):
        module(name, __path__=[str(tree.joinpath(*name.split(".")))])
    module("vllm.logger", init_logger=logging.getLogger)
    module("vllm.envs", VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR=cache)
    module("vllm.config", CacheConfig=None, VllmConfig=None, replace=dataclasses.replace)
    module("vllm.platforms", current_platform=None)
    module("vllm.utils.flashinfer", has_flashinfer=None)
    group = SimpleNamespace(rank_in_group=rank)
    module("vllm.distributed.parallel_state", get_world_group=lambda: group)
    module(f"{CACHES}.utils", build_warmup_runner=None, is_draft_model_cacheable=None)
    module(f"{CACHES}.protocol", **json_functions(tree / CACHES.replace(".", "/") / "protocol.py"))
    module("regex", compile=re.compile)
    module("torch")
    sys.modules["flashinfer"] = None  # type: ignore[assignment]


def module(name: str, **content: object) -> None:
    made = sys.modules[name] = ModuleType(name)
    vars(made).update(content)
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, made)


def json_functions(path: Path) -> dict[str, object]:
    body = [node for node in ast.parse(path.read_text()).body if names(node) & JSON_PARTS]
    found = {"json": json, "socket": socket, "struct": struct, "time": time, "Any": object}
    exec(compile(ast.Module(body, []), path, "exec"), found)
    return found


def names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {node.name} if isinstance(node, ast.FunctionDef) else set()


def runner() -> SimpleNamespace:
    cache = SimpleNamespace(mamba_block_size=None, kv_cache_layout=None)
    parallel = SimpleNamespace(data_parallel_rank=0)
    config = SimpleNamespace(
        cache_config=cache,
        parallel_config=parallel,
        compute_hash=lambda include_version: FINGERPRINT,
    )
    return SimpleNamespace(vllm_config=config)


if __name__ == "__main__":
    main(*sys.argv[1:])
