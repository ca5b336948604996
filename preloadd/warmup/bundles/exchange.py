"""A compile cache given to the stores, and fetched from them. Both block.

Whatever goes wrong is a reason to tell people, and engines compile for themselves.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from preloadd.domain.lines import one_line
from preloadd.errors import PreloadError
from preloadd.warmup.bundles.index import Entry, remember
from preloadd.warmup.bundles.install import Installed, install, missing
from preloadd.warmup.bundles.manifest import Bundle
from preloadd.warmup.bundles.pack import pack
from preloadd.warmup.stores.api import Shared


@dataclass(frozen=True, slots=True)
class Withheld:
    """Why there is nothing to give, or nothing was installed: for people, one line."""

    why: str


def publish(
    root: Path,
    folders: Sequence[str],
    identity: Mapping[str, str],
    stores: Shared,
    *,
    now: float,
) -> Bundle | Withheld:
    """Pack these folders of the cache root, and give them to all stores; Withheld if none took it.

    What is under its name there and is not the bundle is replaced: the name is its digest.
    The bundle is packed into a file without a name in `root`, and in memory once while it is given.
    That the folders are of engines of this identity is remembered; `now` is the wall time.
    """
    if not stores.names:
        return Withheld("there is no store for it: name one in [warmup] stores")
    if not folders:
        return Withheld("no engine has compiled anything")
    try:
        with tempfile.TemporaryFile(dir=root) as packed:
            bundle = _packed(root, folders, identity, packed, now)
            packed.seek(0)
            stores.keep(bundle.key, packed.read(), bundle.is_whole)
    except (PreloadError, OSError) as error:
        return Withheld(one_line(error))
    if len(stores.faults) >= len(stores.names):
        return Withheld(f"no store took it: {'; '.join(stores.faults)}")
    return bundle


def is_kept(bundle: Bundle, stores: Shared) -> bool:
    """Whether somebody who is told of a bundle finds it in a store. PreloadError, OSError."""
    return stores.find(bundle.key, bundle.nbytes, bundle.is_whole) is not None


def remembered(
    root: Path, folders: Sequence[str], identity: Mapping[str, str], *, now: float
) -> Bundle:
    """Have these folders of the cache root in mind as those of engines of this identity.

    BadBundle, InsecurePath, OSError as of `pack`.
    """
    with tempfile.TemporaryFile(dir=root) as packed:
        return _packed(root, folders, identity, packed, now)


def _packed(
    root: Path, folders: Sequence[str], identity: Mapping[str, str], out: BinaryIO, now: float
) -> Bundle:
    bundle = pack(root, folders, identity, out)
    remember(root, Entry.of(bundle, made=True, now=now))
    return bundle


def obtain(
    root: Path, bundle: Bundle, stores: Shared, *, trusted: bool, now: float
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
        raw = stores.find(bundle.key, bundle.nbytes, bundle.is_whole)
        if raw is None:
            faults = "".join(f"; {one}" for one in stores.faults)
            names = ", ".join(stores.names) or "there are none"
            return Withheld(
                f"it is in no store ({names}) that the source gave it to, or damaged there{faults}"
            )
        installed = install(root, bundle, io.BytesIO(raw))
        remember(root, Entry.of(bundle, made=False, now=now))
    except (PreloadError, OSError) as error:
        return Withheld(one_line(error))
    return installed
