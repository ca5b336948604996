"""The plugin for vLLM in the environment of an engine, if preloadd itself is installed elsewhere.

vLLM finds plugins by metadata on the path, in every process that it starts, so something has to lie
among the engine's packages: one folder with a link to this package and metadata that name the entry
point, and a `.pth` file that puts the folder *behind* everything else that is found there. Nothing
that is installed beside this package can be imported through it, and nothing of theirs is hidden.

The folder stays where it is when its content is replaced: running engines import from it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from preloadd import __version__
from preloadd.admin.environment import (
    PLACE,
    Answer,
    Environment,
    look,
    require_own,
    user_name,
)
from preloadd.errors import ConfigError
from preloadd.linux import lending
from preloadd.linux.fds import OwnedFd

ENTRY_POINT = "preloadd.engine.vllm.plugin:register"
INSTALLER = "preloadctl"
OLDEST = (3, 11)
PACKAGE = lending.PACKAGE.resolve() if lending.PACKAGE.is_symlink() else lending.PACKAGE
"""Where a link has to lead: never to another link of this kind, through which this may run."""

_METADATA = {
    "METADATA": f"Metadata-Version: 2.1\nName: preloadd\nVersion: {__version__}\n"
    "Summary: Keeps model weights resident across restarts of inference engines\n",
    "entry_points.txt": f"[vllm.general_plugins]\npreloadd = {ENTRY_POINT}\n",
    # What else removes packages leaves alone what another program has put there.
    "INSTALLER": f"{INSTALLER}\n",
}


@dataclass(frozen=True, slots=True)
class Change:
    """What was done, or would be, one line each; none if everything was right already. `said` is
    how it is then."""

    lines: tuple[str, ...]
    said: str


def enable(found: Environment, answer: Answer, *, dry_run: bool) -> Change:
    """Put the plugin there, or bring up to date what is. ConfigError if it would not work; then
    nothing is there that was not."""
    if found.release < OLDEST:
        told = ".".join(map(str, found.release))
        raise ConfigError(f"{found.python} is Python {told}: preloadd needs 3.11 or newer")
    if found.installed:
        return _installed(found)
    said = f"{found.python} has the plugin of preloadd {__version__}, from {PACKAGE}"
    if _is_as_wanted(found):
        return Change((), said)
    lines = (
        f"{found.place}: a link to {PACKAGE}, and metadata{_before(found)}",
        f"{_line(found)}: puts that folder behind all others",
    )
    if not dry_run:
        fresh = not found.place.exists()
        with _writing(found):
            _put(found)
        _verify(found, answer, fresh=fresh)
    return Change(lines, said)


def disable(found: Environment, *, dry_run: bool) -> Change:
    """Remove what `enable` put there. ConfigError if that cannot be written."""
    lines = [str(path) for path in (_line(found), found.place) if os.path.lexists(path)]
    if lines and not dry_run:
        with _writing(found):
            _remove(found)
    if found.installed:
        return Change(
            tuple(lines),
            f"preloadd {found.metadata} stays in {found.distribution}, where it is installed: "
            f"`{found.python} -m pip uninstall preloadd` removes it",
        )
    return Change(tuple(lines), f"{found.python} has no plugin of preloadd")


def _installed(found: Environment) -> Change:
    """preloadd itself is there: that one is its engines'."""
    there = f"preloadd {found.metadata} is installed in {found.distribution}"
    if found.metadata != __version__:
        raise ConfigError(
            f"{there}, and this is {__version__}: engines of {found.python} use that one. Install "
            "this version there, or uninstall that one and run this again"
        )
    if ENTRY_POINT not in found.entry_points:
        raise ConfigError(f"{there}, but not its entry point for vLLM: install it there anew")
    return Change((), f"{there}, with its plugin")


def _line(found: Environment) -> Path:
    return found.site / f"{PLACE}.pth"


def _before(found: Environment) -> str:
    """What is replaced."""
    link = found.place / PACKAGE.name
    if not link.is_symlink() or link.readlink() == PACKAGE:
        return ""
    return f" (the link led to {link.readlink()}{_of(found.version)})"


def _of(version: str) -> str:
    return f", {version}" if version else ", where there is nothing"


def _is_as_wanted(found: Environment) -> bool:
    metadata = _metadata(found.place)
    wanted = {metadata / name: text for name, text in _METADATA.items()}
    wanted[_line(found)] = f"{PLACE}\n"
    try:
        return (
            list(found.place.glob("*.dist-info")) == [metadata]
            and (found.place / PACKAGE.name).readlink() == PACKAGE
            and all(path.read_text() == text for path, text in wanted.items())
        )
    except OSError:
        return False


def _metadata(place: Path) -> Path:
    return place / f"preloadd-{__version__}.dist-info"


@contextmanager
def _writing(found: Environment) -> Iterator[None]:
    """A block that alone writes there. ConfigError tells of what cannot be written, InsecurePath
    of packages that are another user's."""
    try:
        with OwnedFd(os.open(found.site, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as site:
            require_own(found.site)
            fcntl.flock(site.fileno(), fcntl.LOCK_EX)
            yield
    except OSError as error:
        # A path of the file system, or one of the arguments of a copy.
        path = error.filename or found.site
        raise ConfigError(f"{path}: {error.strerror}: {_remedy(found.site)}") from error


def _remedy(site: Path) -> str:
    try:
        owner = site.stat().st_uid
    except OSError:
        return "make an environment that has its folder of packages"
    if owner != os.geteuid():
        return f"run this as {user_name(owner)}, to whom {site} belongs"
    return "see whether the file system is read-only or full, and what else lies there"


def _put(found: Environment) -> None:
    """Each step leaves an environment that works as before or as wanted; the line comes last."""
    place, metadata = found.place, _metadata(found.place)
    place.mkdir(exist_ok=True)
    place.chmod(0o755)
    link = place / f"{PACKAGE.name}.new"
    link.unlink(missing_ok=True)
    link.symlink_to(PACKAGE)
    link.replace(place / PACKAGE.name)
    metadata.mkdir(exist_ok=True)
    metadata.chmod(0o755)
    for name, text in _METADATA.items():
        _replace(metadata / name, text)
    for old in place.glob("*.dist-info"):
        if old != metadata:
            shutil.rmtree(old)
    _replace(_line(found), f"{PLACE}\n")


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.write_text(text)
    # Engines of other users read it, whatever this process' mask.
    fresh.chmod(0o644)
    fresh.replace(path)


def _remove(found: Environment) -> None:
    _line(found).unlink(missing_ok=True)
    if os.path.lexists(found.place):
        shutil.rmtree(found.place)


def _verify(found: Environment, answer: Answer, *, fresh: bool) -> None:
    """ConfigError if the interpreter does not find what was put there, which then goes again."""
    now = look(found.python, answer)
    if ENTRY_POINT in now.entry_points and now.version == __version__:
        return
    if fresh:
        with _writing(found):
            _remove(found)
    raise ConfigError(
        f"{found.python} does not find what was put into {found.site}"
        f"{', so it was removed again' if fresh else ''}: it imports preloadd from "
        f"{now.package or 'nowhere'}. Either it does not read .pth files there, or another "
        "preloadd comes first: remove that one"
    )


def closed_above(package: Path) -> str:
    """The folder that keeps other users from reading `package`; empty if none does."""
    for folder in (package, *package.parents):
        if stat.S_IMODE(folder.stat().st_mode) & 0o005 != 0o005:
            return str(folder)
    return ""
