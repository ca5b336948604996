"""Which folders of a compile cache are of which engines, kept in a file beside vLLM's own folders.

vLLM's names of them do not tell, and cannot be known before an engine has compiled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from preloadd.domain.strict_json import Malformed, decode
from preloadd.errors import InsecurePath
from preloadd.linux.fds import OwnedFd
from preloadd.linux.private import locked_folder, read_private, write_private
from preloadd.warmup.bundles import tree
from preloadd.warmup.bundles.identity import digest
from preloadd.warmup.bundles.manifest import (
    AOT,
    CACHES,
    BadBundle,
    Bundle,
    folder_of,
    is_sha256,
)
from preloadd.warmup.bundles.usage import Listing, Stamp

NAME = "preloadd-bundles.json"
FORMAT = 1
MAX_ENTRIES = 64
"""Older ones are forgotten: of engines that nobody starts any more, most likely."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A bundle that was installed, or packed where it was `made`, `at` that wall time in seconds.

    `identity` is the digest of the one that its manifest has.
    """

    sha256: str
    identity: str
    nbytes: int
    files: int
    folders: tuple[str, ...]
    made: bool
    at: int

    @classmethod
    def of(cls, bundle: Bundle, *, made: bool, now: float) -> Entry:
        """That of a bundle, as of `now`."""
        manifest = bundle.manifest
        return cls(
            sha256=bundle.sha256,
            identity=digest(manifest.identity),
            nbytes=bundle.nbytes,
            files=len(manifest.members),
            folders=manifest.folders,
            made=made,
            at=int(now),
        )


def entries(root: Path) -> tuple[Entry, ...]:
    """What is known of `root`, the last one first."""
    with suppress(InsecurePath, Malformed, BadBundle):
        return read(root)
    return ()


def read(root: Path) -> tuple[Entry, ...]:
    """The same; InsecurePath, Malformed, BadBundle or OSError for what `entries` passes over."""
    with suppress(FileNotFoundError):
        return _parsed(read_private(root / NAME, (os.geteuid(),)))
    return ()


def remember(root: Path, entry: Entry) -> None:
    """Have it among the `entries`. InsecurePath, OSError.

    One that was installed stays so, although it is packed here as well, to be given on.
    """
    with locked_folder(root, within=tree.BUSY_S) as folder:
        there = entries(root)
        if any(_is_same(one, entry) and not one.made for one in there):
            entry = replace(entry, made=False)
        known = [one for one in there if not _is_same(one, entry)]
        write_private(folder, NAME, _rendered([entry, *known][:MAX_ENTRIES]))


def recalled(root: Path, identity: Mapping[str, str]) -> tuple[str, ...]:
    """The folders of engines of this identity, if they were installed or made here and are there
    still; else none."""
    wanted, there = digest(identity), listing(root)
    for one in entries(root):
        if one.identity == wanted and there.keys() >= set(one.folders):
            return one.folders
    return ()


def listing(root: Path) -> Listing:
    """All that engines and `install` have put into the compile cache of `root`.

    None of it is read, and an engine may be writing. InsecurePath for folders that others can
    write, OSError.
    """
    found: dict[str, dict[str, Stamp]] = {}
    try:
        top = OwnedFd(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except FileNotFoundError:
        return found
    with top:
        for folder in _folders(top):
            files = _files(top, folder)
            if files:
                found[folder] = files
    return found


def _is_same(one: Entry, other: Entry) -> bool:
    """Engines of another identity may have compiled the same code: both are to find it."""
    return (one.identity, one.sha256) == (other.identity, other.sha256)


def _files(top: OwnedFd, folder: str) -> dict[str, Stamp]:
    with suppress(FileNotFoundError):
        return {
            path.removeprefix(f"{folder}/"): Stamp(seen.st_ino, seen.st_size, seen.st_mtime_ns)
            for path, seen in tree.walked(top, folder, strict=False)
        }
    return {}


def _folders(top: OwnedFd) -> list[str]:
    """Those that may be of a bundle."""
    below = [f"{CACHES}/{name}" for name in tree.folders(top, CACHES)]
    below += [f"{CACHES}/{AOT}/{name}" for name in tree.folders(top, f"{CACHES}/{AOT}")]
    return [path for path in below if _is_whole(path)]


def _is_whole(path: str) -> bool:
    with suppress(BadBundle):
        return folder_of(path) == path
    return False


def _rendered(known: Sequence[Entry]) -> bytes:
    body = {"format": FORMAT, "bundles": [asdict(one) for one in known]}
    return json.dumps(body, indent=1, sort_keys=True).encode("ascii") + b"\n"


def _parsed(raw: bytes) -> tuple[Entry, ...]:
    body = decode(raw)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise Malformed(f"it is not of the format {FORMAT}")
    bundles = body.get("bundles")
    if not isinstance(bundles, list):
        raise Malformed("it has no list of bundles")
    return tuple(map(_entry, bundles))


def _entry(body: object) -> Entry:
    match body:
        case {
            "sha256": str(sha256),
            "identity": str(identity),
            "nbytes": int(nbytes),
            "files": int(files),
            "folders": [*folders],
            "made": bool(made),
            "at": int(at),
        } if is_sha256(sha256) and is_sha256(identity):
            whole = tuple(folder_of(str(one)) for one in folders)
            return Entry(sha256, identity, nbytes, files, whole, made, at)
    raise Malformed("it has an entry that is none")
