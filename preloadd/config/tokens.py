"""Where seeding tokens are kept: the hashes of a source, and the one secret of a mirror.

Both may also be given tokens as they are: in a file, a credential of the service manager, or a
variable. The first of those is what a mirror shows; a source takes each of them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from preloadd.domain.tokens import Token, is_hash, is_secret
from preloadd.errors import ConfigError, InsecurePath, PreloadError, ReadFailed
from preloadd.linux.plain import open_file, read_up_to
from preloadd.linux.private import locked_folder, read_private, write_private

TOKENS = "tokens.json"
SECRET = "seed.token"  # noqa: S105 - the name of a file
CREDENTIAL = "preloadd.seed-token"
VARIABLE = "PRELOADD_SEED_TOKEN"
"""Of the environment of daemons and launchers, which hand it on to none of their children."""

MAX_NBYTES = 4096
"""Of one token: it has to fit into a request, however it is written there."""

MAX_SECRETS = 64
MAX_GIVEN_NBYTES = MAX_SECRETS * (MAX_NBYTES + 1)
"""Of all tokens in one place, a line each."""

Change = Callable[[tuple[Token, ...]], tuple[Token, ...]]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    tokens: tuple[Token, ...]


def read_tokens(folder: Path) -> tuple[Token, ...]:
    """The tokens that a source below the state folder `folder` accepts; none if there is no file.

    InsecurePath if others can read it; ConfigError if it is damaged; ReadFailed.
    """
    path = folder / TOKENS
    try:
        raw = read_private(path, _owners(folder))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise _failed(path, error, "read") from error
    return _decoded(raw, path)


def change_tokens(folder: Path, change: Change) -> None:
    """Replace the tokens of `folder` by what `change` makes of them, one change at a time.

    If it cannot be written, the old file stays as it was. Errors are those of `read_tokens`.
    """
    path = folder / TOKENS
    try:
        with locked_folder(folder) as opened:
            tokens = change(read_tokens(folder))
            file = _File(version=1, tokens=tokens)
            write_private(opened, TOKENS, msgspec.json.format(msgspec.json.encode(file)) + b"\n")
    except OSError as error:
        raise _failed(path, error, "written") from error


def keep_secret(folder: Path, secret: str) -> None:
    """Keep the secret that a source gave this mirror, in the place of any other one."""
    try:
        with locked_folder(folder) as opened:
            write_private(opened, SECRET, f"{secret}\n".encode())
    except OSError as error:
        raise _failed(folder / SECRET, error, "written") from error


def kept_secret(folder: Path) -> str | None:
    """The secret that this mirror keeps below the state folder `folder`; None if it keeps none.

    InsecurePath if others can read the file; ConfigError if it holds no secret.
    """
    try:
        return _secret(read_private(folder / SECRET, _owners(folder)), folder / SECRET)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _failed(folder / SECRET, error, "read") from error


def places(file: str, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """The files that hold tokens as they are, in their order: one that is configured, if `file` is
    not empty, and the service manager's credential, if there is one."""
    given = environ.get("CREDENTIALS_DIRECTORY", "")
    credential = Path(given, CREDENTIAL)
    found = [Path(file)] if file else []
    return (*found, credential) if given and credential.exists() else tuple(found)


def given_secrets(file: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The tokens in those `places` and in `VARIABLE`. ConfigError, InsecurePath, ReadFailed."""
    found = [
        secret
        for path in places(file, environ)
        # The credential's mode is the business of the manager who made it for this service alone.
        for secret in read_secrets(path, must_be_closed=path.name != CREDENTIAL)
    ]
    if (said := environ.get(VARIABLE)) is not None:
        found.append(require_secret(said, f"${VARIABLE}"))
    return tuple(found)


def read_secrets(path: Path, *, must_be_closed: bool = True) -> tuple[str, ...]:
    """The tokens in a file, one a line and at least one.

    It may be a link, as files of secrets in containers are, and be readable for its group.
    ConfigError, ReadFailed, and InsecurePath if all users could read it, unless that may be.
    """
    try:
        with open_file(path, follow=True) as fd:
            mode = stat.S_IMODE(os.fstat(fd.fileno()).st_mode)
            raw = read_up_to(fd, MAX_GIVEN_NBYTES + 1)
    except InsecurePath:
        told = f"{path} is no regular file: give one with a token on each line"
        raise ConfigError(told) from None
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path}: there is no such file: correct the path") from None
    except OSError as error:
        raise ReadFailed(
            f"{path} could not be read: {error.strerror}. It is to hold the tokens of seeding, and "
            "be readable for the daemons' user and nobody else"
        ) from error
    if must_be_closed and mode & 0o007:
        raise InsecurePath(
            f"{path} is open to all users (mode {mode:04o}): run `chmod o-rwx {path}`, and replace "
            "the tokens in it"
        )
    return secrets_in(raw, str(path))


def secrets_in(raw: bytes, whose: str) -> tuple[str, ...]:
    """The tokens in `raw`, one a line; ConfigError, which names `whose` they are."""
    try:
        lines = raw.decode().split("\n")
    except UnicodeDecodeError:
        # Not its cause: that would keep what was read.
        raise ConfigError(f"{whose} holds bytes that are not UTF-8: put tokens there") from None
    found = tuple(require_secret(line, whose) for line in lines if line.strip())
    if not found:
        raise ConfigError(f"{whose} is empty: put a token there, or several, one a line")
    if len(found) > MAX_SECRETS or len(raw) > MAX_GIVEN_NBYTES:
        raise ConfigError(f"{whose} holds more than {MAX_SECRETS} tokens: remove the old ones")
    return found


def require_secret(text: str, whose: str) -> str:
    """`text` without the spaces around it; ConfigError, which does not show it, if it can be no
    token."""
    secret = text.strip()
    if not secret:
        raise ConfigError(f"{whose} is empty: give the token, or leave it out")
    if not secret.isprintable():
        raise ConfigError(f"{whose} holds what cannot be printed: a token is text on one line")
    if len(secret.encode()) > MAX_NBYTES:
        raise ConfigError(f"{whose} is longer than {MAX_NBYTES:,} bytes: give a shorter token")
    return secret


def _secret(raw: bytes, path: Path) -> str:
    text = raw.decode(errors="replace").strip()
    if not is_secret(text):
        raise ConfigError(
            f"{path} holds no token: get one from the source (`preloadctl token create`) and "
            "pass it to `preloadctl token keep`"
        )
    return text


def _decoded(raw: bytes, path: Path) -> tuple[Token, ...]:
    try:
        file = msgspec.json.decode(raw, type=_File)
    except msgspec.MsgspecError as error:
        raise _damaged(path, str(error)) from error
    for token in file.tokens:
        if not is_hash(token):
            raise _damaged(path, f"the hash of {token.name!r} is none")
    if file.version != 1:
        raise ConfigError(
            f"{path} was written by a newer preloadd (version {file.version} of the file): install "
            "that version again"
        )
    return file.tokens


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is damaged ({why}): put back a copy, or remove it and create all tokens anew"
    )


def _owners(folder: Path) -> set[int]:
    """Who may own what is in `folder`: root, this user, and the service whose folder it is."""
    return {0, os.geteuid(), folder.stat().st_uid}


def _failed(path: Path, error: OSError, what: str) -> PreloadError:
    return ReadFailed(
        f"{path} could not be {what}: {error.strerror}. Nothing was changed: see to the disk and "
        f"the permissions of {path.parent}, then try again"
    )
