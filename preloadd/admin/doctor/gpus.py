"""The NVIDIA driver, asked through its files and its own tool; nothing of CUDA is loaded."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress

from preloadd.admin.doctor.interpreter import run
from preloadd.admin.findings import Finding, note, ok, warning
from preloadd.admin.world import World
from preloadd.domain.devices import minor_in

_QUERY = ["--query-gpu=uuid,name,memory.total,persistence_mode", "--format=csv,noheader"]


def examine(world: World) -> Iterator[Finding]:
    """Whether there is a driver, what GPUs it has, and whether it keeps what no process uses."""
    try:
        text = (world.root / "proc/driver/nvidia/version").read_text()
    except OSError:
        yield note("gpu", "no NVIDIA driver: weights can live in host memory only")
        return
    version = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    gpus = world.gpus()
    told = f"driver {version[1] if version else 'of unknown version'}, {len(gpus)} GPUs"
    yield ok("gpu", told) if gpus else warning("gpu", told, "see `nvidia-smi` and the kernel log")
    if gpus:
        yield from _nodes(world)
    yield from _told_by_driver(world)


def _nodes(world: World) -> Iterator[Finding]:
    """Whether the driver's device nodes are there: no daemon may make them, as its tool would."""
    minors = sorted(_minors(world))
    wanted = ["nvidiactl", "nvidia-uvm", *(f"nvidia{minor}" for minor in minors)]
    missing = [f"/dev/{name}" for name in wanted if not (world.root / "dev" / name).exists()]
    if missing:
        yield warning(
            "gpu",
            f"{', '.join(missing)}: not there, and daemons cannot make device nodes",
            "run `nvidia-modprobe -u -c 0` as root at each boot, or nvidia-persistenced.service; "
            "in a container, have its runtime pass them in",
        )


def _minors(world: World) -> Iterator[int]:
    """The numbers of the GPUs' nodes, which need not begin with 0; none where nobody tells."""
    for path in (world.root / "proc/driver/nvidia/gpus").glob("*/information"):
        with suppress(OSError, UnicodeDecodeError):
            if (minor := minor_in(path.read_text())) >= 0:
                yield minor


def _told_by_driver(world: World) -> Iterator[Finding]:
    """What each GPU is, and persistence mode."""
    tool = shutil.which("nvidia-smi", path=world.environ.get("PATH"))
    if tool is None:
        yield note("gpu", "memory and persistence mode are unknown: there is no nvidia-smi")
        return
    said, why = run([tool, *_QUERY], world.environ)
    gpus = [fields for line in said.splitlines() if len(fields := line.split(", ")) == 4]
    if not gpus:
        yield warning("gpu", f"nvidia-smi tells nothing: {why}", "see the kernel log for NVRM, Xid")
        return
    for uuid, name, memory, _ in gpus:
        yield ok("gpu", f"{uuid}: {name}, {memory}")
    off = [uuid for uuid, *_, mode in gpus if mode.strip() != "Enabled"]
    if off:
        yield warning(
            "gpu",
            f"persistence mode is off for {', '.join(off)}: the driver may give up memory that no "
            "process has mapped",
            "enable nvidia-persistenced.service, or run `nvidia-smi -pm 1`",
        )
    else:
        yield ok("gpu", "persistence mode is on")
