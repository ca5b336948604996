"""Builds drivers that stand in for those of GPUs, and says how a process comes to use them."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent
CUDA_NAME = "libcuda.so.1"
NVML_NAME = "libnvidia-ml.so.1"
HIP_NAME = "libamdhip64.so"


def cuda(folder: Path) -> dict[str, str]:
    """What a child's environment needs besides this process's own, to find our CUDA driver.

    It has no devices until STAND_IN_DEVICES names some: see stand_in.c for all that can be said.
    NVML comes with it: see nvml.c.
    """
    _build(folder / NVML_NAME, "nvml.c")
    _build(folder / CUDA_NAME, "stand_in.c", "-Wl,-soname," + CUDA_NAME)
    paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"LD_LIBRARY_PATH": os.pathsep.join(paths)}


def cuda_here(folder: Path) -> ctypes.CDLL:
    """Have this process find our CUDA driver from now on, for good.

    The bindings ask for the name alone, and the loader knows a library of that name by then.
    """
    try:
        return ctypes.CDLL(CUDA_NAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        cuda(folder)
        return ctypes.CDLL(str(folder / CUDA_NAME), mode=ctypes.RTLD_GLOBAL)


def hip(folder: Path) -> Path:
    """The path of our HIP driver."""
    return _build(folder / HIP_NAME, "stand_in.c", "-DHIP")


def _build(library: Path, source: str, *options: str) -> Path:
    if not library.exists():
        fresh = library.with_name(f"{library.name}.{os.getpid()}")
        command = ["cc", "-O1", "-shared", "-fPIC", "-pthread", "-Wall", *options]
        command += ["-o", str(fresh), str(SOURCES / source), "-ldl"]
        subprocess.run(command, check=True)
        fresh.replace(library)
    return library
