"""A compile cache as a bundle: equal files make equal bytes, wherever and whenever it is packed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from preloadd.domain.lines import one_line
from preloadd.linux.fds import OwnedFd
from preloadd.linux.private import locked_folder
from preloadd.warmup.bundles import tree, ustar
from preloadd.warmup.bundles.manifest import (
    MAX_BUNDLE,
    MAX_FILE,
    MAX_MANIFEST,
    BadBundle,
    Bundle,
    Manifest,
    Member,
    check,
    check_count,
    check_path,
    folder_of,
    render,
)

PIECE = 1 << 20
"""Bytes that are read at once: no more of a bundle is in memory."""


def pack(root: Path, folders: Sequence[str], identity: Mapping[str, str], out: BinaryIO) -> Bundle:
    """Write the bundle of these folders of vLLM's cache root to `out`, from where that stands.

    Without what is of use only while somebody compiles. BadBundle for what would not be installed
    elsewhere, and while an engine still writes; InsecurePath, with its name, for a link or a
    device; OSError.
    """
    whole = hashlib.sha256()
    written = 0

    def write(data: bytes) -> None:
        nonlocal written
        whole.update(data)
        out.write(data)
        written += len(data)
        if written > MAX_BUNDLE:
            raise BadBundle(f"it has more than {MAX_BUNDLE:,} bytes, the most that is taken")

    members = []
    with locked_folder(root, within=tree.BUSY_S) as top:
        for path, seen in _found(top, folders):
            write(ustar.header(path, seen.st_size))
            digest = hashlib.sha256()
            for piece in _content(top, path, seen):
                digest.update(piece)
                write(piece)
            write(ustar.padding(seen.st_size))
            members.append(Member(path, seen.st_size, digest.hexdigest()))
    write(ustar.END)
    manifest = Manifest(dict(identity), tuple(members))
    _check(manifest)
    return Bundle(whole.hexdigest(), written, manifest)


def digest_of(content: BinaryIO) -> str:
    """The digest of what is in `content` from where that stands."""
    digest = hashlib.sha256()
    while piece := content.read(PIECE):
        digest.update(piece)
    return digest.hexdigest()


def _check(manifest: Manifest) -> None:
    check(manifest)
    if (nbytes := len(render(manifest))) > MAX_MANIFEST:
        raise BadBundle(f"its manifest has {nbytes:,} bytes, and {MAX_MANIFEST:,} are the most")


def _found(top: OwnedFd, folders: Sequence[str]) -> list[tuple[str, os.stat_result]]:
    """All files of the folders in the order of their paths, before one is read."""
    found: dict[str, os.stat_result] = {}
    for folder in folders:
        if folder != folder_of(folder):
            raise BadBundle(f"{one_line(folder)} is a part of a folder: bundle {folder_of(folder)}")
        found |= tree.walked(top, folder)
    check_count(len(found))
    for path, seen in found.items():
        check_path(path)
        if seen.st_size > MAX_FILE:
            raise BadBundle(f"{one_line(path)} has {seen.st_size:,} bytes, which is too much")
    return sorted(found.items())


def _content(top: OwnedFd, path: str, seen: os.stat_result) -> Iterator[bytes]:
    """What is in the file that was `seen`, in pieces; BadBundle if somebody writes it."""
    with tree.opened(top, path) as fd, open(fd.fileno(), "rb", closefd=False) as file:
        left = seen.st_size
        while left and (piece := file.read(min(PIECE, left))):
            left -= len(piece)
            yield piece
        now = os.fstat(fd.fileno())
        if left or (now.st_size, now.st_mtime_ns) != (seen.st_size, seen.st_mtime_ns):
            raise BadBundle(f"{one_line(path)} changed meanwhile: an engine still compiles")
