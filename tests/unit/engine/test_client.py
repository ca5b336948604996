"""Attaching to a real daemon. Hostile ones are in tests/process."""

import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

import preloadd.engine
from preloadd.domain.ids import device_id
from preloadd.domain.leases import Mode
from preloadd.domain.lifecycle import State
from preloadd.engine.arenas import Arenas
from preloadd.engine.client import attach
from preloadd.engine.native import NativeCheckpoint
from preloadd.engine.options import Options
from preloadd.errors import DeviceFailed, InsecurePath, Mismatch, Unavailable
from preloadd.memory.host import HostMapper
from tests.checkpoints import llama, stored
from tests.descriptors import targets
from tests.leases import content
from tests.listening import listen
from tests.threads import threads_left
from tests.waiting import eventually


@pytest.fixture
def get(daemon, model):
    """Attaches with these options; everything is let go of at the end."""
    made = []

    def get(*, wanted=None, environ=None, mapper=None, arenas=None, **options):
        chosen = Options(**({"socket_path": daemon.socket} if environ is None else {}) | options)
        wish = wanted or NativeCheckpoint(model).wanted(device_id("CPU-0"), client="engine")
        found = attach(
            wish,
            chosen,
            mapper or HostMapper(),
            environ=environ or {},
            uid=os.geteuid(),
            arenas=Arenas() if arenas is None else arenas,
        )
        made.append(found)
        return found

    yield get
    for found in made:
        found.close()
    eventually(lambda: daemon.status().lease_count == 0, lambda: "end of all leases")


def test_the_weights_are_mapped_and_the_daemon_knows_who_holds_them(get, daemon, model):
    attachment = get()
    assert content(attachment) == stored(model)
    assert not attachment.arena.writable
    (lease,) = daemon.status().leases
    assert (lease.client, lease.pid, lease.mode) == ("engine", os.getpid(), Mode.ZERO_COPY)
    assert lease.generation == attachment.manifest.generation


def test_closing_gives_the_lease_back(get, daemon):
    get().close()
    eventually(lambda: daemon.status().lease_count == 0, lambda: "end of the lease")


def test_weights_in_use_stay_mapped_and_held(get, daemon):
    attachment = get()
    window = attachment.arena.chunk(0)
    with pytest.raises(BufferError):
        attachment.close()
    assert daemon.status().lease_count == 1
    assert window[:1] is not None
    window.release()


def test_a_device_that_is_lost_is_told_once_and_gives_the_lease_back(get, daemon, lost):
    arenas = Arenas()
    attachment = get(mapper=lost, arenas=arenas)
    with pytest.raises(DeviceFailed, match="the GPU is lost"):
        attachment.close()
    eventually(lambda: daemon.status().lease_count == 0, lambda: "end of the lease")
    assert len(arenas) == 0
    attachment.close()


def test_a_device_that_is_lost_while_memory_is_in_use_takes_nothing_from_its_users(
    get, daemon, lost
):
    attachment = get(mapper=lost)
    window = attachment.arena.chunk(0)
    with pytest.raises(BufferError):
        attachment.close()
    assert daemon.status().lease_count == 1
    window.release()
    with pytest.raises(DeviceFailed):
        attachment.close()


HERE = str(Path(preloadd.engine.__file__).parent)


def interrupted(at: int, do) -> bool:
    """Whether it came to that: Ctrl-C is pressed at a call within the engine, the so manyth.

    Not at one that undoes what was begun: there is no help against that.
    """
    passed = 0

    def look(frame, event, _):
        nonlocal passed
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HERE) and code.co_name != "_close":
            passed += 1
            if passed == at:
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        do()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def memory() -> list[str]:
    """Descriptors of memory in this process. Sockets come and go with what the manager parks."""
    return [number for number, target in targets().items() if target.startswith("/memfd:")]


