"""Compiled code for the engines of a rank: had before they start, and given to others.

Nothing in here is an error: what cannot be had in time, engines compile for themselves.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio

from preloadd.domain.lines import one_line
from preloadd.errors import PreloadError
from preloadd.protocol.messages import Warmable
from preloadd.rank.seeding.api import Fetch
from preloadd.rank.warmup.claim import Claim
from preloadd.transport.threads import Threads
from preloadd.warmup.bundles import exchange
from preloadd.warmup.bundles.exchange import Withheld
from preloadd.warmup.bundles.index import listing, recalled
from preloadd.warmup.bundles.install import Installed
from preloadd.warmup.bundles.manifest import Bundle
from preloadd.warmup.bundles.pack import pack
from preloadd.warmup.bundles.usage import Listing, compiled, judge
from preloadd.warmup.seeding.compile_cache import (
    ANSWER,
    BUNDLE,
    CompileKind,
    CompileWanted,
    payload_of,
)
from preloadd.warmup.stores.api import Shared

log = logging.getLogger(__name__)

T = TypeVar("T")

WORK_S = 120.0
"""Seconds that reading, packing or installing a compile cache may take, stores included."""

_LOOK_S = 60.0
"""Seconds between two looks at whether engines use what was installed."""

_MAX_TOLD = 500


@dataclass(frozen=True, slots=True)
class _Made:
    """What there is of a configuration: what a loader told of it, and its folders."""

    told: Warmable
    folders: tuple[str, ...]


class CompiledCode:
    """What the first rank of a group does about what its engines compile; `work` beside serving.

    `settled` is set once others can be answered what there was at first. Only if it is `trusted`,
    code goes to others or comes from them. `stores` are borrowed, None while there are none; `wall`
    is for people.
    """

    def __init__(
        self,
        *,
        trusted: bool,
        stores: Callable[[], Shared | None],
        fetch: Fetch | None,
        wall: Callable[[], float],
    ) -> None:
        self.kind = CompileKind()
        self.settled = anyio.Event()
        self._trusted = trusted
        self._stores = stores
        self._fetch = fetch
        self._wall = wall
        self._told: Warmable | None = None
        self._folders: tuple[str, ...] = ()
        self._installed: tuple[str, ...] = ()
        self._before: Listing | None = None
        self._claim = Claim()
        self._bundle: Bundle | None = None
        self._made: dict[str, _Made] = {}
        self._line = self._given = self._unused = ""
        self._due = anyio.Event()
        self._threads = Threads("the disk or a store")

    # -- what a load does --

    @property
    def as_before(self) -> bool:
        """Whether what was found was on this host already."""
        return bool(self._folders) and not self._installed

    async def found(self, told: Warmable, *, within: float) -> bool:
        """Whether the engines that a loader `told` of find what they would compile, maybe since it
        was fetched just now: `within` seconds are left for a peer."""
        self._told, self._before = told, None
        self._folders, self._installed, self._bundle = (), (), None
        self._line = self._given = self._unused = ""
        if not told.identity:
            return False
        root, identity = _root(told), told.identity
        self._folders = await self._done(partial(recalled, root, identity)) or ()
        if self._folders:
            self._say(f"compiled code: as before, {len(self._folders)} folders below {root}")
            self._due.set()
        elif self._trusted and self._fetch is not None:
            await self._fetched(root, told, within)
        if not self._folders:
            await self._alone(root)
        return bool(self._folders)

    async def rehearsed(self) -> None:
        """An engine has compiled what was not to be had: keep it in mind, and give it to others."""
        told, before = self._told, self._before
        if told is None or before is None or self._folders:
            return
        after = await self._done(partial(listing, _root(told)))
        self.let_go()
        if after is None:
            return
        self._folders = compiled(before, after)
        if self._folders:
            self._say(f"compiled code: {len(self._folders)} folders made by an engine")
            self._due.set()

    def let_go(self) -> None:
        """There was no rehearsal, or it came to no good end: others may compile there."""
        self._claim.close()

    def adopted(self, told: Warmable) -> None:
        """Weights of an earlier life are served, and so is what was compiled for them."""
        self._told = told
        self._due.set()

    # -- beside serving --

    async def work(self) -> None:
        """Give what was made to the stores, and look at times whether engines use what was
        installed, for as long as the daemon lives. What others asked for since the last look, of
        whichever configuration, is given again if no store has it any more: whoever is told asks
        no other source. What is nowhere then is not told of."""
        while True:
            lacking = {each for each in self.kind.asked() if not await self._is_kept(each)}
            if self._due.is_set():
                self._due = anyio.Event()
                lacking |= await self._noted()
            for config_hash in lacking:
                await self._give(self._made[config_hash])
            self.settled.set()
            await self._look()
            with anyio.move_on_after(_LOOK_S):
                await self._due.wait()

    def answer_of(self, config_hash: str) -> Mapping[str, bytes]:
        """For engines on this host, which may keep compiled code elsewhere: what a source answers
        of that configuration's; nothing where code is not given to others. Blocking."""
        bundle = self._bundle_of(config_hash)
        return {} if bundle is None else {ANSWER: payload_of(bundle)}

    def bundle_of(self, config_hash: str) -> Mapping[str, bytes]:
        """The bundle itself, as it is packed now. Blocking; PreloadError, OSError."""
        bundle, content = self._bundle_of(config_hash), io.BytesIO()
        if bundle is None or self._told is None:
            return {}
        manifest = bundle.manifest
        pack(_root(self._told), manifest.folders, manifest.identity, content)
        return {BUNDLE: content.getvalue()}

    def _bundle_of(self, config_hash: str) -> Bundle | None:
        told = self._told
        known = told is not None and told.config_hash == config_hash
        return self._bundle if known and self._trusted else None

    def told(self) -> tuple[str, ...]:
        """Lines for people: where compiled code is from, and what is wrong with it."""
        return tuple(filter(None, (self._line, self._unused, self._given)))

    async def _alone(self, root: Path) -> None:
        """Have what is compiled in `root` from now on be this group's alone, and see what is there
        before: unless both is known, nothing that comes is taken for this group's."""
        self.let_go()
        self._claim = Claim()
        alone = await self._done(partial(self._claim.take, root))
        if alone:
            self._before = await self._done(partial(listing, root))
        elif alone is not None:
            self._say("compiled code: not kept in mind, for another group compiles there as well")

    async def _fetched(self, root: Path, told: Warmable, within: float) -> None:
        stores = self._stores()
        if self._fetch is None or stores is None:
            self._say("compiled code: not fetched, for there is no store to fetch it from")
            return
        if not within:
            self._say("compiled code: not asked for: waiting for tables took all the time for that")
            return
        wanted = CompileWanted(told.config_hash, told.identity)
        seeded = await self._fetch(wanted, within=within)
        if seeded.value is None:
            self._say(f"compiled code: not seeded ({seeded.outcome}): {seeded.why}")
            return
        obtain = partial(
            exchange.obtain, root, seeded.value, stores, trusted=self._trusted, now=self._wall()
        )
        got = await self._done(obtain)
        if isinstance(got, Withheld):
            self._say(f"compiled code: not installed: {got.why}")
        if not isinstance(got, Installed):
            return
        self._folders = self._installed = got.folders
        self._before = await self._done(partial(listing, root))
        self._say(f"compiled code: installed from the source, {len(got.folders)} folders in {root}")
        self._due.set()

    async def _noted(self) -> set[str]:
        """Note what there is of the configuration that is loaded; its hash, if there is any."""
        told = self._told
        if told is None or not told.identity:
            return set()
        recall = partial(recalled, _root(told), told.identity)
        folders = self._folders or await self._done(recall) or ()
        if not folders:
            return set()
        self._made[told.config_hash] = _Made(told, folders)
        return {told.config_hash}

    async def _give(self, made: _Made) -> None:
        """Have it in mind for the next load, and in the stores if others may have it."""
        told, stores, now = made.told, self._stores(), self._wall()
        what = _root(told), made.folders, told.identity
        bundle: Bundle | Withheld | None = None
        if self._trusted and stores is not None:
            bundle = await self._done(partial(exchange.publish, *what, stores, now=now))
            await self._offer(told, bundle)
        if not isinstance(bundle, Bundle):
            bundle = await self._done(partial(exchange.remembered, *what, now=now))
        if self._told is told:
            self._bundle = bundle

    async def _is_kept(self, config_hash: str) -> bool:
        """Whether who is told of what is offered for a configuration finds it."""
        offered, stores = self.kind.offered(config_hash), self._stores()
        if offered is None or stores is None:
            return False
        return await self._done(partial(exchange.is_kept, offered, stores)) or False

    async def _offer(self, told: Warmable, given: Bundle | Withheld | None) -> None:
        """Tell others of what was `given` to the stores, or as before if it was not, and one of
        them has that still; else of nothing."""
        if isinstance(given, Bundle):
            self.kind.offer(told.config_hash, given)
            line = f"compiled code: given to others, {given.nbytes / 2**20:.1f} MiB"
        else:
            if await self._is_kept(told.config_hash):
                return
            self.kind.withdraw(told.config_hash)
            if given is None:
                return
            line = f"compiled code: not given to others: {given.why}"[:_MAX_TOLD]
        log.log(logging.INFO if isinstance(given, Bundle) else logging.WARNING, "%s", line)
        if self._told is told:
            self._given = line

    async def _look(self) -> None:
        told, installed, before = self._told, self._installed, self._before
        if told is None or before is None or not installed or self._unused:
            return
        now = await self._done(partial(listing, _root(told)))
        if now is None or self._told is not told:
            return
        if line := judge(installed, before, now).line:
            self._unused = one_line(line)[:_MAX_TOLD]
            log.warning("%s", self._unused)

    async def _done(self, work: Callable[[], T]) -> T | None:
        """What blocking `work` returns; None, and people are told, if it fails or takes long."""
        try:
            return await self._threads.run(work, within=WORK_S)
        except (PreloadError, OSError) as error:
            self._say(f"compiled code: {error}")
        return None

    def _say(self, line: str) -> None:
        self._line = one_line(line)[:_MAX_TOLD]
        log.info("%s", self._line)


def _root(told: Warmable) -> Path:
    return Path(told.identity["cache_root"])
