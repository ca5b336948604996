"""Where sockets live, and which folders may be trusted with them.

Three things make a folder or socket unfit: being a symbolic link, belonging to somebody who could
plant things there, and permissions that let others do so. Folders that preloadd finds by itself
must besides be private. Whoever passes a check may still be swapped if a folder further up belongs
to somebody else: who connects asks `peers.peer` for the listener as well.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from preloadd.domain.lines import one_line
from preloadd.errors import ConfigError, InsecurePath, PreloadError
from preloadd.linux.fds import OwnedFd, exhausted, is_exhausted

PRIVATE = 0o700
SYSTEM_DIR = Path("/run/preloadd")
DAEMON_USER = "preloadd"
"""The user that daemons of the service manager run as; its folders are trusted if it exists."""

Owners = Callable[[], Collection[int]]
"""Users by their numbers, asked for only where it depends on them: whoever knows users' names may
be a server on the network, or hang."""

_NO_ROOM = "make room there (space and inodes), or choose another socket directory"
_IN_THE_WAY = "remove it"
_CHOOSE = "choose one yourself (socket_dir, or --weight-cache-socket-dir)"
_REMEDIES = {
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.EISDIR: _IN_THE_WAY,
    errno.ENXIO: _IN_THE_WAY,
}


def socket_dirs(environ: Mapping[str, str], uid: int) -> list[Path]:
    """Where an engine of user `uid` looks for daemons, first choice first."""
    chosen = environ.get("PRELOADD_SOCKET_DIR")
    return [*([Path(chosen)] if chosen else []), SYSTEM_DIR, *derived_dirs(environ, uid)]


def derived_dirs(environ: Mapping[str, str], uid: int) -> list[Path]:
    """Those of `socket_dirs` that nobody chose: private to the user, to be checked as `derived`."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    temporary = environ.get("TMPDIR", "")
    # The XDG rules say to ignore a relative folder.
    mine = [Path(runtime, "preloadd")] if runtime.startswith("/") else []
    return [*mine, Path(temporary if temporary.startswith("/") else "/tmp", f"preloadd-{uid}")]  # noqa: S108 checked before use


def origin(derived: Path, environ: Mapping[str, str]) -> str:
    """The variable that one of `derived_dirs` comes from, as a shell writes it; '' for none."""
    names = ("XDG_RUNTIME_DIR", "TMPDIR")
    set_to = [name for name in names if Path(environ.get(name, "")) == derived.parent]
    return f"${set_to[0]}" if set_to else ""


def prepare_socket_dir(
    path: Path, *, derived: bool, mode: int | None = None, group: int = -1
) -> None:
    """Make `path` (its parent exists) fit to hold sockets of this process, or InsecurePath.

    A new folder is private, whatever the mask of this process. A folder of this user's own is then
    given the permissions of `mode` that it lacks, for `group` (unless -1); it keeps those it has,
    since others may use it for other things. A `derived` folder stays private: ConfigError if
    `mode` says otherwise.
    """
    _refuse_relative(path)
    if derived and mode is not None and mode != PRIVATE:
        raise ConfigError(
            f"{one_line(path)} was chosen automatically and stays private (0700), but other users "
            f"or groups are to have access: {_CHOOSE}"
        )
    fresh = _make(path)
    with _folder(path) as folder:
        found = os.fstat(folder.fileno())
        if fresh and PRIVATE & ~found.st_mode:
            _itself(folder).chmod(PRIVATE)
        _check_folder(path, found, derived=derived, owners=set)
        if mode is not None and found.st_uid == os.geteuid():
            _open_up(folder, found, mode, group)


def trusted_users() -> set[int]:
    """Whose daemons are believed: root's, those of this process's user, and the service's."""
    users = {0, os.geteuid()}
    with suppress(KeyError):
        users.add(pwd.getpwnam(DAEMON_USER).pw_uid)
    return users


def is_trusted(user: int, owners: Owners = trusted_users) -> bool:
    """Whether a user is root, this process's, or one of `owners`."""
    return user in {0, os.geteuid()} or user in owners()


def trusted_dir(path: Path, *, derived: bool, owners: Owners = trusted_users) -> None:
    """InsecurePath unless sockets below `path` can only be those of root, this user or `owners`.

    FileNotFoundError or NotADirectoryError if there is no such folder.
    """
    _refuse_relative(path)
    with _folder(path) as folder:
        _check_folder(path, os.fstat(folder.fileno()), derived=derived, owners=owners)


