"""What has to be equal where a compile cache of vLLM is to be used: see `CompileIdentity`."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import vllm
from vllm import envs
from vllm.config import VllmConfig

from preloadd.domain.key import bounded, table
from preloadd.frameworks.vllm.identity import hardware
from preloadd.warmup.bundles.identity import CompileIdentity

_PROCESSOR = Path("/proc/cpuinfo")
_FLAGS = ("flags", "Features")
"""What the kernel calls a processor's instruction sets, on x86 and on Arm."""


def compile_identity(
    config: VllmConfig,
    *,
    config_hash: str,
    engine_args: Sequence[str],
    ranks: Sequence[tuple[int, int]],
    environ: Mapping[str, str],
) -> CompileIdentity:
    """That of engines with this configuration, in this environment, on this hardware.

    `config_hash` is vLLM's of 64 digits, `ranks` are (data-parallel rank, rank) of the whole world.
    """
    model = config.model_config
    return CompileIdentity(
        config_hash=config_hash,
        model=f"{model.model}@{model.revision or ''}",
        vllm=str(vllm.__version__),
        torch=str(torch.__version__),
        triton=_version("triton"),
        cuda=torch.version.cuda or torch.version.hip or "",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        architecture=_architecture(),
        environment=table({n: environ[n] for n in envs.compile_factors() if n in environ}),
        engine_args=tuple(engine_args),
        world=config.parallel_config.world_size_across_dp,
        ranks=tuple(sorted(ranks)),
        cache_root=str(Path(envs.VLLM_CACHE_ROOT).absolute()),
        site_packages=str(Path(vllm.__file__).parents[1]),
    )


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


@cache
def _architecture() -> str:
    """What machine code is made for: a GPU by its name, for kernels are tuned on it; a processor by
    all that it can, for compilers are told to use that."""
    if torch.cuda.is_available():
        return f"{hardware()} {torch.cuda.get_device_name()}"
    flags = ""
    for line in _PROCESSOR.read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in _FLAGS:
            flags = " ".join(sorted(value.split()))
            break
    return f"{platform.machine()} {hardware()} {bounded(flags, 0)}"
