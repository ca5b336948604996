"""The rank's view of a loader, with stand-ins that are real processes and follow a script."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from preloadd.domain.settings import Deadlines, Versions, Warmup
from preloadd.errors import DamagedManifest, LoaderFailed
from preloadd.linux import memfd
from preloadd.memory.host import HostKeeper
from preloadd.protocol import messages as m
from preloadd.rank import loading
from preloadd.rank.loading import Loader
from tests.checkout import ROOT
from tests.descriptors import open_descriptors
from tests.unit.rank.generations import ID, PAGE

pytestmark = pytest.mark.anyio


PROLOGUE = """
import os, signal, socket, sys, time
from contextlib import suppress
from preloadd.linux.fds import OwnedFd
from preloadd.linux.memfd import create, sealed_bytes
from preloadd.linux.passed import inherited
from preloadd.memory.host import HostFiller
from preloadd.protocol import codec, messages as m
from preloadd.transport.blocking import Link
(fd,) = inherited(os.environ, os.getpid())["link"]
link = Link(socket.socket(fileno=fd.take()))
order = codec.decode_order(link.receive().data)
def say(message, *fds):
    link.send(codec.encode(message), fds)
def chunk(index, nbytes=4096, told=None):
    with HostFiller().create(nbytes) as made:
        say(m.ChunkFilled(index=index, nbytes=told or nbytes), made.fd)
def manifest():
    data = open(os.environ["MANIFEST"], "rb").read()
    with sealed_bytes("manifest", data) as fd:
        say(m.ManifestWritten(nbytes=len(data)), fd)
def good():
    chunk(0); chunk(1, 8192); manifest()