def trusted_socket(path: Path, *, derived: bool, owners: Owners = trusted_users) -> None:
    """InsecurePath unless the socket at `path` is one of root, this user or `owners`.

    The folder that holds it is checked like `trusted_dir` does. FileNotFoundError or
    NotADirectoryError if there is none.
    """
    _refuse_relative(path)
    with _folder(path.parent) as folder:
        _check_folder(path.parent, os.fstat(folder.fileno()), derived=derived, owners=owners)
        found = os.stat(path.name, dir_fd=folder.fileno(), follow_symlinks=False)
    if stat.S_ISLNK(found.st_mode):
        raise _is_link(path)
    if not stat.S_ISSOCK(found.st_mode):
        raise InsecurePath(f"{one_line(path)} is no socket: remove it, then start the daemon again")
    _check_owner(path, found, owners)


def unusable(path: Path, error: OSError) -> PreloadError:
    """What to raise if `error` keeps `path`, something in a socket directory, from being made or
    opened: ConfigError, InsecurePath or OutOfDescriptors, with the remedy."""
    if is_exhausted(error):
        return exhausted(error, f"opening {one_line(path)}")
    if error.errno == errno.ELOOP:
        return _is_link(path, _IN_THE_WAY)
    remedy = _REMEDIES.get(
        error.errno or 0,
        "choose a socket directory on a file system of this host that you may write to",
    )
    return ConfigError(f"{one_line(path)}: {error.strerror}: {remedy}")


def _make(path: Path) -> bool:
    """Whether the folder is new."""
    with suppress(FileExistsError):
        path.mkdir(PRIVATE)
        return True
    return False


def _itself(folder: OwnedFd) -> Path:
    """A path that leads to what is open: a descriptor opened with O_PATH refuses fchmod, fchown."""
    return Path(f"/proc/self/fd/{folder.fileno()}")


def _open_up(folder: OwnedFd, found: os.stat_result, mode: int, group: int) -> None:
    has = stat.S_IMODE(found.st_mode)
    same = _itself(folder)
    suffices = (mode & 0o070) >> 3 & ~has == 0  # what all others may do
    if found.st_gid != group and not suffices:
        os.chown(same, -1, group)
    if mode & ~has:
        same.chmod(has | mode)


def _refuse_relative(path: Path) -> None:
    if not path.is_absolute():
        raise ConfigError(
            f"the socket directory or socket {one_line(path)} must be an absolute path"
        )


def _folder(path: Path) -> OwnedFd:
    """`path` itself, not what it links to."""
    try:
        return OwnedFd(os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC))
    except NotADirectoryError:
        # That is also how the kernel refuses a link here.
        if path.is_symlink():
            raise _is_link(path) from None
        raise


def _check_folder(path: Path, found: os.stat_result, *, derived: bool, owners: Owners) -> None:
    _check_owner(path, found, owners)
    mode, name = stat.S_IMODE(found.st_mode), one_line(path)
    if derived and mode & 0o077:
        raise InsecurePath(
            f"{name} is open to group or others (mode {mode:04o}) though it was chosen "
            f"automatically: run `chmod 700 {name}`, or {_CHOOSE}"
        )
    # In a sticky folder nobody can remove or rename what belongs to somebody else.
    if mode & 0o022 and not mode & stat.S_ISVTX:
        raise InsecurePath(
            f"{name} is writable for group or others (mode {mode:04o}), who could replace the "
            f"sockets in it: run `chmod go-w {name}`, or choose another socket directory"
        )


def _check_owner(path: Path, found: os.stat_result, owners: Owners) -> None:
    if not is_trusted(found.st_uid, owners):
        trusted = ", ".join(map(str, sorted({0, os.geteuid(), *owners()})))
        raise InsecurePath(
            f"{one_line(path)} belongs to user {found.st_uid}, trusted are {trusted}: let a "
            "trusted user own it, or choose another socket directory"
        )


def _is_link(path: Path, remedy: str = "give the path it leads to") -> InsecurePath:
    return InsecurePath(
        f"{one_line(path)} is a symbolic link, and whoever made it could turn it elsewhere: "
        f"{remedy}"
    )
