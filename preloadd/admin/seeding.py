"""Whether a group could be seeded as it says: tokens and files for TLS, as daemons find them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

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
    "listen_host": "make one with `preloadctl token create`",
    "source_host": "keep one of the source's with `preloadctl token keep`",
}

_SHIPPED = "usr/lib/systemd/system/preloadd@.service"
_ADDED = tuple(
    f"{top}/systemd/system*/{name}"
    for top in ("usr/lib", "usr/local/lib", "etc", "run")
    for name in ("preloadd@*.service", "preloadd@*.service.d/*.conf", "service.d/*.conf")
)
_GIVES = re.compile(r"^\s*(?:\w*Credential|\w*Environment|ExecStart)", re.MULTILINE)
"""Lines by which a unit can give its rank a token that is none of the host's."""


def seed_faults(
    group: Group, file: str, host: HostSettings, trial: Service, root: Path
) -> Iterator[Fault]:
    """What would keep the group's ranks from starting, since they could not be seeded."""
    if not group.seed.wanted:
        return
    with trial.acting():
        found = [*_tokens(group, file, trial, Path(host.state_dir)), *_files(group, file)]
    yield from found
    told = {fault.key for fault in found}
    for end in () if _may_be_given(trial, root) else _lacks(group, host, trial):
        if (key := f"seed.{end}") not in told:
            text = "there is no token, without which the ranks do not start"
            yield Fault(file, key, f"{text}: {_MAKE[end]}, or name a file with one in token_file")


def seed_notes(
    group: Group, file: str, host: HostSettings, trial: Service, root: Path
) -> Iterator[str]:
    """What is to be known of the group's seeding besides."""
    seed = group.seed
    if seed.listen_host and seed.tls is None and not _private(seed.listen_host):
        yield (
            f"{file}: seed.listen_host: others are seeded at {seed.listen_host} without TLS: let "
            "only trusted hosts reach its ports, or give tls_cert"
        )
    if _may_be_given(trial, root):
        for end in _lacks(group, host, trial):
            yield (
                f"{file}: seed.{end}: no token is found, without which the ranks do not start, "
                f"unless their units have the credential {CREDENTIAL}, which only they see"
            )


def _may_be_given(trial: Service, root: Path) -> bool:
    """Whether ranks may have a token that cannot be seen from here: if the daemons' user is not
    tried, if there are no units yet, or if somebody has added to them what may give them one."""
    shipped = root / _SHIPPED
    added = {path for pattern in _ADDED for path in root.glob(pattern)} - {shipped}
    return trial.stands_in or not shipped.exists() or any(map(_gives, added))


def _gives(unit: Path) -> bool:
    try:
        return bool(_GIVES.search(unit.read_text()))
    except (OSError, UnicodeDecodeError):
        return True


def _private(host: str) -> bool:
    return is_one_host(host) and host not in EVERYWHERE


def _tokens(group: Group, file: str, trial: Service, state: Path) -> Iterator[Fault]:
    try:
        if group.seed.token_file:
            read_secrets(Path(group.seed.token_file))
    except PreloadError as error:
        yield Fault(file, "seed.token_file", str(error))
    try:
        if VARIABLE in trial.environ:
            require_secret(trial.environ[VARIABLE], f"${VARIABLE}")
    except ConfigError as error:
        yield Fault(file, "seed", str(error))
    for end, read in (("listen_host", read_tokens), ("source_host", kept_secret)):
        try:
            if getattr(group.seed, end):
                read(state)
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


def _lacks(group: Group, host: HostSettings, trial: Service) -> list[str]:
    """Each end that the group has, and for which nothing that can be seen has a token."""
    if group.seed.token_file or VARIABLE in trial.environ:
        return []
    with trial.acting():
        return [end for end, found in _found(group, Path(host.state_dir)) if not found]


def _found(group: Group, state: Path) -> Iterator[tuple[str, bool]]:
    """Each end that the group has, and whether the state folder has a token for it."""
    if group.seed.listen_host:
        yield "listen_host", os.access(state / TOKENS, os.F_OK, effective_ids=True)
    if group.seed.source_host:
        try:
            kept = kept_secret(state)
        except PreloadError:
            return  # told as a fault
        yield "source_host", kept is not None
