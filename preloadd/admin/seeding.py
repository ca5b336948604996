"""Whether groups could be seeded as they say: tokens and files for TLS, as daemons find them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from preloadd.admin.service import Service
from preloadd.config.files import Fault
from preloadd.config.group import Group
from preloadd.config.host import HostSettings
from preloadd.config.tokens import (
    CREDENTIAL,
    TOKENS,
    VARIABLE,
    kept_secret,
    read_secrets,
    read_tokens,
    require_secret,
)
from preloadd.domain.meeting import is_one_host
from preloadd.domain.seeding import EVERYWHERE
from preloadd.errors import ConfigError, PreloadError
from preloadd.transport.certificates import require_usable

_MAKE = {
    "seed.listen_host": "make one with `preloadctl token create`",
    "seed.source_host": "keep one of the source's with `preloadctl token keep`",
}

_SHIPPED = "usr/lib/systemd/system/preloadd@.service"
_OURS = (_SHIPPED, "run/systemd/generator/preloadd@*.service.d/50-group.conf")
_READ = tuple(
    f"{top}/systemd/{name}"
    for top in ("usr/lib", "lib", "usr/local/lib", "etc", "run")
    for name in (
        *("system.conf", "system.conf.d/*.conf", "*/preloadd@*.service"),
        *("*/preloadd@*.service.d/*.conf", "*/service.d/*.conf"),
    )
)
"""All that systemd reads of ranks: its folders of units have several names."""

_GIVES = re.compile(r"^\s*(?:\w*Credential|\w*Environment|ExecStart)", re.MULTILINE)
"""Lines by which they can give a rank a token that is none of the host's."""


class Here(NamedTuple):
    """What groups have on this host. `unseen` if their ranks may have tokens that cannot be seen
    from here."""

    trial: Service
    state: Path
    unseen: bool


def seeding_here(host: HostSettings, trial: Service, root: Path) -> Here:
    """The same. Tokens are unseen if the daemons' user is not tried, if there are no units yet, or
    if somebody has added to them what may give them one."""
    added = _paths(root, _READ) - _paths(root, _OURS)
    shipped = (root / _SHIPPED).exists()
    unseen = trial.stands_in or not shipped or any(map(_gives, added))
    return Here(trial, Path(host.state_dir), unseen)


def seeding(group: Group, file: str, here: Here) -> tuple[list[Fault], list[str]]:
    """What would keep the group's ranks from starting, since they could not be seeded, and notes
    of what is to be known besides."""
    if not group.seed.wanted:
        return [], []
    with here.trial.acting():
        faults = [*_tokens(group, file, here), *_files(group, file)]
        lacks = [f"seed.{end}" for end in _lacks(group, here)]
    notes, told = list(_reachable(group, file)), {fault.key for fault in faults}
    for key in lacks:
        if here.unseen:
            notes.append(
                f"{file}: {key}: no token is found, without which the ranks do not start, unless "
                f"their units have the credential {CREDENTIAL}, which only they see"
            )
        elif key not in told:
            text = "there is no token, without which the ranks do not start"
            remedy = f"{_MAKE[key]}, or name a file with one in token_file"
            faults.append(Fault(file, key, f"{text} ({remedy})"))
    return faults, notes


def _paths(root: Path, patterns: tuple[str, ...]) -> set[str]:
    """Where they lie: there are several ways to one file, such as /lib."""
    return set(map(os.path.realpath, chain.from_iterable(map(root.glob, patterns))))


def _gives(unit: str) -> bool:
    try:
        return bool(_GIVES.search(Path(unit).read_text()))
    except (OSError, UnicodeDecodeError):
        return True


def _reachable(group: Group, file: str) -> Iterator[str]:
    """A note of what others could reach."""
    seed = group.seed
    if seed.listen_host and seed.tls is None and not _private(seed.listen_host):
        yield (
            f"{file}: seed.listen_host: others are seeded at {seed.listen_host} without TLS: let "
            "only trusted hosts reach its ports, or give tls_cert"
        )


def _private(host: str) -> bool:
    return is_one_host(host) and host not in EVERYWHERE


def _tokens(group: Group, file: str, here: Here) -> Iterator[Fault]:
    environ = here.trial.environ
    try:
        if group.seed.token_file:
            read_secrets(Path(group.seed.token_file))
    except PreloadError as error:
        yield Fault(file, "seed.token_file", str(error))
    try:
        if VARIABLE in environ:
            require_secret(environ[VARIABLE], f"${VARIABLE}")
    except ConfigError as error:
        yield Fault(file, "seed", str(error))
    for end, read in (("listen_host", read_tokens), ("source_host", kept_secret)):
        try:
            if getattr(group.seed, end):
                read(here.state)
        except PreloadError as error:
            yield Fault(file, f"seed.{end}", str(error))


def _files(group: Group, file: str) -> Iterator[Fault]:
    seed = group.seed
    listens, asks = bool(seed.listen_host), bool(seed.source_host)
    try:
        require_usable(seed.tls, listens=listens, asks=asks, prefix="seed.tls_")
    except ConfigError as error:
        setting, _, text = str(error).partition(": ")
        yield Fault(file, setting, text)


def _lacks(group: Group, here: Here) -> Iterator[str]:
    """Each end that the group has, and for which nothing that can be seen has a token."""
    if group.seed.token_file or VARIABLE in here.trial.environ:
        return
    tokens = here.state / TOKENS
    if group.seed.listen_host and not os.access(tokens, os.F_OK, effective_ids=True):
        yield "listen_host"
    with suppress(PreloadError):  # told as a fault
        if group.seed.source_host and kept_secret(here.state) is None:
            yield "source_host"
