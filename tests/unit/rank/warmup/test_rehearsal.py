"""A rehearsal with stand-ins for the engine that are real processes and follow a script."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from preloadd.domain.placement import Parallel, place
from preloadd.domain.settings import Builder, Memory, Rendezvous, Versions, Warmup
from preloadd.rank.fellows import Fellows
from preloadd.rank.gate import Gate
from preloadd.rank.warmup.caches import CacheContents
from preloadd.rank.warmup.rehearsal import (
    Outcome,
    Rehearsal,
    Rehearsed,
    hindrance,
    rehearse,
)
from tests.descriptors import open_descriptors

pytestmark = pytest.mark.anyio

GRANDCHILD = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path(os.environ["PIDS"]).write_text(f"{child.pid} {os.getpid()}")
"""


SHARED = Warmup(trust_bundles=True)


def gone(pids: Path) -> bool:
    """Whether all these processes have ended; nobody may have reaped those of init yet."""
    for pid in map(int, pids.read_text().split()):
        with suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                return False
    return True


async def test_an_engine_gets_the_order_and_the_pass_and_what_it_makes_is_told(scripted, group):
    before = open_descriptors()
    gate, told = Gate(), []
    script = """
assert os.environ["PRELOADD_REHEARSAL"] not in repr(sys.argv)
assert settings.model.builder == "vllm"
say(os.environ["PRELOADD_REHEARSAL"])
root = Path(os.environ["VLLM_CACHE_ROOT"])
(root / "torch_compile_cache/torch_aot_compile/new").mkdir(parents=True)
say("done")
"""
    done = await scripted(script).run(
        group, gate, lambda progress: told.append(progress.phase), within=20.0
    )
    assert (done.outcome, done.why) == (Outcome.DONE, "")
    assert done.made == CacheContents(compiled=frozenset({"torch_aot_compile/new"}))
    assert f"warming up: {gate.key}" in told
    assert "0 new tables, 1 new folders of compiled code" in str(done)
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("sys.exit(3)", "the engine ended with 3 while starting"),
        ("say('compiling'); os.kill(os.getpid(), 9)", "killed by signal 9 while compiling"),
        ("link.send(codec.encode(m.Failed(code='config', detail='a bad word')))", "a bad word"),
        ("link.send(b'nonsense')", "the engine was ended"),
        ("link.send(codec.encode(m.ManifestWritten(nbytes=1)))", "the engine was ended"),
        ("link.send(codec.encode(m.Identified(key={}))); time.sleep(60)", "from an engine"),
    ],
)
async def test_an_engine_that_fails_is_told_of(scripted, group, script, why):
    done = await scripted(script).run(group, Gate(), lambda _: None, within=20.0)
    assert done.outcome is Outcome.FAILED
    assert why in done.why
    assert "the first engine does it" in str(done)


async def test_what_a_failing_engine_said_is_in_the_log_and_bounded(scripted, group, caplog):
    script = """
print("RuntimeError: the cause")
for number in range(5000):
    print("x" * 1000, number, file=sys.stderr)
sys.exit(1)
"""
    with caplog.at_level("DEBUG", "preloadd.rank.warmup.rehearsal_engine"):
        assert (await scripted(script).run(group, Gate(), lambda _: None, within=20.0)).why
    said = [record.getMessage() for record in caplog.records]
    assert 2000 < len(said) < 2050
    assert max(map(len, said)) < 500
    warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "RuntimeError: the cause" in warned[0]


async def test_an_interpreter_that_is_not_there_is_told_of(scripted, group, tmp_path):
    rehearsal = replace(scripted(""), argv=[str(tmp_path / "python")])
    done = await rehearsal.run(group, Gate(), lambda _: None, within=20.0)
    assert (done.outcome, "cannot be started" in done.why) == (Outcome.FAILED, True)


