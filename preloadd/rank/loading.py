"""The loader as seen from its rank: started, listened to, ended, reaped, and only then believed."""

from __future__ import annotations

import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

import anyio

from preloadd.domain.settings import RankSettings
from preloadd.errors import (
    DamagedManifest,
    LoaderFailed,
    OutOfDescriptors,
    PreloadError,
    ProtocolViolation,
)
from preloadd.linux import seqpacket
from preloadd.linux.fds import OwnedFd
from preloadd.linux.memfd import read_sealed
from preloadd.linux.process import Child, ending, spawn
from preloadd.memory.api import Keeper
from preloadd.protocol import codec, payload
from preloadd.protocol.loading import LoadPhase, LoadReceiver
from preloadd.protocol.messages import (
    LINK,
    Failed,
    Identified,
    Order,
    Proceed,
    Progress,
    Tune,
    Tuned,
    Warmable,
)
from preloadd.protocol.peering import PEER
from preloadd.rank.ending import heard_to_its_end, stop
from preloadd.rank.generation import Generation
from preloadd.transport.aio import Link

log = logging.getLogger(__name__)

T = TypeVar("T")

_EXIT_S = 10.0
"""Seconds that a loader which has handed over everything may take to exit."""

_TELL_EVERY_S = 5.0

OnProgress = Callable[[Progress], None]
Agree = Callable[[Mapping[str, str]], Awaitable[None]]
"""Returns once what has this key may be filled in; it may never do so."""

Lend = Callable[[Link], Coroutine[None, None, None]]
"""Answers a loader that asks for weights of a peer, until it is cancelled."""

WARMING = "warming"
"""The phase in which a rank looks for tables, before its loader is told whether to tune."""


class Warm(Protocol):
    """What becomes of the tables of what was loaded (see `rank.warmup.tables`). Raises nothing."""

    async def wanted(self, warmable: Warmable) -> bool:
        """Whether the loader is to tune; if not, its table is in its place, or has none."""

    async def made(self, warmable: Warmable, tuned: Tuned) -> None:
        """The loader that was told to tune has ended so."""


