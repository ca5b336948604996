"""What a package of preloadd puts on a machine, as a layer made out of the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNITS = sorted([*ROOT.glob("systemd/*.service"), *ROOT.glob("systemd/*.target")])

STAND_IN = Path(__file__).with_name("stand_in.py").read_text()
"""A program that behaves as units expect, and otherwise as a test wants."""

VENV = "/opt/venv"
"""A virtual environment with all that ranks, loaders and engines need, readable for every user."""

TESTS = "/opt/tests"
"""Where machines see what tests run inside them."""

_PYTHON = f"python{sysconfig.get_python_version()}"
_SYSTEM_PYTHON = Path("/usr/bin", _PYTHON)
_LIBRARIES = "" if _SYSTEM_PYTHON.exists() else "LD_LIBRARY_PATH=/opt/python/lib"


def _program(arguments: str) -> str:
    """A script that runs Python with preloadd as the package installs it."""
    return f"""#!/bin/sh
export PYTHONPATH=/usr/lib/preloadd PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 {_LIBRARIES}
exec {VENV}/bin/python {arguments} "$@"
"""


REAL = _program("-m preloadd")
"""preloadd itself; needs `PYTHON_BINDS`."""

PYTHON_BINDS = (
    # No service's user can go into a home folder, where a test's interpreter often lies.
    (Path(sys.base_prefix), "/opt/python"),
    (
        Path(sysconfig.get_path("purelib")),
        f"{VENV}/lib/{_PYTHON}/site-packages",
    ),
    (ROOT / "preloadd", "/usr/lib/preloadd/preloadd"),
    (ROOT / "bench", f"{TESTS}/bench"),
    (ROOT / "tests/system/inside", f"{TESTS}/inside"),
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
    for path, text in {
        "usr/libexec/preloadd/preloadd": program,
        "usr/bin/preloadctl": _program("-m preloadd.cli"),
        "usr/bin/preloadd-python": _program(""),
    }.items():
        _executable(folder / path, text)
    _virtual_environment(folder / VENV.lstrip("/"))
    # It becomes the mode of the machine's root.
    folder.chmod(0o755)
    return folder


def _executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def _virtual_environment(folder: Path) -> None:
    """One of the system's Python, as an administrator makes it; its packages are the tests' own.

    They were built for the tests' interpreter, which stands in where the system's is another one.
    """
    if _SYSTEM_PYTHON.exists():
        subprocess.run([_SYSTEM_PYTHON, "-m", "venv", "--without-pip", folder], check=True)
        return
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text("home = /opt/python/bin\n")
    (folder / "bin/python").symlink_to(f"/opt/python/bin/{_PYTHON}")
