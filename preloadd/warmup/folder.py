"""Tables in files: found, read, installed whole, removed.

A root is a folder of folders, one for each configuration. Below a root no symbolic link is
followed, and nothing is touched that is not named as a table. OSError passes through.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from preloadd.domain.lines import one_line
from preloadd.domain.strict_json import MAX_NBYTES
from preloadd.errors import InsecurePath
from preloadd.linux.fds import OwnedFd
from preloadd.linux.plain import naming, open_file, open_folder, read_up_to, staged
from preloadd.linux.private import locked_folder, remove_folder
from preloadd.warmup.merge import Existing, settle
from preloadd.warmup.names import TableName, is_config_hash
from preloadd.warmup.table import BadTable, Table, parse, written

CLOSED = "this user may not read it"
"""The fault of a table of which no more is known."""


@dataclass(frozen=True, slots=True)
class Found:
    """A file that is named as a table. `table` is None, and `fault` says why, if it is none; an
    engine that loads it could end only if it `ends`.

    `used` is the wall time at which it was last written or, as far as the file system tells, read.
    """

    path: Path
    name: TableName
    table: Table | None
    fault: str
    used: float
    ends: bool = False

    @property
    def config_hash(self) -> str:
        """The configuration that it is of."""
        return self.path.parent.name


def hashes(root: Path) -> list[str]:
    """The configurations that have a folder in `root`; none if there is no such root."""
    with suppress(FileNotFoundError):
        with os.scandir(root) as entries:
            found = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
        return sorted(filter(is_config_hash, found))
    return []


def tables(root: Path, config_hash: str) -> list[Found]:
    """What is named as a table of that configuration, in order of ranks, fit or not."""
    _require_hash(config_hash)
    path = root / config_hash
    with open_folder(path) as folder:
        found = [_found(folder, path / name) for name in _listed(folder)]
    return sorted((one for one in found if one), key=lambda one: one.name)


def stored(root: Path, config_hash: str, name: TableName) -> bytes | None:
    """What is in the file of that table, fit or not; None if there is none.

    InsecurePath for links, and for what is no file.
    """
    _require_hash(config_hash)
    path = root / config_hash
    with suppress(FileNotFoundError), open_folder(path) as folder:
        return _read(folder, path / str(name))
    return None


def install(
    root: Path, config_hash: str, new: Mapping[TableName, Table], existing: Existing
) -> list[Path]:
    """Write the tables of one configuration, all or none; the files that were written.

    A file that is no table is replaced: no engine can use it. What is the same already is left
    alone. TableConflict for one that is not to be replaced; BadTable for what nobody could read
    there; InsecurePath for links, and for folders that others can write.
    """
    _require_hash(config_hash)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = root / config_hash
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    open_folder(path).close()  # refuses what is no folder, or a link to one
    with locked_folder(path) as folder, ExitStack() as undo:
        ready = []
        for name, table in new.items():
            target = path / str(name)
            content = _content(folder, target, table, existing)
            if content is not None:
                with naming(target):
                    fresh = undo.enter_context(staged(target.name, folder, content))
                ready.append((fresh, target))
        for fresh, target in ready:
            with naming(target):
                os.replace(
                    fresh, target.name, src_dir_fd=folder.fileno(), dst_dir_fd=folder.fileno()
                )
        os.fsync(folder.fileno())
    return [target for _, target in ready]


def remove(root: Path, config_hash: str) -> list[Path]:
    """Remove every table of a configuration, and its folder if that is empty then; the tables.

    A folder that is named as one stays.
    """
    path, gone = root / config_hash, []
    found = tables(root, config_hash)
    with open_folder(path) as folder:
        for one in found:
            with suppress(FileNotFoundError, IsADirectoryError), naming(one.path):
                os.unlink(one.path.name, dir_fd=folder.fileno())
                gone.append(one.path)
    try:
        remove_folder(path)
    except OSError as error:
        # The last one: somebody is about to put something there.
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT, errno.EAGAIN):
            raise
    return gone


def _require_hash(text: str) -> None:
    if not is_config_hash(text):
        raise ValueError(f"{text!r} is no hash of a configuration")


def _found(folder: OwnedFd, path: Path) -> Found | None:
    """What is at `path`, in the borrowed `folder`; None if it is gone, or no table by its name."""
    name = TableName.parse(path.name)
    if name is None:
        return None
    table, fault, used, ends = None, "", 0.0, False
    try:
        used = _used(folder, path.name)
        table = parse(_read(folder, path), str(path))
    except FileNotFoundError:
        return None
    except PermissionError:
        fault = CLOSED
    except BadTable as error:
        fault, ends = error.why, not error.harmless
    except InsecurePath as error:
        ends = True
        # What it is, without the remedy: that is the same for all.
        fault = str(error).removeprefix(f"{one_line(path)} ").partition(": ")[0]
    return Found(path, name, table, fault, used, ends)


def _listed(folder: OwnedFd) -> list[str]:
    return os.listdir(folder.fileno())  # noqa: PTH208 what is open, not what is there by now


def _used(folder: OwnedFd, name: str) -> float:
    seen = os.stat(name, dir_fd=folder.fileno(), follow_symlinks=False)
    return max(seen.st_mtime, seen.st_atime)


def _read(folder: OwnedFd, path: Path) -> bytes:
    """At most one byte more than a table may have."""
    with _open(folder, path) as fd:
        return read_up_to(fd, MAX_NBYTES + 1)


def _open(folder: OwnedFd, path: Path) -> OwnedFd:
    """Open without it counting as a use, which the kernel lets the owner alone do."""
    with suppress(PermissionError):
        return open_file(path.name, folder, named=path, flags=os.O_NOATIME)
    return open_file(path.name, folder, named=path)


def _content(folder: OwnedFd, path: Path, new: Table, existing: Existing) -> bytes | None:
    """What is to be written at `path`; None if that is there already."""
    wanted = new
    with suppress(FileNotFoundError, BadTable):
        old = parse(_read(folder, path), str(path))
        wanted = settle(old, new, existing, str(path))
        if wanted is old:
            return None
    return written(wanted, str(path))  # two tables may be too much for one
