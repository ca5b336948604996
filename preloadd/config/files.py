"""TOML files as they were written: read, laid over one another, each value with its origin.

Standard library only. Nothing is judged here but whether a file can be read at all.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from preloadd.domain.strict_json import is_deeper
from preloadd.errors import InsecurePath
from preloadd.linux.plain import open_file, read_up_to

CONFIG_DIR = Path("/etc/preloadd")
HOST_FILE = "preloadd.toml"
HOST_DROP_INS = "preloadd.toml.d"
GROUPS = "groups.d"
_DROP_INS = ".toml.d"

MAX_NBYTES = 1 << 20
MAX_DEPTH = 16
TOO_DEEP = f"is nested more than {MAX_DEPTH} deep (flatten it)"

Key = tuple[str, ...]
Table = dict[str, object]

_LONGEST = 200
_BARE = re.compile(r"[A-Za-z0-9_-]+\Z")
_PLACE = re.compile(r"\(at line (\d+), column (\d+)\)\Z")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong. `origin` is a file, or what else a value came from; `key` is dotted,
    and empty where the whole file is meant; `text` ends with the remedy, and may have several
    lines."""

    origin: str
    key: str
    text: str

    def __str__(self) -> str:
        where = f"{self.origin}: {shortened(self.key)}" if self.key else self.origin
        return "\n".join(f"{where}: {line}" for line in self.text.splitlines() or [""])


def shortened(text: str) -> str:
    """`text` that somebody wrote, no longer than people read it."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


class Document(NamedTuple):
    """A file and the table in it. One with drop-ins is laid together from `parts`, itself first."""

    path: Path
    table: Table
    parts: tuple[tuple[Path, Table], ...] = ()

    @property
    def layers(self) -> Layers:
        """What it says, each value with the file that it is from."""
        found = Layers()
        self.lay_over(found)
        return found

    def lay_over(self, below: Layers) -> None:
        """Lay what it says over what is there."""
        for path, table in self.parts or ((self.path, self.table),):
            below.lay(str(path), table)

    def written(self, key: str) -> str | None:
        """The file that says what `key`, as TOML writes it, has in the end; None if none does. Of a
        table it is the last that says anything in it."""
        return next(iter(self._writers(key)), None)

    def home(self, key: str) -> str:
        """The file that says `key`, or else the main one."""
        return self.written(key) or str(self.path)

    def fault(self, key: str, text: str, *beside: str) -> Fault:
        """What is wrong with `key`, at the file that says it; `text` names the keys `beside` too.

        Those that another file says are told with that, and so are other parts of a table. A key
        that nobody says is missed in the file with one that is said beside it, with its table, or
        else in the main one.
        """
        found = {one: where for one in beside if (where := self._writers(one))}
        own = self._writers(key)
        nearest = next(iter(found.values()), self._writers(key.partition(".")[0]))
        origin = next(iter((*own, *nearest)), str(self.path))
        more = [f"{key} is also in {where}" for where in own if where != origin]
        more += [
            f"{one} is in {where}"
            for one, wheres in found.items()
            for where in wheres
            if where != origin
        ]
        if more:
            told = ", ".join(more)
            text = f"{text[:-1]}; {told})" if text.endswith(")") else f"{text} ({told})"
        return Fault(origin, key, text)

    def _writers(self, key: str) -> list[str]:
        """The files that say what `key` has in the end, the last first: of a table all that say
        anything in it, of another value one."""
        found: list[str] = []
        for path, table in reversed(self.parts or ((self.path, self.table),)):
            said = _said(table, key)
            if isinstance(said, dict):
                found.append(str(path))
            elif said is not None:
                # What is no table hides all below, and is hidden by a table.
                return found or [str(path)]
        return found


class FoundFiles(NamedTuple):
    """The files that were found, and which folders could not be looked into."""

    paths: list[Path]
    faults: list[Fault]


def config_dir(environ: Mapping[str, str]) -> Path:
    """Where the files of this host lie."""
    return Path(environ.get("PRELOADD_CONFIG_DIR") or CONFIG_DIR)


def host_files(folder: Path) -> FoundFiles:
    """The host's file, if there is one, and its drop-ins in the order in which they count."""
    main = folder / HOST_FILE
    dropped = _toml_files(folder / HOST_DROP_INS)
    return FoundFiles([*([main] if _may_exist(main) else []), *dropped.paths], dropped.faults)


