"""What an administrator's command needs to know of the host. Standard library only."""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from preloadd.config.files import config_dir
from preloadd.domain.settings import RUNNING
from preloadd.errors import InsecurePath
from preloadd.linux.plain import read_file

CACHE = "/var/cache/preloadd"
"""The cache folder of the units."""

_MAX_NBYTES = 1 << 20
_GPU_UUID = re.compile(r"^GPU UUID:\s+(GPU-[0-9a-f-]{36})\s*$", re.MULTILINE)
_ASSIGNMENT = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)=(.*)\Z")


@dataclass(frozen=True, slots=True)
class World:
    """This host as seen from `root`, with the environment of the command."""

    environ: Mapping[str, str]
    root: Path = Path("/")

    @property
    def config_dir(self) -> Path:
        """Where the files of this host lie."""
        return config_dir(self.environ)

    @property
    def defaults(self) -> Path:
        """The file with variables that systemd gives to every daemon."""
        return self.root / "etc/default/preloadd"

    @property
    def runtime(self) -> Path:
        """The folder in which systemd makes one for each rank."""
        return self.root / "run/preloadd"

    def service_environ(self, user: str) -> dict[str, str]:
        """The environment of a daemon that systemd runs as `user`."""
        path = self.environ.get("PATH", os.defpath)
        environ = {"PATH": path, "XDG_CACHE_HOME": CACHE, **self.defaults_environ()}
        with suppress(KeyError):
            environ["HOME"] = pwd.getpwnam(user).pw_dir
        return environ

    def daemon_environ(self) -> dict[str, str]:
        """What daemons find in their environment of settings: under systemd that is not what this
        command was started with, but what the defaults say."""
        booted = (self.root / "run/systemd/system").is_dir()
        environ = {} if booted else dict(self.environ)
        if "PRELOADD_CONFIG_DIR" in self.environ:
            environ["PRELOADD_CONFIG_DIR"] = self.environ["PRELOADD_CONFIG_DIR"]
        return environ | self.defaults_environ()

    def defaults_environ(self) -> dict[str, str]:
        """The variables in `defaults`; none if there is no such file."""
        with suppress(OSError, UnicodeDecodeError):
            return dict(assignments(self.defaults.read_text()))
        return {}

    def python(self) -> str:
        """The interpreter of daemons: as the environment, else the defaults say, else this one."""
        chosen = self.environ.get("PRELOADD_PYTHON") or self.defaults_environ().get(
            "PRELOADD_PYTHON"
        )
        return chosen or sys.executable

    def gpus(self) -> list[str]:
        """UUIDs of the NVIDIA GPUs that the driver tells of, in the order of their addresses."""
        found = []
        for path in sorted((self.root / "proc/driver/nvidia/gpus").glob("*/information")):
            with suppress(OSError, UnicodeDecodeError):
                found += _GPU_UUID.findall(path.read_text())
        return found

    def running(self) -> list[tuple[Path, bytes]]:
        """What each rank of systemd was started with, as it wrote it down; see `rank.orders`."""
        records = self.records().items()
        return [(path, found) for path, found in records if isinstance(found, bytes)]

    def records(self) -> dict[Path, bytes | OSError | InsecurePath]:
        """What is in the record of each rank of systemd, or why that cannot be seen."""
        found: dict[Path, bytes | OSError | InsecurePath] = {}
        # Not `glob`: to that a folder it may not look into is an empty one.
        with suppress(FileNotFoundError):
            for folder in sorted(self.runtime.iterdir()):
                path = folder / RUNNING
                try:
                    found[path] = read_file(path, _MAX_NBYTES)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                except (OSError, InsecurePath) as error:
                    found[path] = error
        return found

    def running_versions(self) -> dict[str, str]:
        """The version of preloadd by the instance that runs it."""
        found = {}
        for path, raw in self.running():
            with suppress(ValueError, TypeError, KeyError):
                found[path.parent.name] = str(json.loads(raw)["version"])
        return found


def assignments(text: str) -> Iterator[tuple[str, str]]:
    """The variables of an environment file of systemd, written on one line each."""
    for line in text.splitlines():
        if line.lstrip().startswith(("#", ";")) or not (found := _ASSIGNMENT.match(line)):
            continue
        try:
            words = shlex.split(found[2])
        except ValueError:  # an open quote
            words = [found[2].strip()]
        yield found[1], " ".join(words)
