"""From what the user wrote to a folder: found on this host, or fetched by the loader's Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from preloadd.domain.lines import one_line
from preloadd.errors import EXIT_STATUS, ErrorCode, LoaderFailed, ModelNotFound
from preloadd.launcher.policy import describe
from preloadd.launcher.progress import Display
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
    return await _fetch([*command, model, "--revision", revision or DEFAULT_REVISION], environ)


def may_fetch(model: str, environ: Mapping[str, str]) -> bool:
    """Whether to look for `model` on the network: it can be an id, and that is not forbidden."""
    if any(environ.get(name, "").upper() in _TRUE for name in OFFLINE):
        return False
    return is_id(model) and not Path(model).exists()


async def _fetch(command: Sequence[str], environ: Mapping[str, str]) -> Path:
    """Run `command` and return the folder that it prints last, or else why there is none."""
    found = await answer(command, environ)
    status = found.status
    lines = found.said.decode(errors="replace").splitlines()
    folder = Path(lines[-1].strip()) if lines else None
    if status and lines:
        raise LoaderFailed(f"{command[-3]} could not be fetched: {one_line(lines[-1])}", status)
    if status or folder is None or not folder.is_dir():
        raise LoaderFailed(
            f"{command[-3]} could not be fetched: the download {describe(status)} (its own words "
            "are above): give a folder, or correct the id, the revision or the network settings",
            status or EXIT_STATUS[ErrorCode.LOADER],
        )
    return folder
