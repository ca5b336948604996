"""A Debian of its own, of this machine's release, in a folder; and an engine's Python beside it."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

from tests.system import newer
from tests.system.newer import NotToBeHad

INCLUDED = ("systemd", "systemd-sysv", "dbus", "python3", "curl", "rpm", "man-db")
TIMEOUT_S = 600.0

ENGINE = "/opt/engine"
"""The environment of an engine: all that the tests have, but neither preloadd nor sdnotify."""

_PYTHON = f"python{sysconfig.get_python_version()}"
_SITE = Path(sysconfig.get_path("purelib"))
_PACKAGES = "/opt/packages"
_OWN = ("preloadd", "__editable__", "sdnotify", "_virtualenv", "distutils-precedence")

BINDS = ((_SITE, _PACKAGES),)


def make(folder: Path) -> Path:
    """The smallest Debian that boots, with what packages may use; NotToBeHad."""
    if shutil.which("mmdebstrap") is None:
        raise NotToBeHad("mmdebstrap is missing (Debian: apt install mmdebstrap)")
    release = newer.codename()
    told = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True)
    options = [line for line in told.stdout.splitlines() if line.startswith("Acquire::http")]
    source = f"deb [signed-by={newer.KEYRING}] {newer.mirror()} {release} main"
    command = ["nice", "mmdebstrap", "--mode=root", "--variant=minbase"]
    command += [f"--include={','.join(INCLUDED)}", *(f"--aptopt={line}" for line in options)]
    done = subprocess.run(
        [*command, release, folder, source],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise NotToBeHad(f"mmdebstrap: exit {done.returncode}: {done.stderr[-2000:]}")
    if not (folder / f"usr/bin/{_PYTHON}").exists():
        raise NotToBeHad(f"Debian {release} has no {_PYTHON}, which runs these tests")
    return folder


def layer(folder: Path) -> Path:
    """An engine's virtual environment, as a layer over a root that has `BINDS`."""
    environment = folder / ENGINE.lstrip("/")
    site = environment / "lib" / _PYTHON / "site-packages"
    site.mkdir(parents=True)
    (environment / "bin").mkdir()
    (environment / "bin/python").symlink_to(f"/usr/bin/{_PYTHON}")
    settings = "home = /usr/bin\ninclude-system-site-packages = false\n"
    (environment / "pyvenv.cfg").write_text(settings)
    for entry in _SITE.iterdir():
        if not entry.name.startswith(_OWN) and entry.suffix != ".pth":
            (site / entry.name).symlink_to(f"{_PACKAGES}/{entry.name}")
    # It becomes the mode of the machine's root.
    folder.chmod(0o755)
    return folder
