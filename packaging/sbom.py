"""What a package carries, as CycloneDX 1.5 on standard output: sbom.py WHEEL...

The first wheel is preloadd, the others are carried along with it. All of it comes from the wheels,
from requirements.txt and from $SOURCE_DATE_EPOCH, so the same sources make the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import uuid
import zipfile
from collections.abc import Sequence
from datetime import UTC, datetime
from email.message import Message
from email.parser import BytesParser
from pathlib import Path
from typing import Any

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
_PINNED = re.compile(r"^(\S+)==(\S+) --hash=sha256:([0-9a-f]{64})$", re.MULTILINE)
_CLASSIFIED = {"License :: OSI Approved :: MIT License": "MIT"}
"""The name in the list of SPDX, where a package has not said that itself."""


def main(wheels: Sequence[str]) -> None:
    """Write it."""
    own, *carried = (_metadata(Path(wheel)) for wheel in wheels)
    root = _component(own, "application", _digest(Path(wheels[0])))
    sources = {name: digest for name, _, digest in _PINNED.findall(REQUIREMENTS.read_text())}
    components = [_component(each, "library", sources[each["Name"]]) for each in carried]
    body: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"timestamp": _time(), "component": root},
        "components": components,
        "dependencies": [
            {"ref": root["bom-ref"], "dependsOn": [each["bom-ref"] for each in components]},
            *({"ref": each["bom-ref"], "dependsOn": []} for each in components),
        ],
    }
    identity = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(body, sort_keys=True))
    body = {"serialNumber": identity.urn, **body}
    sys.stdout.write(json.dumps(body, indent=2, sort_keys=True) + "\n")


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return BytesParser().parsebytes(archive.read(name))


def _component(told: Message, kind: str, digest: str) -> dict[str, Any]:
    """`digest` is that of what it was made of: of the wheel, or of the source that is pinned."""
    purl = f"pkg:pypi/{told['Name']}@{told['Version']}"
    return {
        "type": kind,
        "bom-ref": purl,
        "name": told["Name"],
        "version": told["Version"],
        "description": told["Summary"],
        "purl": purl,
        "licenses": [{"license": {"id": _license(told)}}],
        "hashes": [{"alg": "SHA-256", "content": digest}],
    }


def _license(told: Message) -> str:
    classified = (_CLASSIFIED.get(each) for each in told.get_all("Classifier", ()))
    return told["License-Expression"] or next(filter(None, classified))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _time() -> str:
    at = datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


if __name__ == "__main__":
    main(sys.argv[1:])
