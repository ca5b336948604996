"""The composition root of `preloadd run`: whatever is wrong is said before any rank is spawned."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio

from preloadd.config.drafts import CONFIG
from preloadd.config.run import Chosen, RunOptions, rank_settings
from preloadd.domain.ids import Instance
from preloadd.domain.lines import one_line
from preloadd.domain.settings import Builder, Memory, RankSettings
from preloadd.errors import ModelNotFound, PreloadError
from preloadd.launcher import devices, model
from preloadd.launcher.checks import (
    find_python,
    prepare_socket_dir,
    require_room,
    require_stores,
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
from preloadd.weights.native import require_divisible
from preloadd.weights.vllm import require_heads

_Named = tuple[str, str]
"""A model and its revision, as the user wrote them."""


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
    """What a launcher needs to know of the world, and the programs that it starts.

    `tokens` are handed to ranks that are seeded, beside those that they find themselves.
    """

    options: RunOptions
    environ: Mapping[str, str]
    display: Display
    rank: Callable[[RankSettings], Sequence[str]] = rank_command
    fetch: Callable[[str], Sequence[str]] = fetch_command
    loader: Callable[[str], Sequence[str]] = loader_command
    tokens: tuple[str, ...] = field(default=(), repr=False)

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
        found = {named: self._find(named, environ) for named in self._models()}
        if self.options.warmup_cache_stores:
            await anyio.to_thread.run_sync(require_stores, self.options, environ, python)
        chosen = await self._choose(python, environ, ending)
        if chosen is None:
            return None
        self.options.layout_in(chosen.memory)
        # Its length is checked with the names in it, which are those of the devices.
        instances = self.options.instances(chosen)
        socket_dir, derived = prepare_socket_dir(self.options, instances, self.environ)
        folders = await self._folders(found, python, environ, ending)
        if folders is None:
            return None
        folder, draft = folders[0], folders[1] if len(folders) > 1 else None
        if self.options.builder is Builder.NATIVE:
            require_divisible(folder, self.options.parallel)
        else:
            require_heads(folder, self.options.parallel.tensor, self.options.engine_args)
        if chosen.memory is Memory.HOST:
            require_room(folder, self.options.share)
        self._tell(chosen, folder, draft)
        ranks = rank_settings(
            self.options,
            chosen,
            model=folder,
            draft=draft,
            socket_dir=socket_dir,
            derived=derived,
            python="" if python == sys.executable else python,
        )
        return Launch(
            ranks=ranks,
            command=self.rank,
            environ=self.environ,
            restarts=Restarts() if self.options.restart_ranks else None,
            health=self._health(listener, socket_dir, instances, owned),
            reaps_orphans=True,
            tokens=self.tokens,
        )

    def _tell(self, chosen: Chosen, folder: Path, draft: Path | None) -> None:
        """Say what is about to begin."""
        beside = f" and its draft {one_line(draft)}" if draft else ""
        if (said := self.options.speculation) is not None and said.why_not_held:
            self.display.say(f"the draft has no ranks: {CONFIG} {one_line(said.why_not_held)}")
        self.display.say(f"loading {one_line(folder)}{beside} into {one_line(chosen.told)}")
        if (node := self.options.node(chosen)).count > 1:
            here, met = node.ranks, node.meeting
            self.display.say(
                f"ranks {here.start} to {here[-1]} of {node.parallel.world} are here; all meet at "
                f"{one_line(met.address)} port {met.port}"
            )

    def _models(self) -> Iterator[_Named]:
        """The target, and the draft if ranks hold one that has a checkpoint of its own."""
        options = self.options
        yield options.model, options.revision
        if options.drafted is not None and options.drafted.model:
            yield options.drafted.model, options.drafted.revision

    def _find(self, named: _Named, environ: Mapping[str, str]) -> Path | None:
        """A model's folder on this host; None if it has to be fetched; ModelNotFound.

        On one of several nodes it is for the ranks to complain: then the others hear of it.
        """
        try:
            return model.find(*named, environ=environ)
        except ModelNotFound:
            if not self.options.placed.spans:
                raise
            return Path(named[0])

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
        self,
        listener: socket.socket | None,
        socket_dir: Path,
        instances: Sequence[Instance],
        owned: ExitStack,
    ) -> Health | None:
        """The endpoint on `listener`."""
        if listener is None:
            return None
        health = Health(
            listener,
            socket_dir=socket_dir,
            instances=instances,
            environ=self.environ,
            log_level=self.options.log_level,
        )
        return owned.enter_context(health)

    async def _folders(
        self,
        found: Mapping[_Named, Path | None],
        python: str,
        environ: Mapping[str, str],
        ending: Ending,
    ) -> list[Path] | None:
        """The folders of all models, after downloads; None if the end began before those ended."""
        folders = []
        for named, folder in found.items():
            folder = folder or await self._fetch(named, python, environ, ending)  # noqa: PLW2901
            if folder is None:
                return None
            require_text(f"the folder of {one_line(named[0])}", folder)
            folders.append(folder)
        return folders

    async def _fetch(
        self, named: _Named, python: str, environ: Mapping[str, str], ending: Ending
    ) -> Path | None:
        """A model's folder, after a download; None if the end began before that was done."""
        with ending.until():
            return await model.fetch(
                *named,
                environ=environ,
                command=self.fetch(python),
                display=self.display,
            )
        return None
