"""An engine as users have one: torch on the device, weights attached through `attach_checkpoint`.

An `Engine` lives in a process of its own (see `child`). Times are milliseconds.
"""

from __future__ import annotations

import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch
from blake3 import blake3

from bench.gpu.checkpoints import HEAD, head_of
from preloadd.engine.options import Where
from preloadd.engine.place import open_place, spot
from preloadd.engine.torch import Weights, attach_checkpoint

HASHERS = 8
LAYERS = 8
BATCH = 16
PAUSE_S = 0.002


@dataclass(frozen=True, slots=True)
class Computed:
    """What an engine computed all the while: how often, how many different results there were, and
    how often within each time asked for."""

    times: int
    results: int
    within: tuple[int, ...]


class Engine:
    """Ready once it has a CUDA context, if it is to have one. `memory` is `auto` or `host`."""

    def __init__(self, model: str, sockets: str, memory: str) -> None:
        torch.set_num_threads(1)
        self._model = Path(model)
        self._options = {"socket_dir": sockets, "memory": memory}
        self._where = Where(memory)
        self._weights: Weights | None = None
        self._computing: _Computing | None = None
        if self._where is Where.AUTO:
            torch.zeros(1, device="cuda")
            torch.cuda.synchronize()

    def open(self) -> float:
        """What a process pays once before it attaches to anything: the driver's bindings."""
        started = time.perf_counter()
        open_place(spot(self._where), os.environ)
        return 1000 * (time.perf_counter() - started)

    def attach(self) -> float:
        """Attach, and keep the weights: from connecting to usable tensors."""
        started = time.perf_counter()
        self._weights = attach_checkpoint(self._model, options=self._options)
        return 1000 * (time.perf_counter() - started)

    def close(self) -> float:
        """Give the weights back, unmapped."""
        assert self._weights is not None
        started = time.perf_counter()
        self._weights.close()
        took = 1000 * (time.perf_counter() - started)
        self._weights = None
        return took

    def repeat(self, runs: int) -> list[tuple[float, float]]:
        """Attach and close again and again; the times of both."""
        return [(self.attach(), self.close()) for _ in range(runs)]

    def heads(self) -> int:
        """How many tensors of a sparse checkpoint begin with the bytes they should begin with."""
        return sum(
            _bytes_of(tensor)[:HEAD].cpu().numpy().tobytes() == head_of(number)
            for number, tensor in enumerate(self._tensors().values())
        )

    def digests(self) -> dict[str, str]:
        """BLAKE3 of every tensor's bytes, as they are on the device."""
        tensors = self._tensors()
        longest = max(tensor.nbytes for tensor in tensors.values())
        pinned = self._where is Where.AUTO
        rooms: SimpleQueue[torch.Tensor] = SimpleQueue()
        for _ in range(HASHERS):
            rooms.put(torch.empty(longest, dtype=torch.uint8, pin_memory=pinned))

        def digest(tensor: torch.Tensor) -> str:
            room = rooms.get()
            try:
                found = room[: tensor.nbytes].copy_(_bytes_of(tensor))
                return blake3(found.numpy()).hexdigest()
            finally:
                rooms.put(room)

        with ThreadPoolExecutor(HASHERS) as pool:
            return dict(zip(tensors, pool.map(digest, tensors.values()), strict=True))

    def compute(self) -> None:
        """Begin to compute with the weights, all the time."""
        self._computing = _Computing(list(self._tensors().values()))

    def computed(self, spans: list[tuple[float, float]]) -> Computed:
        """Stop computing. `spans` are times on the monotonic clock."""
        assert self._computing is not None
        computed = self._computing.stop(spans)
        self._computing = None
        return computed

    def overwrite(self, how: str) -> None:
        """Write to a tensor: in place on the device (`kernel`), or by a copy to it (`copy`).

        Returns only if nothing kept it from doing so.
        """
        tensor = _bytes_of(next(iter(self._tensors().values())))
        if how == "copy":
            tensor.copy_(torch.full(tensor.shape, 7, dtype=torch.uint8))
        else:
            tensor.fill_(7)
        if tensor.is_cuda:
            torch.cuda.synchronize()

    def _tensors(self) -> dict[str, torch.Tensor]:
        assert self._weights is not None
        return self._weights.tensors


class _Computing:
    """A thread that multiplies with a few layers spread over the arena, over and over."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        matrices = [tensor for tensor in tensors if tensor.dim() == 2]
        step = max(1, len(matrices) // LAYERS)
        self._layers = matrices[::step][:LAYERS]
        self._times: list[float] = []
        self._results: set[bytes] = set()
        self._failures: list[Exception] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self, spans: list[tuple[float, float]]) -> Computed:
        """End it; what it did. Raises what went wrong in it."""
        self._stop.set()
        self._thread.join()
        for failure in self._failures:
            raise failure
        within = tuple(sum(begin <= t <= end for t in self._times) for begin, end in spans)
        self._layers = []
        return Computed(len(self._times), len(self._results), within)

    def _run(self) -> None:
        try:
            given = [_activations(layer) for layer in self._layers]
            while not self._stop.wait(PAUSE_S):
                self._results.add(_product(given, self._layers))
                self._times.append(time.monotonic())
        except Exception as error:  # noqa: BLE001 - told by whoever stops this
            self._failures.append(error)


def _product(given: list[torch.Tensor], layers: list[torch.Tensor]) -> bytes:
    sums = [(x @ layer).float().abs().sum() for x, layer in zip(given, layers, strict=True)]
    found = torch.stack(sums).cpu()
    if not bool(found.isfinite().all()):
        raise ArithmeticError("the numbers are no numbers")
    return found.numpy().tobytes()


def _activations(layer: torch.Tensor) -> torch.Tensor:
    """The same numbers every time, for a matrix to be multiplied with."""
    rows = layer.shape[0]
    ramp = torch.linspace(-1, 1, BATCH * rows, device=layer.device)
    return ramp.reshape(BATCH, rows).mul(math.pi).sin().to(layer.dtype)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
