"""vLLM engines in a process of their own, one after the other, timed.

Each line it reads is an order in JSON. `{"start": {...}}`: an engine, by arguments of `LLM`, and
`ours`, whether the load format `ipc_cache` is preloadd's or vLLM's own. `{"generate": true}`: what
it says to the same prompts as every other. `{"stop": true}`: its end. One line answers each.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

_STARTED = time.monotonic()
_taken: dict[str, float] = {}


def timed(owner: Any, name: str, key: str) -> None:
    """Have calls of `owner.name` add their seconds to `key`, the GPU's work included."""
    import torch

    function: Callable[..., Any] | None = getattr(owner, name, None)
    if function is None:
        return

    @wraps(function)
    def timing(*given: Any, **named: Any) -> Any:
        began = time.monotonic()
        try:
            return function(*given, **named)
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            _taken[key] = _taken.get(key, 0.0) + time.monotonic() - began

    setattr(owner, name, timing)


def time_phases() -> None:
    """Time what an engine's start consists of."""
    from vllm.model_executor.model_loader import BaseModelLoader, base_loader
    from vllm.model_executor.model_loader.weight_cache import ipc_loader
    from vllm.v1.worker.gpu_worker import Worker

    from preloadd.engine.vllm import binding, loader

    for name in (
        *("init_device", "load_model", "determine_available_memory"),
        *("initialize_from_config", "compile_or_warm_up_model"),
    ):
        timed(Worker, name, f"worker.{name}")
    for kind in (BaseModelLoader, ipc_loader.IpcModelLoader, loader.PreloaddLoader):
        timed(kind, "load_model", "load_model")
    timed(loader.PreloaddLoader, "get_external_weight_memory", "counting")
    timed(ipc_loader.IpcModelLoader, "get_external_weight_memory", "counting")
    timed(loader, "take_lease", "key and lease")
    timed(ipc_loader.IpcModelLoader, "_fetch_entries", "key and lease")
    timed(ipc_loader.IpcModelLoader, "_apply_entries", "binding")
    for name in ("bind_early", "bind_late", "complete"):
        timed(binding._Binding, name, "binding")  # noqa: SLF001
    for module in (binding, ipc_loader, base_loader):
        timed(module, "initialize_model", "building the model")
        timed(module, "process_weights_after_loading", "post-processing")


class Session:
    """The engine there is at the moment."""

    def __init__(self) -> None:
        from vllm.model_executor import model_loader
        from vllm.model_executor.model_loader.weight_cache.ipc_loader import IpcModelLoader

        self._formats = model_loader._LOAD_FORMAT_TO_MODEL_LOADER  # noqa: SLF001
        self._theirs = IpcModelLoader
        self._engine: Any = None

    def start(self, order: dict[str, Any]) -> dict[str, Any]:
        """Start one; what that took."""
        from vllm import LLM

        from preloadd.engine.vllm.loader import PreloaddLoader

        self._formats["ipc_cache"] = PreloaddLoader if order.pop("ours", False) else self._theirs
        _taken.clear()
        gc.collect()
        began = time.monotonic()
        self._engine = LLM(
            dtype="bfloat16", max_model_len=2048, enable_prefix_caching=False, seed=0, **order
        )
        return {"start_s": time.monotonic() - began, "taken": dict(_taken)}

    def generate(self) -> dict[str, Any]:
        """Tokens and log-probabilities."""
        from vllm import SamplingParams

        vocabulary = self._engine.llm_engine.model_config.get_vocab_size()
        drawn = random.Random(5)
        prompts: Any = [
            {"prompt_token_ids": [drawn.randrange(3, vocabulary) for _ in range(length)]}
            for length in (8, 17, 64, 200)
        ]
        sampling = SamplingParams(
            temperature=0, max_tokens=32, ignore_eos=True, logprobs=1, detokenize=False
        )
        answers = self._engine.generate(prompts, sampling, use_tqdm=False)
        outputs = [answer.outputs[0] for answer in answers]
        return {
            "tokens": [list(output.token_ids) for output in outputs],
            "logprobs": [repr(output.cumulative_logprob) for output in outputs],
        }

    def stop(self) -> dict[str, Any]:
        """End it, and give back what it had of the GPU."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._engine = None
        gc.collect()
        cleanup_dist_env_and_memory()
        return {}


def main() -> None:
    """Carry out order after order."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_PLUGINS"] = ""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is not an answer
    import vllm  # noqa: F401

    time_phases()
    session = Session()
    print(json.dumps({"import_s": time.monotonic() - _STARTED}), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        if "start" in order:
            found = session.start(order["start"])
        elif "generate" in order:
            found = session.generate()
        else:
            found = session.stop()
        print(json.dumps(found), file=answers)
    os._exit(0)  # vLLM's own end takes seconds, and is not what is measured


if __name__ == "__main__":
    main()
