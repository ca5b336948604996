"""The composition root of `preloadd run`: whatever is wrong is said before any rank is spawned."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio

from preloadd.config.run import Chosen, RunOptions, rank_settings
from preloadd.domain.lines import one_line
from preloadd.domain.settings import Memory, RankSettings
from preloadd.errors import PreloadError
from preloadd.launcher import devices, model
from preloadd.launcher.checks import (
    find_python,
    prepare_socket_dir,
    require_room,
    require_text,
)
from preloadd.launcher.ending import SIGNALS, Ending
from preloadd.launcher.group import Launch, run_group
from preloadd.launcher.health import Health, listen
from preloadd.launcher.policy import Restarts
from preloadd.launcher.private import private_folder
from preloadd.launcher.progress import Display
from preloadd.linux.lending import lend
from preloadd.transport.probe import ask_probe


def rank_command(settings: RankSettings) -> Sequence[str]:
    """The command line of a rank, which stays on the launcher's interpreter."""
    return [sys.executable, "-m", "preloadd.rank", settings.instance]


def fetch_command(python: str) -> Sequence[str]:
    """The command that downloads a model and prints its folder; id and revision are appended."""
    return [*loader_command(python), "fetch"]


def loader_command(python: str) -> Sequence[str]:
    """The command line of a loader, to which is appended what to tell and end."""
    return [python, "-m", "preloadd.loader"]


@dataclass(frozen=True, slots=True)
class Start:
    """What a launcher needs to know of the world, and the programs that it starts."""

    options: RunOptions
    environ: Mapping[str, str]
    display: Display
    rank: Callable[[RankSettings], Sequence[str]] = rank_command
    fetch: Callable[[str], Sequence[str]] = fetch_command
    loader: Callable[[str], Sequence[str]] = loader_command

    async def run(self) -> int:
        """Run the group until it ends; the launcher's exit code.

        PreloadError or OSError if it cannot even begin. Takes over `SIGNALS` meanwhile.
        """
        failure: PreloadError | OSError | None = None
        ending = Ending(self.display)
        with anyio.open_signal_receiver(*SIGNALS) as signals:
            async with anyio.create_task_group() as watching:
                watching.start_soon(ending.watch, signals)
                try:
                    await self._serve(ending)
                except (PreloadError, OSError) as error:
                    # If it left the task group, that would wrap it.
                    failure = error
                watching.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return ending.code

    async def _serve(self, ending: Ending) -> None:
        python = find_python(self.options.python)
        with ExitStack() as owned:
            # What another interpreter is asked must not depend on what is installed there.
            lent = self.environ
            if python != sys.executable:
                lent = lend(owned.enter_context(private_folder()), self.environ)
            launch = await self._prepare(python, lent, ending, owned)
            if launch is not None:
                # Not before: what a download leaves in a shared cache is not only this user's.
                os.umask(0o077)
                await run_group(launch, ending, self.display)

    async def _prepare(
        self, python: str, environ: Mapping[str, str], ending: Ending, owned: ExitStack
    ) -> Launch | None:
        """What to start, after all checks, those first that need no device: it may take a driver
        a minute to answer. None if the end began meanwhile."""
        listener = self._listen(owned)
        found = model.find(self.options.model, self.options.revision, environ=environ)
        chosen = await self._choose(python, environ, ending)
        if chosen is None:
            return None
        # Its length is checked with the names in it, which are those of the devices.
        socket_dir, derived = prepare_socket_dir(self.options, chosen.instances, self.environ)
        folder = found or await self._fetch(python, environ, ending)
        if folder is None:
            return None
        require_text("the model's folder", folder)
        if chosen.memory is Memory.HOST:
            require_room(folder, self.options.parallel.data)
        self.display.say(f"loading {one_line(folder)} into {one_line(chosen.told)}")
        ranks = rank_settings(
            self.options,
            chosen,
            model=folder,
            socket_dir=socket_dir,
            derived=derived,
            python="" if python == sys.executable else python,
        )
        return Launch(
            ranks=ranks,
            command=self.rank,
            environ=self.environ,
            restarts=Restarts() if self.options.restart_ranks else None,
            health=self._health(listener, socket_dir, chosen, owned),
            reaps_orphans=True,
        )

    async def _choose(
        self, python: str, environ: Mapping[str, str], ending: Ending
    ) -> Chosen | None:
        """Where the weights go; None if the end began before that was known."""
        if self.options.memory != "host":
            self.display.say("looking for GPUs")
        look = partial(ask_probe, self.loader(python))
        with ending.until():
            return await devices.find(self.options, look, environ)
        return None

    def _listen(self, owned: ExitStack) -> socket.socket | None:
        """The endpoint's socket, so that a taken port is said at once; None if none is wanted."""
        host, port = self.options.weight_cache_health_host, self.options.weight_cache_health_port
        return None if port is None else owned.enter_context(listen(host, port))

    def _health(
        self, listener: socket.socket | None, socket_dir: Path, chosen: Chosen, owned: ExitStack
    ) -> Health | None:
        """The endpoint on `listener`."""
        if listener is None:
            return None
        health = Health(
            listener,
            socket_dir=socket_dir,
            instances=chosen.instances,
            environ=self.environ,
            log_level=self.options.log_level,
        )
        return owned.enter_context(health)

    async def _fetch(self, python: str, environ: Mapping[str, str], ending: Ending) -> Path | None:
        """The model's folder, after a download; None if the end began before that was done."""
        with ending.until():
            return await model.fetch(
                self.options.model,
                self.options.revision,
                environ=environ,
                command=self.fetch(python),
                display=self.display,
            )
        return None
