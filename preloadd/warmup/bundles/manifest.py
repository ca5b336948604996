"""What is in a bundle: for which engines it was made, and each file with its size and digest.

What `parse` returns names nothing outside of the folders of vLLM's compile cache.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, TypeGuard

from preloadd.domain.key import MAX_TABLE
from preloadd.domain.lines import one_line
from preloadd.domain.strict_json import MAX_NBYTES as MAX_ANSWER
from preloadd.errors import ErrorCode, PreloadError
from preloadd.warmup.bundles import ustar
from preloadd.warmup.stores.api import MAX_NBYTES

FORMAT = 1
CACHES = "torch_compile_cache"
"""The folder in vLLM's cache root that has all of them."""

AOT = "torch_aot_compile"
"""In there, the folder of those that were compiled ahead of time."""

MAX_BUNDLE = MAX_NBYTES
"""Bytes of a bundle: what a store takes as one value, and so what is held in memory at once."""

MAX_FILE = MAX_BUNDLE - 4096
"""Bytes of a file; only the bundle's own size bounds it."""

MAX_FILES = 1 << 14
"""Compiling large models leaves some thousands. Each costs a file system some blocks."""

MAX_MANIFEST = MAX_ANSWER - (64 << 10)
"""Bytes of a manifest, which has to fit into an answer with what is around it."""

MAX_PATH = 1024
MAX_DEPTH = 12
"""Names in a path. vLLM and its compilers need eight."""

