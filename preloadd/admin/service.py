"""Trying things as the daemons' user would: what it may read, and what its interpreter can do."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import preloadd
from preloadd.admin.environment import NO_PYTHON
from preloadd.config.files import Fault, unreadable
from preloadd.linux.asking import ask
from preloadd.linux.process import Identity

TIMEOUT_S = 60.0
PACKAGE_ROOT = Path(preloadd.__file__).parents[1]

_LOAD = "import preloadd.loader.__main__; print('loads')"


@dataclass(frozen=True, slots=True)
class Service:
    """The user and the environment that daemons have.

    `identity` is who to become for that, None if this process stays who it is. `stands_in` says
    that this is another user, because only root can become that one.
    """

    user: str
    environ: Mapping[str, str]
    identity: Identity | None
    stands_in: bool

    def closed_files(self, folder: Path) -> list[Fault]:
        """What a daemon could not read of the configuration below `folder`."""
        with self.acting():
            return unreadable(folder)

    def cannot_load(self, python: str) -> str:
        """Why `python` could not run a loader; empty if it could."""
        why, said = self.answer([python, "-P", "-c", _LOAD])
        # Whatever is no Python may well end with 0.
        return why or ("" if said.split()[-1:] == [b"loads"] else NO_PYTHON)

    def fails(self, command: Sequence[str]) -> str:
        """What a command says last when it fails; empty if it does not."""
        return self.answer(command)[0]

    def answer(self, command: Sequence[str], **more: str) -> tuple[str, bytes]:
        """What a command says last when it fails, empty if it does not, and what it wrote to its
        standard output; with `more` in its environment."""
        try:
            told = ask(
                command,
                {**self.environ, **more},
                timeout=TIMEOUT_S,
                identity=self.identity,
                cwd="/",
            )
        except TimeoutError as error:
            return str(error), b""
        except OSError as error:
            return f"{command[0]}: {error.strerror}", b""
        if told.status == 0:
            return "", told.said
        return told.complaint or f"{command[0]} ended with status {told.status}", b""

    @contextmanager
    def acting(self) -> Iterator[None]:
        """This process may do what the user may; it has no other threads."""
        if self.identity is None:
            yield
            return
        mine = os.getgroups(), os.getegid(), os.geteuid()
        try:
            os.setgroups(self.identity.groups)
            os.setegid(self.identity.group)
            os.seteuid(self.identity.user)
            yield
        finally:
            groups, group, user = mine
            os.seteuid(user)
            os.setegid(group)
            os.setgroups(groups)


def service(user: str, environ: Mapping[str, str]) -> Service:
    """The service that runs as `user`, tried as nearly as this process may."""
    environ = with_this_package(environ)
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        return Service(user, environ, None, stands_in=True)
    if entry.pw_uid == os.geteuid():
        return Service(user, environ, None, stands_in=False)
    if os.geteuid() != 0:
        return Service(user, environ, None, stands_in=True)
    groups = tuple(os.getgrouplist(user, entry.pw_gid))
    identity = Identity(entry.pw_uid, entry.pw_gid, groups)
    return Service(user, environ, identity, stands_in=False)


def with_this_package(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` in which any interpreter finds this preloadd, as the daemons' launcher has it.

    One that lies among other packages is not shown around: those are this interpreter's own.
    """
    if PACKAGE_ROOT.name in ("site-packages", "dist-packages"):
        return dict(environ)
    paths = [str(PACKAGE_ROOT), *filter(None, [environ.get("PYTHONPATH")])]
    return {**environ, "PYTHONPATH": os.pathsep.join(paths)}