@dataclass(frozen=True, slots=True)
class Loader:
    """How to load: the loader's command and environment, and who proves what it made.

    `on_loaded` is told of what was loaded, which is not its to keep. `renewed` brings settings up
    to date: a rank may load again long after it was told them. Without `warming` nothing is tuned.
    With `lend` it may have weights of a peer.
    """

    argv: Sequence[str]
    environ: Mapping[str, str]
    keeper: Keeper
    on_loaded: Callable[[Generation], None] = lambda _: None
    renewed: Callable[[RankSettings], RankSettings] = lambda settings: settings
    warming: Warm | None = None
    lend: Lend | None = None

    async def load(
        self,
        settings: RankSettings,
        on_progress: OnProgress,
        agree: Agree | None = None,
        frees: int | None = None,
    ) -> Generation:
        """A new generation, sealed; the caller owns it.

        Where ranks meet first, `agree` has them do so; where parked weights are replaced, it gives
        them up, which `frees` so many bytes. LoaderFailed carries the loader's own exit
        status; after all is loaded, no end of a loader that warms up is a failure. Cancelling ends
        the loader first.
        """
        if self.lend is None:
            return await self._load(settings, on_progress, agree, frees, [])
        loaded: list[Generation] = []
        failed: list[Exception] = []
        ours, theirs = seqpacket.pair()
        with closing(Link(ours)) as link, theirs:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.lend, link)
                try:
                    fds = [(PEER, theirs.fileno())]
                    loaded.append(await self._load(settings, on_progress, agree, frees, fds))
                except (PreloadError, OSError) as error:
                    # Out of the group it would come as a group of errors.
                    failed.append(error)
                tasks.cancel_scope.cancel()
        for failure in failed:
            raise failure
        return loaded[0]

    async def _load(
        self,
        settings: RankSettings,
        on_progress: OnProgress,
        agree: Agree | None,
        frees: int | None,
        fds: Sequence[tuple[str, int]],
    ) -> Generation:
        ours, theirs = seqpacket.pair()
        link = Link(ours)
        with ExitStack() as undo:
            undo.callback(link.close)
            with theirs:
                child = spawn(
                    self.argv,
                    environ=self.environ,
                    fds=[(LINK, theirs.fileno()), *fds],
                    parent_death_signal=signal.SIGKILL,
                )
            undo.callback(child.close)
            receiver = LoadReceiver[OwnedFd](waits=agree is not None)
            undo.callback(_close_all, receiver)
            try:
                # A loader that ended at once is heard hanging up.
                with suppress(OSError):
                    order = Order(settings=self.renewed(settings), frees=frees)
                    await link.send(codec.encode(order))
                with heard_to_its_end(child, link):
                    await _listen(link, receiver, on_progress, settings.deadlines.silence, agree)
                    given_up = await self._warmed(link, receiver, on_progress, settings)
                if not given_up:
                    await _ended(child, _EXIT_S)
            finally:
                with anyio.CancelScope(shield=True):
                    status = await _stop(child, settings.deadlines.stop / 2)
            if not child.started:
                raise LoaderFailed(self._not_started(status), status)
            generation = _believed(receiver, status, self.keeper, self.argv[0])
        with ExitStack() as undo:
            undo.callback(generation.close)
            await self._made(receiver, given_up or f"the loader {ending(status)} while it tuned")
            undo.pop_all()
        self.on_loaded(generation)
        return generation

    async def _warmed(
        self,
        link: Link,
        receiver: LoadReceiver[OwnedFd],
        on_progress: OnProgress,
        settings: RankSettings,
    ) -> str:
        """Listen on while the loader warms up; why it is to be ended before it does so by itself.

        '' as well where it does not warm up.
        """
        if receiver.warmable is None:
            return ""
        try:
            with anyio.fail_after(settings.warmup.deadline):
                await self._answer(link, receiver, receiver.warmable, on_progress)
                silence = settings.deadlines.silence
                await _listen(link, receiver, on_progress, silence, phase=WARMING)
        except TimeoutError:
            return f"it took more than {settings.warmup.deadline:g} s: the loader was ended"
        except LoaderFailed as error:
            if receiver.phase is LoadPhase.FAILED:
                raise
            return str(error)
        return ""

    async def _answer(
        self,
        link: Link,
        receiver: LoadReceiver[OwnedFd],
        warmable: Warmable,
        on_progress: OnProgress,
    ) -> None:
        """Tell a loader that waits for it whether to tune."""

        async def wanted() -> bool:
            return self.warming is not None and await self.warming.wanted(warmable)

        if not warmable.tunes:
            await wanted()
            return
        async with anyio.create_task_group() as telling:
            telling.start_soon(tell_on, on_progress, Progress(phase=WARMING))
            answer = await _while_silent(link, wanted)
            telling.cancel_scope.cancel()
        if answer is not None:
            receiver.tune(wanted=answer)
            with suppress(OSError):
                await link.send(codec.encode(Tune(wanted=answer)))

    async def _made(self, receiver: LoadReceiver[OwnedFd], how: str) -> None:
        """Tell how tuning ended, if a loader was told to."""
        if self.warming is not None and receiver.warmable is not None and receiver.tunes:
            tuned = receiver.tuned or Tuned(failure=how)
            await self.warming.made(receiver.warmable, tuned)

    def _not_started(self, status: int) -> str:
        why = f"the loader ended with {status}: {self.argv[0]} cannot be started"
        return f"{why}: give an interpreter that this user may run"