"""


@pytest.fixture
def load(tmp_path, settings, make):
    """Loads with a loader that does as `script` says; the generation is closed at the end."""
    original = make()
    data = os.pread(original.sealed.fileno(), 1 << 20, 0)
    (tmp_path / "manifest").write_bytes(data)
    environ = os.environ | {"PYTHONPATH": str(ROOT), "MANIFEST": str(tmp_path / "manifest")}
    generations = []

    async def load(
        script,
        *,
        told=lambda _: None,
        renewed=lambda given: given,
        agree=None,
        warming=None,
        within=20.0,
        **deadlines,
    ):
        argv = [sys.executable, "-c", PROLOGUE + script]
        limits = Deadlines(**{"silence": 10.0, "stop": 0.4, **deadlines})
        chosen = replace(settings, deadlines=limits, warmup=Warmup(deadline=within))
        loader = Loader(
            argv,
            environ,
            HostKeeper(),
            on_loaded=generations.append,
            renewed=renewed,
            warming=warming,
        )
        generation = await loader.load(chosen, told, agree)
        assert generations[-1] is generation
        return generation

    yield load
    for generation in generations:
        generation.close()


async def test_what_a_loader_hands_over_becomes_a_sealed_generation(load):
    before = open_descriptors()
    told = []
    generation = await load(
        "say(m.Progress(phase='loading', done=1, total=2)); good()", told=told.append
    )
    assert generation.id == ID
    assert [(report.phase, report.done, report.total) for report in told] == [("loading", 1, 2)]
    for fd, nbytes in zip(generation.chunks, (PAGE, 2 * PAGE), strict=True):
        HostKeeper().verify(fd.fileno(), nbytes)
    assert open_descriptors() == before + 3


async def test_the_loader_is_told_what_to_load(load, settings):
    await load(
        f"assert order.settings.model.name == {settings.model.name!r}, order\n"
        f"assert order.settings.instance == 'CPU-0'\ngood()"
    )


BAD = {
    "it says why": (
        "say(m.Failed(code='checkpoint', detail='model.safetensors is empty')); sys.exit(65)",
        65,
        "model.safetensors is empty",
    ),
    "it says why and ends well": (
        "say(m.Failed(code='checkpoint', detail='so be it'))",
        1,
        "so be it",
    ),
    "late": ("good(); say(m.Failed(code='config', detail='warm-up')); sys.exit(78)", 78, "warm-up"),
    "it crashes": ("chunk(0); 1 / 0", 1, "ended with 1 before the weights were complete"),
    "it is killed": (
        "chunk(0); os.kill(os.getpid(), signal.SIGKILL)",
        137,
        "was killed by signal 9 before the weights were complete",
    ),
    "it fails at the very end": ("good(); sys.exit(3)", 3, "ended with 3"),
    "it ends without a word": ("pass", 1, "ended with 0 before the weights were complete"),
    "no manifest": ("chunk(0); chunk(1, 8192)", 1, "ended with 0 before the weights were"),
    "noise": ("link.send(b'noise'); time.sleep(60)", 76, "the loader was ended: the packet is"),
    "chunks out of order": ("chunk(1); time.sleep(60)", 76, "index 1 after 0 chunks"),
    "a chunk without its descriptor": (
        "say(m.ChunkFilled(index=0, nbytes=4096)); time.sleep(60)",
        76,
        "descriptors: 0 instead of 1",
    ),
    "a manifest before its chunks": ("manifest(); time.sleep(60)", 76, "a manifest after 0 chunks"),
    "a request": ("say(m.Status()); time.sleep(60)", 76, "not a loader's report"),
}


@pytest.mark.parametrize(("script", "status", "why"), BAD.values(), ids=BAD)
async def test_a_loader_without_weights_is_an_error_with_its_status(load, script, status, why):
    before = open_descriptors()
    with pytest.raises(LoaderFailed) as failed:
        await load(script)
    assert failed.value.exit_status == status
    assert why in str(failed.value)
    assert open_descriptors() == before


LIES = {
    "chunks of other sizes": ("chunk(0); chunk(1); manifest()", "does not describe the chunks"),
    "a chunk smaller than told": ("chunk(0, 4096, 8192); manifest()", "4096 bytes instead of 8192"),
    "a chunk that cannot be sealed": (
        "say(m.ChunkFilled(index=0, nbytes=4096), OwnedFd(os.open('/dev/zero', 0))); manifest()",
        "something else than a memfd|read-only or refuses seals",
    ),
    "a manifest of noise": (
        "chunk(0)\nwith sealed_bytes('m', b'noise') as fd:\n  say(m.ManifestWritten(nbytes=5), fd)",
        "no manifest of this version",
    ),
}


@pytest.mark.parametrize(("script", "why"), LIES.values(), ids=LIES)
async def test_what_a_loader_made_is_proved(load, script, why):
    before = open_descriptors()
    with pytest.raises(DamagedManifest, match=why):
        await load(script)
    assert open_descriptors() == before


@pytest.mark.slow
async def test_a_silent_loader_is_ended_and_its_phase_told(load):
    since = time.monotonic()
    with pytest.raises(LoaderFailed, match="no progress for 1 s while warming: it was") as failed:
        await load("say(m.Progress(phase='warming'))\ntime.sleep(60)", silence=1.0)
    assert failed.value.exit_status == 137
    assert time.monotonic() - since < 5


@pytest.mark.slow
async def test_a_loader_that_says_the_same_again_and_again_is_ended(load):
    told = []
    with pytest.raises(LoaderFailed, match=r"no progress for 0\.5 s while loading"):
        await load(
            "while True: say(m.Progress(phase='loading', done=1, total=5)); time.sleep(0.1)",
            silence=0.5,
            told=told.append,
        )
    assert len(told) == 1


@pytest.mark.slow
async def test_progress_is_a_sign_of_life(load):
    await load(
        "for n in range(5): say(m.Progress(phase='loading', done=n, total=5)); time.sleep(0.2)\n"
        "good()",
        silence=0.8,
    )


async def test_a_loader_that_does_not_end_is_ended_and_not_believed(load, monkeypatch):
    monkeypatch.setattr(loading, "_EXIT_S", 0.1)
    with pytest.raises(LoaderFailed, match="signal 15"):
        await load("good(); link.close(); time.sleep(60)")


@pytest.mark.slow
async def test_a_loader_that_ignores_that_it_is_ended_is_killed_with_all_its_children(
    load, tmp_path
):
    script = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pid = os.fork()
if not pid:
    time.sleep(60)
open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{pid}}")
say(m.Progress(phase="stubborn"))
time.sleep(60)
"""
    since = time.monotonic()
    with pytest.raises(LoaderFailed, match="while stubborn"):
        await load(script, silence=1.0)
    assert time.monotonic() - since < 30
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        assert not alive(pid)


