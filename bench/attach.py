"""Attaching and adopting against what a user would run instead, all in one run.

Claims: attaching the demo model's tensors takes milliseconds, a killed rank daemon is back in a
fraction of a second without reading the checkpoint, and its memory does not grow with the model.
Prints one table, and JSON with `--json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from bench.daemon import Daemon
from bench.demo.memory import anonymous_of, rss, rss_anon
from bench.demo.model import make_model
from preloadd.engine.torch import attach_checkpoint

ARENA = "/memfd:preloadd-chunk"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--runs", type=int, default=21)
    arguments = parser.parse_args()
    measured = measure(make_model(), arguments.runs)
    if arguments.json:
        sys.stdout.write(json.dumps(measured, indent=1) + "\n")
        return 0
    table = Table(title=f"median of {arguments.runs}, adoption of 5")
    table.add_column("what")
    table.add_column("figure", justify="right")
    for name, value in measured.items():
        table.add_row(name, f"{value:,.2f}")
    Console(highlight=False).print(table)
    return 0


def measure(model: Path, runs: int) -> dict[str, float]:
    """Times in milliseconds, memory in MB."""
    with tempfile.TemporaryDirectory(prefix="preloadd-bench-") as folder:
        with Daemon(model, Path(folder), "CPU-0", "--memory", "host") as daemon:
            options = {"memory": "host", "socket_dir": daemon.sockets}

            def attach() -> None:
                attach_checkpoint(model, options=options).close()

            def read_files() -> None:
                for shard in model.glob("*.safetensors"):
                    for tensor in load_file(shard).values():
                        tensor.clone()

            attach_ms = median_ms(attach, runs)
            files_ms = median_ms(read_files, max(5, runs // 4))
            before = rss_anon()
            with attach_checkpoint(model, options=options) as weights:
                assert all(tensor.max().isfinite() for tensor in weights.tensors.values())
                anonymous, grown = anonymous_of(ARENA), rss_anon() - before
            adoptions = [adoption_ms(daemon) for _ in range(5)]
            return {
                "attach, ms": attach_ms,
                "safetensors load_file into own memory, ms": files_ms,
                "ratio": files_ms / attach_ms,
                "adoption: rank process start to ready, ms": statistics.median(adoptions),
                "rank daemon resident, MB": rss(daemon.status().pid) / 1e6,
                "anonymous memory in the arena's mappings, MB": anonymous / 1e6,
                "anonymous memory an attachment adds, MB": grown / 1e6,
            }


def adoption_ms(daemon: Daemon) -> float:
    """Kill the rank; from the start of its next process to its readiness."""
    adopted = daemon.kill_rank()
    assert adopted.bytes_read == 0
    return 1000 * adopted.seconds


def median_ms(act: Callable[[], None], runs: int) -> float:
    """Median of `runs` after one that does not count."""
    act()
    took = []
    for _ in range(runs):
        started = time.perf_counter()
        act()
        took.append(1000 * (time.perf_counter() - started))
    return statistics.median(took)


if __name__ == "__main__":
    sys.exit(main())
