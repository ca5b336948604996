"""Taking a lease: ask by key, read the manifest, map the chunks. No torch here."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from preloadd.domain.amounts import progress
from preloadd.domain.files import FileIdentity
from preloadd.domain.ids import DeviceId, Instance, Role
from preloadd.domain.key import ABSENT, CHECKPOINT, Key, differences, digest_method
from preloadd.domain.leases import Mode
from preloadd.domain.manifest import Manifest
from preloadd.domain.settings import Memory
from preloadd.engine.arenas import ARENAS, Arenas, Identity, Share, unless_in_use
from preloadd.engine.discovery import Candidate, candidates, found
from preloadd.engine.options import Options
from preloadd.engine.undisturbed import undisturbed
from preloadd.engine.watch import Line, Watcher
from preloadd.errors import (
    AccessDenied,
    AttachError,
    DamagedManifest,
    ErrorCode,
    InsecurePath,
    Mismatch,
    PreloadError,
    ProtocolViolation,
    Unavailable,
)
from preloadd.linux import peers
from preloadd.linux.fds import OwnedFd
from preloadd.linux.memfd import read_sealed
from preloadd.linux.paths import is_trusted, trusted_users
from preloadd.memory.api import Mapper
from preloadd.protocol import messages as m
from preloadd.protocol import payload
from preloadd.transport.blocking import Client, connect

log = logging.getLogger(__name__)

RETRY_S = 0.5
WARMUP_S = 30.0
"""Seconds that a daemon may take to find what an engine is to warm up with."""

_WORTH_WAITING = frozenset(
    {
        *(m.Reason.STARTING, m.Reason.LOADING, m.Reason.INCOMPLETE),
        *(m.Reason.BUSY, m.Reason.STOPPING, "absent"),
    }
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an engine wants. `key` makes its key from a checkpoint's digest, which may be empty;
    `digest` reads that with the method a daemon names (ValueError if it does not know it);
    `memory` is where the engine can use weights."""

    device: DeviceId
    role: Role
    client: str
    files: tuple[FileIdentity, ...]
    key: Callable[[str], Key]
    digest: Callable[[str], str]
    memory: Memory = Memory.HOST


class Attachment:
    """Mapped weights, and the connection that holds them. Owns the connection, and its share of the
    mapping: other attachments in this process may have theirs. `line` is how to reach the daemon;
    `patience` is how many seconds it may take to free memory; `mode` is what it was asked for."""

    def __init__(
        self,
        client: Client,
        granted: m.Granted,
        manifest: Manifest,
        arena: Share,
        line: Line,
        patience: float,
        mode: Mode = Mode.ZERO_COPY,
    ) -> None:
        self.manifest = manifest
        self.arena = arena
        self._client = client
        self._granted = granted
        self._line = line
        self._patience = max(patience, line.timeout)
        self._mode = mode
        self._watcher: Watcher | None = None

    def watch(self) -> None:
        """From now on, and until this is closed, have the log told when the daemon goes and comes
        back. It has no effect on the weights, nor has it that no thread can be had for it.

        Nothing for a copy: whoever has one is not concerned any more.
        """
        if self._watcher is not None or self._mode is Mode.COPY:
            return
        try:
            self._watcher = Watcher(self._line, self.manifest.generation)
        except (PreloadError, OSError) as error:
            log.warning("the daemon of %s is not watched: %s", self._line.name, error)

    def profiling(self, *, active: bool) -> None:
        """Tell the daemon that this engine measures from now on how much memory is free, so that
        nothing is freed meanwhile; or that it does so no more.

        A daemon that is older, or gone, is not told: the mapping is good without.
        """
        if not self._granted.profiling:
            log.info("the daemon of %s is older and cannot spare who profiles", self._line.name)
            return
        try:
            reply = self._client.call(m.Profiling(active=active), timeout=self._line.timeout).reply
        except (PreloadError, OSError) as error:
            log.info("the daemon could not be told of profiling: %s", error)
            return
        if isinstance(reply, (m.Refused, m.NotAvailable)):
            log.info("the daemon does not spare who profiles: %s", reply.detail)

    def warmup(self, kind: str, config_hash: str, *, limit: int) -> dict[str, bytes]:
        """What the daemon has of a kind of warm-up state for this configuration: names, which are
        anything, and contents of at most `limit` bytes each. Nothing from one that is older.

        It is asked over another connection: whatever comes of it, the lease stays. PreloadError.
        """
        if not self._granted.warmup:
            return {}
        with self._line.connect() as client, ExitStack() as received:
            asked = m.WarmupAsked(kind=kind, config_hash=config_hash)
            # A bundle is packed meanwhile, for one engine after the other.
            reply, fds = client.call(asked, timeout=max(self._line.timeout, WARMUP_S))
            received.callback(_close, fds)
            if not isinstance(reply, m.WarmupTold):
                raise _not_granted(reply)
            return {
                name: read_sealed(fd.fileno(), limit)
                for name, fd in zip(reply.names, fds, strict=True)
            }

    def release(self) -> None:
        """Have the daemon free the weights, as copy mode does once it has its own.

        Refusals are ignored: other engines hold them, and then they stay. It may take a while, as
        a daemon frees nothing while other engines measure how much memory is free. A daemon that
        is stopped does it once it goes on.
        """
        try:
            self._client.call(m.Release(), timeout=self._patience)
        except (AttachError, ProtocolViolation) as error:
            log.info("the daemon did not say that it freed the weights: %s", error)

    def close(self) -> None:
        """Unmap, unless others share the mapping, and hang up. BufferError, and the lease stays,
        where it cannot be unmapped since tensors use the memory. DeviceFailed, and the lease is
        given back, where a GPU did not do it."""
        with unless_in_use(self._hang_up):
            self.arena.close()

    def abandon(self) -> None:
        """Hang up, and leave the mapping to whoever still uses it."""
        self.arena.abandon()
        self._hang_up()

    def _hang_up(self) -> None:
        if self._watcher is not None:
            self._watcher.stop()
        self._client.close()


