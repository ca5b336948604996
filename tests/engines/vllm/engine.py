"""vLLM engines as others start them, told what to do one line after the other.

Run with the Python of vLLM, `python -m tests.engines.vllm.engine`. A line of standard input is a
command as JSON: the name of a method of `Session` in "do", its arguments beside it. Standard output
gets one line of JSON for each: what the method returned, or "raised". What is printed goes to
standard error. It ends with standard input.

Times are in milliseconds, sizes in bytes. Floats are written so that they are read as they were.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from bench.demo.memory import anonymous_of, rss_anon

ARENA = "/memfd:preloadd-chunk"

SMALL: Mapping[str, object] = {
    "enforce_eager": True,
    "max_model_len": 256,
    "enable_prefix_caching": False,
    # By default it is most of the machine's memory.
    "kv_cache_memory_bytes": 16 << 20,
    "seed": 0,
}


def main() -> int:
    """Answer commands until there are no more."""
    answers = _own_output()
    session = Session()
    _tell(answers, session.prepared())
    for line in sys.stdin:
        command = json.loads(line)
        act = getattr(session, command.pop("do"))
        try:
            told = act(**command)
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises is the answer
            traceback.print_exc()
            told = {"raised": type(error).__name__, "text": str(error)}
        _tell(answers, told)
    session.drop()
    return 0


class Session:
    """At most one engine at a time."""

    def __init__(self) -> None:
        # Only now, so that all that it prints goes where it belongs.
        import vllm
        from vllm.distributed import cleanup_dist_env_and_memory

        self._vllm = vllm
        self._clean_up = cleanup_dist_env_and_memory
        self._engine: Any = None
        self._settled = False

    def prepared(self) -> dict[str, Any]:
        """What is told before the first command."""
        return {"pid": os.getpid(), "version": self._vllm.__version__}

    def load(self, model: str, *, version: str = "", **arguments: object) -> dict[str, Any]:
        """Start an engine in place of the one before. `version`: what vLLM claims to be."""
        self.drop()
        measured: dict[str, Any] = {}
        started = time.perf_counter()
        try:
            with _measured(measured), _claiming(self._vllm, version):
                self._engine = self._vllm.LLM(model=model, **(dict(SMALL) | arguments))
        except BaseException:
            self._clean_up()
            raise
        return {"start_ms": 1000 * (time.perf_counter() - started)} | measured

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[dict[str, Any]]:
        """What the engine says to each prompt, greedily, with what it thought of every token."""
        sampling = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=1, detokenize=False
        )
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        made = [one.outputs[0] for one in self._engine.generate(given, sampling, use_tqdm=False)]
        return [
            {
                "tokens": list(one.token_ids),
                "cumulative": one.cumulative_logprob,
                "logprobs": [
                    sorted((number, seen.logprob) for number, seen in step.items())
                    for step in one.logprobs
                ],
            }
            for one in made
        ]

    def speculated(self) -> dict[str, int]:
        """How many tokens were guessed by a draft, and how many of them were right. vLLM counts
        only if it is asked to keep statistics."""
        prefix = "vllm:spec_decode_num_"
        counted = {one.name.removeprefix(prefix): one for one in self._engine.get_metrics()}
        names = {"guessed": "draft_tokens", "right": "accepted_tokens"}
        return {told: int(counted[name].value) for told, name in names.items()}

    def memory(self) -> dict[str, int]:
        """What this process holds for itself, and how much of that are pages of weights."""
        return {"anonymous": rss_anon(), "arena_anonymous": anonymous_of(ARENA)}

    def settle(self) -> None:
        """Have the collector leave alone what is there now. vLLM calls it several times a load, and
        what it has to look at are the many objects of vLLM itself."""
        self._settled = True
        gc.freeze()

    def drop(self) -> None:
        """End the engine, if there is one."""
        if self._engine is not None:
            # In several processes they end with it, in one it only lets go.
            self._engine.llm_engine.engine_core.shutdown()
            self._engine = None
            self._clean_up()
            if self._settled:
                gc.freeze()


@contextmanager
def _measured(into: dict[str, Any]) -> Iterator[None]:
    """Measure `load_model` of whatever loader is used in this block, in this process."""
    from vllm.model_executor import model_loader

    choose = model_loader.get_model_loader

    def chosen(config: object) -> object:
        loader = choose(config)
        loader.load_model = _timed(loader.load_model, into)
        return loader

    model_loader.get_model_loader = chosen
    try:
        yield
    finally:
        model_loader.get_model_loader = choose


def _timed(load: Callable[..., Any], into: dict[str, Any]) -> Callable[..., Any]:
    def loaded(*given: object, **named: object) -> object:
        before = rss_anon()
        started = time.perf_counter()
        model = load(*given, **named)
        into["load_ms"] = 1000 * (time.perf_counter() - started)
        into["grown"] = rss_anon() - before
        into["arena_anonymous"] = anonymous_of(ARENA)
        into.update(_held(model))
        return model

    return loaded


def _held(model: Any) -> dict[str, int]:
    """Bytes of the model's tensors that lie in the arena, and of those that do not."""
    arena = [
        range(*(int(end, 16) for end in line.partition(" ")[0].split("-")))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if ARENA in line
    ]
    told = {"shared": 0, "private": 0}
    tensors = [*model.parameters(), *model.buffers()]
    for start, nbytes in {(tensor.data_ptr(), tensor.nbytes) for tensor in tensors}:
        told["shared" if any(start in part for part in arena) else "private"] += nbytes
    return told


@contextmanager
def _claiming(vllm: Any, version: str) -> Iterator[None]:
    """Have vLLM give another version as its own."""
    own = vllm.__version__
    vllm.__version__ = vllm.version.__version__ = version or own
    try:
        yield
    finally:
        vllm.__version__ = vllm.version.__version__ = own


def _own_output() -> TextIO:
    """Standard output, which from now on is standard error for everybody else."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _tell(answers: TextIO, what: object) -> None:
    with suppress(BrokenPipeError):
        answers.write(json.dumps(what) + "\n")
        answers.flush()


if __name__ == "__main__":
    sys.exit(main())
