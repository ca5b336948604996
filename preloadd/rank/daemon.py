"""The life of a rank daemon, in order: adopt or load, park, bind, ready, serve, stop."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from preloadd.domain.access import Peer, Policy, may_attach
from preloadd.domain.amounts import progress
from preloadd.domain.files import FileIdentity
from preloadd.domain.ids import Instance
from preloadd.domain.leases import LEASE, PROFILING, Lease
from preloadd.domain.lifecycle import State
from preloadd.domain.recipe import recipe_of
from preloadd.domain.settings import RankSettings
from preloadd.errors import AccessDenied, PreloadError, ProtocolViolation
from preloadd.linux import peers, seqpacket
from preloadd.linux.fds import OwnedFd, exhausted, is_exhausted
from preloadd.linux.notify import Notifier
from preloadd.protocol.messages import Progress
from preloadd.rank.adoption import Adoption, adopt
from preloadd.rank.counting import Count
from preloadd.rank.device import PARKED, Gpu
from preloadd.rank.fellows import Fellows
from preloadd.rank.generation import Generation
from preloadd.rank.loading import Agree, Loader
from preloadd.rank.parking import LISTENER, RELEASED, Parking, parked_profiling
from preloadd.rank.rendezvous.presence import Presence
from preloadd.rank.seeding.api import Answering, Giver
from preloadd.rank.service import Service
from preloadd.rank.session import Desk
from preloadd.rank.warmup.warmup import WarmUp
from preloadd.transport.aio import Limits
from preloadd.transport.server import Server
from preloadd.transport.threads import Threads
from preloadd.weights.checkpoint import identities_of

log = logging.getLogger(__name__)
adopting = logging.LoggerAdapter(log, {"phase": "adopt"})
loading = logging.LoggerAdapter(log, {"phase": "load"})

BACKLOG = 128
Parked = Mapping[str, Sequence[OwnedFd]]


class Daemon:
    """One rank daemon, once. `run` is its whole life; the lock is held by the caller.

    `warm_up` sees to what is made ready besides weights, `seeder` gives that to other hosts.
    """

    def __init__(
        self,
        settings: RankSettings,
        policy: Policy,
        notifier: Notifier,
        loader: Loader,
        *,
        clock: Callable[[], float],
        watchdog_s: float | None,
        count: Count,
        warm_up: WarmUp,
        gpu: Gpu | None = None,
        seeder: Answering | None = None,
        giver: Giver | None = None,
    ) -> None:
        self._settings = settings
        self._policy = policy
        self._notifier = notifier
        self._loader = loader
        self._watchdog_s = watchdog_s
        self._count = count
        self._asking = Threads("systemd")
        self._gpu = gpu
        self._warm_up = warm_up
        self._seeder = seeder
        self._giver = giver
        self._settled = anyio.Event()
        self._parking = Parking(notifier)
        self._service = Service(settings, self._parking, clock=clock)
        self._service.giver = giver
        folder = Path(settings.socket_dir)
        self._fellows = Fellows(
            {name: folder / name / Instance.parse(name).socket_name for name in settings.peers}
        )
        place = settings.rendezvous
        self._presence = Presence(settings, place, self._progressed) if place else None
        self._desk = Desk(self._service, policy, self._fellows, warm_up.given())
        self._service.troubles = self._troubles
        self._service.warmup = warm_up.told
        deadlines = settings.deadlines
        limits = Limits(deadlines.speak, deadlines.send, settings.max_connections)
        self._server = Server(self._desk.serve, self._admit, limits)
        instance = settings.parsed_instance
        self._group = -1 if policy.group is None else policy.group
        self._path = Path(settings.socket_dir) / settings.instance / instance.socket_name

    async def run(self, parked: dict[str, list[OwnedFd]]) -> None:
        """Serve until SIGTERM or SIGINT. Takes every descriptor in `parked`.

        Raises what keeps this rank from serving. Parked weights that fit stay parked in every case.
        """
        async with AsyncExitStack() as undo:
            undo.callback(self._service.close)
            tasks = await undo.enter_async_context(anyio.create_task_group())
            undo.callback(tasks.cancel_scope.cancel)
            tasks.start_soon(self._stop_on_signal, tasks.cancel_scope)
            tasks.start_soon(self._parking.work)
            tasks.start_soon(self._fellows.follow)
            if self._presence is not None:
                tasks.start_soon(self._presence.work)
            self._take_up_gpu(parked.pop(PARKED, []), tasks, undo)
            if self._watchdog_s is not None:
                tasks.start_soon(self._show_life, self._watchdog_s)
            listener = self._inherited_listener(parked.pop(LISTENER, []))
            reserved = None
            if listener is not None:
                tasks.start_soon(self._serve, listener)
            else:
                # What stands in its way is not to be found out after minutes of loading.
                reserved = undo.enter_context(self._reserve())
            self._resume_leases(parked, tasks)
            await self._bring_up(parked)
            tasks.start_soon(self._warm_up.work)
            if self._giver is not None:
                tasks.start_soon(self._giver.work)
            if reserved is not None:
                tasks.start_soon(self._serve, self._bind(reserved))
            await self._warmed_up()
            if self._seeder is not None:
                tasks.start_soon(self._seed, self._seeder)
            await self._parking.ready()
            self._settled.set()
            await self._reload_when_asked()

    async def _bring_up(self, parked: dict[str, list[OwnedFd]]) -> None:
        """Adopt what is parked, stay released, or load afresh."""
        released = parked.pop(RELEASED, [])
        for mark in released:
            mark.close()
        adoption = self._adopt(parked) if parked else Adoption()
        outdated = adoption.outdated
        if adoption.dropped or outdated or (adoption.generation is None and not released):
            await self._undisturbed()
        self._parking.drop(adoption.dropped)
        if adoption.generation is not None:
            # A release that was marked but came no further was never confirmed either.
            self._parking.drop([RELEASED] if released else [])
            self._adopted(adoption.generation)
        elif released:
            if outdated is not None:
                self._parking.evict(outdated)
                outdated.close()
            self._service.stays_released()
            self._notifier.status("released: the weights are loaded again when asked for")
        else:
            await self._replace(adoption)

    def _adopted(self, generation: Generation) -> None:
        self._service.adopted(generation)
        manifest = generation.manifest
        if self._presence is not None:
            self._presence.serves(manifest.key)
        self._warm_up.adopted(manifest.generation)
        adopting.info("adopted generation %s: %d tensors", manifest.generation, len(manifest))
        self._notifier.status(f"serving {self._settings.model.name} (adopted)")

    async def _replace(self, adoption: Adoption) -> None:
        """Load afresh. Outdated weights are served if nothing comes in their place, where they may
        be; else they stay parked, for a next life that may be told something else."""
        outdated = adoption.outdated
        with ExitStack() as undo:
            if outdated is not None:
                undo.callback(outdated.close)
            try:
                await self._load(evicted=bool(adoption.dropped), outdated=outdated)
            except PreloadError as error:
                if outdated is None or outdated.sealed.closed or not adoption.may_serve:
                    raise
                why = (
                    "the checkpoint has changed but cannot be loaded, so the weights of before "
                    "stay until it is mended and the rank restarted (preloadctl restart): "
                    f"{error}"
                )
                adopting.warning("%s", why)
                undo.pop_all()
                self._adopted(outdated)
                self._service.remark(why)

    async def _load(self, *, evicted: bool, outdated: Generation | None = None) -> None:
        """Load a new generation and park it; PreloadError says why that failed. One that is
        outdated is given up once the loader has found nothing in its way: closed then."""
        if outdated is None:
            self._warm_up.begin(self._service)
        try:
            await self._load_anew(evicted=evicted, outdated=outdated)
        except BaseException:
            self._warm_up.give_up(self._service)
            raise

    async def _warmed_up(self) -> None:
        """Have an engine of this rank's own warm up, where there is something to make."""
        rehearsed = await self._warm_up.finish(self._service, self._fellows, self._progressed)
        if rehearsed is not None and self._service.state is State.SERVING:
            self._notifier.status(f"serving {self._settings.model.name}")

    async def _seed(self, seeder: Answering) -> None:
        """Answer others from when this rank is warm: until then they try again, and a rank that has
        nothing yet would have them do without."""
        await self._warm_up.settled()
        await seeder.serve()

    async def _load_anew(self, *, evicted: bool, outdated: Generation | None) -> None:
        self._service.load_started()
        self._settled.set()
        self._hold_off()
        await self._warm_up.open()
        try:
            generation = await self._filled(evicted=evicted, outdated=outdated)
        except OSError as error:
            if is_exhausted(error):
                raise exhausted(error, "loading") from error
            raise PreloadError(f"loading failed: {error}") from error
        self._service.loaded(generation)
        await self._require_kept(len(generation.chunks) + 1)
        manifest, read = generation.manifest, generation.manifest.counters
        self._warm_up.loaded(manifest.generation)
        loading.info(
            "loaded generation %s: %d tensors, %.2f GiB in %.2f s",
            manifest.generation,
            len(manifest),
            manifest.nbytes / 2**30,
            read.get("load_ms", 0) / 1000,
        )
        self._notifier.status(f"serving {self._settings.model.name}")

    async def _require_kept(self, told: int) -> None:
        """Complain where people will see it if the manager has not kept all it was told to."""
        told += self._gpu.parked if self._gpu is not None else 0
        try:
            kept = await self._asking.run(self._count)
        except OSError as error:
            loading.warning("it is not known what systemd keeps: %s", error)
            return
        if kept is None or kept >= told:
            return
        why = (
            f"systemd keeps {kept} of {told} descriptors: these weights would be lost with this "
            "process. Set FileDescriptorStoreMax=512 in its unit, run `systemctl daemon-reload`, "
            "and restart it"
        )
        loading.error("%s", why)
        self._service.remark(why)

    async def _filled(self, *, evicted: bool, outdated: Generation | None) -> Generation:
        """A new generation that is parked. What was evicted is gone before: two rarely fit."""
        if evicted:
            await self._parking.settle()
        load = partial(self._loader.load, self._settings, self._progressed)
        if outdated is not None:
            load = partial(self._instead_of, outdated)
        generation = await (load() if self._presence is None else self._presence.hold(load))
        try:
            await self._parking.commit(generation)
        except OSError as error:
            self._parking.evict(generation)
            generation.close()
            if is_exhausted(error):
                raise
            raise PreloadError(f"the service manager does not keep the weights: {error}") from error
        return generation

    async def _instead_of(self, outdated: Generation, agree: Agree | None = None) -> Generation:
        """Load what takes the place of outdated weights. What engines hold of them is not freed."""

        async def ready(key: Mapping[str, str]) -> None:
            if agree is not None:
                await agree(key)
            self._warm_up.begin(self._service)
            self._parking.evict(outdated)
            outdated.close()
            try:
                await self._parking.settle()
            except OSError as error:
                loading.warning("the weights of before may still be parked: %s", error)

        frees = 0 if self._service.holders(outdated) else outdated.arena_nbytes
        return await self._loader.load(self._settings, self._progressed, ready, frees)

    async def _reload_when_asked(self) -> None:
        """Wait for requests to load again after a release; a failure is told, not fatal."""
        while True:
            await self._service.load_wanted.wait()
            self._parking.drop([RELEASED])
            try:
                await self._load(evicted=True)
                await self._warmed_up()
            except PreloadError as error:
                loading.error("loading again failed: %s", error)
                self._service.load_failed(str(error))
                self._notifier.status(f"failed: {error}")

    async def _undisturbed(self) -> None:
        """Wait while engines profile that hold weights of an earlier life: what is evicted, and a
        loader at its end, frees memory."""
        if self._service.profilers():
            deadlines = self._settings.deadlines
            self._notifier.extend_timeout(deadlines.profiling + deadlines.silence)
            self._notifier.status("waiting for engines that measure free memory")
            self._settled.set()
            await self._service.undisturbed()

    def _progressed(self, told: Progress) -> None:
        self._service.progressed(told)
        self._hold_off()
        text = progress(told.phase, told.done, told.total)
        self._notifier.progress(text, told.phase, told.done, told.total)

    def _hold_off(self) -> None:
        """Ask the manager for as long as a loader may take to the next sign of life, and for as
        long as ending it takes: what it died of is ours to tell."""
        deadlines = self._settings.deadlines
        self._notifier.extend_timeout(deadlines.silence + deadlines.stop)

    def _adopt(self, parked: Parked) -> Adoption:
        """What comes of `parked`; the checkpoint's error if neither that nor a load can succeed."""
        unseen: PreloadError | None = None
        files: tuple[FileIdentity, ...] = ()
        try:
            files = identities_of(Path(self._settings.model.path))
        except PreloadError as error:
            adopting.warning("the checkpoint cannot be compared with what is parked: %s", error)
            unseen = error
        wanted = recipe_of(self._settings, files)
        adoption = adopt(parked, self._loader.keeper, wanted)
        # Files that changed are an ordinary reason to load.
        level = logging.INFO if adoption.may_serve else logging.WARNING
        for reason in adoption.reasons:
            adopting.log(level, "%s", reason)
        if adoption.generation is None and unseen is not None:
            # What is parked stays so: the settings may be the mistake.
            if adoption.outdated is not None:
                adoption.outdated.close()
            raise unseen
        return adoption

    def _take_up_gpu(self, fds: list[OwnedFd], tasks: TaskGroup, undo: AsyncExitStack) -> None:
        """Look after the GPU, if there is one, beside everything else; takes `fds`."""
        if self._gpu is not None:
            undo.callback(self._gpu.close)
            self._gpu.resume(fds)
            tasks.start_soon(self._look_after, self._gpu)
        elif fds:
            for fd in fds:
                fd.close()
            self._parking.drop([PARKED])

    async def _look_after(self, gpu: Gpu) -> None:
        # Not before there is time: until a load has begun or what was parked is served.
        await self._settled.wait()
        await gpu.look_after(self._parking, self._warn)

    def _troubles(self) -> list[str]:
        """What is wrong beside the weights, for as long as it is."""
        seeding = [] if self._seeder is None else [self._seeder.port.fault]
        return [*self._warm_up.troubles(), *seeding]

    def _warn(self, why: str) -> None:
        log.warning("%s", why)
        self._service.warn(why)

    def _inherited_listener(self, fds: list[OwnedFd]) -> socket.socket | None:
        """The parked listening socket, unless nobody could connect to it by its path."""
        found = None
        for fd in fds:
            with fd:
                if found is None:
                    found = self._listener(fd)
        if fds and found is None:
            self._parking.drop([LISTENER])
        return found

    def _listener(self, fd: OwnedFd) -> socket.socket | None:
        """The socket that was parked as `fd` if it listens at our path; takes `fd`."""
        try:
            sock = seqpacket.adopted(fd)
        except ProtocolViolation as error:
            log.warning("what was parked as %s is %s", LISTENER, error)
            return None
        # It was bound under another name in the folder, and then renamed.
        folder = Path(os.fsdecode(sock.getsockname())).parent
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens and folder == self._path.parent and self._path.is_socket():
            # The settings may be others than when it was bound.
            seqpacket.set_access(self._path, self._policy.socket_mode, group=self._group)
            return sock
        sock.close()
        return None

    def _resume_leases(self, parked: dict[str, list[OwnedFd]], tasks: TaskGroup) -> None:
        """Go on with the engines that were attached to an earlier daemon."""
        for name in [name for name in parked if name.startswith(LEASE)]:
            for fd in parked.pop(name):
                try:
                    sock, peer, lease = _parked_lease(name, fd)
                except (ProtocolViolation, ValueError) as error:
                    log.warning("what was parked as %s is no lease: %s", name, error)
                    self._parking.drop([name])
                    continue
                self._service.lease_began(lease, None)
                tasks.start_soon(self._server.resume, sock, lease.id, peer)
        self._resume_profiling(parked)

    def _resume_profiling(self, parked: dict[str, list[OwnedFd]]) -> None:
        """Go on sparing those of them that measure free memory."""
        for name in [name for name in parked if name.startswith(PROFILING)]:
            for fd in parked.pop(name):
                try:
                    known = self._service.profiling_resumed(*parked_profiling(name, fd))
                except ValueError as error:
                    log.warning("what was parked as %s is no mark: %s", name, error)
                    known = False
                if not known:
                    self._parking.drop([name])

    def _reserve(self) -> seqpacket.Reservation:
        mode = self._policy.socket_mode
        return seqpacket.Reservation(self._path, mode, group=self._group)

    def _bind(self, reserved: seqpacket.Reservation) -> socket.socket:
        listener = reserved.listen(BACKLOG)
        self._parking.keep_listener(listener.fileno())
        return listener

    async def _serve(self, listener: socket.socket) -> None:
        with listener:
            try:
                await self._server.serve(listener)
            finally:
                if not self._notifier.listening:
                    # Nobody keeps the listener for a next start: no path may stay behind.
                    self._path.unlink(missing_ok=True)

    def _admit(self, sock: socket.socket) -> Peer:
        peer = peers.peer(sock)
        if not may_attach(self._policy, peer):
            raise AccessDenied(
                f"user {peer.uid} may not use {self._settings.instance}: list the user or one of "
                "its groups in the daemon's access settings"
            )
        return peer

    async def _stop_on_signal(self, scope: anyio.CancelScope) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                log.info("stopping on %s", signal.Signals(number).name)
                self._notifier.stopping()
                self._service.stopping()
                scope.cancel()
                return

    async def _show_life(self, interval_s: float) -> None:
        """Prove that this loop turns."""
        while True:
            self._notifier.watchdog()
            await anyio.sleep(interval_s)


def _parked_lease(name: str, fd: OwnedFd) -> tuple[socket.socket, Peer, Lease]:
    """An engine's connection and lease; takes `fd`. ProtocolViolation, ValueError if it is none."""
    with ExitStack() as undo:
        sock = seqpacket.connected(fd)
        undo.callback(sock.close)
        peer = peers.peer(sock)
        lease = Lease.from_fdname(name, pid=peer.pid)
        undo.pop_all()
    return sock, peer, lease