@pytest.mark.slow
async def test_an_engine_that_hangs_is_ended_with_all_it_started(scripted, group, pids):
    hangs = scripted(f"signal.signal(15, signal.SIG_IGN)\n{GRANDCHILD}\ntime.sleep(600)")
    silent = replace(group, deadlines=replace(group.deadlines, silence=1.0))
    done = await hangs.run(silent, Gate(), lambda _: None, within=20.0)
    assert "said nothing for 1 s while starting" in done.why
    assert gone(pids)


@pytest.mark.slow
async def test_an_engine_that_talks_for_ever_ends_at_the_deadline(scripted, group, pids):
    script = f"{GRANDCHILD}\nwhile True:\n    print('still here', flush=True); time.sleep(0.05)"
    short = replace(group, deadlines=replace(group.deadlines, silence=0.8))
    done = await scripted(script).run(short, Gate(), lambda _: None, within=2.0)
    assert "it took longer than 2 s" in done.why
    assert gone(pids)


@pytest.mark.slow  # orphans are init's to reap, which takes it a moment
async def test_what_an_engine_leaves_behind_is_ended(scripted, group, pids):
    done = await scripted(f"{GRANDCHILD}\nsay('done')").run(
        group, Gate(), lambda _: None, within=20.0
    )
    assert done.outcome is Outcome.DONE
    assert gone(pids)


@pytest.mark.slow
async def test_a_gate_that_is_to_be_opened_ends_the_engine(scripted, group, pids):
    gate = Gate()

    async def end() -> None:
        while not (pids.exists() and pids.read_text()):  # noqa: ASYNC110
            await anyio.sleep(0.01)
        gate.end("the weights are to be released")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(end)
        done = await scripted(f"{GRANDCHILD}\ntime.sleep(600)").run(
            group, gate, lambda _: None, within=20.0
        )
    assert (done.outcome, done.why) == (Outcome.ENDED, "the weights are to be released")
    assert gone(pids)


@pytest.mark.slow
async def test_cancelling_ends_the_engine(scripted, group, pids):
    async def cancel(scope: anyio.CancelScope) -> None:
        while not (pids.exists() and pids.read_text()):  # noqa: ASYNC110
            await anyio.sleep(0.01)
        scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel, tasks.cancel_scope)
        await scripted(f"{GRANDCHILD}\ntime.sleep(600)").run(
            group, Gate(), lambda _: None, within=20.0
        )
    assert gone(pids)


# -- with the group --


async def test_ranks_that_do_not_come_are_not_waited_for_for_ever(scripted, group, socket_dir):
    fellows = Fellows({"CPU-1": socket_dir / "nobody.sock"})
    done = await rehearse(
        scripted("say('done')"), group, Gate(), fellows, lambda _: None, within=0.2
    )
    assert (done.outcome, done.why) == (Outcome.FAILED, "these ranks do not serve: CPU-1")


async def test_nothing_is_started_where_the_gate_is_to_be_opened_already(scripted, group, pids):
    gate = Gate()
    gate.end("a release")
    script = scripted(f"{GRANDCHILD}\nsay('done')")
    done = await rehearse(script, group, gate, Fellows({}), lambda _: None, within=20.0)
    assert (done.outcome, done.why, pids.exists()) == (Outcome.ENDED, "a release", False)


# -- who rehearses, and with what --


def test_on_a_processor_there_is_a_rehearsal_only_for_what_is_shared(group):
    assert "nothing is tuned for a processor" in hindrance(group)
    assert hindrance(replace(group, warmup=SHARED)) == ""
    on_a_gpu = replace(group, model=replace(group.model, memory=Memory.CUDA))
    assert hindrance(on_a_gpu) == ""
    off = replace(on_a_gpu, warmup=Warmup(autotune=False))
    assert "switched off" in hindrance(off)
    assert hindrance(replace(off, warmup=Warmup(autotune=False, trust_bundles=True))) == ""