_FOLDER = re.compile(rf"{CACHES}/(?:{AOT}/[0-9a-f]{{64}}|[0-9a-f]{{10}})")
_PART = re.compile(r"[!-.0-\[\]-~]{1,255}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIELD = re.compile(r"[a-z_]{1,64}")

_MAX_FIELDS = 64
_MAX_VALUE = MAX_TABLE
_PASSING = ("__pycache__", "locks")
_PASSING_ENDS = (".lock", ".tmp")
_PASSING_BEGINS = ("tmp.", ".nfs")


class BadBundle(PreloadError):
    """This is not to be bundled, or the bundle not to be installed; the text says why.

    Engines then compile for themselves, which is slower and never wrong.
    """

    code: ClassVar[ErrorCode] = ErrorCode.DAMAGED


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """A file by its path from vLLM's cache root."""

    path: str
    nbytes: int
    sha256: str

    @property
    def folder(self) -> str:
        """The folder of the compile cache in which it is, which is installed as a whole."""
        return folder_of(self.path)


@dataclass(frozen=True, slots=True)
class Manifest:
    """`members` are in the order of their paths, which is that of the bundle; there is one."""

    identity: Mapping[str, str]
    members: tuple[Member, ...]

    @property
    def folders(self) -> tuple[str, ...]:
        """What is installed, each whole, in order."""
        return tuple(sorted({one.folder for one in self.members}))

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(one.nbytes for one in self.members)

    @property
    def bundle_nbytes(self) -> int:
        """Bytes of the one bundle that this is the manifest of."""
        return ustar.length((one.path, one.nbytes) for one in self.members)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle as it is told of: its digest, by which stores know it, its size, what is in it."""

    sha256: str
    nbytes: int
    manifest: Manifest

    @property
    def key(self) -> str:
        """Its name in stores."""
        return f"vllm-warmup-cache/compile_cache/{self.sha256}/bundle.tar"

    def is_whole(self, content: bytes) -> bool:
        """Whether these are its bytes."""
        return len(content) == self.nbytes and hashlib.sha256(content).hexdigest() == self.sha256


def folder_of(path: str) -> str:
    """The folder of the compile cache that `path` is, or is in; BadBundle."""
    found = _FOLDER.match(path)
    if found is None or path[found.end() : found.end() + 1] not in ("", "/"):
        raise BadBundle(f"{one_line(path)} is in no folder of vLLM's {CACHES}")
    return found[0]


def passing(name: str) -> bool:
    """Whether a file or folder of that name is of use only while somebody compiles."""
    return name in _PASSING or name.endswith(_PASSING_ENDS) or name.startswith(_PASSING_BEGINS)


def check_path(path: str) -> None:
    """BadBundle unless a file of a bundle may be at `path`."""
    parts = path.split("/")
    if path == folder_of(path):
        raise BadBundle(f"{one_line(path)} is a folder's place, and no file's")
    if len(path) > MAX_PATH or len(parts) > MAX_DEPTH:
        raise BadBundle(f"{one_line(path[:MAX_PATH])}… is too long a path")
    for part in parts:
        if part in (".", "..") or not _PART.fullmatch(part):
            raise BadBundle(f"{one_line(path)} has a name in it that no compiler gives a file")
        if passing(part):
            raise BadBundle(f"{one_line(path)} is of use only while somebody compiles")


def render(manifest: Manifest) -> bytes:
    """As JSON, the same for equal manifests."""
    body = {
        "format": FORMAT,
        "identity": dict(manifest.identity),
        "files": [
            {"path": one.path, "size": one.nbytes, "sha256": one.sha256} for one in manifest.members
        ],
        "count": len(manifest.members),
        "total": manifest.nbytes,
    }
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode("ascii")


def from_json(body: object) -> Manifest:
    """The manifest that somebody else wrote, checked to its last path; BadBundle."""
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise BadBundle(f"its manifest is not of format {FORMAT}: run one version of preloadd")
    if set(body) != {"format", "identity", "files", "count", "total"}:
        raise BadBundle("its manifest has other fields than those of its format")
    files = body["files"]
    if not isinstance(files, list):
        raise BadBundle("its manifest has no list of files")
    check_count(len(files))
    found = Manifest(_identity(body["identity"]), tuple(map(_member, files)))
    check(found)
    if (body["count"], body["total"]) != (len(found.members), found.nbytes):
        raise BadBundle("its manifest has other totals than its files")
    return found


def check(manifest: Manifest) -> None:
    """BadBundle unless all paths are allowed, in order, and none is in the way of another."""
    for before, after in pairwise(one.path for one in manifest.members):
        if before >= after:
            raise BadBundle(f"{one_line(after)} is there twice, or not in its place")
    files = {one.path for one in manifest.members}
    for one in manifest.members:
        check_path(one.path)
        parts = one.path.split("/")
        for end in range(3, len(parts)):
            if "/".join(parts[:end]) in files:
                raise BadBundle(f"{one_line(one.path)} is below a file")
    if manifest.bundle_nbytes > MAX_BUNDLE:
        raise BadBundle(
            f"it has {manifest.bundle_nbytes:,} bytes, and {MAX_BUNDLE:,} are the most that is "
            "taken"
        )


def check_count(files: int) -> None:
    """BadBundle unless there may be so many files in a bundle."""
    if not 0 < files <= MAX_FILES:
        raise BadBundle(f"it has {files:,} files, and 1 to {MAX_FILES:,} are taken")


def is_sha256(text: object) -> TypeGuard[str]:
    """Whether it is a digest as it is written here."""
    return isinstance(text, str) and _SHA256.fullmatch(text) is not None


def _identity(body: object) -> dict[str, str]:
    if not isinstance(body, dict) or len(body) > _MAX_FIELDS:
        raise BadBundle("its manifest does not say for which engines it was made")
    for name, value in body.items():
        if not _FIELD.fullmatch(name) or not isinstance(value, str) or len(value) > _MAX_VALUE:
            raise BadBundle("its manifest has an identity that nobody would write")
    return body


def _member(body: object) -> Member:
    if not isinstance(body, dict) or set(body) != {"path", "size", "sha256"}:
        raise BadBundle("its manifest has a file without path, size or sha256")
    path, nbytes, sha256 = body["path"], body["size"], body["sha256"]
    if not isinstance(path, str) or not path.isascii():
        raise BadBundle("its manifest has a file with a path that is no plain text")
    if type(nbytes) is not int or not 0 <= nbytes <= MAX_FILE:
        raise BadBundle(f"{one_line(path[:MAX_PATH])} has a size that is not allowed")
    if not is_sha256(sha256):
        raise BadBundle(f"{one_line(path[:MAX_PATH])} has no digest")
    return Member(path, nbytes, sha256)
