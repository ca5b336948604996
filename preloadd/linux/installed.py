"""What is installed for an interpreter, read from its folders: it is not run for that.

Running one takes longer than a rank that adopts has, and one with a broken package has no answer.
What only its own start-up code knows of (`.pth` files, wrapper scripts) is not found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_VERSION = re.compile(r"version(?:_info)?\s*=\s*(3\.\d+)")
_PYTHON = re.compile(r"python(3\.\d+)")


def version(names: Sequence[str], folders: Sequence[str]) -> str:
    """The version of a distribution of one of these names, as its metadata in `folders` tells it.

    Of each name the first counts, as for an import; of several names all do, for one may be hollow.
    '' if there is none.
    """
    # Not above: most ranks need none of it, and it takes as long as all else that they import.
    from importlib.metadata import distributions

    found = []
    for name in names:
        for distribution in distributions(name=name, path=list(folders)):
            # One without the file, as a removal that was broken off leaves it, has no version.
            if "Version" in distribution.metadata:
                found.append(distribution.metadata["Version"])
                break
    return ", ".join(dict.fromkeys(found))


def search_path(python: str, environ: Mapping[str, str]) -> list[str]:
    """The folders in which `python` finds packages, in the order in which it looks."""
    given = environ.get("PYTHONPATH", "").split(os.pathsep)
    return [*filter(None, given), *_folders(Path(python), environ)]


def _folders(python: Path, environ: Mapping[str, str]) -> Iterator[str]:
    # As it was called: through a link an interpreter knows its virtual environment.
    for prefix in (python.parent.parent, python.parent):
        config = prefix / "pyvenv.cfg"
        with suppress(OSError, UnicodeDecodeError):
            settings = config.read_text()
            yield from _packages(python.parent.parent, _matched(_VERSION, settings))
            if re.search(r"include-system-site-packages\s*=\s*true", settings):
                base = _matched(re.compile(r"home\s*=\s*(.+)"), settings)
                yield from _outside(Path(base, "python3"), environ)
            return
    yield from _outside(python, environ)


def _outside(python: Path, environ: Mapping[str, str]) -> Iterator[str]:
    """The folders of an interpreter that is in no virtual environment."""
    real = python.resolve()
    release = _matched(_PYTHON, real.name)
    if not environ.get("PYTHONNOUSERSITE"):
        home = Path(environ.get("HOME") or "/nonexistent")
        yield from _packages(Path(environ.get("PYTHONUSERBASE") or home / ".local"), release)
    prefix = real.parent.parent
    # Debian's Python looks there first.
    for root in dict.fromkeys((prefix / "local", prefix)):
        yield from _packages(root, release)
    yield from _existing(prefix.glob("lib/python3/dist-packages"))


def _packages(prefix: Path, release: str) -> Iterator[str]:
    for name in ("site-packages", "dist-packages"):
        yield from _existing(prefix.glob(f"lib*/python{release or '3.*'}/{name}"))


def _existing(paths: Iterator[Path]) -> Iterator[str]:
    # A link such as lib64 shows the same folder twice, which does no harm.
    yield from map(str, sorted(paths))


def _matched(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1].strip() if found else ""
