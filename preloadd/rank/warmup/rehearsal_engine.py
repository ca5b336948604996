"""The engine of a warm-up as its rank hears it: started, listened to, ended with all of its own."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import anyio

from preloadd.domain.lines import one_line
from preloadd.domain.settings import RankSettings
from preloadd.errors import OutOfDescriptors, ProtocolViolation
from preloadd.linux import seqpacket
from preloadd.linux.fds import OwnedFd
from preloadd.linux.process import Child, ending, spawn
from preloadd.protocol import codec
from preloadd.protocol.messages import LINK, REHEARSAL, Failed, Order, Progress
from preloadd.rank.ending import heard_to_its_end, stop
from preloadd.rank.gate import Gate
from preloadd.transport.aio import Link

log = logging.getLogger(__name__)

DONE = "done"
"""The phase of an engine that has said its token."""

_EXIT_S = 30.0
"""Seconds that an engine which has done all may take to end by itself."""

_PIECE = 1 << 16
_MOST_LINES = 2000
_LONGEST_LINE = 400
_LAST_LINES = 8
_CAUSE = re.compile(r"\b(\w+(Error|Exception)|preloadd\.errors\.\w+): ")
"""What names a cause, which vLLM tells long before its last words."""

_TELL_EVERY_S = 5.0

OnProgress = Callable[[Progress], None]


@dataclass(slots=True)
class RehearsalEngine:
    """One engine. It has `within` seconds in all; where it says nothing for as long as a loader may
    be silent, or the gate is to be opened, it is ended. `on_progress` is told now and then."""

    settings: RankSettings
    within: float
    gate: Gate
    on_progress: OnProgress
    phase: str = "starting"
    failure: str = ""
    heard: float = 0.0
    told: float = 0.0
    lines: int = 0
    causes: list[str] = field(default_factory=list)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    rest: str = ""

    async def run(self, argv: Sequence[str], environ: Mapping[str, str]) -> str:
        """Start the engine, hear it to its end, and end what is left; why it failed, or ''."""
        ours, theirs = seqpacket.pair()
        with ExitStack() as undo:
            link = Link(ours)
            undo.callback(link.close)
            undo.callback(theirs.close)
            try:
                said, writes = _pipe(undo)
                child = spawn(
                    argv,
                    environ={**environ, REHEARSAL: self.gate.key},
                    fds=[(LINK, theirs.fileno())],
                    # It ends what it has started, which a kill would leave.
                    parent_death_signal=signal.SIGTERM,
                    stdout=writes.fileno(),
                    stderr=writes.fileno(),
                )
            except OSError as error:
                return f"{argv[0]} cannot be started: {error.strerror or error}"
            undo.callback(child.close)
            theirs.close()
            writes.close()
            why = await self._heard_out(child, link, said)
            if why and not self.gate.ending.is_set():
                self._read(said)
                for line in dict.fromkeys([*self.causes, *self.last]):
                    log.warning("the engine of the warm-up said: %s", line)
            return why

    async def _heard_out(self, child: Child, link: Link, said: OwnedFd) -> str:
        grace = self.settings.deadlines.stop / 2
        status = 0
        try:
            with anyio.move_on_after(self.within) as over:
                why = await self._hear(child, link, said)
            if over.cancelled_caught:
                why = (
                    f"it took longer than {self.within:.0f} s ({self.phase}): raise "
                    "warmup.deadline_s, or --warmup-timeout"
                )
        finally:
            with anyio.CancelScope(shield=True):
                status = await stop(child, grace)
        if not child.group_gone():
            log.warning("what the engine of the warm-up started still lives (group %d)", child.pid)
        return self._judged(why, child, status)

    def _judged(self, why: str, child: Child, status: int) -> str:
        if self.gate.ending.is_set():
            return self.gate.why
        if why or self.failure or self.phase == DONE:
            return why or self.failure
        if not child.started:
            return f"the engine ended with {status}: its interpreter cannot be started"
        return f"the engine {ending(status)} while {self.phase}"

    async def _hear(self, child: Child, link: Link, said: OwnedFd) -> str:
        """Listen until the engine has ended, or is to be ended; why that, or ''."""
        silence = self.settings.deadlines.silence
        self.heard = anyio.current_time()
        with suppress(OSError):  # one that ended at once is heard hanging up
            await link.send(codec.encode(Order(settings=self.settings)))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel_at_the_end, self.gate, tasks.cancel_scope)
            tasks.start_soon(self._follow, said)
            with heard_to_its_end(child, link):
                why = await self._listen(link, silence)
            if not why:
                with anyio.move_on_after(_EXIT_S):
                    await anyio.wait_readable(child)
            tasks.cancel_scope.cancel()
            return why
        return ""

    async def _listen(self, link: Link, silence: float) -> str:
        """Take reports until the engine hangs up; why it is to be ended before, or ''."""
        while (left := self.heard + silence - anyio.current_time()) > 0:
            try:
                with anyio.move_on_after(left):
                    packet = await link.receive()
                    packet.close()
                    if packet.eof or self._take(packet.data):
                        return ""
            except (ProtocolViolation, OutOfDescriptors) as error:
                return f"the engine was ended: {error}"
        return f"the engine said nothing for {silence:g} s while {self.phase}"

    def _take(self, data: bytes) -> bool:
        """Take one report; whether it is the last one."""
        self._lives()
        report = codec.decode_report(data)
        if isinstance(report, Failed):
            self.failure = report.detail
            return True
        if not isinstance(report, Progress):
            raise ProtocolViolation(f"{codec.tag(report)} from an engine")
        self.phase = report.phase
        self._tell()
        return self.phase == DONE

    def _lives(self) -> None:
        self.heard = anyio.current_time()
        if self.heard - self.told > _TELL_EVERY_S:
            self._tell()

    def _tell(self) -> None:
        self.told = anyio.current_time()
        self.on_progress(Progress(phase=f"warming up: {self.phase}"))

    async def _follow(self, said: OwnedFd) -> None:
        """Keep the log up with what the engine says."""
        while True:
            await anyio.wait_readable(said.fileno())
            if not self._read(said):
                return
            self._lives()

    def _read(self, said: OwnedFd) -> bool:
        """Take what was said; False at the end."""
        with suppress(BlockingIOError):
            piece = os.read(said.fileno(), _PIECE)
            text = self.rest + piece.decode(errors="replace").replace("\r", "\n")
            *lines, rest = text.split("\n")
            self.rest = rest[-_LONGEST_LINE:]
            for line in filter(None, map(str.strip, lines)):
                self._log(one_line(line)[:_LONGEST_LINE])
            return bool(piece)
        return True

    def _log(self, line: str) -> None:
        self.last.append(line)
        if _CAUSE.search(line) and len(self.causes) < _LAST_LINES:
            self.causes.append(line)
        self.lines += 1
        if self.lines <= _MOST_LINES:
            log.debug("the engine of the warm-up: %s", line)


async def cancel_at_the_end(gate: Gate, scope: anyio.CancelScope) -> None:
    """Cancel `scope` once somebody wants the gate open."""
    await gate.ending.wait()
    scope.cancel()


def _pipe(undo: ExitStack) -> tuple[OwnedFd, OwnedFd]:
    """A pipe whose reading end does not block."""
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    reads = undo.enter_context(OwnedFd(ours))
    writes = undo.enter_context(OwnedFd(theirs))
    os.set_blocking(ours, False)
    return reads, writes
