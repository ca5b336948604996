"""Whether a group could be seeded as it says: tokens and files for TLS, as daemons find them."""

from __future__ import annotations

import os
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
)
from preloadd.domain.meeting import is_one_host
from preloadd.domain.seeding import EVERYWHERE
from preloadd.errors import ConfigError, PreloadError
from preloadd.transport.certificates import asking, listening


def seed_faults(group: Group, file: str, host: HostSettings, trial: Service) -> Iterator[Fault]:
    """What would keep the group's ranks from starting, since they could not be seeded."""
    if not group.seed.wanted:
        return
    with trial.acting():
        found = [*_tokens(group, file, Path(host.state_dir)), *_files(group, file)]
    yield from found


def seed_notes(group: Group, file: str, host: HostSettings, trial: Service) -> Iterator[str]:
    """What is to be known of the group's seeding besides."""
    seed = group.seed
    if seed.listen_host and seed.tls is None and not _private(seed.listen_host):
        yield (
            f"{file}: seed.listen_host: others are seeded at {seed.listen_host} without TLS: let "
            "only trusted hosts reach its ports, or give tls_cert"
        )
    if seed.token_file or VARIABLE in trial.environ:
        return
    with trial.acting():
        lacks = [end for end, found in _found(group, Path(host.state_dir)) if not found]
    for end in lacks:
        yield (
            f"{file}: seed.{end}: no token is found, without which the ranks do not start, unless "
            f"their units have the credential {CREDENTIAL}"
        )


def _private(host: str) -> bool:
    return is_one_host(host) and host not in EVERYWHERE


def _tokens(group: Group, file: str, state: Path) -> Iterator[Fault]:
    try:
        if group.seed.token_file:
            read_secrets(Path(group.seed.token_file))
    except PreloadError as error:
        yield Fault(file, "seed.token_file", str(error))
    for end, read in (("listen_host", read_tokens), ("source_host", kept_secret)):
        try:
            if getattr(group.seed, end):
                read(state)
        except PreloadError as error:
            yield Fault(file, f"seed.{end}", str(error))


def _files(group: Group, file: str) -> Iterator[Fault]:
    seed, files = group.seed, group.seed.tls
    try:
        if files is not None and seed.listen_host:
            listening(files)
        if files is not None and seed.source_host:
            asking(files)
    except ConfigError as error:
        setting, _, text = str(error).partition(": ")
        yield Fault(file, f"seed.tls_{setting}", text)


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
