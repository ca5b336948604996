"""systemd, and what it has to allow: stored descriptors, open files; and the supervisor's port."""

from __future__ import annotations

import errno
import http.client
import json
import os
import re
import resource
import socket
from collections.abc import Iterator
from contextlib import closing, suppress

from preloadd.admin.doctor.configuration import Raw
from preloadd.admin.findings import Finding, fault, note, ok, warning
from preloadd.admin.world import World
from preloadd.errors import ConfigError, NoServiceManager, PreloadError
from preloadd.linux.systemctl import Systemctl, unit_name

OLDEST = 252
"""The oldest systemd on which keeping and giving back of weights was tried."""

STORED = 130
"""Descriptors that one rank parks: 128 chunks, the manifest, the listener; and leases on top."""

UNIT = "preloadd@.service"
TEMPLATE = "preloadd@CPU-0.service"
GENERATOR = "/usr/lib/systemd/system-generators/preloadd-generator"

_ANSWER_S = 1.0


def examine(world: World, raw: Raw) -> Iterator[Finding]:
    """Look at the service manager and the limits it gives."""
    manager = Systemctl(world.environ)
    try:
        yield _version(manager.version())
        yield from _unit(manager)
        yield from _groups(manager, raw)
    except NoServiceManager as error:
        yield note("systemd", str(error), "run a group in the foreground: `preloadd run`")
        yield from _own_limit()
    except PreloadError as error:
        yield warning("systemd", str(error), "see `systemctl status`")
    yield from _port(raw)


def _version(said: str) -> Finding:
    number = re.match(r"systemd (\d+)", said)
    if number is None or int(number[1]) < OLDEST:
        return warning(
            "systemd",
            f"{said or 'an unknown version'}: tried from {OLDEST} on",
            "restart ranks only when their weights may be lost, or upgrade systemd",
        )
    return ok("systemd", said)


def _unit(manager: Systemctl) -> Iterator[Finding]:
    wanted = ("LoadState", "FileDescriptorStoreMax", "LimitNOFILESoft")
    told = manager.properties(TEMPLATE, wanted)
    if told.get("LoadState") != "loaded":
        yield fault(
            "units",
            f"systemd does not know {TEMPLATE}",
            "install the units of preloadd, then `systemctl daemon-reload`",
        )
        return
    stored, files = _number(told, "FileDescriptorStoreMax"), _number(told, "LimitNOFILESoft")
    if stored < STORED:
        yield fault(
            "fd store",
            f"FileDescriptorStoreMax={stored} of preloadd@.service: weights are lost at a restart",
            "remove the drop-in that sets it (`systemctl cat preloadd@.service`): it should be 512",
        )
    else:
        yield ok("fd store", f"{stored} descriptors for each rank")
    if files < 2 * stored:
        yield fault(
            "open files",
            f"LimitNOFILE={files} of preloadd@.service is less than twice its fd store: a restart "
            "with many descriptors fails",
            f"set LimitNOFILE={8 * 1024} in a drop-in",
        )
    else:
        yield ok("open files", f"{files} for each rank")


def _groups(manager: Systemctl, raw: Raw) -> Iterator[Finding]:
    """Whether the generator has told systemd which ranks fail and come back together."""
    lost = [instance for instance in raw.instances if not _is_grouped(manager, instance)]
    if lost:
        yield fault(
            "groups",
            f"systemd knows no group of {', '.join(lost)}: a failure would not take the group of "
            "such a rank down and bring it back",
            f"`systemctl daemon-reload`; if that is no help, `{GENERATOR} $(mktemp -d)` says why",
        )


def _is_grouped(manager: Systemctl, instance: str) -> bool:
    try:
        unit = unit_name(UNIT, instance)
    except ConfigError:
        return True  # it is no instance at all, which the configuration's faults tell
    return bool(manager.properties(unit, ["PartOf"]).get("PartOf"))


def _own_limit() -> Iterator[Finding]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        yield warning(
            "open files", f"at most {hard} for each process", "raise `ulimit -Hn` to 8192"
        )
    else:
        yield ok("open files", f"at most {hard} for each process")


def _port(raw: Raw) -> Iterator[Finding]:
    """Whether the supervisor has its port, or could have it."""
    place = f"[{raw.host}]:{raw.port}" if ":" in raw.host else f"{raw.host}:{raw.port}"
    if _is_supervisor(raw):
        yield ok("supervisor", f"answers on {place}")
    elif why := _taken(raw):
        yield fault(
            "supervisor",
            f"cannot listen on {place}: {why}",
            "end the program that has the port (`ss -ltnp`), or correct supervisor.host and "
            "supervisor.port",
        )
    else:
        yield ok("supervisor", f"does not run; {place} is free")


def _taken(raw: Raw) -> str:
    """Why the supervisor could not have its port, which is not taken from it meanwhile."""
    try:
        found = socket.getaddrinfo(raw.host, raw.port, type=socket.SOCK_STREAM)
        family, kind, _, _, address = found[0]
        with suppress(OSError), socket.socket(family, kind) as asking:
            asking.settimeout(_ANSWER_S)
            asking.connect(address)
            return os.strerror(errno.EADDRINUSE)
        with socket.socket(family, kind) as trying:
            # As a server does, so that one can be started at this very moment.
            trying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trying.bind(address)
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def _is_supervisor(raw: Raw) -> bool:
    with closing(http.client.HTTPConnection(raw.host, raw.port, timeout=_ANSWER_S)) as asked:
        try:
            asked.request("GET", "/livez")
            answer = json.loads(asked.getresponse().read(1 << 16))
        except (OSError, OverflowError, ValueError, http.client.HTTPException):
            return False
    return isinstance(answer, dict) and "alive" in answer


def _number(told: dict[str, str], name: str) -> int:
    text = told.get(name, "")
    return int(text) if text.isdigit() else 1 << 30 if text == "infinity" else 0
