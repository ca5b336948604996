"""The loader as seen from its rank: started, listened to, ended, reaped, and only then believed."""

from __future__ import annotations

import logging
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import anyio

from preloadd.domain.settings import RankSettings
from preloadd.errors import DamagedManifest, LoaderFailed, OutOfDescriptors, ProtocolViolation
from preloadd.linux import seqpacket
from preloadd.linux.fds import OwnedFd
from preloadd.linux.memfd import read_sealed
from preloadd.linux.process import NOT_STARTED, Child, spawn
from preloadd.memory.api import Keeper
from preloadd.protocol import codec, payload
from preloadd.protocol.loading import LoadPhase, LoadReceiver
from preloadd.protocol.messages import LINK, Failed, Identified, Order, Proceed, Progress
from preloadd.rank.generation import Generation
from preloadd.transport.aio import Link

log = logging.getLogger(__name__)

_EXIT_S = 10.0
"""Seconds that a loader which has handed over everything may take to exit."""

_GONE_S = 5.0
_POLL_S = 0.01

OnProgress = Callable[[Progress], None]
Agree = Callable[[Mapping[str, str]], Awaitable[None]]
"""Returns once what has this key may be filled in; it may never do so."""


@dataclass(frozen=True, slots=True)
class Loader:
    """How to load: the loader's command and environment, and who proves what it made.

    `on_loaded` is told of what was loaded, which is not its to keep. `renewed` brings settings up
    to date: a rank may load again long after it was told them.
    """

    argv: Sequence[str]
    environ: Mapping[str, str]
    keeper: Keeper
    on_loaded: Callable[[Generation], None] = lambda _: None
    renewed: Callable[[RankSettings], RankSettings] = lambda settings: settings

    async def load(
        self, settings: RankSettings, on_progress: OnProgress, agree: Agree | None = None
    ) -> Generation:
        """A new generation, sealed; the caller owns it.

        Where ranks meet first, `agree` has them do so. LoaderFailed carries the loader's own exit
        status. Cancelling ends the loader first.
        """
        ours, theirs = seqpacket.pair()
        link = Link(ours)
        with ExitStack() as undo:
            undo.callback(link.close)
            with theirs:
                child = spawn(
                    self.argv,
                    environ=self.environ,
                    fds=[(LINK, theirs.fileno())],
                    new_group=True,
                    parent_death_signal=signal.SIGKILL,
                )
            undo.callback(child.close)
            receiver = LoadReceiver[OwnedFd](meets=agree is not None)
            undo.callback(_close_all, receiver)
            try:
                # A loader that ended at once is heard hanging up.
                with suppress(OSError):
                    await link.send(codec.encode(Order(settings=self.renewed(settings))))
                await _listen(link, receiver, on_progress, settings.deadlines.silence, agree)
                await _ended(child, _EXIT_S)
            finally:
                with anyio.CancelScope(shield=True):
                    status = await _stop(child, settings.deadlines.stop / 2)
            if status in NOT_STARTED and receiver.failure is None:
                raise LoaderFailed(self._not_started(status), status)
            generation = _believed(receiver, status, self.keeper)
        self.on_loaded(generation)
        return generation

    def _not_started(self, status: int) -> str:
        why = f"the loader ended with {status}: {self.argv[0]} cannot be started"
        return f"{why}: give an interpreter that this user may run"


async def _listen(
    link: Link,
    receiver: LoadReceiver[OwnedFd],
    on_progress: OnProgress,
    silence: float,
    agree: Agree | None,
) -> None:
    """Take reports until the loader hangs up; LoaderFailed when it breaks the rules.

    To say the same again is no progress: a loader does so while disk or GPU hang.
    """
    told = Progress(phase="starting")
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
    with anyio.CancelScope() as waiting:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_when_readable, link, waiting)
            await agree(key)
            tasks.cancel_scope.cancel()
    if not waiting.cancelled_caught:
        receiver.proceed()
        with suppress(OSError):
            await link.send(codec.encode(Proceed()))


async def _cancel_when_readable(link: Link, waiting: anyio.CancelScope) -> None:
    await anyio.wait_readable(link.socket)
    waiting.cancel()


async def _ended(child: Child, grace: float) -> None:
    """Give a loader that has said everything the time to exit by itself."""
    with anyio.move_on_after(grace):
        await anyio.wait_readable(child)


async def _stop(child: Child, grace: float) -> int:
    """End the loader and all it started; its status once none of them can write any more.

    LoaderFailed if something of its group does not go away: it could still write.
    """
    if child.poll() is None:
        child.signal(signal.SIGTERM)
        with anyio.move_on_after(grace):
            await anyio.wait_readable(child)
        child.kill_group()
        # Without a deadline: a process that waits for a broken disk cannot be killed, but the loop
        # must turn meanwhile.
        await anyio.wait_readable(child)
    status = child.wait()
    with anyio.move_on_after(_GONE_S):
        while not child.group_gone():  # noqa: ASYNC110 - nothing tells of the end of a group
            await anyio.sleep(_POLL_S)
    if not child.group_gone():
        raise LoaderFailed(f"what the loader started still lives (group {child.pid})", status or 1)
    return status


def _believed(receiver: LoadReceiver[OwnedFd], status: int, keeper: Keeper) -> Generation:
    """What was loaded, sealed and proved; or LoaderFailed with the reason the loader gave."""
    if isinstance(receiver.failure, Failed):
        raise LoaderFailed(receiver.failure.detail, status or 1)
    if status or receiver.phase is not LoadPhase.COMPLETE:
        how = f"was killed by signal {status - 128}" if status > 128 else f"ended with {status}"
        raise LoaderFailed(f"the loader {how} before the weights were complete", status or 1)
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
