"""The tokens of seeding, on their way from whoever starts a group to its ranks.

No other child gets to see them, and once they are taken from it, nor does who looks at the command
line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from preloadd.config.run import RunOptions
from preloadd.config.tokens import VARIABLE, given_secrets, require_secret
from preloadd.domain.lines import one_line
from preloadd.errors import ConfigError, PreloadError
from preloadd.linux.cmdline import hide
from preloadd.transport.certificates import require_usable

FLAG = "--seed-token"
FILE = "--seed-token-file"

_WRITTEN = ("--seed-token", "--seed_token")
_BETTER = f"give {FILE}, or set {VARIABLE}"


@dataclass(frozen=True, slots=True)
class Taken:
    """A command line without its token, that (None if there was none), and what to tell people."""

    words: list[str]
    token: str | None = field(repr=False)
    told: str = ""


def take(words: Sequence[str]) -> Taken:
    """Part `words` and the token among them, and hide that from all who can see processes.

    ConfigError if there are several, or if it is none.
    """
    rest, found = [], []
    waiting = iter(words)
    for word in waiting:
        name, equals, value = word.partition("=")
        if name not in _WRITTEN:
            rest.append(word)
            continue
        found.append(value if equals else next(waiting, ""))
    if not found:
        return Taken(rest, None)
    told = _hidden(found)
    if len(set(found)) > 1:
        raise ConfigError(f"{FLAG}: is given with different values: {FILE} takes several")
    if found[0].startswith("--"):
        raise ConfigError(f"{FLAG}: is followed by another option: give the token, or leave it out")
    return Taken(rest, require_secret(found[0], f"{FLAG}:"), told)


def _hidden(secrets: Sequence[str]) -> str:
    try:
        for secret in filter(None, secrets):
            hide(secret)
    except (OSError, ValueError, IndexError) as error:
        return (
            f"{FLAG}: everybody on this host can read it (`ps`), since it cannot be hidden here: "
            f"{one_line(error)}: {_BETTER}"
        )
    return f"{FLAG}: everybody on this host could read it (`ps`) until now: {_BETTER}"


def tokens_for(
    options: RunOptions, taken: str | None, environ: Mapping[str, str]
) -> tuple[str, ...]:
    """The tokens that ranks are to be handed: that of the command line, and of the environment.

    ConfigError, InsecurePath or ReadFailed if seeding could not work with these, with files that
    are named, or for want of any.
    """
    seed = options.seed
    if not seed.wanted:
        if taken is not None:
            text = "there is no host to listen on or ask: give one, or leave this out"
            raise ConfigError(f"{FLAG}: is for seeding, but {text}")
        return ()
    listens, asks = bool(seed.listen_host), bool(seed.source_host)
    require_usable(seed.tls, listens=listens, asks=asks, prefix="--seed-tls-")
    said = {key: value for key, value in environ.items() if key == VARIABLE}
    handed = (*(() if taken is None else (taken,)), *given_secrets("", said))
    found = bool(handed) or bool(given_secrets("", environ))
    try:
        found = bool(given_secrets(seed.token_file, {})) or found
    except PreloadError as error:
        raise type(error)(f"{FILE}: {error}") from None
    if not found:
        raise ConfigError(
            f"{FILE}: must be given, since ranks are seeded with a token only: a file that holds "
            f"the same at both ends. Or set {VARIABLE}"
        )
    return handed
