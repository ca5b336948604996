"""Digests of whole files, kept by file identity, so that a host hashes a file once.

The folder is ours alone: whoever can write there decides which weights count as equal. An entry
that is damaged, of another file or of another owner is as good as none, and so is a folder that
cannot be used: a cache may cost time, never correctness.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from preloadd.domain.files import FileIdentity
from preloadd.domain.lines import one_line
from preloadd.errors import InsecurePath
from preloadd.linux.fds import OwnedFd
from preloadd.linux.plain import naming, open_file, open_folder, read_up_to
from preloadd.linux.private import write_private

MAX_ENTRIES = 4096
"""Files in the folder before the oldest are removed."""

_DIGEST_NBYTES = 32
_LOCK = "lock"
_AGAIN_S = 0.1
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

log = logging.getLogger(__name__)


class _Entry(msgspec.Struct, frozen=True):
    identity: FileIdentity
    digest: bytes


_decoder = msgspec.json.Decoder(_Entry)
_encoder = msgspec.json.Encoder()


class DigestCache:
    """The cache in one folder, which is made (mode 0700) when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def recall(
        self,
        identity: FileIdentity,
        compute: Callable[[], bytes],
        *,
        waiting: Callable[[], None] = lambda: None,
    ) -> bytes:
        """The digest of the file of `identity`: the kept one, else `compute()`, which is then kept.

        Processes that want the same digest at the same time wait for one of them to compute it, and
        call `waiting` now and then meanwhile.
        """
        kept = self._read(identity)
        if kept is not None:
            return kept
        with self._locked(identity, waiting) as usable:
            kept = self._read(identity) if usable else None
            if kept is not None:
                return kept
            digest = compute()
            if usable:
                self._write(_Entry(identity, digest))
            return digest

    def _path(self, identity: FileIdentity) -> Path:
        # Not the whole identity: a file that changed replaces its own entry.
        return self._folder / f"{identity.device:x}-{identity.inode:x}.json"

    def _read(self, identity: FileIdentity) -> bytes | None:
        try:
            if not _is_private(os.lstat(self._folder)):
                return None
            with open_file(self._path(identity)) as fd:
                if not _is_private(os.fstat(fd.fileno())):
                    return None
                entry = _decoder.decode(read_up_to(fd, 4096))
        except (OSError, InsecurePath, msgspec.MsgspecError):
            return None
        if entry.identity != identity or len(entry.digest) != _DIGEST_NBYTES:
            return None
        return entry.digest

    @contextmanager
    def _locked(self, identity: FileIdentity, waiting: Callable[[], None]) -> Iterator[bool]:
        """Hold the folder's lock, or find the digest kept while waiting for it; False, with a
        warning, where the folder cannot be used."""
        lock = self._lock(identity, waiting)
        if lock is None:
            yield False
            return
        with lock:
            yield True

    def _lock(self, identity: FileIdentity, waiting: Callable[[], None]) -> OwnedFd | None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_private(os.lstat(self._folder)):
                log.warning(
                    "digests are not kept: others may write to %s, or it is not ours; "
                    "remove it or take their permission to write",
                    self._folder,
                )
                return None
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            with OwnedFd(os.open(self._folder / _LOCK, flags, 0o600)) as fd:
                # Who hashes one file after the other hardly ever lets go of the lock.
                while not _taken(fd) and self._read(identity) is None:
                    waiting()
                    time.sleep(_AGAIN_S)
                return OwnedFd(fd.take())
        except OSError as error:
            log.warning("digests are not kept in %s: %s", self._folder, error.strerror)
            return None

    def _write(self, entry: _Entry) -> None:
        path = self._path(entry.identity)
        try:
            with open_folder(self._folder) as folder, naming(path):
                write_private(folder, path.name, _encoder.encode(entry))
            self._prune()
        except (OSError, InsecurePath) as error:
            log.warning("the digest was not kept: %s", one_line(error))

    def _prune(self) -> None:
        entries = [entry for entry in os.scandir(self._folder) if entry.name != _LOCK]
        if len(entries) <= MAX_ENTRIES:
            return
        entries.sort(key=lambda entry: entry.stat(follow_symlinks=False).st_mtime_ns)
        for entry in entries[: len(entries) - MAX_ENTRIES]:
            os.unlink(entry.path)  # noqa: PTH108 - it has the path as text


def _taken(fd: OwnedFd) -> bool:
    try:
        fcntl.flock(fd.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def cache_folder_of(environ: Mapping[str, str]) -> Path | None:
    """Where digests are kept: in the service's cache folder, else the user's, else nowhere."""
    service = environ.get("CACHE_DIRECTORY", "").partition(":")[0]
    if service.startswith("/"):
        return Path(service, "digests")
    cache, home = environ.get("XDG_CACHE_HOME", ""), environ.get("HOME", "")
    if cache.startswith("/"):
        return Path(cache, "preloadd", "digests")
    return Path(home, ".cache", "preloadd", "digests") if home.startswith("/") else None


def _is_private(seen: os.stat_result) -> bool:
    """Whether only we could have written what was `seen`."""
    return seen.st_uid == os.geteuid() and not seen.st_mode & _OTHERS_WRITE
