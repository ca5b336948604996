"""A checkpoint whose every byte follows from its place, and how engines see that it is right.

Word `i` of tensor `n` is `n * START + i * STEP`, in 64 bits that wrap around.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

START = 0x9E37_79B9_7F4A_7C15
STEP = 0xC2B2_AE3D_27D4_EB4F
WORD = 8
ALIGNED = 512
_WRAP = 1 << 64

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16"}


def name(number: int) -> str:
    """The name of a tensor."""
    return f"model.layers.{number}.mlp.up_proj.weight"


def write_checkpoint(folder: Path, nbytes: int, tensors: int, threads: int) -> int:
    """Write at least `nbytes` as so many tensors of one size; words of each tensor."""
    each = -(-nbytes // tensors // ALIGNED) * ALIGNED
    header = {
        name(number): {
            "dtype": "I64",
            "shape": [each // WORD],
            "data_offsets": [number * each, (number + 1) * each],
        }
        for number in range(tensors)
    }
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    first = np.arange(each // WORD, dtype=np.uint64) * np.uint64(STEP)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, 8 + len(text) + tensors * each)

        def put(number: int) -> None:
            data = memoryview(first + np.uint64(number * START % _WRAP)).cast("B")
            place = 8 + len(text) + number * each
            done = 0
            while done < each:
                done += os.pwrite(file.fileno(), data[done:], place + done)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(put, range(tensors)))
    return each // WORD


def checksum(tensors: int, words: int) -> int:
    """What an engine's answer must be: all words, those of tensor `n` counted `n + 1` times."""
    steps = STEP * (words * (words - 1) // 2)
    found = sum((n + 1) * (n * START * words + steps) for n in range(tensors))
    return signed(found)


def signed(value: int) -> int:
    """`value` as a signed word."""
    wrapped = value % _WRAP
    return wrapped - _WRAP if wrapped >= _WRAP // 2 else wrapped
