"""A scripted engine: asks one question again and again, and prints a line of JSON for each answer.

    engine.py MODEL DEVICE...

With several devices the model is divided into as many pipeline stages, one rank each, and put
together again. `at` is when an answer was there, in monotonic seconds, which all machines share.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from preloadd.domain.placement import Parallel, Placement
from preloadd.engine.discovery import DEVICES
from preloadd.engine.torch import Weights, attach_checkpoint
from preloadd.engine.transformers import from_pretrained

QUESTION = "What is the capital of France?"
OPTIONS = {"memory": "host", "fallback": False}


def main(folder: Path, devices: Sequence[str]) -> None:
    """Answer for ever."""
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if len(devices) == 1:
        os.environ[DEVICES] = devices[0]
        model: Any = from_pretrained(folder, options=OPTIONS)
    else:
        model = put_together(folder, [stage(folder, devices, n) for n in range(len(devices))])
    tokens = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    start = tokens["input_ids"].shape[1]
    while True:
        made = model.generate(**tokens, max_new_tokens=16, do_sample=False)
        answer = tokenizer.decode(made[0][start:], skip_special_tokens=True)
        print(json.dumps({"answer": answer, "at": time.monotonic()}), flush=True)


def stage(folder: Path, devices: Sequence[str], number: int) -> Weights:
    """The tensors of one pipeline stage, and the lease on them."""
    os.environ[DEVICES] = devices[number]
    placement = Placement(Parallel(pipeline=len(devices)), pipeline_rank=number)
    return attach_checkpoint(folder, options=OPTIONS, placement=placement, client="test-engine")


def put_together(folder: Path, stages: Sequence[Weights]) -> Any:
    """The model that holds the stages."""
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    tensors = {name: tensor for each in stages for name, tensor in each.tensors.items()}
    model = kind.from_pretrained(None, config=config, state_dict=tensors, dtype=torch.bfloat16)
    model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    model.stages = stages
    return model


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