def test_an_interrupt_leaves_nothing_wherever_it_comes(get, daemon):
    arenas, at = Arenas(), 1
    before = memory()
    while interrupted(at, lambda: get(arenas=arenas)):
        assert (len(arenas), memory()) == (0, before), at
        at += 1
    assert at > 15
    eventually(lambda: daemon.status().lease_count == 1, lambda: "end of all leases but one")


def test_an_abandoned_lease_leaves_the_mapping(get, daemon, model):
    attachment = get()
    attachment.abandon()
    eventually(lambda: daemon.status().lease_count == 0, lambda: "end of the lease")
    assert content(attachment) == stored(model)


def test_a_refused_release_changes_nothing(get, daemon, model, caplog):
    caplog.set_level("INFO")
    one, _ = get(mode=Mode.COPY), get()
    one.release()
    assert daemon.status().generation == one.manifest.generation
    assert content(one) == stored(model)


def test_other_files_with_equal_content_are_matched_by_digest(get, tmp_path):
    copy = llama(tmp_path / "copy")
    wanted = NativeCheckpoint(copy).wanted(device_id("CPU-0"), client="engine")
    assert content(get(wanted=wanted)) == stored(copy)


def test_where_the_files_are_the_same_nothing_is_read(get, model):
    def read(_: str) -> str:
        raise AssertionError("the digest was read")

    wanted = NativeCheckpoint(model).wanted(device_id("CPU-0"), client="engine")
    assert get(wanted=replace(wanted, digest=read))


def test_where_more_than_the_content_differs_nothing_is_read(get, tmp_path):
    def read(_: str) -> str:
        raise AssertionError("the digest was read")

    other = NativeCheckpoint(llama(tmp_path / "other", seed=1), dtype="float32")
    wanted = other.wanted(device_id("CPU-0"), client="engine")
    with pytest.raises(Mismatch, match="dtype: daemon has 'float16', engine wants 'float32'"):
        get(wanted=replace(wanted, digest=read))


def test_other_content_is_a_mismatch_with_both_digests(get, tmp_path):
    other = NativeCheckpoint(llama(tmp_path / "other", seed=1))
    with pytest.raises(Mismatch) as refused:
        get(wanted=other.wanted(device_id("CPU-0"), client="engine"))
    ((field, theirs, ours),) = refused.value.fields
    assert field == "checkpoint"
    assert theirs != ours
    assert theirs.startswith("sampled-1:")
    assert ours.startswith("sampled-1:")


def test_a_digest_that_this_engine_does_not_know_is_a_mismatch(get, tmp_path):
    def unknown(method: str) -> str:
        raise ValueError(method)

    copy = NativeCheckpoint(llama(tmp_path / "copy")).wanted(device_id("CPU-0"), client="e")
    with pytest.raises(Mismatch, match="checkpoint: daemon has 'sampled-1:"):
        get(wanted=replace(copy, digest=unknown))


def test_another_device_is_a_mismatch(get, model):
    wanted = NativeCheckpoint(model).wanted(device_id("CPU-5"), client="engine")
    with pytest.raises(Mismatch, match="device: daemon has 'CPU-0', engine wants 'CPU-5'"):
        get(wanted=wanted)


def test_what_is_written_privately_reaches_no_other_engine(get, model):
    arenas = Arenas()
    engine = get(mapper=HostMapper(private=True), arenas=arenas)
    other = get(arenas=arenas)
    with engine.arena.chunk(0) as view:
        view[:] = bytes(len(view))
    assert content(other) == content(get()) == stored(model)
    assert content(engine) != stored(model)
    assert engine.arena.private_nbytes > other.arena.private_nbytes == 0


