"""Compile caches as a kind: `compile_cache`, one bundle for a configuration.

The answer tells of the bundle, and the bundle itself is in a store that both sides use: so it takes
a live source, and the same store on both sides. The target installs nothing by itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from preloadd.errors import ProtocolViolation
from preloadd.warmup.bundles.identity import apart
from preloadd.warmup.bundles.manifest import BadBundle, Bundle, from_json, is_sha256, render
from preloadd.warmup.names import is_config_hash
from preloadd.warmup.seeding.kinds import Unfit
from preloadd.warmup.seeding.messages import INVALID_HASH

KIND = "compile_cache"

WHOLE = f"{KIND}.tar"
"""How an engine asks its daemon for the bundle itself, of which `KIND` tells."""

ANSWER, BUNDLE = "answer.json", "bundle.tar"
"""Names of what it gets for these."""

_HASH = "config_hash"
_KEY, _NBYTES, _SHA256, _MANIFEST = "key", "nbytes", "sha256", "manifest"


class CompileKind:
    """Answers with what was last offered for a configuration, and notes who is in want of which.
    Offer only what a store has taken."""

    def __init__(self) -> None:
        self._offers: dict[str, tuple[Bundle, bytes] | None] = {}
        # Of both, each thread changes one entry at a time, which Python does at once.
        self._asked: set[str] = set()

    @property
    def name(self) -> str:
        """As requests name it."""
        return KIND

    def offer(self, config_hash: str, bundle: Bundle) -> None:
        """Answer with this bundle from now on."""
        self._offers[config_hash] = bundle, payload_of(bundle)

    def withdraw(self, config_hash: str) -> None:
        """Answer with nothing until one is offered again; that it is asked for is noted still."""
        self._offers[config_hash] = None

    def offered(self, config_hash: str) -> Bundle | None:
        """What is answered with."""
        offer = self._offers.get(config_hash)
        return None if offer is None else offer[0]

    def resolve(self, fields: Mapping[str, object]) -> bytes | None:
        """The payload, as of any kind: where the bundle is, and all that is in it."""
        config_hash = fields.get(_HASH)
        if not isinstance(config_hash, str) or not is_config_hash(config_hash):
            raise ProtocolViolation(INVALID_HASH)
        if config_hash in self._offers:
            self._asked.add(config_hash)
        offer = self._offers.get(config_hash)
        return None if offer is None else offer[1]

    def asked(self) -> set[str]:
        """The configurations of all that was offered or withdrawn, whose bundle somebody has asked
        for since the last time that this was called, and then looks for in a store."""
        asked = set()
        while self._asked:
            asked.add(self._asked.pop())
        return asked


@dataclass(frozen=True, slots=True)
class CompileWanted:
    """The bundle for the engines of a configuration, whose identity has the fields `here`."""

    config_hash: str
    here: Mapping[str, str]

    kind: ClassVar[str] = KIND

    @property
    def fields(self) -> Mapping[str, object]:
        """What names it, in a request."""
        return {_HASH: self.config_hash}

    def judged(self, payload: object) -> Bundle:
        """The bundle that is told of in `payload`, to be fetched from a store; else Unfit."""
        if not isinstance(payload, dict) or set(payload) != {_KEY, _NBYTES, _SHA256, _MANIFEST}:
            raise Unfit("it does not tell of a compile cache")
        try:
            manifest = from_json(payload[_MANIFEST])
        except BadBundle as error:
            raise Unfit(str(error)) from None
        sha256, nbytes = payload[_SHA256], payload[_NBYTES]
        if not is_sha256(sha256):
            raise Unfit("its digest is none")
        if type(nbytes) is not int or nbytes != manifest.bundle_nbytes:
            raise Unfit(f"its manifest is that of a bundle of {manifest.bundle_nbytes:,} bytes")
        bundle = Bundle(sha256, nbytes, manifest)
        if payload[_KEY] != bundle.key:
            raise Unfit("it is not under the name in stores that its digest gives it")
        if differing := apart(manifest.identity, self.here):
            raise Unfit(f"it was compiled for other engines: {differing}")
        return bundle


def payload_of(bundle: Bundle) -> bytes:
    """What is told of a bundle, as JSON."""
    rest = {_KEY: bundle.key, _NBYTES: bundle.nbytes, _SHA256: bundle.sha256}
    manifest = render(bundle.manifest)
    return json.dumps(rest).encode("ascii")[:-1] + b', "manifest": ' + manifest + b"}"
