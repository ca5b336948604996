"""An engine as a service: adds up all its weights again and again, and prints what comes of it.

    python -m tests.gpu.inside.service MODEL

Lines of JSON: `answer` with `at`, when it was there in monotonic seconds; and `verified`, how many
bytes were looked at one by one, `wrong`, which tensors are not as they must be: once at the start,
and once more after SIGTERM, before it ends.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import Any

import torch

from preloadd.engine.torch import attach_checkpoint
from tests.gpu.inside import words

ending = False


def main(folder: str) -> None:
    """Attach, verify, add up until asked to end, verify again."""
    signal.signal(signal.SIGTERM, end)
    began = time.monotonic()
    options = {"fallback": False, "state_timeout_s": 20}
    weights = attach_checkpoint(folder, options=options, client="test-engine")
    tell(attached_ms=round(1000 * (time.monotonic() - began), 1), device=weights.device)
    tensors = [weights.tensors[words.name(number)] for number in range(len(weights.tensors))]
    verify(tensors)
    graph, answer = captured(tensors)
    while not ending:
        graph.replay()
        tell(answer=int(answer.item()), at=time.monotonic())
        time.sleep(0.005)
    verify(tensors)
    sys.stdout.flush()


def end(*_: object) -> None:
    global ending  # noqa: PLW0603 - what a signal can reach
    ending = True


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def verify(tensors: list[torch.Tensor]) -> None:
    """Compare every byte with what follows from its place."""
    began = time.monotonic()
    first = torch.arange(tensors[0].numel(), device=tensors[0].device) * words.signed(words.STEP)
    wrong = [
        number
        for number, tensor in enumerate(tensors)
        if not torch.equal(tensor, first + words.signed(number * words.START))
    ]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    tell(verified=nbytes, wrong=wrong, s=round(time.monotonic() - began, 2))


def captured(tensors: list[torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """The sum of all words, those of tensor `n` counted `n + 1` times, as a graph."""
    times = torch.arange(1, len(tensors) + 1, device=tensors[0].device)

    def total() -> torch.Tensor:
        return (torch.stack([tensor.sum() for tensor in tensors]) * times).sum()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        total()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = total()
    return graph, answer


if __name__ == "__main__":
    main(sys.argv[1])