async def _listen(
    link: Link,
    receiver: LoadReceiver[OwnedFd],
    on_progress: OnProgress,
    silence: float,
    agree: Agree | None = None,
    phase: str = "starting",
) -> None:
    """Take reports until the loader hangs up, or is to warm up; LoaderFailed when it breaks the
    rules. `phase` is what it does until it says what.

    To say the same again is no progress: a loader does so while disk or GPU hang.
    """
    told = Progress(phase=phase)
    deadline = anyio.current_time() + silence
    while True:
        try:
            with anyio.fail_after(deadline - anyio.current_time()):
                packet = await link.receive()
            if packet.eof:
                receiver.receive_eof()
                return
            report = receiver.receive(packet.data, packet.fds)
        except TimeoutError:
            why = f"the loader made no progress for {silence:g} s while {told.phase}: it was ended"
            raise LoaderFailed(why, 128 + signal.SIGKILL) from None
        except (ProtocolViolation, OutOfDescriptors) as error:
            raise LoaderFailed(f"the loader was ended: {error}", error.exit_status) from error
        if isinstance(report, Warmable):
            return
        if isinstance(report, Identified) and agree is not None:
            await _let_go(link, receiver, agree, report.key)
        if report != told:
            deadline = anyio.current_time() + silence
            if isinstance(report, Progress):
                told = report
                on_progress(report)


async def _let_go(
    link: Link, receiver: LoadReceiver[OwnedFd], agree: Agree, key: Mapping[str, str]
) -> None:
    """Have the loader proceed once all agree. It is silent until then: what comes is its end."""

    async def agreed() -> bool:
        await agree(key)
        return True

    if await _while_silent(link, agreed):
        receiver.proceed()
        with suppress(OSError):
            await link.send(codec.encode(Proceed()))


async def _while_silent(link: Link, work: Callable[[], Awaitable[T]]) -> T | None:
    """What `work` returns; None if something comes of the loader first, for that is its end."""
    found: T | None = None
    with anyio.CancelScope() as waiting:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_when_readable, link, waiting)
            found = await work()
            tasks.cancel_scope.cancel()
    return None if waiting.cancelled_caught else found


async def _cancel_when_readable(link: Link, waiting: anyio.CancelScope) -> None:
    await anyio.wait_readable(link.socket)
    waiting.cancel()


async def tell_on(on_progress: OnProgress, progress: Progress) -> None:
    """Tell it again and again, so that the service manager waits."""
    while True:
        on_progress(progress)
        await anyio.sleep(_TELL_EVERY_S)


async def _ended(child: Child, grace: float) -> None:
    """Give a loader that has said everything the time to exit by itself."""
    with anyio.move_on_after(grace):
        await anyio.wait_readable(child)


async def _stop(child: Child, grace: float) -> int:
    """End the loader and all it started; its status once none of them can write any more.

    LoaderFailed if something of its group does not go away: it could still write.
    """
    status = await stop(child, grace)
    if not child.group_gone():
        raise LoaderFailed(f"what the loader started still lives (group {child.pid})", status or 1)
    return status


def _believed(
    receiver: LoadReceiver[OwnedFd], status: int, keeper: Keeper, python: str
) -> Generation:
    """What was loaded, sealed and proved; or LoaderFailed with the reason the loader gave."""
    if isinstance(receiver.failure, Failed):
        raise LoaderFailed(receiver.failure.detail, status or 1)
    complete = receiver.phase is LoadPhase.COMPLETE
    if not complete or (status and receiver.warmable is None):
        raise LoaderFailed(
            f"the loader {ending(status)} before the weights were complete: its log says more, or "
            f"see whether {python} works",
            status or 1,
        )
    load = receiver.take()
    with ExitStack() as undo:
        undo.callback(load.manifest.close)
        for fd, _ in load.chunks:
            undo.callback(fd.close)
        for fd, nbytes in load.chunks:
            keeper.seal(fd.fileno(), nbytes)
        manifest = payload.decode(read_sealed(load.manifest.fileno(), load.manifest_nbytes))
        if manifest.chunks != tuple(nbytes for _, nbytes in load.chunks):
            raise DamagedManifest("the loader's manifest does not describe the chunks it sent")
        undo.pop_all()
    return Generation(manifest, load.manifest, [fd for fd, _ in load.chunks])


def _close_all(receiver: LoadReceiver[OwnedFd]) -> None:
    for fd in receiver.release():
        fd.close()
