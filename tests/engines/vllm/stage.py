"""A rank in the test's own process that serves what vLLM made: all of a daemon but its life."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import anyio

from preloadd.domain.access import Policy
from preloadd.domain.ids import Instance
from preloadd.domain.placement import Parallel, peers, place
from preloadd.domain.settings import (
    Builder,
    Layout,
    Memory,
    ModelSettings,
    RankSettings,
    Warmup,
)
from preloadd.linux import peers as kernel
from preloadd.linux.notify import Notifier
from preloadd.memory.host import HostKeeper
from preloadd.rank.fellows import Fellows
from preloadd.rank.generation import Generation
from preloadd.rank.loading import Loader
from preloadd.rank.parking import Parking
from preloadd.rank.service import Service
from preloadd.rank.session import Desk
from preloadd.transport.aio import Limits
from preloadd.transport.server import Server
from tests.listening import listen

SMALL = (
    *("--max-model-len=256", "--no-enable-prefix-caching"),
    *(f"--kv-cache-memory-bytes={16 << 20}", "--seed=0"),
)
"""What engines of tests are given, in words."""


class Rank:
    """One rank: its settings, and what answers for it."""

    def __init__(self, settings: RankSettings, warm: Mapping = {}) -> None:
        self.settings = settings
        self.parking = Parking(Notifier({}))
        self.service = Service(settings, self.parking, clock=time.monotonic)
        folder = Path(settings.socket_dir)
        sockets = {
            name: folder / name / Instance.parse(name).socket_name for name in settings.peers
        }
        self.fellows = Fellows(sockets)
        self.desk = Desk(self.service, Policy(owner=os.geteuid()), self.fellows, warm)
        self.path = folder / settings.instance / settings.parsed_instance.socket_name

    @asynccontextmanager
    async def serving(self, generation: Generation) -> AsyncIterator[None]:
        """Serve the generation, and look at the other ranks."""
        self.service.adopted(generation)
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        server = Server(self.desk.serve, kernel.peer, Limits())
        async with anyio.create_task_group() as tasks:
            with closing(self.service), listen(self.path, 0o600, 8) as listener:
                tasks.start_soon(self.parking.work)
                tasks.start_soon(self.fellows.follow)
                tasks.start_soon(server.serve, listener)
                try:
                    yield
                finally:
                    tasks.cancel_scope.cancel()
                    self.path.unlink()


def settings_of(
    model: Path, folder: Path, python: Path, *arguments: str, parallel: Parallel | None = None
) -> list[RankSettings]:
    """Settings of all ranks of a group in host memory, with arguments of vLLM."""
    parallel = parallel or Parallel()
    group = [Instance.parse(f"CPU-{rank}") for rank in range(parallel.world)]
    one = ModelSettings(
        path=str(model),
        name="it",
        builder=Builder.VLLM,
        memory=Memory.HOST,
        layout=Layout.PLAIN,
        engine_args=(*SMALL, *arguments),
    )
    return [
        RankSettings(
            group="tests",
            instance=str(instance),
            socket_dir=str(folder),
            derived=False,
            model=replace(one, placement=place(parallel, rank)),
            peers=peers(instance, group),
            python=str(python),
            warmup=Warmup(autotune=True, deadline=300.0),
        )
        for rank, instance in enumerate(group)
    ]


async def loaded(settings: RankSettings, environ: Mapping[str, str]) -> Generation:
    """What vLLM makes of the model; the caller's to close."""
    argv: Sequence[str] = [settings.python or sys.executable, "-m", "preloadd.loader"]
    return await Loader(argv, environ, HostKeeper()).load(settings, lambda _: None)
