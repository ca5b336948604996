"""Runs probe.py under the very unit of a rank, in a booted systemd, on a machine with a GPU.

`python3 -m tests.gpu.sandbox`, as root; prints what each step came to, and what the fd store holds
before and after the process is gone. Standard library only.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.system import installed
from tests.system.machine import Plan, booted

HERE = Path(__file__).parent
DRIVER = Path("/usr/local/nvidia")
INSTANCE = "GPU-0"
PROGRAM = """#!/bin/sh
export PYTHONPATH=/srv/probe LD_LIBRARY_PATH=/usr/local/nvidia/lib64:/opt/python/lib
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PATH=/usr/local/nvidia/bin:/usr/bin:/bin:/usr/local/cuda/bin
cd /
exec >>/run/preloadd/GPU-0/probe.out 2>>/run/preloadd/GPU-0/probe.err
/opt/venv/bin/python /srv/probe/probe.py
echo "status $?"
exec sleep infinity
"""
DROP_IN = """[Service]
Type=exec
WatchdogSec=0
NotifyAccess=all
"""


def main() -> int:
    """Boot, probe, kill, count."""
    with tempfile.TemporaryDirectory() as folder:
        package = installed.install(Path(folder, "package"), PROGRAM)
        nodes = "; ".join(
            f"mkdir -p $(dirname {path})"
            f" && mknod -m 666 {path} c {os.major(device)} {os.minor(device)}"
            for path, device in devices()
        )
        plan = Plan(
            layers=[package],
            binds=[*installed.PYTHON_BINDS, (HERE, "/srv/probe"), (DRIVER, "/usr/local/nvidia")],
            prepare=f"{installed.PREPARE}; {nodes}",
        )
        with booted(plan) as machine:
            unit = f"preloadd@{INSTANCE}.service"
            machine.write(f"/etc/systemd/system/{unit}.d/probe.conf", DROP_IN)
            machine.systemctl("daemon-reload")
            print("systemd", machine.version, flush=True)
            print(machine.run("systemd-analyze", "security", unit, check=False).stdout[-200:])
            machine.systemctl("start", unit)
            out = machine.path(f"/run/preloadd/{INSTANCE}/probe.out")
            deadline = time.monotonic() + 240
            while time.monotonic() < deadline:
                if out.exists() and "status" in out.read_text():
                    break
                time.sleep(0.5)
            print(out.read_text() if out.exists() else "no output", flush=True)
            error = machine.path(f"/run/preloadd/{INSTANCE}/probe.err")
            print(error.read_text()[-3000:] if error.exists() else "", flush=True)
            told = {"stored while it runs": machine.show(unit, "NFileDescriptorStore")}
            told["device MiB while it runs"] = used()
            machine.systemctl("kill", "--signal=KILL", "--kill-whom=all", unit, check=False)
            time.sleep(0.4)
            told["stored after SIGKILL"] = machine.show(unit, "NFileDescriptorStore")
            told["device MiB after SIGKILL"] = used()
            machine.systemctl("stop", unit, check=False)
            time.sleep(0.5)
            told["device MiB after stop"] = used()
            print(json.dumps(told))
            print("\n".join(machine.messages(unit)[-15:]))
    return 0


def devices() -> list[tuple[str, int]]:
    """The GPU's character devices."""
    return [
        (str(path), path.stat().st_rdev)
        for path in sorted([*Path("/dev").glob("nvidia*"), *Path("/dev").glob("nvidia-caps/*")])
        if stat.S_ISCHR(path.stat().st_mode)
    ]


def used() -> str:
    """Device memory in use, in MiB."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
