"""A compile cache as vLLM leaves it, in two folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from preloadd.linux.private import LOCK

AOT = "torch_compile_cache/torch_aot_compile/" + "5a" * 32
PLAIN = "torch_compile_cache/0123456789"
FILES = {
    f"{AOT}/rank_0_0/model": b"model" * 1000,
    f"{AOT}/inductor_cache/5u/c5ueq.main.so": b"\x7fELF" + bytes(3000),
    f"{AOT}/inductor_cache/aotautograd/{'a' * 53}/{'b' * 53}": b"graph",
    f"{PLAIN}/rank_0_0/backbone/vllm_compile_cache.py": b"{}",
    f"{PLAIN}/rank_0_0/backbone/empty": b"",
}
IDENTITY = {"vllm": "0.33.0", "cuda": "13.0"}


def write(root: Path, files: Mapping[str, bytes] = FILES) -> None:
    """Put the files below `root`."""
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)


def contents(root: Path) -> dict[str, bytes]:
    """Every file below `root`, by its path; but for the lock."""
    files = [p for p in root.rglob("*") if p.is_file() and p.name != LOCK]
    return {str(p.relative_to(root)): p.read_bytes() for p in files}
