"""Where a model lies: a local folder, or a snapshot in the Hugging Face cache. No network.

The cache's layout is public: `models--<org>--<name>/refs/<revision>` holds the name of a commit,
`snapshots/<commit>/` the files.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from preloadd.domain.lines import one_line
from preloadd.errors import ModelNotFound

DEFAULT_REVISION = "main"

_ID = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]{0,95}/)?[A-Za-z0-9_][A-Za-z0-9._-]{0,95}\Z")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*(?:/[A-Za-z0-9_][A-Za-z0-9._+-]*)*\Z")
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")
_FOLDER = re.compile(r"[0-9A-Za-z_-]{1,64}\Z")
_PATH_STARTS = ("/", ".", "~")


def locate(model: str, revision: str, *, environ: Mapping[str, str]) -> Path:
    """The folder of `model`: a local one as it is, a hub id's snapshot for `revision` ('' is main).

    Whether the folder is complete is for `open_checkpoint` to say. ModelNotFound names what was
    looked for, where, and the remedy.
    """
    if not model:
        raise ModelNotFound("no model is named: give a folder, or an id such as org/name")
    folder, told = _expanded(model, environ), one_line(model)
    try:
        if folder.is_dir():
            return folder
        if folder.exists():
            raise ModelNotFound(f"{told} is a file: give the folder that holds the model")
    except OSError as error:
        raise ModelNotFound(f"{told}: {error.strerror}: give a folder that can be read") from None
    if model.startswith(_PATH_STARTS):
        raise ModelNotFound(f"{told}: no such folder: correct the path")
    return _snapshot(model, revision or DEFAULT_REVISION, cache_folder(environ))


def is_id(model: str) -> bool:
    """Whether `model` can be the id of one on the hub; there may be a folder of that name."""
    return bool(_ID.match(model)) and ".." not in model and "--" not in model


def cache_folder(environ: Mapping[str, str]) -> Path:
    """The folder that the Hugging Face libraries keep models in under this environment."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(name):
            return _expanded(environ[name], environ)
    if environ.get("HF_HOME"):
        return _expanded(environ["HF_HOME"], environ) / "hub"
    return _expanded(environ.get("XDG_CACHE_HOME") or "~/.cache", environ) / "huggingface" / "hub"


def _snapshot(model: str, revision: str, cache: Path) -> Path:
    if not is_id(model):
        raise ModelNotFound(
            f"{model!r} is neither a folder nor the id of a model: "
            "give a path, or an id such as org/name"
        )
    if not _REVISION.match(revision):
        raise ModelNotFound(f"{revision!r} is no revision: give a branch, a tag or a full commit")
    repository = cache / f"models--{model.replace('/', '--')}"
    for commit in _commits(repository, revision):
        snapshot = repository / "snapshots" / commit
        if snapshot.is_dir():
            return snapshot
    raise ModelNotFound(
        f"{model}, revision {revision}, is neither a local folder nor in the Hugging Face cache "
        f"{one_line(cache)}{_others(repository)}: download it (`hf download {model} --revision "
        f"{revision}`), set HF_HOME or HF_HUB_CACHE to the cache that has it, or give a folder"
    )


def _commits(repository: Path, revision: str) -> Iterator[str]:
    """Names that the snapshot of `revision` may have, the surest first."""
    if _COMMIT.match(revision):
        yield revision
    try:
        told = (repository / "refs" / revision).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return
    if _FOLDER.match(told):
        yield told


def _others(repository: Path) -> str:
    """What else of the model is in the cache, as part of a sentence."""
    refs = repository / "refs"
    if not refs.is_dir():
        return ""
    names = sorted(str(path.relative_to(refs)) for path in refs.rglob("*") if path.is_file())
    return f" (which has its revisions {', '.join(names[:10])})" if names else ""


def _expanded(text: str, environ: Mapping[str, str]) -> Path:
    """`text` as a path, a leading `~` replaced by the home that `environ` gives."""
    if text != "~" and not text.startswith("~/"):
        return Path(text)
    try:
        home = environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a container may run as a user without an entry
        return Path(text)
    return Path(home + text[1:])