def test_a_daemon_in_host_memory_is_not_waited_for_until_it_has_freed_it(get, own_daemon, caplog):
    """Nobody measures memory there. One that is stopped does what it was told when it goes on."""
    caplog.set_level("INFO", "preloadd.engine.client")
    where = {"socket_path": own_daemon.socket, "wanted": own_daemon.wanted()}
    engine = get(**where, mode=Mode.COPY, connect_timeout_s=0.5, state_timeout_s=60.0)
    own_daemon.signal(signal.SIGSTOP)
    try:
        since = time.monotonic()
        engine.release()
        assert time.monotonic() - since < 5
    finally:
        own_daemon.signal(signal.SIGCONT)
    assert "the daemon did not say that it freed the weights: the daemon at" in caplog.text
    engine.close()
    eventually(lambda: own_daemon.status().state is State.RELEASED, lambda: "the release")


# -- profiling --


def test_the_daemon_is_told_that_an_engine_profiles(get, daemon):
    attachment = get()
    for active in (True, False):
        attachment.profiling(active=active)
        (lease,) = daemon.status().leases
        assert lease.profiling is active


def test_a_daemon_that_spares_nobody_is_no_error(own_daemon, caplog):
    caplog.set_level("INFO", "preloadd.engine.client")
    attachment = own_daemon.attach(mode=Mode.COPY)
    attachment.release()
    attachment.profiling(active=True)
    assert "the daemon does not spare who profiles: only an engine that holds" in caplog.text
    own_daemon.signal(signal.SIGTERM)
    assert own_daemon.ended() == 0
    for name in own_daemon.parked:
        own_daemon.unpark(name)
    attachment.profiling(active=False)
    assert "the daemon could not be told of profiling: the daemon at" in caplog.text
    attachment.profiling(active=False)
    assert {record.levelname for record in caplog.records} == {"INFO"}


# -- watching --


def watchers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "preloadd watch CPU-0"]


@pytest.mark.slow
def test_an_engine_that_watches_tells_that_its_daemon_went_and_is_back(own_daemon, model, caplog):
    caplog.set_level("DEBUG", "preloadd.engine.watch")
    attachment = own_daemon.attach()
    attachment.watch()
    attachment.watch()
    assert len(watchers()) == 1
    eventually(lambda: "the daemon of CPU-0 is serving" in caplog.text, lambda: "its state")
    own_daemon.kill()
    eventually(lambda: "the daemon of CPU-0 is gone" in caplog.text, lambda: "a warning")
    own_daemon.start()
    own_daemon.ready()
    eventually(lambda: "back with the same weights" in caplog.text, lambda: "a note")
    assert content(attachment) == stored(model)
    attachment.close()
    eventually(lambda: not watchers(), lambda: "end of the thread")
    assert [r.levelname for r in caplog.records if r.levelname != "DEBUG"] == ["WARNING", "INFO"]


def test_who_has_a_copy_is_not_concerned_with_its_daemon(get):
    attachment = get(mode=Mode.COPY)
    attachment.watch()
    assert not watchers()


def test_watching_ends_with_the_lease_only(get):
    attachment = get()
    attachment.watch()
    window = attachment.arena.chunk(0)
    with pytest.raises(BufferError):
        attachment.close()
    assert len(watchers()) == 1
    attachment.abandon()
    eventually(lambda: not watchers(), lambda: "end of the thread")
    window.release()


def test_without_a_thread_an_engine_goes_on(get, caplog):
    attachment = get()
    with threads_left(0):
        attachment.watch()
    assert "the daemon of CPU-0 is not watched: " in caplog.text
    assert "this process gets no more threads" in caplog.text


# -- finding the daemon --


def test_it_is_found_in_a_folder_by_its_device(get, daemon):
    assert get(socket_path=None, socket_dir=Path(daemon.settings.socket_dir))
    assert get(environ={"PRELOADD_SOCKET_DIR": daemon.settings.socket_dir})


def test_nobody_there_names_every_place(get, socket_dir):
    with pytest.raises(Unavailable) as absent:
        get(environ={"PRELOADD_SOCKET_DIR": str(socket_dir), "TMPDIR": str(socket_dir)})
    assert absent.value.reason == "absent"
    for path in (socket_dir, socket_dir / f"preloadd-{os.geteuid()}"):
        assert f"{path}/CPU-0/rank.sock" in str(absent.value)