@pytest.mark.slow
async def test_children_that_a_loader_leaves_are_gone_before_its_chunks_are_sealed(load, tmp_path):
    """They may still have them mapped writable."""
    script = f"""
with HostFiller().create(4096) as made:
    say(m.ChunkFilled(index=0, nbytes=4096), made.fd)
    if not (pid := os.fork()):
        link.close()
        time.sleep(60)
open({str(tmp_path / "pids")!r}, "w").write(str(pid))
chunk(1, 8192); manifest()
"""
    generation = await load(script)
    assert not alive(int((tmp_path / "pids").read_text()))
    assert memfd.seals(generation.chunks[0].fileno()) & memfd.SEAL_FUTURE_WRITE


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def test_cancelling_ends_the_loader(load, tmp_path):
    script = f"""
open({str(tmp_path / "pids")!r}, "w").write(str(os.getpid()))
say(m.Progress(phase="loading"))
time.sleep(60)
"""
    with anyio.CancelScope() as scope:
        await load(script, told=lambda _: scope.cancel())
    assert scope.cancelled_caught
    assert not alive(int((tmp_path / "pids").read_text()))


STRAY = """
if not os.fork():
    time.sleep(20)
    os._exit(0)
"""


@pytest.mark.slow
async def test_a_loader_is_heard_to_its_own_end_whoever_else_has_its_socket(load):
    with anyio.fail_after(8):
        assert (await load(STRAY + "good()")).id == ID
        with pytest.raises(LoaderFailed, match="ended with 3 before the weights were complete"):
            await load(STRAY + "os._exit(3)")


@pytest.mark.parametrize(
    ("status", "how"), [(255, "ended with 255"), (200, "ended with 200"), (139, "by signal 11")]
)
async def test_only_what_is_a_signal_is_called_one(load, status, how):
    with pytest.raises(LoaderFailed, match=how):
        await load(f"os._exit({status})")


async def test_a_command_that_is_not_there_is_said(settings):
    loader = Loader(["/nonexistent/python"], os.environ, HostKeeper())
    with pytest.raises(LoaderFailed, match="/nonexistent/python cannot be started") as failed:
        await loader.load(settings, lambda _: None)
    assert failed.value.exit_status == 127


async def test_no_descriptors_for_another_load_is_the_systems_own_error(load, descriptors_left):
    with descriptors_left(1), pytest.raises(OSError, match="Too many open files"):
        await load("good()")


async def test_loader_is_told_what_holds_now(load):
    """Not what held when the rank was started."""
    seen = []

    def renewed(given):
        seen.append(given)
        return replace(given, versions=Versions(vllm="0.33.0"))

    await load('assert order.settings.versions.vllm == "0.33.0"\ngood()', renewed=renewed)
    assert [given.versions for given in seen] == [Versions()]


IDENTIFIED = "say(m.Identified(key={'dtype': 'float16'})); "
PROCEED = "codec.decode_proceed(link.receive().data); "


async def test_a_loader_proceeds_once_all_agree_on_what_it_identified(load):
    asked = []

    async def agree(key):
        asked.append(key)
        await anyio.sleep(0.05)

    generation = await load(IDENTIFIED + PROCEED + "good()", agree=agree, silence=5.0)
    assert generation.id == ID
    assert asked == [{"dtype": "float16"}]


async def test_to_wait_for_others_is_no_silence(load):
    async def agree(_key):
        await anyio.sleep(0.8)

    script = IDENTIFIED + PROCEED + "good()"
    assert (await load(script, agree=agree, silence=0.6)).id == ID


async def test_a_loader_that_ends_while_all_gather_is_noticed(load):
    with anyio.fail_after(10), pytest.raises(LoaderFailed, match="ended with 7"):
        await load(IDENTIFIED + "sys.exit(7)", agree=lambda _: anyio.sleep_forever())


async def test_a_load_that_is_given_up_while_all_gather_leaves_no_loader(load):
    with anyio.move_on_after(0.8) as waited:
        await load(
            IDENTIFIED + "time.sleep(60)", agree=lambda _: anyio.sleep_forever(), silence=30.0
        )
    assert waited.cancelled_caught


@pytest.mark.parametrize("identified", ["", IDENTIFIED])
async def test_a_loader_that_does_not_wait_for_others_is_ended(load, identified):
    with anyio.fail_after(10), pytest.raises(LoaderFailed, match="nobody has let the loader"):
        await load(identified + "good()", agree=lambda _: anyio.sleep_forever())


WARMABLE = "good(); say(m.Warmable(tunes=True)); "
TUNE = "tune = codec.decode_tune(link.receive().data).wanted; "


