"""From what the user wrote to a folder: found on this host, or fetched by the loader's Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from preloadd.domain.lines import one_line
from preloadd.errors import EXIT_STATUS, ErrorCode, LoaderFailed, ModelNotFound
from preloadd.launcher.policy import describe
from preloadd.launcher.progress import Display
from preloadd.linux.asking import Answer
from preloadd.transport.child import answer
from preloadd.weights.checkpoint.locate import DEFAULT_REVISION, is_id, locate

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE = {"1", "ON", "YES", "TRUE"}


def find(model: str, revision: str, *, environ: Mapping[str, str]) -> Path | None:
    """The folder of `model` on this host; None if it has to be fetched, and may be.

    ModelNotFound if it is not there and may not be fetched.
    """
    try:
        return locate(model, revision, environ=environ)
    except ModelNotFound:
        if not may_fetch(model, environ):
            raise
    return None


async def fetch(
    model: str,
    revision: str,
    *,
    environ: Mapping[str, str],
    command: Sequence[str],
    display: Display,
) -> Path:
    """The folder of `model`, which is downloaded by `command`; cancelling ends that.

    LoaderFailed with the exit status of the download.
    """
    display.say(f"fetching {model}, which is not in the Hugging Face cache")
    words = [*command, model, "--revision", revision or DEFAULT_REVISION]
    return _folder(model, await answer(words, environ))


def may_fetch(model: str, environ: Mapping[str, str]) -> bool:
    """Whether to look for `model` on the network: it can be an id, and that is not forbidden."""
    if any(environ.get(name, "").upper() in _TRUE for name in OFFLINE):
        return False
    return is_id(model) and not Path(model).exists()


def _folder(model: str, found: Answer) -> Path:
    """The folder that a download printed last; LoaderFailed with why there is none."""
    failed = f"{model} could not be fetched"
    lines = found.said.decode(errors="replace").splitlines()
    if not found.started:
        why = "the download could not be started (why is above): name another Python with --python"
        raise LoaderFailed(f"{failed}: {why}", found.status)
    if found.status and lines:
        raise LoaderFailed(f"{failed}: {one_line(lines[-1])}", found.status)
    if not found.status and lines and (folder := Path(lines[-1].strip())).is_dir():
        return folder
    raise LoaderFailed(
        f"{failed}: the download {describe(found.status)} (its own words are above): give a "
        "folder, or correct the id, the revision or the network settings",
        found.status or EXIT_STATUS[ErrorCode.LOADER],
    )
