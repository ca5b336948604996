"""A newer systemd than this machine's: the files of its distribution's backports, as a layer.

Nothing is installed. The packages come from the mirror that apt uses already, through apt, which
checks their signatures; what it keeps of them lies beside the layer.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

PACKAGES = ("systemd", "systemd-sysv", "libsystemd0", "libsystemd-shared", "libudev1")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
TIMEOUT_S = 60.0


class NotToBeHad(Exception):
    """There is no newer systemd here; the text says why."""


def layer(cache: Path) -> Path:
    """A folder to lay over the root; made at the first call (6 MB to download), kept in `cache`."""
    suite = f"{codename()}-backports"
    made = cache / f"systemd-{suite}"
    if not made.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            fresh = _make(suite, Path(scratch))
            # If another process was faster, its layer is as good.
            if not made.is_dir():
                fresh.rename(made)
    return made


def codename() -> str:
    """What Debian calls this machine's release; NotToBeHad elsewhere."""
    try:
        system = platform.freedesktop_os_release()
    except OSError as error:
        raise NotToBeHad("this system does not say what it is") from error
    if system["ID"] != "debian" or shutil.which("apt-get") is None:
        raise NotToBeHad(f"it is taken from Debian's backports, this is {system['ID']}")
    return system["VERSION_CODENAME"]


def _make(suite: str, scratch: Path) -> Path:
    (scratch / "lists/partial").mkdir(parents=True)
    source = f"deb [signed-by={KEYRING}] {mirror()} {suite} main\n"
    (scratch / "sources.list").write_text(source)
    apt = ["apt-get", "--quiet=2", "-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=3"]
    for option, value in {
        "Dir::State::Lists": "lists",
        "Dir::Cache": "cache",
        "Dir::Etc::SourceList": "sources.list",
        "Dir::Etc::SourceParts": "-",
    }.items():
        apt += ["-o", f"{option}={value if value == '-' else scratch / value}"]
    _run([*apt, "update"], scratch)
    _run([*apt, "download", *PACKAGES], scratch)
    for package in scratch.glob("*.deb"):
        _run(["dpkg-deb", "--extract", str(package), str(scratch / "tree")], scratch)
    return _merged(scratch / "tree", scratch / "layer")


def mirror() -> str:
    """Where this machine's apt gets the distribution itself from."""
    ask = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    told = [line.rstrip("/") for line in _run(ask, Path("/")).splitlines()]
    mirrors = [line for line in told if line.endswith("/debian")]
    if not mirrors:
        raise NotToBeHad("apt has no source whose address ends in /debian")
    return mirrors[0]


def _merged(tree: Path, layer: Path) -> Path:
    """The packages' files, all below /usr: a folder /lib would hide the link of that name."""
    for folder in ("bin", "lib", "sbin"):
        if (tree / folder).is_dir():
            shutil.copytree(tree / folder, tree / "usr" / folder, symlinks=True, dirs_exist_ok=True)
    layer.mkdir()
    (tree / "usr").rename(layer / "usr")
    layer.chmod(0o755)
    return layer


def _run(argv: list[str], folder: Path) -> str:
    try:
        done = subprocess.run(
            argv,
            cwd=folder,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise NotToBeHad(f"{argv[0]} did not end in {TIMEOUT_S:g} s") from error
    if done.returncode:
        raise NotToBeHad(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr.strip()}")
    return done.stdout
