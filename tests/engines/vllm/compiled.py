"""An engine that compiles as vLLM does on GPUs: `python -m tests.engines.vllm.compiled MODEL SIZE`.

Prints what it generated, how long it took to start, and its identity, as JSON. On a CPU vLLM leaves
compiling to torch, and does not read again what it has kept of that; here it keeps to its own
backend, but for a pass that looks for operators of GPUs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import redirect_stdout

PROMPT = (5, 17, 300, 41)


def main() -> None:
    """Start it, have it speak, end it."""
    model, size = sys.argv[1], int(sys.argv[2])
    with redirect_stdout(sys.stderr):
        import vllm

        from preloadd.frameworks.vllm.compiled import compile_identity

        _keep_own_backend()
        started = time.perf_counter()
        engine = vllm.LLM(
            model=model,
            load_format="dummy",
            hf_overrides={"num_hidden_layers": 1},
            compilation_config={"compile_sizes": []},
            skip_tokenizer_init=True,
            max_model_len=size,
            max_num_seqs=2,
            max_num_batched_tokens=size,
            kv_cache_memory_bytes=64 << 20,
        )
        start_s = time.perf_counter() - started
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=8, detokenize=False)
        (said,) = engine.generate({"prompt_token_ids": list(PROMPT)}, sampling, use_tqdm=False)
        identity = compile_identity(
            engine.llm_engine.vllm_config,
            config_hash="ab" * 32,
            engine_args=(f"--max-model-len={size}",),
            ranks=((0, 0),),
            environ=os.environ,
        )
    told = {
        "start_s": start_s,
        "tokens": list(said.outputs[0].token_ids),
        "identity": identity.fields,
    }
    print(json.dumps(told), flush=True)
    os._exit(0)  # nothing is left that vLLM would have to put away


def _keep_own_backend() -> None:
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.platforms.cpu import CpuPlatform

    adapt = CpuPlatform.check_and_update_config.__func__

    def adapted(platform: type, config: object) -> None:
        mode = config.compilation_config.mode
        adapt(platform, config)
        config.compilation_config.mode = mode

    CpuPlatform.check_and_update_config = classmethod(adapted)
    FixFunctionalizationPass.__call__ = lambda self, graph: None


if __name__ == "__main__":
    main()
