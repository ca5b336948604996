"""Takes what seeds out of a wheel of vLLM: `python -m tests.engines.vllm_seeding_files WHEEL DIR`.

The rest of it would need CUDA.
"""

import sys
from zipfile import ZipFile

FILES = (
    "vllm/model_executor/model_loader/weight_cache/protocol.py",
    "vllm/model_executor/model_loader/weight_cache/seed.py",
    "vllm/model_executor/model_loader/weight_cache/warmup_cache.py",
    "vllm/model_executor/warmup/flashinfer_autotune_cache.py",
)


def main() -> None:
    """Extract them, with their folders."""
    wheel, folder = sys.argv[1:]
    with ZipFile(wheel) as archive:
        archive.extractall(folder, FILES)


if __name__ == "__main__":
    main()
