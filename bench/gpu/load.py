"""Loading 16 GiB of bf16 in 8 files: native, against its ceilings and what else there is.

Claims: with the files in the page cache, native loading reaches 0.85 of the lower of the pinned
copy rate and the parallel read rate of the page cache, and is ahead of `safetensors` and of every
loader library; with the files on disk alone it reaches 0.9 of what parallel O_DIRECT reads reach.

Native is the whole chain in a fresh loader each time: "filling" is from the first chunk to the last
byte in device memory, "all of it" adds headers, digests and the manifest. The others run in a
process that is warm: imports, CUDA context and one load that does not count are behind it.
Libraries that go past the page cache are also measured going through it, and with a quarter of the
files, since they would take minutes. Cold runs use a quarter as well, and take turns. GB are 10^9
bytes.

Takes about 200 s on an H200, and 20 s more where `--work` has no files yet. `--sweep` measures our
own ring instead, for other numbers of threads and sizes of pieces (about 80 s).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.checkpoints import GIB, dense, evict, part_of, resident, shards
from bench.gpu.child import Actor, ChildError
from bench.gpu.disk import read_rate
from bench.gpu.filling import Filling
from bench.gpu.loaders import LIBRARIES, LOAD_FILE, Loading, Way
from bench.gpu.meter import MIB
from bench.gpu.session import Session, run

WARM = 0.85
COLD = 0.9
THREADS = (8, 16)
FEWEST = 5
LIBRARY_S = 25.0
COLD_SHARE = 0.02
SWEEP = [
    (threads, mib, buffers)
    for threads in (8, 12, 16, 24)
    for mib in (4, 8, 16, 32)
    for buffers in (0, 2 * threads)
]


@dataclass(frozen=True, slots=True)
class Native:
    """What loads came to, GB/s, one sample a load."""

    filling: list[float]
    whole: list[float]
    serving_s: list[float]
    direct: list[float]


def main() -> int:
    """Measure."""

    def also(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--gib", type=float, default=16, help="size of the weights")
        parser.add_argument("--files", type=int, default=8, help="of as many shards")
        parser.add_argument("--whole", type=Path, help="a dense checkpoint to take the files of")
        parser.add_argument("--sweep", action="store_true", help="measure our own ring instead")

    return run("load", __doc__.partition("\n")[0], _measure, limit_s=240, also=also)


def _measure(session: Session) -> None:
    given = session.arguments
    session.report.tell("making the checkpoint …")
    whole = given.whole
    if whole is None:
        whole = dense(session.work / f"dense-{given.gib:g}", given.files, int(given.gib * GIB))
    model = part_of(whole, session.scratch / "warm", given.files)
    few = part_of(whole, session.scratch / "few", max(1, given.files // 4))
    measured = _Load(session, model, few)
    if given.sweep:
        session.part("sweep", measured.sweep)
        return
    session.part("ceilings", measured.ceilings)
    session.part("native, warm", measured.native_warm)
    session.part("native, cold", measured.native_cold)
    session.part(LOAD_FILE.name, measured.load_file)
    for way in LIBRARIES:
        session.part(way.name, lambda part, way=way: measured.library(part, way))
    session.part("promises", measured.promises)


class _Load:
    """All parts over one checkpoint, and over a smaller one of the same files."""

    def __init__(self, session: Session, model: Path, few: Path) -> None:
        self._session, self._report, self._runs = session, session.report, session.runs
        self._model, self._few = model, few
        self._medians: dict[str, float] = {}
        self._others: dict[str, float] = {}

    def ceilings(self, part: str) -> None:
        """Of the page cache, and of the bus."""
        paths = shards(self._model)
        read_rate(paths, threads=max(THREADS))
        self._report.figure(part, "share of the files in the page cache", resident(paths))
        rates = []
        for threads in THREADS:
            found = [read_rate(paths, threads=threads) for _ in range(self._runs)]
            what = f"page cache, preadv by {threads} threads"
            rates.append(self._report.figure(part, what, found, "GB/s"))
        self._medians["page cache"] = max(rates)
        if self._session.meter is None:
            self._report.absent(part, "pinned host-to-device copy", "needs a GPU")
            return
        with Actor(Loading) as loading:
            loading.ready()
            found = loading.ask(Loading.pinned_rate, self._runs)
        what = "pinned host-to-device copy"
        self._medians["copy"] = self._report.figure(part, what, found, "GB/s")

    def native_warm(self, part: str) -> None:
        """The page cache has every byte."""
        read_rate(shards(self._model), threads=max(THREADS))
        loads = self._loads(self._model, self._runs, lambda: None)
        self._medians["filling"] = self._report.figure(part, "filling", loads.filling, "GB/s")
        self._medians["whole"] = self._report.figure(part, "all of it", loads.whole, "GB/s")
        what = "from starting `preloadd run` to serving"
        self._report.figure(part, what, loads.serving_s, "s")
        self._report.figure(part, "share read past the page cache", loads.direct)

    def native_cold(self, part: str) -> None:
        """The page cache has nothing of the files; three ways take turns."""
        paths = shards(self._few)
        best = max(((8, 4), (16, 16)), key=lambda way: self._cold_rate(paths, *way, direct=True))
        direct, buffered, filling, whole, share = [], [], [], [], []
        for _ in range(self._runs):
            direct.append(self._cold_rate(paths, *best, direct=True))
            loads = self._loads(self._few, 1, lambda: self._evict(paths))
            filling += loads.filling
            whole += loads.whole
            share += loads.direct
            buffered.append(self._cold_rate(paths, *best, direct=False))
        figure = self._report.figure
        what = f"O_DIRECT by {best[0]} threads, {best[1]} MiB"
        ceiling = figure(part, what, direct, "GB/s")
        figure(part, what.replace("O_DIRECT", "buffered reads"), buffered, "GB/s")
        native = figure(part, "native, filling", filling, "GB/s")
        everything = figure(part, "native, all of it", whole, "GB/s")
        figure(part, "native, share read past the page cache", share)
        figure(part, "native, filling / O_DIRECT", native / ceiling, at_least=self._least(COLD))
        figure(part, "native, all of it / O_DIRECT", everything / ceiling)

    def load_file(self, part: str) -> None:
        """All files."""
        self._other(part, LOAD_FILE, shards(self._model))

    def library(self, part: str, way: Way) -> None:
        """A quarter of the files."""
        self._other(part, way, shards(self._few))

    def promises(self, part: str) -> None:
        """What native loading was promised to be, from the figures above."""
        medians, figure = self._medians, self._report.figure
        ceiling = min(medians[name] for name in ("page cache", "copy") if name in medians)
        what = "lower of copy and page cache"
        least = self._least(WARM)
        figure(part, f"filling / {what}", medians["filling"] / ceiling, at_least=least)
        figure(part, f"all of it / {what}", medians["whole"] / ceiling)
        for name, rate in self._others.items():
            ahead = medians["whole"] / rate
            figure(part, f"all of it / {name}", ahead, at_least=1.0)

    def sweep(self, part: str) -> None:
        """Our ring with other numbers; 0 buffers are one and a half for each thread."""
        paths = shards(self._model)
        read_rate(paths, threads=max(THREADS))
        found = {}
        with Actor(Filling, str(self._model)) as filling:
            filling.ready()
            filling.ask(Filling.fill, 8, 16 * MIB, 0)
            for threads, mib, buffers in SWEEP:
                if time.monotonic() > self._session.deadline:
                    break
                rates = [filling.ask(Filling.fill, threads, mib * MIB, buffers) for _ in range(3)]
                what = f"{threads} threads, {mib} MiB, {buffers or 'default'} buffers"
                found[what] = self._report.figure(part, what, rates, "GB/s")
        best = max(found, key=lambda what: found[what])
        self._report.figure("best", best, found[best], "GB/s")

    def _least(self, promised: float) -> float | None:
        """What was promised was promised of GPUs."""
        return promised if self._session.meter else None

    def _other(self, part: str, way: Way, paths: list[Path]) -> None:
        if self._session.meter is None:
            self._report.absent(part, "load to the GPU", "needs one")
            return
        deadline = time.monotonic() + LIBRARY_S
        rates: list[float] = []
        try:
            with Actor(Loading, environ=way.environ) as loading:
                loading.ready()
                loading.ask(Loading.load, way.load, paths)
                while len(rates) < self._runs and (
                    len(rates) < FEWEST or time.monotonic() < deadline
                ):
                    rates.append(loading.ask(Loading.load, way.load, paths))
        except ChildError as error:
            if not rates:
                self._report.absent(part, "load to the GPU", str(error))
                return
        what = f"{len(paths)} files to the GPU, page cache warm"
        if len(rates) < min(FEWEST, self._runs):
            what += f"; gave up after {len(rates)}"
        self._others[way.name] = self._report.figure(part, what, rates, "GB/s")

    def _loads(self, model: Path, runs: int, before: Callable[[], None]) -> Native:
        found = Native([], [], [], [])
        for _ in range(runs):
            before()
            started = time.monotonic()
            with self._session.daemon(model) as daemon:
                found.serving_s.append(time.monotonic() - started)
                told = daemon.status()
            counted = told.counters
            found.filling.append(told.tensor_bytes / max(1, counted["generation_fill_ms"]) / 1e6)
            found.whole.append(told.tensor_bytes / max(1, counted["generation_load_ms"]) / 1e6)
            direct = counted["generation_bytes_direct"]
            found.direct.append(direct / max(1, counted["generation_bytes_read"]))
        return found

    def _cold_rate(self, paths: Sequence[Path], threads: int, mib: int, *, direct: bool) -> float:
        self._evict(paths)
        return read_rate(paths, threads=threads, mib=mib, direct=direct)

    def _evict(self, paths: Sequence[Path]) -> None:
        """ValueError if the files stay in the page cache, so that no warm run is called cold."""
        left = evict(paths)
        if left > COLD_SHARE:
            raise ValueError(f"{left:.0%} of the files stay in the page cache")


if __name__ == "__main__":
    sys.exit(main())
