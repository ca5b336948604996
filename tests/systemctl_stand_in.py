"""A `systemctl` that is a program on PATH: it knows units, does as it is told, and writes it down.

What the real one does was looked up with systemd 252: blocks of properties in no order, status 4
and its words without the right, "offline" where there is no systemd.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PROGRAM = """#!@PYTHON@ -IS
import json, os, sys, time

home = "@HOME@/"
with open(home + "world.json") as file:
    world = json.load(file)
options = [a for a in sys.argv[1:] if a.startswith("-") and a != "--"]
words = [a for a in sys.argv[1:] if not a.startswith("-")]
verb, names = words[0], words[1:]
with open(home + "calls", "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
if world.get("environ"):
    with open(home + "environ.json", "w") as file:
        json.dump(dict(os.environ), file)
time.sleep(world.get("sleep", {}).get(verb, 0))
if verb == "is-system-running":
    print(world["state"])
    sys.exit(0 if world["state"] == "running" else 1)
if world["state"] == "offline":
    print("System has not been booted with systemd as init system (PID 1).", file=sys.stderr)
    sys.exit(1)
status, said = world.get("answers", {}).get(verb, (0, ""))
units = world["units"]
if verb == "show":
    wanted = next(o for o in options if o.startswith("--property=")).split("=", 1)[1].split(",")
    blocks = []
    for name in names:
        told = {"Id": name, "LoadState": "not-found", "ActiveState": "inactive", "SubState": "dead"}
        told |= units.get(name, {})
        blocks.append("\\n".join(f"{k}={v}" for k, v in reversed(told.items()) if k in wanted))
    print("\\n\\n".join(blocks))
elif verb == "list-units":
    ends = [pattern.split("*") for pattern in names]
    for name, told in units.items():
        if any(name.startswith(e[0]) and name.endswith(e[-1]) for e in ends):
            print(f"{name} loaded {told['ActiveState']} {told['SubState']} what it is")
elif status == 0:
    for name in names:
        for other, told in world.get("then", {}).get(f"{verb} {name}", {}).items():
            units[other] |= told
    with open(home + "world.json", "w") as file:
        json.dump(world, file)
sys.stderr.write(said)
sys.exit(status)
"""


class SystemctlStandIn:
    """Its home; `environ` makes processes find it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environ = {"PATH": str(home)}
        self._world: dict[str, Any] = {"state": "running", "units": {}}
        program = home / "systemctl"
        program.write_text(PROGRAM.replace("@PYTHON@", sys.executable).replace("@HOME@", str(home)))
        program.chmod(0o755)
        self._write()

    def unit(self, name: str, active: str = "active", sub: str = "running", **more: object) -> None:
        """There is this unit, with these properties."""
        known = {"Id": name, "LoadState": "loaded", "ActiveState": active, "SubState": sub}
        self._world["units"][name] = {**known, **{k: str(v) for k, v in more.items()}}
        self._write()

    def set(self, **world: Any) -> None:
        """`state` of all; `answers`: verb to status and text; `sleep`: verb to seconds; `then`:
        what becomes of units after a verb and a name."""
        self._world |= world
        self._write()

    @property
    def calls(self) -> list[list[str]]:
        """Every command line."""
        path = self.home / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def orders(self) -> list[list[str]]:
        """Those command lines that change something, without the options that all have."""
        common = {"--system", "--no-pager", "--no-ask-password"}
        asking = {"show", "list-units", "is-system-running"}
        told = [[word for word in call if word not in common] for call in self.calls]
        return [call for call in told if not asking & set(call)]

    def _write(self) -> None:
        (self.home / "world.json").write_text(json.dumps(self._world))
