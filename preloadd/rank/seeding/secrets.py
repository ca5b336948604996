"""The tokens of a rank: the one that it shows to its source, and those that it accepts itself.

None of them is in its settings, which are logged and kept, nor in the environment of its loader.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from preloadd.config.tokens import (
    MAX_GIVEN_NBYTES,
    TOKENS,
    VARIABLE,
    given_secrets,
    kept_secret,
    places,
    read_tokens,
    secrets_in,
)
from preloadd.domain.settings import Seeding
from preloadd.domain.tokens import SALT_NBYTES, Token, token, verify
from preloadd.errors import ConfigError, PreloadError
from preloadd.linux.fds import OwnedFd
from preloadd.linux.memfd import read_sealed
from preloadd.rank.seeding.api import Admits
from preloadd.rank.seeding.fresh import Fresh

log = logging.getLogger(__name__)


def passed_tokens(passed: Sequence[OwnedFd]) -> tuple[str, ...]:
    """What a launcher handed to this rank; closes every descriptor. ConfigError."""
    found: tuple[str, ...] = ()
    for fd in passed:
        with fd:
            found += secrets_in(read_sealed(fd.fileno(), MAX_GIVEN_NBYTES), "what was passed")
    return found


def without_tokens(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a child."""
    return {name: value for name, value in environ.items() if name != VARIABLE}


def own_token(seeding: Seeding, environ: Mapping[str, str], passed: Sequence[str]) -> str:
    """What this rank shows to its source: what was passed, else the first in its `token_file`, in
    the manager's credential, in the environment, or what is kept in the folder of tokens.

    ConfigError if there is none, or one of those is no token; InsecurePath, ReadFailed.
    """
    given = (*passed, *given_secrets(seeding.token_file, environ))
    kept = None if given or not seeding.tokens else kept_secret(Path(seeding.tokens))
    if not given and kept is None:
        raise ConfigError(
            f"there is no token to show to the source {seeding.source}: keep one with "
            "`preloadctl token keep`, or give token_file the path of a file that holds one"
        )
    return given[0] if given else str(kept)


def admission(
    seeding: Seeding,
    environ: Mapping[str, str],
    passed: Sequence[str],
    *,
    wall: Callable[[], float],
) -> Admits:
    """Whether a token is one that this rank accepts: as `own_token`, all of them, but instead of
    the one that is kept those that were made here.

    Files are read again when they have changed; none is accepted while one cannot be used. `wall`
    is the time in seconds since 1970, by which tokens expire.
    """
    accepted = Fresh(
        "the disk that tokens are on",
        _files(seeding, environ),
        lambda: _accepted(seeding, environ, passed, now=wall()),
    )
    told: set[str] = set()

    async def admits(shown: bytes) -> bool:
        try:
            tokens = await accepted.get()
            told.clear()
            return verify(tokens, shown, wall()) is not None
        except PreloadError as error:
            if str(error) not in told:
                told.add(str(error))
                log.warning("nobody is seeded: %s", error)
            return False

    return admits


def require_tokens(
    seeding: Seeding, environ: Mapping[str, str], passed: Sequence[str], *, wall: float
) -> None:
    """ConfigError, InsecurePath or ReadFailed if this rank has no tokens, or cannot read some."""
    if seeding.source is not None:
        shown = own_token(seeding, environ, passed)
        if not shown.isascii():
            log.warning("the token is not ASCII, at which a source that is vLLM stops answering")
    if seeding.listen is None:
        return
    accepted = _accepted(seeding, environ, passed, now=wall)
    if not accepted and not (seeding.tokens and Path(seeding.tokens, TOKENS).exists()):
        raise ConfigError(
            f"there is no token by which those are known who are seeded at {seeding.listen}: make "
            "one with `preloadctl token create`, or give token_file the path of a file with one"
        )
    if not any(one.valid(wall) for one in accepted):
        log.warning(
            "no token is valid, so that nobody is seeded at %s: see `preloadctl token list`",
            seeding.listen,
        )


def _files(seeding: Seeding, environ: Mapping[str, str]) -> tuple[Path, ...]:
    made = (Path(seeding.tokens, TOKENS),) if seeding.tokens else ()
    return (*made, *places(seeding.token_file, environ))


def _accepted(
    seeding: Seeding, environ: Mapping[str, str], passed: Sequence[str], *, now: float
) -> tuple[Token, ...]:
    made = read_tokens(Path(seeding.tokens)) if seeding.tokens else ()
    given = (*passed, *given_secrets(seeding.token_file, environ))
    salted = (
        token("given", secret, os.urandom(SALT_NBYTES), now=now, expires=None) for secret in given
    )
    return (*made, *salted)