def group_files(folder: Path) -> FoundFiles:
    """The files of the groups in order of name, the drop-ins of each behind it."""
    files = _toml_files(folder / GROUPS)
    found = FoundFiles([], [*files.faults, *_astray(folder / GROUPS)])
    for path in files.paths:
        dropped = _toml_files(_drop_ins(path))
        found.paths.extend([path, *dropped.paths])
        found.faults.extend(dropped.faults)
    return found


def unreadable(folder: Path) -> list[Fault]:
    """What of the files below `folder` this user cannot read, whatever is in them."""
    if faults := folder_faults(folder):
        return faults
    host, groups = host_files(folder), group_files(folder)
    contents = [content(path) for path in (*host.paths, *groups.paths)]
    return [*host.faults, *groups.faults, *(one for one in contents if isinstance(one, Fault))]


def folder_faults(folder: Path) -> list[Fault]:
    """What keeps this user from looking for files in `folder`."""
    try:
        mode = folder.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = 0
    except OSError as error:
        return [_closed(folder, error)]
    if not stat.S_ISDIR(mode):
        text = "there is no such folder (create it, or set PRELOADD_CONFIG_DIR)"
        return [Fault(str(folder), "", text)]
    if not os.access(folder, os.X_OK, effective_ids=True):
        return [_closed(folder, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))]
    return []


def read(path: Path) -> Table | Fault:
    """The table in the file at `path`, or why there is none."""
    found = content(path)
    return found if isinstance(found, Fault) else parse(found, str(path))


def content(path: Path) -> bytes | Fault:
    """What is in the file at `path`, or why it cannot be read."""
    try:
        with open_file(path, follow=True) as fd:
            raw = read_up_to(fd, MAX_NBYTES + 1)
            # Of one that is too long, not all was read.
            nbytes = max(len(raw), os.fstat(fd.fileno()).st_size)
    except InsecurePath:
        return Fault(str(path), "", "is no regular file (remove it, or write a file)")
    except OSError as error:
        return _closed(path, error)
    if nbytes > MAX_NBYTES:
        return Fault(str(path), "", f"has {nbytes:,} bytes (shorten it to {MAX_NBYTES:,})")
    return raw


def parse(raw: bytes, origin: str) -> Table | Fault:
    """The table that `raw` spells, or why it spells none."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        return Fault(origin, "", f"line {line}: is not UTF-8 (save the file as UTF-8)")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        return Fault(origin, "", TOO_DEEP)
    except ValueError as error:  # numbers of thousands of digits are no TOMLDecodeError
        return Fault(origin, "", _broken(text, str(error)))
    if is_deep(table):
        return Fault(origin, "", TOO_DEEP)
    return table


def is_deep(value: object) -> bool:
    """Whether something is nested deeper than any setting."""
    return is_deeper(value, MAX_DEPTH)


def spelled(key: Sequence[str | int]) -> str:
    """`key` as TOML writes it, on one line; places in a list in brackets."""
    text = ""
    for part in key:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if _BARE.match(part) else json.dumps(part))
    return text


@dataclass(slots=True)
class Layers:
    """Tables laid over one another: the later one wins, value by value."""

    values: Table = field(default_factory=dict)
    origins: dict[Key, str] = field(default_factory=dict)

    def lay(self, origin: str, table: Mapping[str, object]) -> None:
        """Put `table` on top. `table` stays the caller's and is not changed."""
        self._lay((), self.values, origin, table)

    def origin(self, key: Sequence[str | int]) -> str | None:
        """Where the value at `key` came from, or what holds it; None if nobody wrote it."""
        names = tuple(part for part in key if isinstance(part, str))
        for end in range(len(names), 0, -1):
            if names[:end] in self.origins:
                return self.origins[names[:end]]
        return None

    def _lay(self, at: Key, below: Table, origin: str, table: Mapping[str, object]) -> None:
        for name, value in table.items():
            self.origins[(*at, name)] = origin
            if isinstance(value, dict):
                under = below.get(name)
                mine: Table = under if isinstance(under, dict) else {}
                below[name] = mine
                self._lay((*at, name), mine, origin, value)
            else:
                below[name] = value


