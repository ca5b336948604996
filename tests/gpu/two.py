"""A model divided over two GPUs, its engine's workers, and who may have which shard.

    python3 -m tests.gpu.two [--json PATH]

Prints one table; the exit status is 1 if a promise is broken, 2 where there are no two GPUs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.daemon import Group
from bench.gpu.child import Child, Raised, prepare
from bench.gpu.meter import NOTHING
from bench.gpu.report import Report
from tests.checkpoints import CONFIG, llama
from tests.gpu import device
from tests.gpu.inside import engine, worker
from tests.ports import free_port

RANKS = (0, 1)
LARGER = {
    **CONFIG,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
}


def main() -> int:
    """Serve a divided model, and attach to it in every way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    why = device.missing()
    if why or device.count() < len(RANKS):
        print(f"there are no two GPUs here: {why or 'one'}", file=sys.stderr)
        return 2
    report = Report("two GPUs", given.json)
    report.facts |= device.meter().facts()
    prepare([engine.__name__])
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        began = time.monotonic()
        model = llama(Path(folder, "model"), config=LARGER)
        report.tell(f"a model was made in {time.monotonic() - began:.1f} s")
        try:
            Trial(report, model, Path(folder)).run()
        except Exception as error:  # noqa: BLE001 - whatever it is, what was found is told
            report.failed("trial", f"{type(error).__name__}: {error}")
    report.show()
    return 1 if report.bad else 0


class Trial:
    """One model, and the GPUs by their numbers for NVML."""

    def __init__(self, report: Report, model: Path, folder: Path) -> None:
        self.report, self.model, self.folder = report, model, folder
        self.meters = [device.meter(number) for number in RANKS]
        self.gpus = [meter.uuid for meter in self.meters]
        self.sockets = ""
        self.groups = 0

    def run(self) -> None:
        """Everything, in order."""
        with _workers([{}, {}]) as first:
            for each in first:  # what the driver takes at the first context stays with it
                each(engine.make_context)
        before = [meter.used() for meter in self.meters]
        flags = ["--gpus", ",".join(self.gpus)]
        for name, more, environ in (
            ("TP 2", [], {}),
            ("daemon swapped by --gpus", ["--gpus", ",".join(self.gpus[::-1])], {}),
            ("daemon swapped by environment", [], {"CUDA_VISIBLE_DEVICES": "1,0"}),
            ("daemon by UUIDs", flags, {}),
        ):
            with self.serving(more, environ) as group:
                self.sockets = str(group.sockets)
                # Of rank 0 and of rank 1.
                order = RANKS[::-1] if "swapped" in name else RANKS
                self.placed(name, group, order, before)
                self.engines(name, order)
                self.wrong(name, order)
                self.report.tell(f"{name}: done")
            left = [
                self.meters[number].back_to(before[number]) - before[number] for number in RANKS
            ]
            back = all(abs(more) <= NOTHING for more in left)
            self.report.holds(name, "device memory is back at the start", back, f"{left} B more")

    @contextmanager
    def serving(self, flags: Sequence[str], environ: Mapping[str, str]) -> Iterator[Group]:
        """The daemon's side."""
        self.groups += 1
        folder = self.folder / str(self.groups)
        folder.mkdir(mode=0o700)
        settings = {**os.environ, **environ}
        base = ["--memory", "cuda", "--tensor-parallel-size", "2"]
        with Group(self.model, folder, *base, *flags, environ=settings) as group:
            yield group

    def placed(self, name: str, group: Group, order: Sequence[int], before: list[int]) -> None:
        """Whether each rank has its own GPU, and takes no more of it than its weights."""
        told = group.serving(*(self.gpus[number] for number in order))
        device.settles(lambda: not any(meter.contexts() for meter in self.meters))
        for status, number in zip(told, order, strict=True):
            more = self.meters[number].used() - before[number] - status.arena_bytes
            self.report.figure(name, f"GPU {number}: beyond the arena", more, "B", at_most=NOTHING)
        shares = [status.tensor_bytes for status in told]
        self.report.holds(name, "both ranks have as much", shares[0] == shares[1], f"{shares}")

    def engines(self, name: str, order: Sequence[int]) -> None:
        """Workers that call the GPUs by all the names there are."""
        # Rank by rank: its environment, and what number its GPU has there.
        ways: dict[str, list[tuple[dict[str, str], int]]] = {
            "as NVML counts": [({}, number) for number in order],
            "swapped": [({"CUDA_VISIBLE_DEVICES": "1,0"}, 1 - number) for number in order],
            "each its own UUID": [
                ({"CUDA_VISIBLE_DEVICES": self.gpus[number]}, 0) for number in order
            ],
        }
        for way, chosen in ways.items():
            with _workers([environ for environ, _ in chosen]) as workers:
                self._compute(name, way, workers, [index for _, index in chosen], order)

    def _compute(
        self,
        name: str,
        way: str,
        workers: Sequence[Child],
        indices: Sequence[int],
        order: Sequence[int],
    ) -> None:
        told = together(
            workers,
            lambda rank: (worker.attach, str(self.model), rank, indices[rank], self.sockets),
        )
        right = [each["gpu"] for each in told] == [self.gpus[number] for number in order]
        devices = [each["devices"] for each in told]
        right = right and devices == [[f"cuda:{index}"] for index in indices]
        self.report.holds(name, f"workers {way}: attached on the ranks' GPUs", right, f"{devices}")
        port = free_port()
        together(workers, lambda rank: (worker.join, rank, port))
        began = time.monotonic()
        found = together(workers, lambda rank: (worker.products, str(self.model), rank))
        took = time.monotonic() - began
        wrong = [what for each in found for what, is_equal in each.items() if not is_equal]
        told = f"{len(found[0])} products in {took:.2f} s{', wrong: ' if wrong else ''}"
        self.report.holds(
            name, f"workers {way}: equal to undivided", not wrong, told + ", ".join(wrong)
        )
        together(workers, lambda _: (worker.leave,))

    def wrong(self, name: str, order: Sequence[int]) -> None:
        """A worker on the other rank's GPU gets nothing, and is told why."""
        with _workers([{}, {}]) as workers:
            for rank, each in enumerate(workers):
                other = order[1 - rank]
                try:
                    each(worker.attach, str(self.model), rank, other, self.sockets)
                    code = text = "attached"
                except Raised as error:
                    code, text = error.code, error.text
                said = "tp_rank" in text
                self.report.holds(
                    name,
                    f"rank {rank} on the other GPU is refused",
                    code == "mismatch" and said,
                    text[:200],
                )


@contextmanager
def _workers(environs: Sequence[Mapping[str, str | None]]) -> Iterator[list[Child]]:
    with ExitStack() as owned:
        yield [owned.enter_context(Child(environ)) for environ in environs]


def together(workers: Sequence[Child], what: Callable[[int], tuple[Any, ...]]) -> list[Any]:
    """Have all workers do something at once; what came of it, rank by rank."""
    for rank, each in enumerate(workers):
        each.begin(*what(rank))
    return [each.result() for each in workers]


if __name__ == "__main__":
    sys.exit(main())
