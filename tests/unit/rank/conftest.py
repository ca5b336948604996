"""Generations of real memfds, a service manager's socket, and settings that need no checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from preloadd.domain.recipe import Recipe, recipe_of
from preloadd.domain.settings import ModelSettings, RankSettings
from preloadd.linux.fds import OwnedFd
from preloadd.linux.memfd import sealed_bytes
from preloadd.linux.notify import Notification, Notifier, NotifySocket
from preloadd.protocol import payload
from preloadd.rank.generation import Generation, chunk_name, manifest_name
from tests.unit.rank.generations import FILES, ID, filled, manifest_of


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def settings(socket_dir: Path, tmp_path: Path) -> RankSettings:
    """Settings of a rank whose checkpoint is not there."""
    return RankSettings(
        group="tests",
        instance="CPU-0",
        socket_dir=str(socket_dir),
        derived=False,
        model=ModelSettings(path=str(tmp_path / "model"), name="tests/model"),
    )


@pytest.fixture
def recipe(settings: RankSettings) -> Recipe:
    """What a rank with these settings and FILES wants."""
    return recipe_of(settings, FILES)


Make = Callable[..., Generation]


@pytest.fixture
def make(recipe: Recipe) -> Iterator[Make]:
    """Makes generations of two chunks with one tensor each; closed at the end."""
    with ExitStack() as undo:

        def make(generation: str = ID, *, wanted: Recipe = recipe, **changes) -> Generation:
            manifest = manifest_of(generation, wanted, changes)
            chunks = [filled(nbytes, index) for index, nbytes in enumerate(manifest.chunks)]
            sealed = sealed_bytes("manifest", payload.encode(manifest))
            made = Generation(manifest, sealed, chunks)
            undo.callback(made.close)
            return made

        yield make


@pytest.fixture
def parked() -> Callable[[Generation], dict[str, list[OwnedFd]]]:
    """Copies of a generation's descriptors as a manager hands them back: the taker's to close."""

    def parked(generation: Generation) -> dict[str, list[OwnedFd]]:
        names = [chunk_name(generation.id, n) for n in range(len(generation.chunks))]
        fds = generation.descriptors()
        return {manifest_name(generation.id): fds[:1]} | {
            name: [fd] for name, fd in zip(names, fds[1:], strict=True)
        }

    return parked


@pytest.fixture
def manager(socket_dir: Path) -> Iterator[NotifySocket]:
    """A service manager that reads when the test does."""
    with NotifySocket(socket_dir / "notify") as manager:
        yield manager


@pytest.fixture
def notifier(manager: NotifySocket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notifier]:
    """The rank's line to `manager`."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(manager.path))
    with closing(Notifier(os.environ)) as notifier:
        yield notifier


@pytest.fixture
def told(manager: NotifySocket) -> Callable[[], list[tuple[str, str, int]]]:
    """What the manager was told up to now, in short: verb, name, descriptors; barriers are kept up.

    Descriptors are closed.
    """

    def told() -> list[tuple[str, str, int]]:
        found = []
        while (message := manager.receive()) is not None:
            found.append(_short(message))
            message.close()
        return found

    return told


def _short(message: Notification) -> tuple[str, str, int]:
    verbs = ("FDSTOREREMOVE", "FDSTORE", "BARRIER", "READY", "STATUS", "STOPPING", "WATCHDOG")
    verb = next((verb for verb in verbs if verb in message.fields), "?")
    name = message.fields.get("FDNAME", message.fields.get("STATUS", ""))
    return verb, name, len(message.fds)
