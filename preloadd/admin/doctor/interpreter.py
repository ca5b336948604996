"""The interpreter of the daemons: there, new enough, with all it needs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence

from preloadd import __version__
from preloadd.admin.doctor import distributions
from preloadd.admin.findings import Finding, fault, ok, warning
from preloadd.admin.service import with_this_package
from preloadd.admin.world import World
from preloadd.linux.asking import ask

TIMEOUT_S = 30.0
OLDEST = (3, 11)
SYSTEMS = re.compile(r"(/usr)?/bin/python3(\.\d+)?")
"""Interpreters that belong to the distribution, into whose packages nobody should install."""
_VERSION = "import sys; print(*sys.version_info[:3])"


def examine(world: World) -> Iterator[Finding]:
    """Look at the interpreter that `PRELOADD_PYTHON` names, else this one."""
    python = world.python()
    remedy = f"set PRELOADD_PYTHON in {world.defaults} to a Python 3.11 or newer"
    if shutil.which(python) is None:
        yield fault("interpreter", f"{python}: no executable file", remedy)
        return
    said, why = run([python, "-c", _VERSION], world.environ)
    numbers = tuple(int(part) for part in said.split() if part.isdigit())
    if not numbers:
        yield fault("interpreter", f"{python} does not run: {why}", remedy)
        return
    written = ".".join(map(str, numbers))
    if numbers < OLDEST:
        yield fault("interpreter", f"{python} is Python {written}", remedy)
        return
    yield ok("interpreter", f"{python}, Python {written}")
    yield from _distributions(python, world)
    yield from _running(world)


def run(command: Sequence[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """What a command wrote to standard output, and the last it wrote to standard error."""
    try:
        told = ask(command, with_this_package(environ), timeout=TIMEOUT_S)
    except TimeoutError as error:
        return "", str(error)
    except OSError as error:
        return "", f"{command[0]}: {error.strerror}"
    return told.said.decode(errors="replace"), told.complaint or f"status {told.status}"


def _distributions(python: str, world: World) -> Iterator[Finding]:
    said, why = run([python, "-P", distributions.__file__], world.environ)
    try:
        told = json.loads(said)
        versions: dict[str, str | None] = told["versions"]
        old: list[str] = told["old"]
    except (ValueError, KeyError, TypeError):
        yield fault("distributions", f"{python} does not tell its own: {why}", "repair it")
        return
    least = distributions.NEEDED
    missing = [name for name in least if versions[name] is None]
    wrong = [f"{name} {versions[name]} (at least {least[name]})" for name in old]
    if missing or wrong:
        wanted = " ".join(f"'{name}>={least[name]}'" for name in (*missing, *old))
        what = [*(f"{name} is missing" for name in missing), *wrong]
        remedy = f"{python} -m pip install {wanted}"
        if SYSTEMS.fullmatch(python):
            remedy = (
                f"this is the system's Python: set PRELOADD_PYTHON in {world.defaults} to that of "
                "your engine, such as /opt/vllm/bin/python"
            )
        yield fault("distributions", f"{python}: {', '.join(what)}", remedy)
    else:
        told_versions = ", ".join(f"{name} {versions[name]}" for name in least)
        yield ok("distributions", told_versions)


def _running(world: World) -> Iterator[Finding]:
    """Daemons that run another version than the installed one; on purpose, after an upgrade."""
    yield ok("version", f"preloadd {__version__} is installed")
    for instance, version in world.running_versions().items():
        if version != __version__:
            yield warning(
                "version",
                f"{instance} runs preloadd {version}, installed is {__version__}",
                f"`systemctl restart preloadd@{instance}.service` when it suits: weights are kept",
            )
