"""A folder that hosts share, such as a mount of NFS: a file for each value, at the path of its key.

A file appears whole or not at all, and is replaced, where it is damaged, in one step. Below the
folder no symbolic link is followed, and nothing is believed that somebody wrote who may not write
the folder itself.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from preloadd.domain.lines import one_line
from preloadd.errors import ConfigError, InsecurePath
from preloadd.linux import plain
from preloadd.linux.fds import OwnedFd
from preloadd.linux.owner import Owner
from preloadd.warmup.stores.api import StoreFault, require_key, too_long

KIND = "file"

_ROOT = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
"""What file systems answer that have no hard links, or no more."""


def open_file(path: str, environ: Mapping[str, str]) -> FileStore:
    """The store in the folder at `path`; ConfigError."""
    del environ
    if not path.startswith("/"):
        raise ConfigError(f"it names no absolute path: write {KIND}:/path/of/the/folder")
    try:
        with OwnedFd(os.open(path, _ROOT)) as root:
            writable = os.access(".", os.W_OK | os.X_OK, dir_fd=root.fileno(), effective_ids=True)
    except FileNotFoundError:
        raise ConfigError("there is no such folder: create or mount it") from None
    except NotADirectoryError:
        raise ConfigError("it is no folder: name one") from None
    except OSError as error:
        why = f"user {os.geteuid()} cannot look into it ({error.strerror})"
        raise ConfigError(f"{why}: let that user in") from None
    if not writable:
        raise ConfigError(
            f"user {os.geteuid()} cannot write into it: let that user, or mount it writable (in a "
            "sandbox of systemd, add ReadWritePaths= to the unit)"
        )
    return FileStore(Path(path))


class FileStore:
    """Opens the folder anew for every call: what is mounted there may have been mounted anew."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def name(self) -> str:
        """As it is written in settings."""
        return f"{KIND}:{self._root}"

    def find(self, key: str, limit: int) -> bytes | None:
        """The content of that file; None if there is none. StoreFault, InsecurePath or OSError."""
        require_key(key)
        *parts, name = key.split("/")
        with ExitStack() as owned:
            folder = owned.enter_context(_Folder.at(self._root))
            with suppress(FileNotFoundError):
                for part in parts:
                    folder = owned.enter_context(folder.enter(part))
                return folder.read(name, limit)
        return None

    def keep(self, key: str, value: bytes) -> None:
        """Write the file unless it is there. OSError, such as of a disk that is full."""
        self._write(key, value, anew=False)

    def replace(self, key: str, value: bytes) -> None:
        """Write the file, whatever is there. OSError."""
        self._write(key, value, anew=True)

    def close(self) -> None:
        """Nothing is open between calls."""

    def _write(self, key: str, value: bytes, *, anew: bool) -> None:
        require_key(key)
        *parts, name = key.split("/")
        with ExitStack() as owned:
            folder = owned.enter_context(_Folder.at(self._root))
            for part in parts:
                folder = owned.enter_context(folder.made(part))
            folder.write(name, value, anew=anew)


class _Folder(Owner):
    """An open folder, and what was seen of the root it is below."""

    def __init__(self, fd: OwnedFd, path: Path, root: os.stat_result) -> None:
        self._fd = fd
        self._path = path
        self._root = root

    @classmethod
    def at(cls, root: Path) -> _Folder:
        """The root itself, through links: whoever configured it named it. OSError."""
        with ExitStack() as undo, plain.naming(root):
            fd = undo.enter_context(OwnedFd(os.open(root, _ROOT)))
            found = os.fstat(fd.fileno())
            undo.pop_all()
        return cls(fd, root, found)

    def close(self) -> None:
        self._fd.close()

    def enter(self, name: str) -> _Folder:
        """The folder of that name in this one; FileNotFoundError, InsecurePath, OSError."""
        path = self._path / name
        with ExitStack() as undo:
            fd = undo.enter_context(plain.open_folder(name, self._fd, named=path))
            _believe(path, os.fstat(fd.fileno()), self._root)
            undo.pop_all()
        return _Folder(fd, path, self._root)

    def made(self, name: str) -> _Folder:
        """The same, made if it is not there."""
        path = self._path / name
        with suppress(FileExistsError), plain.naming(path):
            os.mkdir(name, 0o700, dir_fd=self._fd.fileno())
            with plain.open_folder(name, self._fd, named=path) as fd:
                self._share(fd, 0o777)
        return self.enter(name)

    def read(self, name: str, limit: int) -> bytes:
        """The content of a file here, which others may take away meanwhile, but never change."""
        path = self._path / name
        with plain.open_file(name, self._fd, named=path) as fd, plain.naming(path):
            found = os.fstat(fd.fileno())
            _believe(path, found, self._root)
            if found.st_size > limit:
                raise too_long(found.st_size, limit)
            content = plain.read_up_to(fd, limit + 1)
        if len(content) != found.st_size:
            raise StoreFault(f"{one_line(path)} changed while it was read")
        return content

    def write(self, name: str, content: bytes, *, anew: bool) -> None:
        """Have a file of that name with that content, if there is none, or `anew`."""
        path, here = self._path / name, self._fd.fileno()
        share = partial(self._share, mode=0o644)
        with plain.naming(path):
            if not anew and _is_there(name, here):
                return
            with plain.staged(name, self._fd, content, dress=share) as fresh:
                (_rename if anew else _publish)(fresh, name, here)
                os.fsync(here)

    def _share(self, fd: OwnedFd, mode: int) -> None:
        """Open what was made to all who may use the root, whatever the mask of this process."""
        with suppress(PermissionError):
            os.fchown(fd.fileno(), -1, self._root.st_gid)
        os.fchmod(fd.fileno(), mode & self._root.st_mode & 0o775)


def _publish(fresh: str, name: str, here: int) -> None:
    """Give a file its name if nobody has it: of two writers at once, the first wins."""
    try:
        # A name that is taken is refused, which renaming could only do on some file systems.
        with suppress(FileExistsError):
            os.link(fresh, name, src_dir_fd=here, dst_dir_fd=here, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if not _is_there(name, here):
            _rename(fresh, name, here)


def _rename(fresh: str, name: str, here: int) -> None:
    os.rename(fresh, name, src_dir_fd=here, dst_dir_fd=here)


def _is_there(name: str, here: int) -> bool:
    with suppress(FileNotFoundError):
        os.stat(name, dir_fd=here, follow_symlinks=False)
        return True
    return False


def _believe(path: Path, found: os.stat_result, root: os.stat_result) -> None:
    """InsecurePath for what somebody owns or can change who may not write the root.

    Of a root that all may write, only its owner's files are believed, root's, and own ones.
    """
    shared = root.st_mode & 0o022 == 0o020 and found.st_gid == root.st_gid
    if found.st_uid not in (0, os.geteuid(), root.st_uid) and not shared:
        raise InsecurePath(
            f"{one_line(path)} is of user {found.st_uid}, who is not to write into this store: "
            "remove it"
        )
    if found.st_mode & 0o002 or (found.st_mode & 0o020 and not shared):
        raise InsecurePath(
            f"{one_line(path)} is writable for more than this store is (mode "
            f"{stat.S_IMODE(found.st_mode):04o}): remove it"
        )
