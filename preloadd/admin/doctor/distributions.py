"""Run as a script by the interpreter in question: what it has of what daemons need, as JSON.

Imports nothing of preloadd, because that may be what is missing.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NEEDED = {
    "anyio": "4.8",
    "blake3": "1.0",
    "fastapi": "0.133",
    "msgspec": "0.20",
    "prometheus-client": "0.18",
    "pydantic": "2.12",
    "rich": "13.9",
    "safetensors": "0.6.2",
    "sdnotify": "0.3.2",
    "typer": "0.15",
    "uvicorn": "0.30",
}
"""Distributions by name, each with the oldest version that will do."""


BUNDLED = Path(__file__).parents[3] / "bundled"
"""What comes with preloadd itself, and is searched last; see `linux.notify`."""


def main() -> None:
    """Tell the version of every distribution, null where it is missing."""
    sys.path.append(str(BUNDLED))
    found = {name: _version(name) for name in (*NEEDED, "preloadd")}
    old = [name for name, least in NEEDED.items() if older(found[name], least)]
    sys.stdout.write(json.dumps({"versions": found, "old": old}))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def older(found: str | None, least: str) -> bool:
    """Whether a version that was found is not even `least`."""
    return found is not None and _numbers(found) < _numbers(least)


def _numbers(text: str) -> list[int]:
    """The release of a version; what follows it (rc1, .dev0, +cu130) counts as that release."""
    release = re.match(r"(?:\d+!)?(\d+(?:\.\d+)*)", text)
    return [int(part) for part in release[1].split(".")] if release else []


if __name__ == "__main__":
    main()
