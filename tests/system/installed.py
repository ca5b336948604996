"""What a package of preloadd puts on a machine, as a layer made out of the checkout."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNITS = sorted([*ROOT.glob("systemd/*.service"), *ROOT.glob("systemd/*.target")])

STAND_IN = Path(__file__).with_name("stand_in.py").read_text()
"""A program that behaves as units expect, and otherwise as a test wants."""

REAL = """#!/bin/sh
export LD_LIBRARY_PATH=/opt/python/lib PYTHONPATH=/usr/lib/preloadd PYTHONSAFEPATH=1
export PYTHONDONTWRITEBYTECODE=1
exec /opt/venv/bin/python -m preloadd "$@"
"""
"""preloadd itself, under the interpreter of the tests; needs `PYTHON_BINDS`."""

PYTHON_BINDS = (
    # No service's user can go into a home folder, where a test's interpreter often lies.
    (Path(sys.base_prefix), "/opt/python"),
    (
        Path(sysconfig.get_path("purelib")),
        f"/opt/venv/lib/python{sysconfig.get_python_version()}/site-packages",
    ),
    (ROOT / "preloadd", "/usr/lib/preloadd/preloadd"),
)

PREPARE = "systemd-sysusers preloadd.conf"


def install(folder: Path, program: str) -> Path:
    """Lay out a package in the new `folder`, with `program` as its one executable."""
    units = folder / "usr/lib/systemd/system"
    units.mkdir(parents=True)
    for unit in UNITS:
        shutil.copy(unit, units)
    for source, target in {
        "preloadd-generator": "lib/systemd/system-generators/preloadd-generator",
        "preloadd.sysusers": "lib/sysusers.d/preloadd.conf",
        "preloadd.tmpfiles": "lib/tmpfiles.d/preloadd.conf",
        "preloadd.preset": "lib/systemd/system-preset/50-preloadd.preset",
    }.items():
        path = folder / "usr" / target
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "systemd" / source, path)
    executable = folder / "usr/libexec/preloadd/preloadd"
    executable.parent.mkdir(parents=True)
    executable.write_text(program)
    executable.chmod(0o755)
    _virtual_environment(folder / "opt/venv")
    # It becomes the mode of the machine's root.
    folder.chmod(0o755)
    return folder


def _virtual_environment(folder: Path) -> None:
    """One whose packages are those of the tests' own."""
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text("home = /opt/python/bin\n")
    version = sysconfig.get_python_version()
    (folder / "bin/python").symlink_to(f"/opt/python/bin/python{version}")
