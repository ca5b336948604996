"""Seeding tokens: what a source keeps of them, and whether what a mirror presents is one of them.

A secret has 256 random bits, so nobody can try them all and a fast hash keeps it as well as a slow
one. The salt only keeps equal secrets from looking equal.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

PREFIX = "plt_"
SECRET_NBYTES = 32
SALT_NBYTES = 16
DIGEST_NBYTES = 32

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_SALT = re.compile(rf"[0-9a-f]{{{2 * SALT_NBYTES}}}\Z")
_DIGEST = re.compile(rf"[0-9a-f]{{{2 * DIGEST_NBYTES}}}\Z")
_SECRET = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{43}}\Z")
_PERSON = b"preloadd-token"


@dataclass(frozen=True, slots=True)
class Token:
    """One valid secret, of which only the hash is kept. Times are seconds since the epoch.

    `expires` None means never; several tokens may have one name while one replaces another.
    """

    name: str
    salt: str
    digest: str
    created: float
    expires: float | None = None

    def valid(self, now: float) -> bool:
        """Whether it has not expired."""
        return self.expires is None or now < self.expires


def token(name: str, secret: str, salt: bytes, *, now: float, expires: float | None) -> Token:
    """What to keep of `secret`."""
    return Token(name, salt.hex(), _digest(presented(secret), salt).hex(), now, expires)


def presented(secret: str) -> bytes:
    """A secret as it is compared, whatever is in it: none is refused for not being Unicode."""
    return secret.encode("utf-8", "surrogatepass")


def verify(tokens: Iterable[Token], shown: bytes, now: float) -> str | None:
    """The name of the valid token that `shown` is, or None; see `presented`.

    Every token is compared, each in constant time: how long it takes tells nothing of any of them.
    """
    found = None
    for candidate in tokens:
        digest = _digest(shown, bytes.fromhex(candidate.salt))
        same = hmac.compare_digest(digest, bytes.fromhex(candidate.digest))
        if same and candidate.valid(now):
            found = candidate.name
    return found


def ending(tokens: Iterable[Token], name: str, at: float) -> tuple[Token, ...]:
    """`tokens`, of which those called `name` are valid until `at` at the latest."""
    return tuple(_until(one, at) if one.name == name else one for one in tokens)


def unexpired(tokens: Iterable[Token], now: float) -> tuple[Token, ...]:
    """Those of `tokens` that are still of use."""
    return tuple(one for one in tokens if one.valid(now))


def is_name(text: str) -> bool:
    """Whether a token may be called so."""
    return bool(_NAME.match(text))


def is_secret(text: str) -> bool:
    """Whether `text` is written as secrets are."""
    return bool(_SECRET.match(text))


def is_hash(one: Token) -> bool:
    """Whether salt and digest are written as `token` writes them, so that `verify` can compare."""
    return bool(_SALT.match(one.salt) and _DIGEST.match(one.digest))


def _until(one: Token, at: float) -> Token:
    return replace(one, expires=at if one.expires is None else min(one.expires, at))


def _digest(secret: bytes, salt: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=DIGEST_NBYTES, salt=salt, person=_PERSON).digest()