def attach(
    wanted: Wanted,
    options: Options,
    mapper: Mapper,
    *,
    environ: Mapping[str, str],
    uid: int,
    arenas: Arenas = ARENAS,
) -> Attachment:
    """The weights that match `wanted`, and the lease on them. What `arenas` has is not mapped anew.

    AttachError (or InsecurePath, ProtocolViolation, DamagedManifest) says why there is none. With
    `options.fallback` the first answer counts; without it, a daemon that is absent, silent or still
    loading is asked again until `options.state_timeout_s` is over, and may take as long to answer.
    """
    deadline = time.monotonic() + (0.0 if options.fallback else options.state_timeout_s)
    waits = False

    def within() -> float:
        # The first try is not to keep from the log for long that the daemon is waited for.
        left = round(deadline - time.monotonic(), 1) if waits else 0.0
        return max(options.connect_timeout_s, left)

    map_granted = partial(_map, wanted, mapper, arenas)
    while True:
        try:
            return _attach(wanted, options, map_granted, environ, uid, within)
        except Unavailable as error:
            remaining = deadline - time.monotonic()
            if error.reason not in _WORTH_WAITING or remaining <= 0:
                raise
            if not waits:
                log.info("waiting up to %.0f s for the daemon: %s", remaining, error)
            waits = True
            time.sleep(min(RETRY_S, remaining))


def _attach(
    wanted: Wanted,
    options: Options,
    map_granted: Callable[[m.Granted, Key, Sequence[OwnedFd]], tuple[Manifest, Share]],
    environ: Mapping[str, str],
    uid: int,
    within: Callable[[], float],
) -> Attachment:
    """One try. `within` is how many seconds the daemon has for what it is asked next."""
    timeout = options.connect_timeout_s
    places = candidates(options, wanted.device, wanted.role, environ, uid)
    with ExitStack() as undo:
        client, place = _connected(places, within)
        undo.callback(client.close)
        with ExitStack() as received:
            shown = environ.get(m.REHEARSAL, "")
            asks = partial(_request, wanted, mode=options.mode, rehearsal=shown)
            granted = _granted(client, wanted, asks, within, received)
            manifest, arena = map_granted(*granted)
        line = Line(
            str(Instance(wanted.device, wanted.role)),
            partial(_reconnected, place, timeout),
            timeout,
        )
        # In host memory no engine measures how much is free, so there is nothing to wait for.
        patience = timeout if wanted.memory is Memory.HOST else options.state_timeout_s
        attachment = Attachment(client, granted[0], manifest, arena, line, patience, options.mode)
        undo.pop_all()
    return attachment


def _connected(
    places: Sequence[Candidate], within: Callable[[], float]
) -> tuple[Client, Candidate]:
    """A connection to the first daemon that listens. A socket whose daemon has ended hides none."""
    silent: list[Unavailable] = []
    for place in found(places):
        try:
            check = partial(_check_listener, place.path)
            return connect(place.path, timeout=within(), check=check), place
        except Unavailable as error:
            silent.append(error)
    raise Unavailable(silent[0].reason, "; ".join(map(str, silent)))


