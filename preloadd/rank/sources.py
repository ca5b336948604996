"""What the settings of a rank are made from, as one word: while it is the same, so are they.

What judges the files takes long to import, and a rank that comes back mostly finds them as they
were.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from preloadd import __version__
from preloadd.config import files
from preloadd.config.files import Fault
from preloadd.weights.checkpoint import identify

PREFIX = "PRELOADD_"
"""How all variables begin that settings depend on."""

_CODE = Path(files.__file__).parent


def fingerprint(folder: Path, environ: Mapping[str, str]) -> str:
    """A digest of all that settings depend on, below `folder` and in `environ`.

    '' where part of it cannot be read. It is not of the contents alone: a file that was changed and
    changed back, maybe while it was judged, is another one. Nor of the version: packages of one
    version may be built twice, and whoever installs one puts new files into the folder of the code.
    """
    listings = [files.host_files(folder), files.group_files(folder)]
    if files.folder_faults(folder) or any(listing.faults for listing in listings):
        return ""
    found: list[object] = [__version__, str(folder), _told(environ)]
    try:
        found.append(identify(_CODE))
        for path in (path for listing in listings for path in listing.paths):
            # In this order: a file that changes in between is then taken for another one later on.
            found += [str(path), identify(path), content := files.content(path)]
            if isinstance(content, Fault):
                return ""
    except OSError:
        return ""
    return hashlib.sha256(repr(found).encode()).hexdigest()


def _told(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    return sorted((name, value) for name, value in environ.items() if name.startswith(PREFIX))
