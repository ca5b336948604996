"""A bundle put where engines look: each of its folders whole, all of them or none.

What is there already is never written to. Until a folder is complete, and on the disk, it has
another name, in a folder beside it that nobody else can enter.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from preloadd.domain.lines import one_line
from preloadd.linux.fds import OwnedFd
from preloadd.linux.owner import Owner
from preloadd.linux.private import locked_folder
from preloadd.warmup.bundles import tree, ustar
from preloadd.warmup.bundles.manifest import CACHES, BadBundle, Bundle, Manifest, Member, check
from preloadd.warmup.bundles.pack import PIECE, digest_of

_STAGE = ".preloadd-"


class InTheWay(BadBundle):
    """A folder of the bundle is there with other content, and was kept; nothing was installed."""


@dataclass(frozen=True, slots=True)
class Installed:
    """`folders` are those of the bundle; `new` those of them that were not there."""

    folders: tuple[str, ...]
    new: tuple[str, ...]


def missing(root: Path, manifest: Manifest) -> tuple[str, ...]:
    """The folders of a bundle that are not in the cache root; InTheWay, InsecurePath, OSError."""
    if not (root / CACHES).exists():
        return manifest.folders
    with locked_folder(root, within=tree.BUSY_S) as top:
        return _missing(top, manifest)


def install(root: Path, bundle: Bundle, content: BinaryIO) -> Installed:
    """Install a bundle, whose bytes `content` has from its beginning, in vLLM's cache root.

    Its length is checked first, then its digest, then each byte against the manifest, before a file
    is where an engine looks. BadBundle, InTheWay, InsecurePath or OSError: nothing was installed.
    """
    _check_whole(bundle, content)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (
        locked_folder(root, within=tree.BUSY_S) as top,
        tree.entered(top, CACHES, make=True) as caches,
    ):
        _sweep(caches)
        new = _missing(top, bundle.manifest)
        if new:
            with _Stage(caches) as stage:
                content.seek(0)
                stage.fill(bundle.manifest, new, _Source(content))
                stage.publish(top, new)
    return Installed(bundle.manifest.folders, new)


def _check_whole(bundle: Bundle, content: BinaryIO) -> None:
    check(bundle.manifest)
    nbytes = content.seek(0, os.SEEK_END)
    if not nbytes == bundle.nbytes == bundle.manifest.bundle_nbytes:
        raise BadBundle(
            f"it has {nbytes:,} bytes, was said to have {bundle.nbytes:,}, and its manifest makes "
            f"{bundle.manifest.bundle_nbytes:,}"
        )
    content.seek(0)
    if digest_of(content) != bundle.sha256:
        raise BadBundle(f"its digest is not {bundle.sha256}")


def _missing(top: OwnedFd, manifest: Manifest) -> tuple[str, ...]:
    """The folders that are not there at all; InTheWay for one that is, and not as it is to be."""
    there: set[str] = set()
    for folder in manifest.folders:
        with suppress(FileNotFoundError):
            tree.entered(top, folder).close()
            there.add(folder)
    for one in manifest.members:
        if one.folder in there and not _same(top, one):
            name = one_line(one.path.rpartition("/")[2])
            raise InTheWay(
                f"{one.folder} is there already, with another {name}, and was kept: if no engine "
                "of this host uses it, remove it"
            )
    return tuple(folder for folder in manifest.folders if folder not in there)


def _same(top: OwnedFd, member: Member) -> bool:
    """Whether that very file is there."""
    try:
        with tree.opened(top, member.path) as fd, open(fd.fileno(), "rb", closefd=False) as file:
            return (
                os.fstat(fd.fileno()).st_size == member.nbytes and digest_of(file) == member.sha256
            )
    except FileNotFoundError:
        return False


def _sweep(caches: OwnedFd) -> None:
    """Remove what was left by one that was killed: who has the lock is alone in installing."""
    for name in tree.folders(caches, ""):
        if name.startswith(_STAGE):
            shutil.rmtree(name, dir_fd=caches.fileno())


class _Source:
    """A bundle that is read from its beginning, by whoever knows what has to come."""

    def __init__(self, content: BinaryIO) -> None:
        self._content = content

    def expect(self, data: bytes, what: str) -> None:
        """BadBundle unless `data` come next."""
        if self._content.read(len(data)) != data:
            raise BadBundle(f"it has something else where {what} has to be")

    def pieces(self, member: Member) -> Iterator[bytes]:
        """The content of a file; BadBundle if it is not that of the manifest."""
        digest, left = hashlib.sha256(), member.nbytes
        while left and (piece := self._content.read(min(PIECE, left))):
            digest.update(piece)
            left -= len(piece)
            yield piece
        if digest.hexdigest() != member.sha256:
            raise BadBundle(f"{member.path} in it is not the file of its manifest")

    def end(self) -> None:
        """BadBundle unless this is where the bundle ends."""
        self.expect(ustar.END, "its end")
        if self._content.read(1):
            raise BadBundle("it does not end where it has to")


class _Stage(Owner):
    """A private folder for what is not complete; it goes away with all that is in it."""

    def __init__(self, caches: OwnedFd) -> None:
        """Made in the borrowed `caches`."""
        self._caches = caches
        self._name = f"{_STAGE}{secrets.token_hex(8)}"
        self._places: dict[str, str] = {}
        self._folder = tree.entered(caches, self._name, make=True)

    def close(self) -> None:
        """Remove it. What cannot be removed now is when something is installed next."""
        self._folder.close()
        shutil.rmtree(self._name, ignore_errors=True, dir_fd=self._caches.fileno())

    def fill(self, manifest: Manifest, new: Sequence[str], source: _Source) -> None:
        """Write the files of the folders `new`; every byte is checked, whosever it is."""
        self._places = {folder: str(number) for number, folder in enumerate(new)}
        for one in manifest.members:
            source.expect(ustar.header(one.path, one.nbytes), f"the plain file {one.path}")
            place = self._places.get(one.folder)
            if place is None:
                for _ in source.pieces(one):
                    pass
            else:
                self._write(place + one.path.removeprefix(one.folder), source.pieces(one))
            source.expect(ustar.padding(one.nbytes), f"nothing after {one.path}")
        source.end()
        # Only now that all is written: file by file would take much longer.
        tree.sync(self._folder, "")

    def publish(self, top: OwnedFd, new: tuple[str, ...]) -> None:
        """Give the folders their names, all or none."""
        with ExitStack() as owned, ExitStack() as undo:
            for folder in new:
                parent, _, name = folder.rpartition("/")
                place = owned.enter_context(tree.entered(top, parent, make=True))
                _rename(self._folder, self._places[folder], place, name, folder)
                undo.callback(_rename, place, name, self._folder, self._places[folder], folder)
                os.fsync(place.fileno())
            undo.pop_all()

    def _write(self, path: str, pieces: Iterator[bytes]) -> None:
        with tree.fresh(self._folder, path) as fd, open(fd.fileno(), "wb", closefd=False) as file:
            file.writelines(pieces)


def _rename(source: OwnedFd, old: str, target: OwnedFd, new: str, told: str) -> None:
    """Over an empty folder at most: the kernel refuses all else."""
    try:
        os.rename(old, new, src_dir_fd=source.fileno(), dst_dir_fd=target.fileno())
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise InTheWay(f"{told} has come to be there meanwhile, and was kept") from None
        raise OSError(error.errno, error.strerror, told) from None
