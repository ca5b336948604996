"""The one door to systemd: `systemctl` as a child process, and what it tells as typed values.

Nothing here knows what the units are for. Names are checked before they are passed on, nothing is
ever asked of a person, and a manager that hangs is told as such after a deadline.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from preloadd.errors import (
    ConfigError,
    NoServiceManager,
    ServiceManagerDenied,
    ServiceManagerError,
)
from preloadd.linux.owner import Owner

QUERY_TIMEOUT = 5.0
"""Seconds that systemd has to answer a question."""

_KINDS = "service|target|socket|slice|timer|path|mount"
_NAME = re.compile(rf"[A-Za-z0-9_:.\\][A-Za-z0-9_:.\\@-]*\.(?:{_KINDS})\Z")
_PATTERN = re.compile(rf"[A-Za-z0-9_:.\\][A-Za-z0-9_:.\\@*?-]*\.(?:{_KINDS})\Z")
_INSTANCE = re.compile(r"[A-Za-z0-9_:.\\-]+\Z")
_MAX_NAME = 255
# Exit status of systemctl, from the LSB: the caller lacks the privilege.
_DENIED = 4
_NOT_LOADED = " not loaded."
# What systemctl says, with status 1, when nobody is there to type a password.
_PASSWORD_WANTED = "nteractive authentication required"  # noqa: S105 no password


class Verb(StrEnum):
    """What can be done to units."""

    START = "start"
    STOP = "stop"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit as systemd tells it: its `show` properties of nearly these names.

    `loaded` is `not-found` where there is no such unit. `parked` counts stored descriptors.
    """

    name: str
    loaded: str = ""
    active: str = ""
    sub: str = ""
    result: str = ""
    main_pid: int = 0
    restarts: int = 0
    parked: int = 0
    status: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    wants: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended; `said` is what systemctl wrote, which is empty mostly when it went well."""

    done: bool
    said: str


def unit_name(template: str, instance: str) -> str:
    """The unit of `template` (as `preloadd@.service`) for `instance`; ConfigError.

    Instances are taken as they are: systemd knows them under the names that people write, and an
    escaped one would be another unit.
    """
    if not _INSTANCE.match(instance):
        raise ConfigError(
            f"{instance!r} cannot be part of a unit's name: use letters, digits and ':', '_', '.', "
            "'-' only"
        )
    return _checked(template.replace("@.", f"@{instance}.", 1), _NAME)


class Systemctl:
    """Asks and orders the system's service manager. Every call blocks and owns its process.

    All raise NoServiceManager where there is none, ServiceManagerDenied without the right to, and
    ServiceManagerError for whatever else went wrong.
    """

    def __init__(self, environ: Mapping[str, str], *, timeout: float = QUERY_TIMEOUT) -> None:
        # Messages are compared, and go into messages of our own.
        self._environ = {**environ, "LC_ALL": "C", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""}
        self._timeout = timeout

    def show(self, names: Sequence[str]) -> tuple[Unit, ...]:
        """The units of these names, in order, whether they are loaded or not."""
        if not names:
            return ()
        checked = [_checked(name, _NAME) for name in names]
        text = self._ask(["show", f"--property={','.join(_PROPERTIES)}", "--", *checked])
        found = parse_show(text)
        if len(found) != len(names):
            raise ServiceManagerError(
                f"systemctl told of {len(found)} units when asked for {len(names)}: see "
                f"`systemctl show {shlex.join(checked)}`"
            )
        return found

    def loaded(self, patterns: Sequence[str]) -> tuple[str, ...]:
        """Names of the loaded units that match, inactive ones included."""
        checked = [_checked(pattern, _PATTERN) for pattern in patterns]
        options = ["--all", "--full", "--plain", "--no-legend"]
        return parse_list(self._ask(["list-units", *options, "--", *checked]))

    def reset_failed(self, names: Sequence[str]) -> None:
        """Forget that these units failed, and how often they were started.

        Of one that is not loaded there is nothing to forget.
        """
        if not names:
            return
        arguments = ["reset-failed", "--", *(_checked(name, _NAME) for name in names)]
        status, _, said = self._run(arguments)
        if not all(line.endswith(_NOT_LOADED) for line in said.split("; ")):
            self._demand(arguments, status, said)

    def reload(self) -> None:
        """Have systemd read its units anew and run its generators; running services stay."""
        self._ask(["daemon-reload"])

    def version(self) -> str:
        """What systemd calls itself, such as `systemd 252 (252.39-1~deb12u1)`."""
        return self._ask(["--version"]).partition("\n")[0]

    def properties(self, name: str, wanted: Sequence[str]) -> dict[str, str]:
        """Properties of one unit as systemd writes them; those it does not know are missing."""
        text = self._ask(["show", f"--property={','.join(wanted)}", "--", _checked(name, _NAME)])
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def begin(self, verb: Verb, names: Sequence[str], *, alone: bool = False) -> Job:
        """Order `verb` for all units and wait for nothing; the caller closes the job.

        `alone`: exactly these units, without those that depend on them or that they depend on.
        """
        return Job(self, verb, self._popen(_order(verb, names, alone=alone)))

    def enqueue(self, verb: Verb, names: Sequence[str]) -> None:
        """Order `verb` for all units without ever knowing how it ends."""
        self._ask(["--no-block", *_order(verb, names)])

    def check(self, arguments: Sequence[str], status: int, said: str) -> None:
        """Raise what a failed call means if it failed for no fault of the units."""
        if status == _DENIED or _PASSWORD_WANTED in said:
            raise ServiceManagerDenied(
                f"systemd refuses `systemctl {shlex.join(arguments)}` to this user: {said}: run "
                "this as root"
            )
        if status and self._is_offline():
            raise NoServiceManager(
                "systemd does not run here (a container?): ranks of `preloadd run` are stopped "
                "and started with that command"
            )

    def _ask(self, arguments: Sequence[str]) -> str:
        status, out, err = self._run(arguments)
        self._demand(arguments, status, err)
        return out

    def _demand(self, arguments: Sequence[str], status: int, said: str) -> None:
        """Raise what it means that a call failed, if it did."""
        self.check(arguments, status, said)
        if status:
            raise ServiceManagerError(
                f"`systemctl {shlex.join(arguments)}` failed ({status}): {said or 'without a word'}"
            )

    def _is_offline(self) -> bool:
        return self._run(["is-system-running"])[1].strip() == "offline"

    def _run(self, arguments: Sequence[str]) -> tuple[int, str, str]:
        with self._popen(arguments) as process:
            try:
                out, err = process.communicate(timeout=self._timeout)
            except BaseException as error:
                process.kill()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise ServiceManagerError(
                        f"systemd did not answer `systemctl {shlex.join(arguments)}` within "
                        f"{self._timeout:g} s: it hangs or is overloaded"
                    ) from error
                raise
        return process.returncode, out, _one_line(err)

    def _popen(self, arguments: Sequence[str]) -> subprocess.Popen[str]:
        argv = ["systemctl", "--system", "--no-pager", "--no-ask-password", *arguments]
        try:
            return subprocess.Popen(  # noqa: S603 names are checked, and follow `--`
                argv,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
            )
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            raise NoServiceManager(
                "there is no systemctl here, and so no systemd: ranks of `preloadd run` are "
                "stopped and started with that command"
            ) from error


class Job(Owner):
    """A job that systemd works on. Closing it only ends the waiting, never the job."""

    def __init__(self, owner: Systemctl, verb: Verb, process: subprocess.Popen[str]) -> None:
        self._owner = owner
        self._verb = verb
        self._process = process

    def wait(self, timeout: float | None) -> Outcome | None:
        """How the job ended; None if it has not after `timeout` seconds (None: for ever)."""
        try:
            _, err = self._process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return None
        status, said = self._process.returncode, _one_line(err)
        self._owner.check([self._verb], status, said)
        return Outcome(status == 0, said)

    def close(self) -> None:
        """Wait no longer."""
        self._process.kill()
        with self._process:
            pass


def parse_show(text: str) -> tuple[Unit, ...]:
    """The units that `systemctl show` told: blocks of `KEY=value` with empty lines between."""
    return tuple(_unit(block) for block in text.split("\n\n") if block.strip())


def parse_list(text: str) -> tuple[str, ...]:
    """The names in the output of `systemctl list-units --plain --no-legend`."""
    return tuple(line.split()[0] for line in text.splitlines() if line.strip())


# Those that a kind of unit does not have are not told of it.
_PROPERTIES = (
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "MainPID",
    "NRestarts",
    "NFileDescriptorStore",
    "StatusText",
    "Environment",
    "Wants",
    "Requires",
)


def _unit(block: str) -> Unit:
    told = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
    return Unit(
        name=told.get("Id", ""),
        loaded=told.get("LoadState", ""),
        active=told.get("ActiveState", ""),
        sub=told.get("SubState", ""),
        result=told.get("Result", ""),
        main_pid=_count(told.get("MainPID", "")),
        restarts=_count(told.get("NRestarts", "")),
        parked=_count(told.get("NFileDescriptorStore", "")),
        status=told.get("StatusText", ""),
        environment=_environment(told.get("Environment", "")),
        wants=tuple(told.get("Wants", "").split()),
        requires=tuple(told.get("Requires", "").split()),
    )


def _count(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


def _environment(text: str) -> dict[str, str]:
    try:
        words = shlex.split(text)
    except ValueError:  # an open quote: none of ours is written so
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)


def _order(verb: Verb, names: Sequence[str], *, alone: bool = False) -> list[str]:
    if not names:
        raise ConfigError(f"no unit to {verb}")
    mode = ["--job-mode=ignore-dependencies"] if alone else []
    return [*mode, verb.value, "--", *(_checked(name, _NAME) for name in names)]


def _checked(name: str, allowed: re.Pattern[str]) -> str:
    if not allowed.match(name) or len(name) > _MAX_NAME:
        raise ConfigError(f"{name!r} is no name of a systemd unit")
    return name


def _one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
