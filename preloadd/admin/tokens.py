"""`preloadctl token`: makes, lists and ends the tokens by which mirrors are known to a source.

A secret is shown once, on standard output, and never again; none is ever taken from a command line,
which every user of the host can read.
"""

from __future__ import annotations

import json
import math
import os
import pwd
import secrets
from collections.abc import Sequence
from pathlib import Path

from preloadd.admin.columns import aligned, moment
from preloadd.config.tokens import change_tokens, keep_secret, read_tokens
from preloadd.domain.tokens import (
    PREFIX,
    SALT_NBYTES,
    SECRET_NBYTES,
    Token,
    ending,
    is_name,
    is_secret,
    token,
    unexpired,
)
from preloadd.errors import ConfigError


def create(folder: Path, name: str, *, now: float, lasts: float | None) -> str:
    """The secret of a new token; ConfigError if there is one of that name."""
    if not is_name(name):
        raise ConfigError(
            f"{name!r} is no name for a token: begin with a letter or digit, go on with those, "
            "'.', '_' and '-', at most 64 in all"
        )

    def add(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
        kept = unexpired(tokens, now)
        if any(one.name == name for one in kept):
            raise ConfigError(
                f"there is a token {name!r}: `token rotate {name}` replaces it, `token revoke "
                f"{name}` ends it"
            )
        return (*kept, fresh)

    secret = _secret()
    fresh = _hashed(name, secret, now, lasts)
    change_tokens(folder, add)
    return secret


def rotate(folder: Path, name: str, *, now: float, lasts: float | None, overlap: float) -> str:
    """The secret that replaces that of `name`, which stays valid for another `overlap` seconds.

    It is valid for as long as the old one was, or for `lasts` seconds; math.inf is for ever.
    """

    def replaced(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
        kept = unexpired(tokens, now)
        _require(kept, name)
        newest = max((one for one in kept if one.name == name), key=lambda one: one.created)
        fresh = _hashed(name, secret, now, _lifetime(newest) if lasts is None else lasts)
        return (*unexpired(ending(kept, name, now + overlap), now), fresh)

    secret = _secret()
    change_tokens(folder, replaced)
    return secret


def revoke(folder: Path, name: str, *, now: float) -> None:
    """End every token of that name at once; ConfigError if there is none."""

    def without(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
        _require(tokens, name)
        return tuple(one for one in unexpired(tokens, now) if one.name != name)

    change_tokens(folder, without)


def keep(folder: Path, written: str) -> None:
    """Keep the secret of a source for this mirror; ConfigError if `written` is none."""
    secret = written.strip()
    if not is_secret(secret):
        raise ConfigError(
            f"standard input holds no token: those begin with {PREFIX!r} and are made by "
            "`preloadctl token create` on the source"
        )
    keep_secret(folder, secret)


def prepare(folder: Path, user: str) -> None:
    """Make the state folder if there is none yet, for the daemons' user if root does it."""
    try:
        folder.mkdir(mode=0o750)
        if os.geteuid() == 0:
            entry = pwd.getpwnam(user)
            os.chown(folder, entry.pw_uid, entry.pw_gid)
    except FileExistsError:
        return
    except KeyError:
        folder.rmdir()
        raise ConfigError(
            f"daemon_user: there is no user {user!r} on this host (run `systemd-sysusers`)"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"the state folder {folder} cannot be made: {error.strerror}: run this as root"
        ) from error


def listed(folder: Path, now: float) -> list[Token]:
    """The tokens that are valid, in order of name and age."""
    return sorted(unexpired(read_tokens(folder), now), key=lambda one: (one.name, one.created))


def as_table(tokens: Sequence[Token]) -> str:
    """One token a line."""
    if not tokens:
        return "no tokens\n"
    rows = [(one.name, moment(one.created), _end(one)) for one in tokens]
    return "".join(f"{line}\n" for line in aligned([("NAME", "CREATED", "EXPIRES"), *rows]))


def as_json(tokens: Sequence[Token]) -> str:
    """The same for machines; hashes stay where they are."""
    told = [
        {
            "name": one.name,
            "created": moment(one.created),
            "expires": one.expires and moment(one.expires),
        }
        for one in tokens
    ]
    return json.dumps({"tokens": told}, indent=2) + "\n"


def _secret() -> str:
    return PREFIX + secrets.token_urlsafe(SECRET_NBYTES)


def _hashed(name: str, secret: str, now: float, lasts: float | None) -> Token:
    expires = None if lasts is None or math.isinf(lasts) else now + lasts
    return token(name, secret, secrets.token_bytes(SALT_NBYTES), now=now, expires=expires)


def _lifetime(one: Token) -> float | None:
    return None if one.expires is None else one.expires - one.created


def _require(tokens: Sequence[Token], name: str) -> None:
    names = sorted({one.name for one in tokens})
    if name not in names:
        known = ", ".join(names) or "none"
        raise ConfigError(f"there is no token {name!r}: those there are: {known}")


def _end(one: Token) -> str:
    return "never" if one.expires is None else moment(one.expires)