def test_a_socket_that_its_daemon_left_hides_no_other_daemon(get, daemon, socket_dir):
    stale = socket_dir / "preloadd" / "CPU-0" / "rank.sock"
    stale.parent.mkdir(parents=True, mode=0o700)
    stale.parents[1].chmod(0o700)
    listen(stale, 0o600, 1).close()
    both = {"PRELOADD_SOCKET_DIR": daemon.settings.socket_dir, "XDG_RUNTIME_DIR": str(socket_dir)}
    assert get(environ=both)
    alone = {"XDG_RUNTIME_DIR": str(socket_dir), "TMPDIR": str(socket_dir)}
    with pytest.raises(Unavailable, match=f"nobody listens on {stale}: its daemon has ended"):
        get(environ=alone)


def test_an_unfit_folder_is_refused_and_not_passed_over(get, daemon):
    folder = Path(daemon.settings.socket_dir)
    folder.chmod(0o777)
    try:
        with pytest.raises(InsecurePath, match="writable for group or others"):
            get(socket_path=None, socket_dir=folder)
    finally:
        folder.chmod(0o700)


def test_without_fallback_an_absent_daemon_is_waited_for(get, socket_dir):
    since = time.monotonic()
    with pytest.raises(Unavailable, match="no daemon serves this device"):
        get(socket_path=socket_dir / "none.sock", fallback=False, state_timeout_s=0.1)
    assert 0.1 <= time.monotonic() - since < 2


@pytest.fixture
def silent(socket_dir):
    """A socket where somebody listens, but says nothing."""
    path = socket_dir / "silent.sock"
    with listen(path, 0o600, 8):
        yield path


def test_with_fallback_a_silent_daemon_is_not_waited_for_any_longer_than_for_an_answer(get, silent):
    since = time.monotonic()
    with pytest.raises(Unavailable, match=r"did not answer attach within 0\.1 s"):
        get(socket_path=silent, connect_timeout_s=0.1, state_timeout_s=60.0)
    assert time.monotonic() - since < 2


def test_without_fallback_a_silent_daemon_is_waited_for_and_no_longer(get, silent, caplog):
    caplog.set_level("INFO", "preloadd.engine.client")
    since = time.monotonic()
    # All that is left of it after the first try and the pause: 0.3 s and 0.5 s.
    with pytest.raises(Unavailable, match=r"did not answer attach within 0\.[56] s"):
        get(socket_path=silent, fallback=False, connect_timeout_s=0.3, state_timeout_s=1.4)
    assert 1.3 <= time.monotonic() - since < 2
    assert "waiting up to 1 s for the daemon: the daemon at" in caplog.text


def test_without_fallback_a_daemon_may_be_slower_than_an_answer_may_be(get, own_daemon, model):
    """One that is stopped for longer, but is there again in time."""
    own_daemon.signal(signal.SIGSTOP)
    again = threading.Timer(1.0, own_daemon.signal, (signal.SIGCONT,))
    again.start()
    where = {"socket_path": own_daemon.socket, "wanted": own_daemon.wanted()}
    try:
        engine = get(**where, fallback=False, connect_timeout_s=0.001, state_timeout_s=60.0)
    finally:
        again.join()
    assert content(engine) == stored(model)
    engine.close()


def test_with_fallback_the_first_answer_counts(get, socket_dir):
    since = time.monotonic()
    with pytest.raises(Unavailable):
        get(socket_path=socket_dir / "none.sock")
    assert time.monotonic() - since < 0.3


def test_a_daemon_without_warm_up_state_has_none(get, daemon):
    attachment = get()
    assert attachment.warmup("flashinfer_autotune", "ab" * 32, limit=1 << 20) == {}
    assert daemon.status().lease_count == 1
