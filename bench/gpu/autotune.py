"""FlashInfer's tables for the FP8 products of a Llama-8B: tuned, and then had from elsewhere.

Claims: a table that was tuned by a loader answers every lookup of a plain user of FlashInfer
(`autotune(False, cache=…)`), wherever it came from: this disk, a shared folder, a peer. That user's
pass over all sizes then takes at most 1/20 of tuning them.

The weights are one layer's, which is all the kinds of products that there are. "Warm-up" is what a
start takes longer than one with `--disable-flashinfer-autotune`: nearly all of it is importing
torch and FlashInfer, to ask that where tables are and what fits.

Takes about a minute on an H200, more where FlashInfer has yet to compile its kernels.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from bench.daemon import Daemon
from bench.gpu.gemms import LAYER, LOOKUPS
from bench.gpu.session import Session, run
from preloadd.domain.dtypes import nbytes
from preloadd.warmup.names import OVERRIDE, TableName

RATIO = 1 / 20
GROUP_S = 600.0
DTYPE = "F8_E4M3"
NAME = str(TableName(0, 0))
TOKEN = "plt_bench-0123456789abcdef"


def main() -> int:
    """Measure."""
    return run("autotune", __doc__.partition("\n")[0], _measure, limit_s=400)


def _measure(session: Session) -> None:
    if session.meter is None:
        session.report.absent("all", "everything", "needs a GPU")
        return
    measured = _Autotune(session, layer(session.scratch / "layer", DTYPE))
    session.part("plain", measured.plain)
    session.part("off", measured.off)
    session.part("tuned", measured.tuned)
    session.part("disk", measured.disk)
    session.part("store", measured.store)
    session.part("peer", measured.peer)


def layer(folder: Path, dtype: str) -> Path:
    """A checkpoint of one layer of that dtype, of zeros that take no room on the disk."""
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    header, end = {}, 0
    for name, shape in LAYER.items():
        start, end = end, end + nbytes(dtype, math.prod(shape))
        header[f"model.layers.0.{name}.weight"] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


class _Autotune:
    """All parts over one checkpoint."""

    def __init__(self, session: Session, model: Path) -> None:
        self._session, self._report, self._model = session, session.report, model
        self._cold_s = self._off_s = 0.0
        self._first = self._root("first")
        self._shared = self._root("shared")

    def plain(self, part: str) -> None:
        """What FlashInfer does by itself."""
        folder = self._root("plain")
        self._cold_s = _user("tune", folder / NAME)["seconds"]
        self._report.figure(part, "tuning all sizes", self._cold_s, "s")
        self._check(part, folder / NAME)
        without = _user("use", folder / "none.json")
        self._report.figure(part, "lookups without a table", without["misses"])

    def off(self, part: str) -> None:
        """How long a start takes that does not warm up."""
        self._off_s, _ = self._start("off", "--disable-flashinfer-autotune")
        self._report.figure(part, "from starting to serving", self._off_s, "s")

    def tuned(self, part: str) -> None:
        """The first start of all, with a store to give the table to."""
        seconds, lines = self._start("first", *self._stores)
        self._tell(part, seconds, lines, "tuned")
        self._check(part, _table(self._first))

    def disk(self, part: str) -> None:
        """The next one, on the same host."""
        seconds, lines = self._start("first")
        self._tell(part, seconds, lines, "found on disk")
        self._check(part, _table(self._first))

    def store(self, part: str) -> None:
        """Another host, with the same store."""
        seconds, lines = self._start("second", *self._stores)
        self._tell(part, seconds, lines, "installed from a shared store")
        self._check(part, _table(self._root("second")))

    def peer(self, part: str) -> None:
        """Another host, with a source that serves."""
        with closing(socket.create_server(("127.0.0.1", 0))) as sock:
            port = str(sock.getsockname()[1])
        token = self._session.scratch / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        listen = ("--seed-listen-host", "127.0.0.1", "--seed-listen-port", port)
        ask = ("--seed-source-host", "127.0.0.1", "--seed-source-port", port)
        own = ("--seed-token-file", str(token))
        with self._daemon("first", *listen, *own):
            seconds, lines = self._start("third", *ask, *own)
        self._tell(part, seconds, lines, "installed from a peer")
        self._check(part, _table(self._root("third")))

    @property
    def _stores(self) -> tuple[str, str]:
        return "--warmup-cache-stores", f"file:{self._shared}"

    def _tell(self, part: str, seconds: float, lines: list[str], wanted: str) -> None:
        """What a start took, and whether it had the table from where it should."""
        had = any(wanted in line for line in lines)
        self._report.holds(part, f"the rank says: {wanted}", had, "; ".join(lines))
        self._report.figure(part, "warm-up", seconds - self._off_s, "s")

    def _check(self, part: str, table: Path) -> None:
        """A plain user finds everything in `table`, and fast."""
        used = _user("use", table)
        self._report.holds(part, "no lookup is without an answer", not used["misses"])
        self._report.figure(part, "lookups answered", used["hits"], at_least=LOOKUPS[DTYPE])
        limit = self._cold_s * RATIO or None
        self._report.figure(part, "all sizes with the table", used["seconds"], "s", at_most=limit)

    def _start(self, root: str, *flags: str) -> tuple[float, list[str]]:
        """Seconds until a rank serves, and what it says of its warm-up, published if it tuned."""
        started = time.monotonic()
        with self._daemon(root, *flags) as daemon:
            seconds = time.monotonic() - started
            until = time.monotonic() + 30.0
            while True:
                lines = list(daemon.status().warmup)
                if not self._publishes(flags, lines) or time.monotonic() > until:
                    return seconds, lines
                time.sleep(0.05)

    def _publishes(self, flags: tuple[str, ...], lines: list[str]) -> bool:
        made = flags == self._stores and any("tuned" in line for line in lines)
        return made and not any("published" in line for line in lines)

    def _daemon(self, root: str, *flags: str) -> Daemon:
        meter = self._session.meter
        assert meter is not None
        folder = Path(tempfile.mkdtemp(dir=self._session.scratch))
        environ = {**os.environ, OVERRIDE: str(self._root(root))}
        own = ("--memory", "cuda", "--gpus", meter.uuid)
        # Kernels may have to be compiled before it serves.
        return Daemon(
            *(self._model, folder, meter.uuid, *own, *flags), environ=environ, patience=GROUP_S
        )

    def _root(self, name: str) -> Path:
        folder = self._session.scratch / "tables" / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder


def _table(root: Path) -> Path:
    (path,) = root.rglob(NAME)
    return path


def _user(what: str, table: Path) -> Mapping[str, float]:
    """What the process in `gemms.py` answers."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu.gemms", what, DTYPE, os.fspath(table)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=GROUP_S,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