@pytest.mark.parametrize("memory", [Memory.HOST, Memory.CUDA, Memory.HIP])
def test_there_is_no_rehearsal_that_leaves_nothing(group, memory):
    def hinders(*words: str, autotune: bool = True, flashinfer: str = "0.7.2") -> str:
        made = replace(group.model, memory=memory, engine_args=words)
        versions = Versions(vllm="0.33.0", flashinfer=flashinfer)
        warmup = Warmup(autotune=autotune, trust_bundles=True)
        return hindrance(replace(group, model=made, warmup=warmup, versions=versions))

    for words in (("--enforce-eager",), ("--optimization-level=0",)):
        untuned = (*words, "--no-enable-flashinfer-autotune")
        assert "nothing is left for others" in hinders(*untuned)
        assert "nothing is left for others" in hinders(*words, autotune=False)
        assert "nothing is left for others" in hinders(*words, flashinfer="")
    # FlashInfer's own store, which is not to be seen, is filled by an engine of one rank.
    tunes = memory is Memory.CUDA
    assert (hinders("--enforce-eager") == "") == tunes
    assert "nothing is left for others" in hinders("--optimization-level=0")
    assert hinders("--optimization-level=0", '--compilation-config={"mode": 3}') == ""
    assert hinders("--optimization-level=2") == hinders(autotune=False) == ""


def test_the_first_rank_of_a_whole_group_rehearses(group):
    group = replace(group, warmup=SHARED)
    first = replace(
        group,
        peers=("CPU-1",),
        model=replace(group.model, placement=place(Parallel(tensor=2), 0)),
    )
    assert hindrance(group) == hindrance(first) == ""
    second = replace(
        first,
        instance="CPU-1",
        peers=("CPU-0",),
        model=replace(first.model, placement=place(Parallel(tensor=2), 1)),
    )
    assert "first rank" in hindrance(second)
    assert "native" in hindrance(replace(group, model=replace(group.model, builder=Builder.NATIVE)))
    assert "draft" in hindrance(replace(group, instance="CPU-0.draft"))
    for method, drafts in {"eagle3": True, "draft_model": True, "ngram": False}.items():
        speculates = (
            f'--speculative-config={{"method": "{method}", "num_speculative_tokens": 2}}',
        )
        speculating = replace(group, model=replace(group.model, engine_args=speculates))
        assert ("draft" in hindrance(speculating)) == drafts
    assert "several hosts" in hindrance(replace(first, peers=()))
    meets = Rendezvous("10.0.0.1", 1, rank=0, world=1, node=0, nodes=2)
    assert "several hosts" in hindrance(replace(group, rendezvous=meets))


def test_an_engine_sees_the_devices_of_all_ranks_in_their_order(group):
    two = replace(group, instance="CPU-4", peers=("CPU-2", "CPU-3"), python="/opt/vllm/bin/python")
    rehearsal = Rehearsal.of(two, {"HOME": "/h", "PATH": "/bin"})
    assert rehearsal.argv == ["/opt/vllm/bin/python", "-m", "preloadd.loader.vllm.rehearse"]
    assert rehearsal.environ["PRELOADD_DEVICES"] == "CPU-4,CPU-2,CPU-3"
    assert rehearsal.caches.compiled == Path("/h/.cache/vllm/torch_compile_cache")
    gpus = ("GPU-a", "GPU-b")
    on_gpus = replace(
        group, instance=gpus[0], peers=gpus[1:], model=replace(group.model, memory=Memory.CUDA)
    )
    environ = Rehearsal.of(on_gpus, {"CUDA_VISIBLE_DEVICES": "7"}).environ
    assert (environ["CUDA_VISIBLE_DEVICES"], "PRELOADD_DEVICES" in environ) == (
        "GPU-a,GPU-b",
        False,
    )


def test_people_read_what_became_of_it():
    done = Rehearsed(Outcome.FAILED, 1.25, "a reason")
    assert str(done) == "the warm-up failed in 1.2 s, and the first engine does it: a reason"