def _reconnected(place: Candidate, timeout: float) -> Client:
    """Another connection to the daemon at a place where one was found."""
    return _connected([place], lambda: timeout)[0]


def _check_listener(path: Path, sock: socket.socket) -> None:
    """The path was checked, but who listens behind it is what counts."""
    listener = peers.peer(sock)
    if not is_trusted(listener.uid):
        raise InsecurePath(
            f"the daemon at {path} runs as user {listener.uid}, trusted are "
            f"{', '.join(map(str, sorted(trusted_users())))}: start it as one of them"
        )


def _granted(
    client: Client,
    wanted: Wanted,
    asks: Callable[[Key], m.Attach],
    within: Callable[[], float],
    received: ExitStack,
) -> tuple[m.Granted, Key, Sequence[OwnedFd]]:
    """Ask by file identities; where they do not settle it, read the digest and ask once more.

    `received` closes the descriptors.
    """
    key = wanted.key("")
    reply, fds = client.call(asks(key), timeout=within())
    if isinstance(reply, m.Mismatched) and [f.name for f in reply.fields] == [CHECKPOINT]:
        try:
            key = wanted.key(wanted.digest(digest_method(reply.fields[0].daemon)))
        except ValueError:
            raise _not_granted(reply) from None
        reply, fds = client.call(asks(key), timeout=within())
    received.callback(_close, fds)
    if not isinstance(reply, m.Granted):
        raise _not_granted(reply)
    return reply, key, fds


def _request(wanted: Wanted, key: Key, *, mode: Mode, rehearsal: str) -> m.Attach:
    return m.Attach(
        key=key,
        device=wanted.device,
        mode=mode,
        client=wanted.client,
        files=wanted.files,
        rehearsal=rehearsal,
    )


def _map(
    wanted: Wanted,
    mapper: Mapper,
    arenas: Arenas,
    granted: m.Granted,
    key: Key,
    fds: Sequence[OwnedFd],
) -> tuple[Manifest, Share]:
    """Map what was granted, after the manifest itself says that it is what was asked for."""
    packed = read_sealed(fds[0].fileno(), granted.manifest)
    if len(packed) != granted.manifest:
        raise DamagedManifest(
            f"the daemon granted a manifest of {granted.manifest} bytes, and sent {len(packed)}"
        )
    with undisturbed():
        manifest = payload.decode(packed)
    if (manifest.generation, manifest.chunks) != (granted.generation, granted.chunks):
        raise DamagedManifest("the daemon granted other chunks than its manifest describes")
    _check_wanted(manifest, wanted, key)
    identity = Identity(
        manifest.backend, wanted.device, manifest.generation, manifest.chunks, mapper.private
    )
    return manifest, arenas.share(identity, fds[1:], mapper)


def _close(fds: Sequence[OwnedFd]) -> None:
    for fd in fds:
        fd.close()


def _check_wanted(manifest: Manifest, wanted: Wanted, key: Key) -> None:
    """Mismatch unless the manifest is of these weights, on the engine's own device."""
    place = {
        "device": manifest.recipe.fields.get("device", ABSENT),
        "memory": manifest.backend,
    }
    found = (
        *differences(place, {"device": wanted.device, "memory": wanted.memory.value}),
        *differences(manifest.key, key, daemon_files=manifest.shards, engine_files=wanted.files),
    )
    if found:
        raise Mismatch(tuple((d.field, d.daemon, d.engine) for d in found))


def _not_granted(reply: m.Reply) -> Exception:
    match reply:
        case m.Mismatched():
            return Mismatch(_told(reply.fields))
        case m.NotAvailable():
            return Unavailable(reply.reason, _progress(reply))
        case m.Refused(code=ErrorCode.DENIED):
            return AccessDenied(reply.detail)
        case m.Refused():
            return AttachError(f"the daemon refused ({reply.code}): {reply.detail}")
        case _:
            return ProtocolViolation(f"the daemon answered attach with {type(reply).__name__}")


def _told(fields: Sequence[m.Field]) -> tuple[tuple[str, str, str], ...]:
    """What differs. A checkpoint that was not read, since other fields differ, is no difference."""
    unread = [f for f in fields if f.name == CHECKPOINT and not f.engine]
    shown = [f for f in fields if f not in unread] or fields
    return tuple((f.name, f.daemon, f.engine) for f in shown)


def _progress(reply: m.NotAvailable) -> str:
    far = progress(reply.phase, reply.done, reply.total, said=reply.reason)
    if reply.reason is not m.Reason.LOADING or not far:
        return f"the daemon has no weights now ({reply.reason}): {reply.detail}"
    return f"the daemon is still loading: {far}"
