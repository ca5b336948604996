"""What a rank answers: its state, its generation, its leases. Knows no socket.

Every method is a step that cannot be interrupted: the event loop runs one at a time, so what one
client asks never sees half of what another did.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence

import anyio
import msgspec

from preloadd import __version__
from preloadd.domain.ids import LeaseId, client_name
from preloadd.domain.key import CHECKPOINT, Difference, differences
from preloadd.domain.leases import Lease, Profilers, may_release
from preloadd.domain.lifecycle import Event, State, advance
from preloadd.domain.settings import RankSettings
from preloadd.errors import ErrorCode
from preloadd.linux.fds import OwnedFd, exhausted, is_exhausted
from preloadd.protocol import messages as m
from preloadd.protocol.codec import cut
from preloadd.rank.gate import Gate, lets_in
from preloadd.rank.generation import Generation
from preloadd.rank.parking import Parking
from preloadd.rank.seeding.api import Giver
from preloadd.rank.telling import lease_told, mismatched, with_weights

_UNAVAILABLE: dict[State, m.Reason] = {
    State.STARTING: m.Reason.STARTING,
    State.LOADING: m.Reason.LOADING,
    State.RELEASED: m.Reason.RELEASED,
    State.FAILED: m.Reason.FAILED,
    State.STOPPING: m.Reason.STOPPING,
}
_RELEASED = "the weights were released; ask for a load to have them again"
_WARMING = (
    "warming up: an engine of the daemon's own makes what others need at their start; they are let "
    "in when it is done"
)
_SETTLE_S = 3.0
_TELL_S = 1.0
_MAX_LEASES_TOLD = 128


class Service:
    """One rank. Owns its generation; leases are told of by their sessions.

    `troubles` are warnings that may pass, `warmup` lines on what else is made ready; whoever knows
    puts a function there.
    """

    def __init__(
        self, settings: RankSettings, parking: Parking, *, clock: Callable[[], float]
    ) -> None:
        self.settings = settings
        self.state = State.STARTING
        self.generation: Generation | None = None
        self.giver: Giver | None = None
        self.load_wanted = anyio.Event()
        self._gate: Gate | None = None
        self._parking = parking
        self._clock = clock
        self._started = clock()
        self._ready_s = 0.0
        self._leases: dict[LeaseId, Lease] = {}
        self._rehearsals: set[LeaseId] = set()
        self._profilers = Profilers(settings.deadlines.profiling)
        self._believed: dict[LeaseId, float] = {}
        self._quieter = anyio.Event()
        self._changed = anyio.Event()
        self._progress = m.Progress(phase="")
        self._detail = ""
        self._warnings: list[str] = []
        self.troubles: Callable[[], Sequence[str]] = tuple
        self.warmup: Callable[[], Sequence[str]] = tuple
        self._adopted = False
        self.warmed_s = 0.0
        self._loads = 0
        self._bytes_read = 0

    # -- life --

    def adopted(self, generation: Generation) -> None:
        """Take a generation that was parked."""
        self.generation, self._adopted, self._detail = generation, True, ""
        self._offer(generation)
        self._enter(Event.ADOPTED)

    def load_started(self) -> None:
        """A loader was started."""
        self.load_wanted = anyio.Event()
        self._detail = ""
        self._enter(Event.LOAD_STARTED)

    def progressed(self, progress: m.Progress) -> None:
        """The loader told how far it is."""
        self._progress = progress

    def loaded(self, generation: Generation) -> None:
        """Take a generation that was just filled and is parked."""
        self.generation, self._adopted = generation, False
        self._offer(generation)
        self._loads += 1
        self._bytes_read += generation.manifest.counters.get("bytes_read", 0)
        self._enter(Event.LOADED)

    def load_failed(self, why: str) -> None:
        """There will be no weights until somebody asks for another load."""
        self._detail = why
        self._enter(Event.LOAD_FAILED)

    def remark(self, why: str) -> None:
        """Weights are served that somebody has to do something about; told until the next load."""
        self._detail = why

    def warn(self, why: str) -> None:
        """The weights are at risk, though they are served: told with every status from now on."""
        self._warnings.append(why)

    def close_gate(self) -> Gate:
        """Let in nobody but who shows the pass of what is returned, until `open_gate`. To be called
        before there are weights, so that nobody slips in."""
        self._gate = Gate()
        self._tell()
        return self._gate

    def open_gate(self) -> None:
        """The warm-up is over, however it ended; nothing happens if there is none."""
        if self._gate is not None:
            self._gate.open()
            self._gate = None
            self._tell()

    async def end_warmup(self, why: str) -> None:
        """End the warm-up of weights that are served, if there is one; wait until it is over."""
        if self._gate is not None and self.state is State.SERVING:
            self._gate.end(why)
            await self._gate.opened()

    def stays_released(self) -> None:
        """The weights were freed in an earlier life, and nobody has asked to load them since."""
        self._detail = _RELEASED
        self._enter(Event.RELEASED)

    def stopping(self) -> None:
        """The daemon is going down; watchers are told, nobody is granted anything any more."""
        self._enter(Event.STOPPED)

    def close(self) -> None:
        """Give up this process's copy of the descriptors."""
        if self.giver is not None:
            self.giver.withdraw()
        if self.generation is not None:
            self.generation.close()
            self.generation = None

    def _offer(self, generation: Generation) -> None:
        if self.giver is not None:
            self.giver.offer(generation)

    def _enter(self, event: Event) -> None:
        self.state = advance(self.state, event)
        if self.state is State.SERVING:
            self._ready_s = self._clock() - self._started
        if self.state is not State.LOADING:
            self._progress = m.Progress(phase="")
        self._tell()

    def _tell(self) -> None:
        """Have watchers look again."""
        self._changed.set()
        self._changed = anyio.Event()

    # -- requests --

    def refusal(self, request: m.Attach | m.Memory) -> m.Mismatched | m.NotAvailable | None:
        """What this rank alone has against the request, or None."""
        if self.generation is None or self.state is not State.SERVING:
            return self._not_available()
        found = self._differences(request)
        return mismatched(found) if found else None

    def barred(
        self, request: m.Attach, elsewhere: Collection[str] = frozenset()
    ) -> m.NotAvailable | None:
        """The answer to who has no pass while this rank warms up, or another one of the group whose
        gate has a digest `elsewhere`; else None."""
        own = [self._gate.digest] if self._gate is not None else []
        if lets_in([*own, *elsewhere], request.rehearsal):
            return None
        return m.NotAvailable(reason=m.Reason.LOADING, detail=_WARMING)

    @property
    def rehearses(self) -> bool:
        """Whether an engine of a warm-up holds weights."""
        return bool(self._rehearsals)

    def warms_up(self, elsewhere: Collection[str] = frozenset()) -> bool:
        """Whether this rank warms up, or another one of the group whose gate has a digest there."""
        return self._gate is not None or bool(elsewhere)

    def incomplete(self, missing: list[str], divided: str) -> m.NotAvailable | None:
        """The answer while other ranks of the group do not serve, or other weights; else None."""
        detail = divided
        if missing:
            detail = f"of the group {self.settings.group} these do not serve: {', '.join(missing)}"
        return m.NotAvailable(reason=m.Reason.INCOMPLETE, detail=detail) if detail else None

    def attach(
        self, request: m.Attach, *, pid: int
    ) -> tuple[Lease, m.Granted, list[OwnedFd]] | m.Mismatched | m.NotAvailable | m.Refused:
        """Grant a lease, or say why not. The descriptors are the caller's to send and close."""
        refusal = self.refusal(request) or self.barred(request)
        if refusal is not None or self.generation is None:
            return refusal or self._not_available()
        manifest = self.generation.manifest
        lease = Lease(
            LeaseId(os.urandom(8).hex()),
            self.generation.id,
            request.mode,
            client_name(request.client),
            pid,
        )
        granted = m.Granted(
            generation=manifest.generation,
            lease=lease.id,
            backend=manifest.backend,
            manifest=os.fstat(self.generation.sealed.fileno()).st_size,
            chunks=manifest.chunks,
            profiling=True,
            warmup=True,
        )
        try:
            return lease, granted, self.generation.descriptors()
        except OSError as error:
            if not is_exhausted(error):
                raise
            return m.Refused(
                code=ErrorCode.NO_DESCRIPTORS,
                detail=str(exhausted(error, f"granting {self.settings.instance}")),
            )

    def lease_began(self, lease: Lease, fd: int | None, *, rehearsal: bool = False) -> None:
        """An engine holds weights from now on; its connection `fd` is parked unless it was.

        One of a `rehearsal` is the group's own, and nobody is told of it as of an engine.
        """
        self._leases[lease.id] = lease
        if rehearsal:
            self._rehearsals.add(lease.id)
            if self._gate is not None:
                self._gate.leases.add(lease.id)
        if fd is not None:
            self._parking.keep_lease(lease, fd)

    def lease(self, known: LeaseId | None) -> Lease | None:
        """The lease of this id."""
        return self._leases.get(known) if known is not None else None

    def lease_ended(self, lease: Lease) -> None:
        """An engine hung up or was hung up on."""
        if self._leases.pop(lease.id, None) is not None:
            self._parking.drop_lease(lease)
            self._profiled(lease.id)
            self._believed.pop(lease.id, None)
            self._rehearsals.discard(lease.id)
            if self._gate is not None:
                self._gate.leases.discard(lease.id)

    def profiling(self, lease: Lease | None, *, active: bool) -> m.Done | m.Refused:
        """A client says whether it measures how much memory is free.

        It is believed for a while from when it said so first, however often it does, or it could
        keep others from freeing any for ever.
        """
        if lease is None:
            return m.Refused(
                code=ErrorCode.UNAVAILABLE,
                detail="only an engine that holds weights is waited for: attach first",
            )
        self._profiled(lease.id)
        if not active:
            return m.Done()
        now = self._clock()
        until = self._believed.get(lease.id)
        if until is None:
            until = self._believed[lease.id] = self._profilers.begin(lease.id, now)
        elif until > now:
            self._profilers.resume(lease.id, until, now)
        else:
            return m.Refused(
                code=ErrorCode.UNAVAILABLE,
                detail=f"this engine was spared for {self.settings.deadlines.profiling:g} s, which "
                "is all there is for one lease",
            )
        self._parking.mark_profiling(lease.id, until)
        return m.Done()

    def profiling_resumed(self, lease: LeaseId, until: float) -> bool:
        """Believe what a lease told an earlier daemon; False if there is no such lease."""
        if lease in self._leases:
            now = self._clock()
            self._profilers.resume(lease, until, now)
            self._believed[lease] = min(until, now + self.settings.deadlines.profiling)
        return lease in self._leases

    def profilers(self, asker: LeaseId | None = None) -> list[Lease]:
        """The leases that profile now, but for the one of whoever asks."""
        active = self._profilers.active(self._clock()) - {asker}
        return [each for each in self._leases.values() if each.id in active]

    async def undisturbed(self, asker: LeaseId | None = None) -> None:
        """Wait until freeing memory disturbs nobody but `asker`, or nobody is believed any more."""
        while (seconds := self._profilers.wait(self._clock(), but=asker)) > 0:
            with anyio.move_on_after(seconds):
                await self._quieter.wait()

    def _profiled(self, lease: LeaseId) -> None:
        if self._profilers.end(lease):
            self._parking.drop_profiling(lease)
            self._quieter.set()
            self._quieter = anyio.Event()

    async def told(self) -> None:
        """Wait until the manager was told all there is to tell now, if it listens."""
        with anyio.move_on_after(_TELL_S):
            await self._parking.told()

    async def settled(self) -> str | None:
        """Wait a moment until the manager has done what it was told; why it has not, or None."""
        try:
            with anyio.fail_after(_SETTLE_S):
                await self._parking.settle()
        except OSError as error:
            return f"the service manager still holds its copy of the weights: {error}"
        return None

    def release_refusal(self, asker: LeaseId | None, *, operator: bool) -> m.Refused | None:
        """Why the asker may not have the weights freed now, or None.

        Engines that went on with weights of an earlier generation neither hinder nor may it.
        """
        refusal = may_release(self.holders(self.generation), asker, operator=operator)
        if refusal is not None:
            return m.Refused(code=ErrorCode.DENIED, detail=refusal)
        if self.generation is None or self.state is not State.SERVING:
            return m.Refused(
                code=ErrorCode.UNAVAILABLE, detail=f"nothing to release: the rank is {self.state}"
            )
        return None

    def release(self, asker: LeaseId | None, *, operator: bool) -> m.Done | m.Refused:
        """Free the weights if the asker may; the parked copy goes first."""
        refusal = self.release_refusal(asker, operator=operator)
        if refusal is not None or self.generation is None:
            return refusal or m.Done()
        self._parking.mark_released()
        self._parking.evict(self.generation)
        self.close()
        self._detail = _RELEASED
        self._enter(Event.RELEASED)
        return m.Done()

    def holders(self, generation: Generation | None) -> list[Lease]:
        """The leases of a generation."""
        if generation is None:
            return []
        return [each for each in self._leases.values() if each.generation == generation.id]

    def load_refusal(self, *, operator: bool) -> m.Refused | None:
        """Why the asker may not have the weights loaded again now, or None."""
        if not operator:
            return m.Refused(
                code=ErrorCode.DENIED,
                detail="only root or the daemon's own user may ask for a load",
            )
        if self.state not in (State.RELEASED, State.FAILED):
            return m.Refused(
                code=ErrorCode.UNAVAILABLE, detail=f"nothing to load: the rank is {self.state}"
            )
        return None

    def load(self, *, operator: bool) -> m.Done | m.Refused:
        """Have the weights loaded again after a release."""
        refusal = self.load_refusal(operator=operator)
        if refusal is None:
            self.load_wanted.set()
        return refusal or m.Done()

    def memory(self, request: m.Memory) -> m.MemoryHeld | m.Mismatched | m.NotAvailable:
        """Device memory an engine with this key finds already taken by weights it will share."""
        refusal = self.refusal(request)
        if refusal is not None or self.generation is None:
            return refusal or self._not_available()
        return m.MemoryHeld(nbytes=self.generation.arena_nbytes)

    def status(self, divided: str = "") -> m.StatusTold:
        """Everything about this rank that may be told to whoever may connect; `divided` is why it
        gives its weights to nobody, where others of the group have other ones."""
        instance = self.settings.parsed_instance
        progress = self._progress_told
        told = m.StatusTold(
            group=self.settings.group,
            instance=self.settings.instance,
            device=instance.device,
            role=instance.role.value,
            pid=os.getpid(),
            version=__version__,
            state=self._state_told,
            detail="; ".join(filter(None, self._remarks(divided))),
            model=self.settings.model.name,
            backend=self.settings.model.memory.value,
            builder=self.settings.model.builder.value,
            adopted=self._adopted,
            phase=progress.phase,
            done=progress.done,
            total=progress.total,
            uptime_s=self._clock() - self._started,
            ready_s=self._ready_s,
            leases=self._leases_told(),
            lease_count=len(self._leases) - len(self._rehearsals),
            counters={
                "loads": self._loads,
                "bytes_read": self._bytes_read,
                "warmup_ms": int(self.warmed_s * 1000),
            },
            warmup=tuple(self.warmup()),
            divided=divided,
        )
        return told if self.generation is None else with_weights(told, self.generation)

    @property
    def _progress_told(self) -> m.Progress:
        """How far the load is that is under way; of one that is over, nothing."""
        if self._state_told is not State.LOADING:
            return m.Progress(phase="")
        return msgspec.structs.replace(self._progress, phase=cut(self._progress.phase))

    @property
    def _state_told(self) -> State:
        """While it warms up, nobody gets the weights: to people that is no serving."""
        warming = self._gate is not None and self.state is State.SERVING
        return State.LOADING if warming else self.state

    def _remarks(self, divided: str) -> tuple[str, ...]:
        return self._detail, self._warming, divided, *self._warnings, *self.troubles()

    @property
    def _warming(self) -> str:
        return _WARMING if self._gate is not None else ""

    def _leases_told(self) -> tuple[m.LeaseTold, ...]:
        active = self._profilers.active(self._clock())
        engines = [one for one in self._leases.values() if one.id not in self._rehearsals]
        told = engines[:_MAX_LEASES_TOLD]
        return tuple(lease_told(lease, profiling=lease.id in active) for lease in told)

    def changed(self) -> tuple[m.StateChanged, anyio.Event]:
        """The state now, and an event that is set at the next change."""
        generation = self.generation.id if self.generation is not None else ""
        warming = self._gate.digest if self._gate is not None else ""
        told = m.StateChanged(
            state=self.state, generation=generation, warming=warming, checkpoint=self.checkpoint
        )
        return told, self._changed

    @property
    def checkpoint(self) -> str:
        """Of which content the weights are; '' without any."""
        return "" if self.generation is None else self.generation.manifest.key.get(CHECKPOINT, "")

    def _differences(self, request: m.Attach | m.Memory) -> tuple[Difference, ...]:
        device = self.settings.parsed_instance.device
        if request.device != device:
            return (Difference("device", device, request.device),)
        if self.generation is None:
            return ()
        manifest = self.generation.manifest
        return differences(
            manifest.key, request.key, daemon_files=manifest.shards, engine_files=request.files
        )

    def _not_available(self) -> m.NotAvailable:
        reason = _UNAVAILABLE.get(self.state, m.Reason.STARTING)
        detail = self._detail or f"{self.settings.instance} is {self.state}"
        progress = self._progress_told
        return m.NotAvailable(
            reason=reason,
            detail=detail,
            phase=progress.phase,
            done=progress.done,
            total=progress.total,
        )
