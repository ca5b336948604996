"""A scripted engine for the demo: loads the model, answers questions from standard input.

Prints one JSON object a line: first how the load went, then one for every question. Times are in
milliseconds, sizes in bytes.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from pathlib import Path

from bench.demo.memory import anonymous_of, rss_anon

ARENA = "/memfd:preloadd-chunk"


def main() -> int:
    """Load, report, then answer until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--socket-dir", type=Path, help="attach; without it, load from disk")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    engine = Engine(arguments.model, arguments.socket_dir)
    _tell(engine.report)
    for line in sys.stdin:
        _tell({"answer": engine.answer(line.strip())})
    return 0


class Engine:
    """transformers over attached weights, or over its own from disk."""

    def __init__(self, folder: Path, socket_dir: Path | None) -> None:
        import torch
        import transformers

        from preloadd.engine.transformers import from_pretrained

        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        # The model's code, which every way of loading imports once a process, is not measured.
        with torch.device("meta"):
            transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.from_pretrained(folder)
            )
        attach_ms = None if socket_dir is None else _attach_ms(folder, socket_dir)
        before = rss_anon()
        started = time.perf_counter()
        if socket_dir is None:
            self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        else:
            self._model = from_pretrained(
                folder, options=_options(socket_dir) | {"fallback": False}
            )
        for parameter in self._model.parameters():
            # What a load only put off is paid here, as the first token would.
            parameter.detach().view(torch.uint8).max()
        self.report = {
            "load_ms": 1000 * (time.perf_counter() - started),
            "attach_ms": attach_ms,
            "rss_anon": rss_anon() - before,
            "arena_anonymous": anonymous_of(ARENA),
        }

    def answer(self, question: str) -> str:
        """The greedy answer to one question."""
        chat = [{"role": "user", "content": question}]
        tokens = self._tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        made = self._model.generate(**tokens, max_new_tokens=16, do_sample=False)
        start = tokens["input_ids"].shape[1]
        return str(self._tokenizer.decode(made[0][start:], skip_special_tokens=True))


def _attach_ms(folder: Path, socket_dir: Path) -> float:
    """From nothing to usable tensors: median of several attachments of the weights alone."""
    from preloadd.engine.torch import attach_checkpoint

    took = []
    for _ in range(11):
        started = time.perf_counter()
        with attach_checkpoint(folder, options=_options(socket_dir)) as weights:
            took.append(1000 * (time.perf_counter() - started))
            assert weights.tensors
    return statistics.median(took)


def _options(socket_dir: Path) -> dict[str, object]:
    return {"memory": "host", "socket_dir": socket_dir}


def _tell(what: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