class Tables:
    """Says whether tables are wanted, after `seconds`, and takes down how it ended."""

    def __init__(self, *, wanted: bool = True, seconds: float = 0.0) -> None:
        self.made_of: list[m.Tuned] = []
        self.asked: list[m.Warmable] = []
        self._wanted, self._seconds = wanted, seconds

    async def wanted(self, warmable):
        self.asked.append(warmable)
        await anyio.sleep(self._seconds)
        return self._wanted

    async def made(self, _warmable, tuned):
        self.made_of.append(tuned)


async def test_a_loader_tunes_if_it_is_told_to(load):
    told, tables = [], Tables(seconds=0.3)
    script = (
        "assert tune; say(m.Progress(phase='tuning', done=1, total=2)); say(m.Tuned(entries=9))"
    )
    generation = await load(WARMABLE + TUNE + script, warming=tables, told=told.append)
    assert generation.id == ID
    assert tables.asked == [m.Warmable(tunes=True)]
    assert tables.made_of == [m.Tuned(entries=9)]
    assert [report.phase for report in told] == ["warming", "tuning"]


@pytest.mark.parametrize("tables", [Tables(wanted=False), None], ids=["found", "nobody to ask"])
async def test_one_that_is_not_told_to_ends(load, tables):
    assert (await load(WARMABLE + TUNE + "assert not tune", warming=tables)).id == ID
    assert tables is None or tables.made_of == []


async def test_one_that_would_not_tune_is_heard_and_not_answered(load):
    tables = Tables()
    await load("good(); say(m.Warmable(why_not='no GPU'))", warming=tables)
    assert [asked.why_not for asked in tables.asked] == ["no GPU"]
    assert tables.made_of == []


ENDS = {
    "it is killed": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        {},
        "the loader was killed by signal 9 while it tuned",
    ),
    "it crashes": ("1 / 0", {}, "the loader ended with 1 while it tuned"),
    # As the dynamic linker ends a process that calls what a library lacks.
    "it lacks a symbol": ("os._exit(127)", {}, "the loader ended with 127 while it tuned"),
    "it says nothing of it": ("pass", {}, "the loader ended with 0 while it tuned"),
    "it fails": ("say(m.Tuned(failure='no nvcc'))", {}, "no nvcc"),
    "it hangs": (
        "say(m.Progress(phase='tuning')); time.sleep(60)",
        {"silence": 0.5},
        "the loader made no progress for 0.5 s while tuning: it was ended",
    ),
    "it takes too long": (
        "[(say(m.Progress(phase='tuning', done=n)), time.sleep(0.1)) for n in range(600)]",
        {"within": 0.8},
        "it took more than 0.8 s: the loader was ended",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("script", "limits", "why"), ENDS.values(), ids=ENDS)
async def test_no_end_of_tuning_is_a_failure_to_load(load, script, limits, why):
    before, tables, since = open_descriptors(), Tables(), time.monotonic()
    generation = await load(WARMABLE + TUNE + script, warming=tables, **limits)
    assert generation.id == ID
    assert [tuned.failure for tuned in tables.made_of] == [why]
    assert open_descriptors() == before + 3
    assert time.monotonic() - since < 8


@pytest.mark.slow
async def test_a_loader_that_ends_while_tables_are_looked_for_is_noticed(load):
    tables = Tables(seconds=60)
    with anyio.fail_after(10):
        assert (await load(WARMABLE + "sys.exit(3)", warming=tables)).id == ID
    assert tables.made_of == []


@pytest.mark.slow
async def test_to_look_for_tables_is_no_silence(load):
    tables = Tables(seconds=0.8)
    await load(WARMABLE + TUNE + "say(m.Tuned())", warming=tables, silence=0.6)
    assert tables.made_of == [m.Tuned()]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("say(m.Tuned()); time.sleep(60)", "tuned: it comes once, from a loader that was told"),
        ("link.send(b'noise'); time.sleep(60)", "the packet is"),
    ],
)
async def test_a_loader_that_breaks_the_rules_is_not_believed_even_then(load, script, why):
    with pytest.raises(LoaderFailed, match=why):
        await load(WARMABLE + TUNE + script, warming=Tables(wanted=False))


async def test_a_failure_that_is_told_while_tuning_counts(load):
    script = "say(m.Failed(code='device-failed', detail='the GPU is gone')); sys.exit(79)"
    with pytest.raises(LoaderFailed, match="the GPU is gone") as failed:
        await load(WARMABLE + TUNE + script, warming=Tables())
    assert failed.value.exit_status == 79
