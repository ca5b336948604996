"""An engine against daemons that break every rule: never wrong weights, never a lost descriptor."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from preloadd.engine.client import attach
from preloadd.engine.options import Options
from preloadd.errors import (
    AccessDenied,
    AttachError,
    DamagedManifest,
    InsecurePath,
    Mismatch,
    PreloadError,
    ProtocolViolation,
    Unavailable,
)
from preloadd.linux import memfd, seqpacket
from preloadd.linux.fds import OwnedFd
from preloadd.memory.host import HostFiller, HostMapper
from preloadd.protocol import codec, payload
from preloadd.protocol import messages as m
from tests.checkout import ROOT
from tests.checkpoints import stored
from tests.leases import content
from tests.listening import listen
from tests.manager import Manager

NOBODY = 65534


@dataclass
class Grant:
    """What a daemon would rightly answer; a hostile one alters it first. Owns its descriptors."""

    granted: m.Granted
    fds: list[OwnedFd]

    @property
    def manifest(self):
        return payload.decode(memfd.read_sealed(self.fds[0].fileno(), payload.MAX_NBYTES))

    def put(self, index: int, fd: OwnedFd) -> None:
        """Have `fd` in the place of another descriptor."""
        self.fds[index].close()
        self.fds[index] = fd

    def tell(self, **changes) -> None:
        """Change the manifest, and describe that rightly."""
        encoded = payload.encode(replace(self.manifest, **changes))
        self.put(0, memfd.sealed_bytes("manifest", encoded))
        self.say(manifest=len(encoded))

    def say(self, **changes) -> None:
        """Change the message."""
        self.granted = m.msgspec.structs.replace(self.granted, **changes)


Answer = Callable[[socket.socket, Grant], None]


@pytest.fixture
def grant(shared: Manager) -> Iterator[Grant]:
    with shared.client() as client:
        request = m.Attach(key=shared.status().key, device="CPU-0")
        reply, fds = client.call(request, timeout=10)
    made = Grant(reply, list(fds))
    yield made
    for fd in made.fds:
        fd.close()


@pytest.fixture
def ask(shared: Manager, grant: Grant, socket_dir: Path):
    """Attach to a daemon that answers every request with `answer`; more requests get it again."""
    path = socket_dir / "rank.sock"

    def ask(answer: Answer, **options):
        chosen = Options(socket_path=path, connect_timeout_s=options.pop("timeout", 10.0))
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(listen(path, 0o600, 8))
            daemon = threading.Thread(target=_serve, args=(listener, answer, grant))
            daemon.start()
            undo.callback(daemon.join)
            undo.callback(listener.shutdown, socket.SHUT_RDWR)
            wanted = shared.wanted()
            return attach(wanted, chosen, HostMapper(), environ={}, uid=os.geteuid())

    return ask


def _serve(listener: socket.socket, answer: Answer, grant: Grant) -> None:
    with contextlib.suppress(OSError):  # the listener was shut down, or the engine hung up
        while True:
            client, _ = listener.accept()
            with client:
                client.settimeout(10)
                while client.recv(1 << 16):
                    answer(client, grant)


def honest(client: socket.socket, grant: Grant) -> None:
    send(client, codec.encode(grant.granted), grant.fds)


def send(client: socket.socket, data: bytes, fds: Sequence[OwnedFd] = ()) -> None:
    seqpacket.send(client, data, [fd.fileno() for fd in fds])


def leaving(client: socket.socket, grant: Grant) -> None:
    honest(client, grant)
    client.shutdown(socket.SHUT_RDWR)


def test_the_stage_is_real(ask, shared):
    """What all other tests alter is good as it is, and stays so without the daemon."""
    lease = ask(leaving)
    assert content(lease) == stored(Path(shared.settings.model.path))
    lease.close()


@pytest.mark.parametrize(
    ("knows", "why"),
    [(False, "is older and cannot spare who profiles"), (True, "could not be told of profiling")],
)
def test_a_daemon_that_is_older_or_gone_is_not_told_of_profiling(ask, grant, caplog, knows, why):
    """An older one would hang up, and so end the lease."""
    caplog.set_level("INFO", "preloadd.engine.client")
    grant.say(profiling=knows)
    lease = ask(leaving)
    lease.profiling(active=True)
    assert [(r.levelname, why in r.getMessage()) for r in caplog.records] == [("INFO", True)]
    lease.close()


def unsealed(data: bytes) -> OwnedFd:
    fd = memfd.create("unsealed")
    os.write(fd.fileno(), data)
    return fd


# -- what was granted is not what it should be --


def manifest_unsealed(grant: Grant) -> None:
    grant.put(0, unsealed(os.pread(grant.fds[0].fileno(), 1 << 20, 0)))


def manifest_with_a_flipped_byte(grant: Grant) -> None:
    data = bytearray(os.pread(grant.fds[0].fileno(), 1 << 20, 0))
    data[-1] ^= 1
    grant.put(0, memfd.sealed_bytes("manifest", data))


def manifest_of_noise(grant: Grant) -> None:
    grant.put(0, memfd.sealed_bytes("manifest", b"x" * os.fstat(grant.fds[0].fileno()).st_size))


def manifest_of_another_size(grant: Grant) -> None:
    data = os.pread(grant.fds[0].fileno(), 1 << 20, 0)
    grant.put(0, memfd.sealed_bytes("manifest", data[:-1]))


def manifest_is_a_device(grant: Grant) -> None:
    grant.put(0, OwnedFd(os.open("/dev/zero", os.O_RDONLY)))


def manifest_of_another_key(grant: Grant) -> None:
    grant.tell(key={**grant.manifest.key, "tp_size": "4"})


def manifest_of_another_checkpoint(grant: Grant) -> None:
    grant.tell(key={**grant.manifest.key, "checkpoint": "sampled-1:00"}, shards=())


def manifest_of_another_device(grant: Grant) -> None:
    recipe = grant.manifest.recipe
    grant.tell(recipe=replace(recipe, fields={**recipe.fields, "device": "GPU-1"}))


def manifest_of_other_memory(grant: Grant) -> None:
    grant.tell(backend="cuda")


def manifest_of_another_generation(grant: Grant) -> None:
    grant.tell(generation="0e" * 16)


def manifest_with_other_chunks(grant: Grant) -> None:
    first, *rest = grant.manifest.chunks
    grant.tell(chunks=(first + 4096, *rest))


def chunk_sizes_that_lie(grant: Grant) -> None:
    first, *rest = grant.manifest.chunks
    grant.tell(chunks=(first + 4096, *rest))
    grant.say(chunks=(first + 4096, *rest))


def chunk_unsealed(grant: Grant) -> None:
    with HostFiller().create(grant.granted.chunks[1]) as chunk:
        grant.put(2, chunk.fd.duplicate())


def chunk_is_a_file(grant: Grant) -> None:
    grant.put(2, OwnedFd(os.open(__file__, os.O_RDONLY)))


def chunk_is_a_device(grant: Grant) -> None:
    grant.put(2, OwnedFd(os.open("/dev/zero", os.O_RDONLY)))


def chunks_swapped(grant: Grant) -> None:
    """Of different sizes, so that it can be seen."""
    sizes = grant.granted.chunks
    other = next(n for n, size in enumerate(sizes) if size != sizes[0])
    grant.fds[1], grant.fds[1 + other] = grant.fds[1 + other], grant.fds[1]


def descriptors_missing(grant: Grant) -> None:
    grant.fds.pop().close()


def descriptors_to_spare(grant: Grant) -> None:
    grant.fds.append(grant.fds[0].duplicate())


def no_descriptors(grant: Grant) -> None:
    while grant.fds:
        grant.fds.pop().close()


def views_beyond_their_storage(grant: Grant) -> None:
    storages = grant.manifest.storages
    grant.tell(storages=replace(storages, nbytes=[1] * len(storages.nbytes)))


@pytest.mark.parametrize(
    ("lie", "error", "told"),
    [
        (manifest_unsealed, ProtocolViolation, "a payload came unsealed"),
        (manifest_with_a_flipped_byte, DamagedManifest, "digest does not match"),
        (manifest_of_noise, DamagedManifest, "no manifest of this version"),
        (manifest_of_another_size, DamagedManifest, r"a manifest of \d+ bytes, and sent \d+"),
        (manifest_is_a_device, ProtocolViolation, "something else than a memfd"),
        (manifest_of_another_key, Mismatch, "tp_size: daemon has '4', engine wants '1'"),
        (manifest_of_another_checkpoint, Mismatch, "checkpoint: daemon has 'sampled-1:00'"),
        (manifest_of_another_device, Mismatch, "device: daemon has 'GPU-1', engine wants 'CPU-0'"),
        (manifest_of_other_memory, Mismatch, "memory: daemon has 'cuda', engine wants 'host'"),
        (manifest_of_another_generation, DamagedManifest, "granted other chunks than its manifest"),
        (manifest_with_other_chunks, DamagedManifest, "granted other chunks than its manifest"),
        (chunk_sizes_that_lie, DamagedManifest, r"a chunk has \d+ bytes instead of \d+"),
        (chunk_unsealed, DamagedManifest, "a chunk is not sealed"),
        (chunk_is_a_file, DamagedManifest, "something else than a memfd|is not sealed"),
        (chunk_is_a_device, DamagedManifest, "something else than a memfd"),
        (chunks_swapped, DamagedManifest, r"a chunk has \d+ bytes instead of \d+"),
        (descriptors_missing, ProtocolViolation, r"descriptors for a manifest and \d+ chunks"),
        (descriptors_to_spare, ProtocolViolation, r"descriptors for a manifest and \d+ chunks"),
        (no_descriptors, ProtocolViolation, r"0 descriptors for a manifest and \d+ chunks"),
        (views_beyond_their_storage, DamagedManifest, "reaches past the end of its storage"),
    ],
)
def test_what_was_granted_is_proved(ask, grant, lie, error, told):
    lie(grant)
    with pytest.raises(error, match=told):
        ask(honest)


# -- answers that are none --


def another_kind(client: socket.socket, grant: Grant) -> None:
    send(client, codec.encode(m.MemoryHeld(nbytes=1)))


def another_kind_with_descriptors(client: socket.socket, grant: Grant) -> None:
    send(client, codec.encode(m.Done()), grant.fds)


def noise(client: socket.socket, grant: Grant) -> None:
    send(client, b"\x01noise", grant.fds)


def a_newer_version(client: socket.socket, grant: Grant) -> None:
    send(client, b"\x02" + codec.encode(grant.granted)[1:], grant.fds)


def too_long(client: socket.socket, grant: Grant) -> None:
    send(client, codec.encode(grant.granted) + b"\0" * (70 << 10), grant.fds)


def descriptors_without_a_message(client: socket.socket, grant: Grant) -> None:
    client.sendmsg([b""], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, bytes(4))])


def the_end(client: socket.socket, grant: Grant) -> None:
    client.shutdown(socket.SHUT_RDWR)


def silence(client: socket.socket, grant: Grant) -> None:
    pass


def the_same_mismatch_twice(client: socket.socket, grant: Grant) -> None:
    """To the key by files and to the key by digest alike."""
    field = m.Field(name="checkpoint", daemon="sampled-1:00", engine="")
    send(client, codec.encode(m.Mismatched(fields=(field,))))


def an_unknown_digest(client: socket.socket, grant: Grant) -> None:
    field = m.Field(name="checkpoint", daemon="quantum-9:00", engine="")
    send(client, codec.encode(m.Mismatched(fields=(field,))))


def refusal(client: socket.socket, grant: Grant) -> None:
    send(client, codec.encode(m.Refused(code="denied", detail="user 7 may not")))


def a_fault(client: socket.socket, grant: Grant) -> None:
    send(client, codec.encode(m.Refused(code="internal", detail="its log says why")))


@pytest.mark.parametrize(
    ("answer", "error", "told"),
    [
        (another_kind, ProtocolViolation, "answered attach with memory-held"),
        (another_kind_with_descriptors, ProtocolViolation, "descriptors where none belong"),
        (noise, ProtocolViolation, "the packet is not a reply"),
        (a_newer_version, ProtocolViolation, "version 2, this side speaks version 1: use the same"),
        (too_long, ProtocolViolation, "a packet of more than 65536 bytes"),
        (descriptors_without_a_message, ProtocolViolation, "descriptors but no message"),
        (the_end, Unavailable, "hung up: it ended or was restarted, see its log"),
        (silence, Unavailable, "did not answer attach within 0.3 s: see its log"),
        (the_same_mismatch_twice, Mismatch, "checkpoint: daemon has 'sampled-1:00'"),
        (an_unknown_digest, Mismatch, "checkpoint: daemon has 'quantum-9:00'"),
        (refusal, AccessDenied, "user 7 may not"),
        (a_fault, AttachError, r"the daemon refused \(internal\): its log says why"),
    ],
)
def test_an_answer_that_is_none_is_an_error_that_says_so(ask, answer, error, told):
    with pytest.raises(error, match=told):
        ask(answer, timeout=0.3 if answer is silence else 10.0)


def test_every_one_of_these_errors_lets_an_engine_fall_back() -> None:
    """Engines load from disk upon a PreloadError, and upon nothing else."""
    for kind in (ProtocolViolation, DamagedManifest, Mismatch, Unavailable, AccessDenied):
        assert issubclass(kind, PreloadError)


# -- a daemon of somebody else --

FOREIGN = """
import os, socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.bind(sys.argv[1])
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
sock.listen()
print("listening", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("owner", [0, NOBODY])
def test_a_daemon_of_another_user_is_not_asked(shared, socket_dir, owner):
    path = socket_dir / "rank.sock"
    with subprocess.Popen(
        [sys.executable, "-I", "-c", FOREIGN, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as daemon:
        assert daemon.stdout.readline() == b"listening\n"
        os.chown(path, owner, -1)
        with pytest.raises(InsecurePath) as refused:
            attach(shared.wanted(), Options(socket_path=path), HostMapper(), environ={}, uid=0)
        daemon.stdin.close()
    why = f"runs as user {NOBODY}" if owner == 0 else f"belongs to user {NOBODY}"
    assert why in str(refused.value)
    assert "trusted are 0" in str(refused.value)


# -- an engine that has reached its own limit --

STARVED = """
import os, resource, sys
from pathlib import Path
from preloadd.domain.ids import device_id
from preloadd.engine.client import attach
from preloadd.engine.native import NativeCheckpoint
from preloadd.engine.options import Options
from preloadd.errors import OutOfDescriptors
from preloadd.memory.host import HostMapper

wanted = NativeCheckpoint(Path(sys.argv[1])).wanted(device_id("CPU-0"), client="starved")
options = Options(socket_path=Path(sys.argv[2]))
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
before = sorted(os.listdir("/proc/self/fd"))
refusals = 0
while True:
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + refusals, hard))
    try:
        lease = attach(wanted, options, HostMapper(), environ={}, uid=os.geteuid())
    except OutOfDescriptors as error:
        assert "raise the limit with `ulimit -n`" in str(error), error
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        assert sorted(os.listdir("/proc/self/fd")) == before
        refusals += 1
    else:
        break
print(refusals)
lease.close()
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
assert sorted(os.listdir("/proc/self/fd")) == before
"""


def test_an_engine_at_its_descriptor_limit_says_so_and_loses_none(shared):
    done = subprocess.run(
        [sys.executable, "-c", STARVED, shared.settings.model.path, str(shared.socket)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert not done.returncode, done.stderr
    assert int(done.stdout) > len(shared.arena)
    shared.rests()
    assert shared.status().lease_count == 0
