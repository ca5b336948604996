"""A rank among the ranks of its group on all hosts: it loads what all agree on, or nothing.

Rank 0 has the hall where they meet, the others connect to it. Once a rank has its weights it
depends on nobody, and stays connected only to say that it is there.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import anyio

from preloadd import __version__
from preloadd.domain.settings import RankSettings, Rendezvous
from preloadd.errors import PreloadError, RendezvousFailed
from preloadd.protocol.messages import Progress
from preloadd.protocol.rendezvous.claims import shared
from preloadd.protocol.rendezvous.convener import Convener, Phase
from preloadd.protocol.rendezvous.frames import decode_from_convener, encode
from preloadd.protocol.rendezvous.member import Member, Stage
from preloadd.protocol.rendezvous.messages import FromConvener, FromMember, Join
from preloadd.protocol.rendezvous.wording import missing_named
from preloadd.rank.loading import Agree
from preloadd.rank.rendezvous.hall import Hall
from preloadd.rank.rendezvous.hearing import hear
from preloadd.transport import tcp

T = TypeVar("T")

_CONNECT_S = 5.0
_AGAIN_S = 0.2
_BACK_S = 2.0
_TICK_S = 0.25
_FAREWELL_S = 1.0
_LINGER_S = 5.0
_POLL_S = 0.05
_RANK_0 = (0,)


class Presence:
    """One rank's part in the meetings of its group, for as long as the daemon lives.

    `told` hears all the while for whom a load waits.
    """

    def __init__(
        self, settings: RankSettings, place: Rendezvous, told: Callable[[Progress], None]
    ) -> None:
        deadlines = settings.deadlines
        patience, silence = deadlines.rendezvous, deadlines.peer_silence
        self._settings = settings
        self._place = place
        self._told = told
        self._tick_s = min(_TICK_S, silence / 8, patience / 8)
        self._agreed = anyio.Event()
        self._claimed = anyio.Event()
        self._loading: anyio.CancelScope | None = None
        self._wire: tcp.Wire | None = None
        self._hung_up = anyio.Event()
        self._hall: Hall | None = None
        self._member = Member(place, patience=patience, silence=silence)
        if place.rank == 0:
            # The convener knows better whom it waits for, and how long.
            self._member = Member(place, patience=math.inf, silence=math.inf)
            # Connected with itself, from the beginning of time.
            self._member.joined(0.0)
            convener = Convener(place, patience=patience, silence=silence)
            self._convener = convener
            self._hall = Hall(convener, place, self._heard)

    async def work(self) -> None:
        """Meet the others until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_time)
            tasks.start_soon(self._visit if self._hall is None else self._hall.serve)

    def serves(self, key: Mapping[str, str]) -> None:
        """This rank has weights with this `key` without having loaded them."""
        self._claim(key, serving=True)

    async def hold(self, load: Callable[[Agree], Awaitable[T]]) -> T:
        """What `load` returns, which has to have all agree before it fills anything.

        RendezvousFailed if they do not, or if one of them is lost meanwhile: `load` is cancelled.
        """
        await self._require_port()
        self._agreed = anyio.Event()
        with anyio.CancelScope() as scope:
            self._loading = scope
            try:
                self._claim({}, identifying=True)
                loaded = await load(self._agree)
            except (PreloadError, OSError) as error:
                # Its end by itself: no answer to what is said now is to cancel that.
                self._loading = None
                await self._linger()
                self._say(self._member.failed(str(error)))
                await self._farewell()
                raise
            finally:
                self._loading = None
            self._say(self._member.done())
            self._claimed.set()
            return loaded
        await self._farewell()
        raise RendezvousFailed(f"group {self._settings.group}: {self._member.why}")

    async def _require_port(self) -> None:
        """RendezvousFailed if nobody could come; not where nobody has to."""
        if self._hall is not None:
            await self._hall.port.tried.wait()
            if self._hall.port.fault and self._convener.phase is not Phase.OPEN:
                raise RendezvousFailed(self._hall.port.fault)

    async def _agree(self, key: Mapping[str, str]) -> None:
        self._claim(key)
        await self._agreed.wait()

    def _claim(
        self, key: Mapping[str, str], *, serving: bool = False, identifying: bool = False
    ) -> None:
        settings, place = self._settings, self._place
        join = Join(
            preloadd=__version__,
            group=settings.group,
            role=settings.parsed_instance.role.value,
            builder=settings.model.builder.value,
            world=place.world,
            rank=place.rank,
            node=place.node,
            nodes=place.nodes,
            key=shared(key),
            drafts=settings.model.partner is not None,
            silence=settings.deadlines.peer_silence,
            serving=serving,
            identifying=identifying,
        )
        self._say(self._member.claim(join, anyio.current_time()))
        self._claimed.set()
        self._notice()

    def _heard(self, message: FromConvener) -> None:
        self._member.received(message, anyio.current_time())
        self._notice()

    def _say(self, messages: Sequence[FromMember]) -> None:
        for message in messages:
            if self._hall is not None:
                self._hall.say(message)
            elif self._wire is not None:
                self._wire.post(encode(message))

    def _notice(self) -> None:
        """Have the load go on, or end."""
        match self._member.stage:
            case Stage.LOADING | Stage.SERVING:
                self._agreed.set()
            case Stage.ENDED if self._loading is not None:
                self._loading.cancel()
            case Stage.GATHERING:
                waited = self._member.missing or _RANK_0
                self._told(Progress(phase=f"waiting for {missing_named(waited, self._place)}"))
            case _:
                pass

    async def _keep_time(self) -> None:
        while True:
            now = anyio.current_time()
            self._say(self._member.tick(now))
            if self._hall is not None:
                self._hall.tick(now)
            if self._wire is not None and not self._member.connected:
                self._wire.hang_up()
            self._notice()
            # Somebody else may be less patient, but strangers have nobody hurry without end.
            await anyio.sleep(min(self._tick_s, max(_POLL_S, self._member.pace / 2)))

    async def _linger(self) -> None:
        """Wait a moment, after a load that ended early, for those who were started with it and are
        to hear of that: they would wait until their deadline."""
        with anyio.move_on_after(_LINGER_S):
            while self._member.stage is Stage.IDENTIFYING and (  # noqa: ASYNC110 - any may come
                self._convener.absent if self._hall is not None else not self._member.connected
            ):
                await anyio.sleep(_POLL_S)

    async def _farewell(self) -> None:
        """Wait a moment until what was said last has been read."""
        if self._hall is not None:
            await self._hall.farewell()
        elif self._wire is not None:
            with anyio.move_on_after(_FAREWELL_S):
                await self._hung_up.wait()

    # -- at rank 0's port --

    async def _visit(self) -> None:
        """Be connected to rank 0 while there is something to say."""
        while True:
            while not self._member.wants_connection:
                self._claimed = anyio.Event()
                await self._claimed.wait()
            try:
                with anyio.fail_after(_CONNECT_S):
                    wire = await tcp.connect(self._place.address, self._place.port)
            except TimeoutError:
                self._member.unreachable(f"no answer within {_CONNECT_S:g} s")
            except OSError as error:
                self._member.unreachable(error.strerror or str(error))
            else:
                await self._talk(wire)
            # The others wait for a rank that loads, and for none that serves.
            await anyio.sleep(_BACK_S if self._member.stage is Stage.SERVING else _AGAIN_S)

    async def _talk(self, wire: tcp.Wire) -> None:
        """Say what is to be said over `wire`, which is closed afterwards, and hear the answers."""
        self._wire, self._hung_up = wire, anyio.Event()
        try:
            self._say(self._member.joined(anyio.current_time()))
            why = await hear(wire, decode_from_convener, self._heard)
        finally:
            self._wire = None
            wire.close()
            self._hung_up.set()
        self._member.lost(why)
        self._notice()