def read_all(
    paths: Sequence[Path], edits: Mapping[Path, bytes] = MappingProxyType({})
) -> tuple[list[Document], list[Fault]]:
    """What can be read of the files, in order, and what is wrong with the others.

    `edits` stand in the place of what some files hold.
    """
    documents, faults = [], []
    for path in paths:
        found = parse(edits[path], str(path)) if path in edits else read(path)
        if isinstance(found, Fault):
            faults.append(found)
        else:
            documents.append(Document(path, found))
    return documents, faults


def group_documents(
    paths: Sequence[Path], edits: Mapping[Path, bytes] = MappingProxyType({})
) -> tuple[list[Document], list[Fault]]:
    """What can be read of the groups whose files, drop-ins among them, are at `paths`; see
    `read_all`. A group is left out if any of its files cannot be read."""
    documents, faults = read_all(paths, edits)
    broken = {_base(Path(fault.origin)) for fault in faults}
    own: dict[Path, list[Document]] = {}
    for document in documents:
        own.setdefault(_base(document.path), []).append(document)
    return [_together(parts) for base, parts in own.items() if base not in broken], faults


def _together(parts: Sequence[Document]) -> Document:
    """A group's file with its drop-ins over it."""
    found = Document(parts[0].path, {}, tuple((part.path, part.table) for part in parts))
    return found._replace(table=found.layers.values)


def _drop_ins(path: Path) -> Path:
    """The folder of what is laid over the file at `path`."""
    return path.with_suffix(_DROP_INS)


def _astray(folder: Path) -> Iterator[Fault]:
    """Folders of drop-ins that are laid over nothing, as after a slip in a name."""
    with suppress(OSError):  # told with the files
        for path in sorted(folder.iterdir()):
            if path.name.endswith(_DROP_INS) and not path.name.startswith("."):
                file = path.with_suffix("")
                if not _may_exist(file):
                    text = f"is laid over {file.name}, which is not there (rename it, or remove it)"
                    yield Fault(str(path), "", text)


def _base(path: Path) -> Path:
    """The file that a drop-in of a group is laid over; others are their own."""
    folder = path.parent
    return folder.with_suffix("") if folder.name.endswith(_DROP_INS) else path


def _within(key: str, one: str) -> bool:
    return key == one or key.startswith((f"{one}.", f"{one}["))


def _said(table: Table, key: str, at: Key = ()) -> object:
    """What a file says of `key`, or what holds that without being a table; None if nothing."""
    for name, value in table.items():
        here = spelled([*at, name])
        if key == here or (_within(key, here) and not isinstance(value, dict)):
            return value
        if isinstance(value, dict) and key.startswith(f"{here}."):
            return _said(value, key, (*at, name))
    return None


def _toml_files(folder: Path) -> FoundFiles:
    # Not `glob`: to that a folder it may not look into is an empty one.
    try:
        found = sorted(folder.iterdir())
    except FileNotFoundError:
        return FoundFiles([], [])
    except NotADirectoryError:
        return FoundFiles([], [Fault(str(folder), "", "is no folder (remove it, or make it one)")])
    except OSError as error:
        return FoundFiles([], [_closed(folder, error)])
    # Hidden files are what editors leave while somebody writes.
    return FoundFiles(
        [path for path in found if path.suffix == ".toml" and not path.name.startswith(".")], []
    )


def _closed(path: Path, error: OSError) -> Fault:
    return Fault(str(path), "", f"{error.strerror} (make it readable for this user)")


def _may_exist(path: Path) -> bool:
    """False only if it certainly does not; why it cannot be looked at is told by reading it."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _broken(text: str, why: str) -> str:
    """What a parser said, the place first; it is the line that people look for."""
    place = _PLACE.search(why)
    if place:
        return (
            f"line {place[1]}, column {place[2]}: {why[: place.start()].strip()} (correct the TOML)"
        )
    if why.endswith("(at end of document)"):
        line = text.rstrip("\n").count("\n") + 1
        why = why.removesuffix("(at end of document)").strip()
        return f"line {line}, the last: {why} (correct the TOML)"
    return f"{why.splitlines()[0]} (correct the TOML)"
