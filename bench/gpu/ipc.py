"""What a user would run instead of attaching: one CUDA IPC handle for each tensor.

A server holds the tensors. Asked over a Unix socket, it reduces each with torch's own
`reduce_tensor` and sends all of them in one pickle, as vLLM and SGLang do to hand weights to
another process; the client rebuilds each. A handle is good for one receiver (they are counted), so
every client needs reducing anew. Payloads that are `READY` were reduced and pickled before they are
asked for: that leaves the client's part, and is more than a server can do for two clients at once.
"""

from __future__ import annotations

import pickle
import socket
import threading
import time

import torch
from torch.multiprocessing.reductions import reduce_tensor

NOW, READY, IDLE = b"n", b"r", b"i"


class Server:
    """Ready once it has a CUDA context; holds no tensors yet."""

    def __init__(self, path: str) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._prepared: bytes | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(16)
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()

    def fill(self, tensors: int, nbytes: int) -> int:
        """Make the tensors, of `nbytes` together at least, and begin to serve; their bytes."""
        rows = -(-nbytes // (tensors * 2 * 1024))
        for number in range(tensors):
            tensor = torch.empty((rows, 1024), dtype=torch.bfloat16, device="cuda")
            self._tensors[f"layers.{number}.weight"] = tensor.fill_(mark_of(number))
        torch.cuda.synchronize()
        threading.Thread(target=self._serve, daemon=True).start()
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def _serve(self) -> None:
        while True:
            client, _ = self._listener.accept()
            with client:
                match client.recv(1):
                    case b"n":
                        client.sendall(self._pickled())
                    case b"r":
                        client.sendall(self._prepared or self._pickled())
                        self._prepared = None
                    case b"i":
                        self._prepared = self._prepared or self._pickled()

    def _pickled(self) -> bytes:
        return pickle.dumps({name: reduce_tensor(t) for name, t in self._tensors.items()})


class Client:
    """Ready once it has a CUDA context."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._tensors: dict[str, torch.Tensor] = {}
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()

    def attach(self, how: bytes) -> float:
        """From connecting to usable tensors, in milliseconds; keeps them."""
        if how == READY:
            self._fetch(IDLE)
        started = time.perf_counter()
        told = pickle.loads(self._fetch(how))
        self._tensors = {name: rebuild(*given) for name, (rebuild, given) in told.items()}
        return 1000 * (time.perf_counter() - started)

    def repeat(self, how: bytes, runs: int) -> list[float]:
        """Attach and let go again and again; the times of attaching."""
        took = []
        for _ in range(runs):
            self.close()
            took.append(self.attach(how))
        self.close()
        return took

    def wrong(self) -> int:
        """How many tensors do not hold what they should."""
        firsts = torch.stack([tensor[0, 0] for tensor in self._tensors.values()]).tolist()
        return sum(first != mark_of(number) for number, first in enumerate(firsts))

    def close(self) -> None:
        """Let go of the tensors."""
        self._tensors = {}
        torch.cuda.synchronize()

    def _fetch(self, how: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(self._path)
            server.sendall(how)
            with server.makefile("rb") as answer:
                return answer.read()


def mark_of(number: int) -> float:
    """What fills tensor `number`: a number that bf16 can hold."""
    return float(number % 251)
