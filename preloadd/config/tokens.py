"""Where seeding tokens are kept: the hashes of a source, and the one secret of a mirror."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from preloadd.domain.tokens import Token, is_hash, is_secret
from preloadd.errors import ConfigError, PreloadError, ReadFailed
from preloadd.linux.private import locked_folder, read_private, write_private

TOKENS = "tokens.json"
SECRET = "seed.token"  # noqa: S105 - the name of a file
CREDENTIAL = "preloadd.seed-token"

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


def own_secret(folder: Path, environ: Mapping[str, str]) -> str | None:
    """The secret of this mirror: the service manager's credential first, then the file; else None.

    InsecurePath if others can read the file; ConfigError if it holds no secret.
    """
    given = environ.get("CREDENTIALS_DIRECTORY", "")
    credential = Path(given, CREDENTIAL)
    try:
        if given and credential.exists():
            # Made by the manager for this service alone; its mode is the manager's business.
            return _secret(credential.read_bytes(), credential)
        return _secret(read_private(folder / SECRET, _owners(folder)), folder / SECRET)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _failed(folder / SECRET, error, "read") from error


def _secret(raw: bytes, path: Path) -> str:
    text = raw.decode(errors="replace").strip()
    if not is_secret(text):
        raise ConfigError(
            f"{path} holds no token: get one from the source (`preloadd admin token create`) and "
            "pass it to `preloadd admin token keep`"
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
