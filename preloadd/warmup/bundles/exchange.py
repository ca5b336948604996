"""A compile cache given to the stores, and fetched from them. Both block.

Whatever goes wrong is a reason to tell people, and engines compile for themselves.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from preloadd.domain.lines import one_line
from preloadd.errors import PreloadError
from preloadd.warmup.bundles.index import Entry, remember
from preloadd.warmup.bundles.install import Installed, install, missing
from preloadd.warmup.bundles.manifest import Bundle
from preloadd.warmup.bundles.pack import pack


class Stores(Protocol):
    """What is used of `stores.chain.Stores`: one of them takes and gives a whole bundle at once."""

    @property
    def names(self) -> Sequence[str]:
        """All stores."""

    @property
    def faults(self) -> Sequence[str]:
        """A line for each store that did not do the last thing it was asked."""

    def find(self, key: str, limit: int) -> bytes | None:
        """The value of the first store that has one."""

    def keep(self, key: str, value: bytes) -> None:
        """Give the value to all stores."""


@dataclass(frozen=True, slots=True)
class Withheld:
    """Why there is nothing to give, or nothing was installed: for people, one line."""

    why: str


def publish(
    root: Path,
    folders: Sequence[str],
    identity: Mapping[str, str],
    stores: Stores,
    *,
    now: float,
) -> Bundle | Withheld:
    """Pack these folders of the cache root, and give them to all stores; Withheld if none took it.

    The bundle is packed into a file without a name in `root`, and in memory once while it is given.
    That the folders are of engines of this identity is remembered; `now` is the wall time.
    """
    if not stores.names:
        return Withheld("there is no store for it: name one in [warmup] stores")
    if not folders:
        return Withheld("no engine has compiled anything")
    try:
        with tempfile.TemporaryFile(dir=root) as packed:
            bundle = pack(root, folders, identity, packed)
            remember(root, Entry.of(bundle, made=True, now=now))
            packed.seek(0)
            stores.keep(bundle.key, packed.read())
    except (PreloadError, OSError) as error:
        return Withheld(one_line(error))
    if len(stores.faults) >= len(stores.names):
        return Withheld(f"no store took it: {'; '.join(stores.faults)}")
    return bundle


def remembered(
    root: Path, folders: Sequence[str], identity: Mapping[str, str], *, now: float
) -> Bundle:
    """Have these folders of the cache root in mind as those of engines of this identity.

    BadBundle, InsecurePath, OSError as of `pack`.
    """
    with tempfile.TemporaryFile(dir=root) as packed:
        bundle = pack(root, folders, identity, packed)
    remember(root, Entry.of(bundle, made=True, now=now))
    return bundle


def obtain(
    root: Path, bundle: Bundle, stores: Stores, *, trusted: bool, now: float
) -> Installed | Withheld:
    """Fetch a bundle that a source told of and install it in the cache root, unless it is there.

    `trusted`: whether the group said that it runs such code. `now` is the wall time, for people.
    """
    if not trusted:
        return Withheld("it is code of another host: [warmup] trust_bundles = true trusts it")
    try:
        new = missing(root, bundle.manifest)
        if not new:
            return Installed(bundle.manifest.folders, ())
        raw = stores.find(bundle.key, bundle.nbytes)
        if raw is None:
            faults = "".join(f"; {one}" for one in stores.faults)
            names = ", ".join(stores.names) or "there are none"
            return Withheld(f"it is in no store ({names}) that the source gave it to{faults}")
        installed = install(root, bundle, io.BytesIO(raw))
        remember(root, Entry.of(bundle, made=False, now=now))
    except (PreloadError, OSError) as error:
        return Withheld(one_line(error))
    return installed
