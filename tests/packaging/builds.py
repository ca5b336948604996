"""Packages made out of the checkout, or out of a copy of it that says it is another version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import preloadd

ROOT = Path(__file__).parents[2]
PARTS = (
    *("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "pyproject.toml"),
    *("docs", "etc", "packaging", "preloadd", "systemd"),
)
TIME = 1_790_000_000
"""When everything was made, in seconds. Not later than now: tools doubt such files."""

VERSION = preloadd.__version__
NEWER = "9.9.9"

TOOLS = ("dpkg-buildpackage", "dh", "rpmbuild", "lintian", "rpmlint")
"""All that these tests run, beside what every system has."""


@dataclass(frozen=True, slots=True)
class Build:
    """What one run of build.sh has left in a folder."""

    folder: Path

    @property
    def deb(self) -> Path:
        """The package for Debian."""
        return next(self.folder.glob("*.deb"))

    @property
    def rpm(self) -> Path:
        """The package for RPM."""
        return next(self.folder.glob("*.rpm"))

    @property
    def sums(self) -> str:
        """Digests of all."""
        return (self.folder / "SHA256SUMS").read_text()


def copy(folder: Path) -> Path:
    """The sources without what is not theirs, and without git, in the new `folder`."""
    folder.mkdir(parents=True)
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=lambda _, names: _foreign(names))
        else:
            shutil.copy(ROOT / part, folder)
    return folder


def newer(sources: Path) -> Path:
    """Make `sources` those of a later version, which has another conffile."""
    for path, old, new in (
        ("preloadd/__init__.py", f'"{VERSION}"', f'"{NEWER}"'),
        ("etc/default/preloadd", "# Variables", "# Of a newer version.\n# Variables"),
    ):
        file = sources / path
        file.write_text(file.read_text().replace(old, new, 1))
    return sources


def build(
    sources: Path, out: Path, sdists: Path, *, umask: int = 0o022, environ: Mapping[str, str] = {}
) -> Build:
    """Run the build of `sources`; `sdists` has what it would download."""
    done = subprocess.run(
        ["nice", sources / "packaging/build.sh", out],
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "SDISTS": str(sdists),
            "SOURCE_DATE_EPOCH": str(TIME),
            **environ,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        umask=umask,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Build(out)


def download(folder: Path) -> Path:
    """Get what builds need of a package index."""
    fetch = [ROOT / "packaging/build.sh", "--fetch", folder]
    done = subprocess.run(
        fetch, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


def _foreign(names: list[str]) -> set[str]:
    return {name for name in names if name == "__pycache__" or name.endswith(".pyc")}
