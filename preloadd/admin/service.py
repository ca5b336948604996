"""Trying things as the daemons' user would: what it may read, and what its interpreter can do."""

from __future__ import annotations

import inspect
import os
import pwd
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import preloadd
from preloadd.admin import readable
from preloadd.config.files import Fault, unreadable

TIMEOUT_S = 60.0
PACKAGE_ROOT = Path(preloadd.__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Service:
    """The user and the environment that daemons have.

    `stands_in` says that things are tried as another user, because only root can become that one.
    """

    user: str
    environ: Mapping[str, str]
    identity: Mapping[str, Any]
    stands_in: bool

    def cannot_read(self, folder: Path, python: str) -> str:
        """Why a daemon could not read the model in `folder`; empty if it could."""
        # Its source, not its path: that user need not be able to read where this is installed.
        return self.fails([python, "-P", "-c", inspect.getsource(readable), str(folder)])

    def closed_files(self, folder: Path) -> list[Fault]:
        """What a daemon could not read of the configuration below `folder`."""
        with self._acting():
            return unreadable(folder)

    def cannot_load(self, python: str) -> str:
        """Why `python` could not run a loader; empty if it could."""
        return self.fails([python, "-P", "-c", "import preloadd.loader.__main__"])

    def fails(self, command: Sequence[str]) -> str:
        """What a command says last when it fails; empty if it does not."""
        return self.answer(command)[0]

    def answer(self, command: Sequence[str], **more: str) -> tuple[str, bytes]:
        """What a command says last when it fails, empty if it does not, and what it wrote to its
        standard output; with `more` in its environment."""
        try:
            done = subprocess.run(  # noqa: S603 the administrator's own interpreter
                command,
                env={**self.environ, **more},
                cwd="/",
                capture_output=True,
                check=False,
                timeout=TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                **self.identity,
            )
        except OSError as error:
            return f"{command[0]}: {error.strerror}", b""
        except subprocess.TimeoutExpired:
            return f"{command[0]} did not finish within {TIMEOUT_S:g} s", b""
        if done.returncode == 0:
            return "", done.stdout
        text = done.stderr.decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else f"{command[0]} ended with status {done.returncode}", b""

    @contextmanager
    def _acting(self) -> Iterator[None]:
        """This process may do what the user may; it has no other threads."""
        if not self.identity:
            yield
            return
        mine = os.getgroups(), os.getegid(), os.geteuid()
        try:
            os.setgroups(self.identity["extra_groups"])
            os.setegid(self.identity["group"])
            os.seteuid(self.identity["user"])
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
        return Service(user, environ, {}, stands_in=True)
    if entry.pw_uid == os.geteuid():
        return Service(user, environ, {}, stands_in=False)
    if os.geteuid() != 0:
        return Service(user, environ, {}, stands_in=True)
    identity = {
        "user": entry.pw_uid,
        "group": entry.pw_gid,
        "extra_groups": os.getgrouplist(user, entry.pw_gid),
    }
    return Service(user, environ, identity, stands_in=False)


def with_this_package(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` in which any interpreter finds this preloadd, as the daemons' launcher has it.

    One that lies among other packages is not shown around: those are this interpreter's own.
    """
    if PACKAGE_ROOT.name in ("site-packages", "dist-packages"):
        return dict(environ)
    paths = [str(PACKAGE_ROOT), *filter(None, [environ.get("PYTHONPATH")])]
    return {**environ, "PYTHONPATH": os.pathsep.join(paths)}
