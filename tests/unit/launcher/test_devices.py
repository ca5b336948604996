"""Who gets which device, by what stand-ins for loaders see."""

import json
import sys
import time
from dataclasses import replace

import anyio
import pytest

from preloadd.config.run import Chosen, parse_run
from preloadd.domain.devices import Device, Probe
from preloadd.domain.settings import Memory
from preloadd.errors import ConfigError, NoSuchDevice
from preloadd.launcher.devices import find, judge, on_host, require_names

A, B = (f"GPU-{start}-de77-970d-5f91-576155feee6c" for start in ("53b1d48b", "53b2aaaa"))
PARTS = [uuid.replace("GPU", "MIG") for uuid in (A, B)]
NOTHING = Probe(problem="libcuda.so.1 is not there")
NEITHER = Probe(problem="libcuda.so.1 is not there", amd_problem="no ROCm, no /dev/kfd")
TWO = Probe(tuple(Device(uuid, "NVIDIA H200", total=140 << 30) for uuid in (A, B)), "580.95")
AMD = Probe((Device("GPU-53b1d48bde77970d", "MI300X", Memory.HIP),))


def chosen(probe: Probe, **given: object) -> Chosen:
    return judge(parse_run({"model": "m", **given}), probe)


def test_a_gpu_that_answers_is_taken_and_said():
    found = chosen(TWO)
    assert (found.memory, found.devices) == (Memory.CUDA, (A,))
    assert found.told == f"cuda memory of {A} NVIDIA H200 (140.0 GiB); driver 580.95"
    both = chosen(TWO, tensor_parallel_size="2")
    assert both.devices == (A, B)
    assert f"{A} NVIDIA H200 (140.0 GiB), {B} NVIDIA H200 (140.0 GiB); driver" in both.told
    assert chosen(TWO, tensor_parallel_size="2", gpus="all").devices == (A, B)
    assert chosen(TWO, gpus="GPU-53b2").devices == (B,)


def test_gpus_are_said_in_the_order_of_ranks():
    found = chosen(TWO, tensor_parallel_size="2", gpus="GPU-53b2,GPU-53b1")
    assert found.devices == (B, A)
    assert found.told.index(B) < found.told.index(A)


def test_host_memory_where_none_answers_and_why():
    found = chosen(NOTHING, tensor_parallel_size="2")
    assert (found.memory, found.devices) == (Memory.HOST, ("CPU-0", "CPU-1"))
    assert found.told == "host memory (no CUDA GPU answers: libcuda.so.1 is not there)"
    hidden = chosen(Probe(hint="CUDA_VISIBLE_DEVICES="))
    assert "no CUDA GPU answers: none is seen (CUDA_VISIBLE_DEVICES=)" in hidden.told


def test_host_memory_for_vllm_has_to_be_asked_for():
    with pytest.raises(NoSuchDevice, match=r"libcuda\.so\.1 is not there; or use --memory host"):
        chosen(NOTHING, builder="vllm")
    assert chosen(TWO, builder="vllm").memory is Memory.CUDA
    asked = parse_run({"model": "m", "builder": "vllm", "memory": "host"})
    assert anyio.run(find, asked, None, {}).memory is Memory.HOST


def test_what_is_untested_on_hardware_is_taken_for_those_who_ask():
    found = chosen(AMD)
    assert (found.memory, found.devices) == (Memory.HOST, ("CPU-0",))
    assert "is seen, but GPU-53b1d48bde77970d (--memory hip))" in found.told
    asked = chosen(AMD, memory="hip")
    assert (asked.memory, asked.devices) == (Memory.HIP, ("GPU-53b1d48bde77970d",))
    assert asked.told == "hip memory of GPU-53b1d48bde77970d MI300X"
    mixed = Probe((*AMD.devices, *TWO.devices[:1]), "580.95", amd_driver="6.12")
    nvidia, amd = chosen(mixed), chosen(mixed, memory="hip")
    assert (nvidia.devices, amd.devices) == ((A,), ("GPU-53b1d48bde77970d",))
    assert nvidia.told.endswith("; driver 580.95")
    assert amd.told.endswith("; driver 6.12")


@pytest.mark.parametrize(
    ("probe", "given", "told"),
    [
        (NOTHING, {"memory": "cuda"}, "libcuda.so.1 is not there; or use --memory host"),
        (NEITHER, {"memory": "cuda"}, "^libcuda.so.1 is not there;"),
        (NEITHER, {"memory": "hip"}, "^no ROCm, no /dev/kfd;"),
        (NOTHING, {"gpus": "all"}, "--gpus: libcuda.so.1 is not there"),
        (TWO, {"tensor_parallel_size": "3"}, "2 GPUs .* too few .*; or use --memory host"),
        (TWO, {"gpus": "all"}, rf"--gpus: 2 GPUs \({A}, {B}\) are too many for"),
        (AMD, {"gpus": "all"}, r"--gpus: no GPU with cuda memory is seen, but .*--memory hip"),
        (TWO, {"gpus": "GPU-9"}, "--gpus: 'GPU-9' fits no GPU"),
        (
            TWO,
            {"memory": "hip"},
            rf"no GPU with hip memory is seen, but {A} \(--memory cuda\), {B}.*; or use",
        ),
        (
            replace(TWO, amd_problem="no ROCm, no /dev/kfd"),
            {"memory": "hip"},
            r"--memory cuda\), .*\(--memory cuda\): no ROCm, no /dev/kfd; or use",
        ),
        (AMD, {"memory": "cuda"}, "no GPU with cuda memory is seen, but GPU-53b1d48bde77970d"),
        (Probe((Device(A, "x", problem="no VMM: take host memory"),)), {}, "take host memory$"),
    ],
)
def test_gpus_that_are_wanted_and_not_there_are_an_error(probe, given, told):
    with pytest.raises(NoSuchDevice, match=told):
        chosen(probe, **given)


def test_a_reader_for_gpus_only_has_no_use_for_host_memory():
    with pytest.raises(ConfigError, match=r"--reader instanttensor.*leave out --reader"):
        chosen(NOTHING, reader="instanttensor")


@pytest.mark.parametrize(
    ("gpus", "told"),
    [
        ("0", "--gpus: '0' is a number, and numbers of GPUs are never used, since"),
        ("GPU-1,1", "--gpus: '1' is a number"),
        (f"all,{A}", "--gpus: 'all' is every GPU: leave out the others"),
        ("CPU-0", "--gpus: 'CPU-0' is host memory and no GPU: use --memory host"),
        ("GPU-1234x", "--gpus: 'GPU-1234x' is no UUID of a GPU and not the beginning of one"),
        ("cuda:0", "--gpus: 'cuda:0' is no UUID"),
    ],
)
def test_what_is_no_name_of_a_gpu_is_said_before_anybody_looks(gpus, told):
    options = parse_run({"model": "m", "gpus": gpus})
    with pytest.raises(ConfigError) as caught:
        anyio.run(find, options, None, {})
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize("gpus", ["all", "GPU-", "gpu-53B1", f"{A},{PARTS[1]}"])
def test_what_may_be_a_name_is_looked_for(gpus):
    require_names(gpus.split(","))


@pytest.mark.parametrize("given", [{}, {"memory": "cuda"}, {"gpus": "all"}], ids=str)
def test_where_nobody_could_look_no_other_memory_is_taken(given):
    with pytest.raises(ConfigError, match=r"^nobody could look for GPUs: .*; with --memory host"):
        chosen(Probe(problem="`py` ended with status 1", answered=False), **given)


def looking(probes: dict[str | None, Probe]):
    asked: list[str | None] = []

    async def look(environ):
        asked.append(environ.get("CUDA_VISIBLE_DEVICES"))
        return probes[asked[-1]]

    return look, asked


def test_host_memory_asks_nobody():
    look, asked = looking({})
    options = parse_run({"model": "m", "memory": "host"})
    assert anyio.run(find, options, look, {}) == on_host(1)
    assert asked == []


def test_parts_of_a_gpu_are_asked_for_one_by_one():
    first, second = (Probe((Device(part, "MIG 1g.18gb"),)) for part in PARTS)
    visible = ",".join(PARTS)
    look, asked = looking({visible: first, PARTS[1]: second})
    options = parse_run({"model": "m", "tensor_parallel_size": "2"})
    found = anyio.run(find, options, look, {"CUDA_VISIBLE_DEVICES": visible})
    assert found.devices == tuple(PARTS)
    assert asked == [visible, PARTS[1]]


PROBE = """
import json, os, sys
assert sys.argv[1:] == ["--probe"], sys.argv
print(json.dumps({line}))
"""


def test_launcher_asks_the_loaders_python_and_starts_ranks_there(stage, drive):
    seen = {"devices": [{"id": A, "name": "NVIDIA H200", "total": 140 << 30}], "driver": "580.95"}
    (stage.folder / "loader.py").write_text(PROBE.format(line=repr(seen)))
    stage.script(A, [["serve"]])
    with drive(memory="auto") as launcher:
        launcher.wait_for("engines connect")
        launcher.process.terminate()
        assert launcher.end() == 143
    assert launcher.shown.startswith("looking for GPUs\n")
    assert f"into cuda memory of {A} NVIDIA H200 (140.0 GiB); driver 580.95\n" in launcher.shown
    settings = json.loads(stage.lives(A)[0]["given"]["settings"][0])
    assert (settings["instance"], settings["model"]["memory"]) == (A, "cuda")
    assert settings["model"]["chunk_bytes"] == 4 << 30


def test_launcher_without_gpus_says_why_it_takes_host_memory(stage, drive):
    (stage.folder / "loader.py").write_text(PROBE.format(line={"problem": "there is no driver"}))
    stage.script("CPU-0", [["serve"]])
    with drive(memory="auto") as launcher:
        launcher.wait_for("engines connect")
        launcher.process.terminate()
        launcher.end()
    assert "into host memory (no CUDA GPU answers: there is no driver)" in launcher.shown


def test_launcher_ends_where_the_loaders_python_cannot_look(stage, drive):
    (stage.folder / "loader.py").write_text("raise SystemExit(3)")
    with drive(memory="auto") as launcher:
        assert launcher.end() == 78
    assert "--probe` ended with status 3 (run it to see why); with" in launcher.shown
    assert stage.lives("CPU-0") == []


def test_launcher_ends_while_a_driver_hangs(stage, drive):
    begun = stage.folder / "begun"
    (stage.folder / "loader.py").write_text(
        f"import time; open({str(begun)!r}, 'w'); time.sleep(60)"
    )
    with drive(memory="auto") as launcher:
        launcher.wait_for("looking for GPUs")
        until = time.monotonic() + 15
        while not begun.exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        launcher.process.terminate()
        assert launcher.end() == 143
    assert stage.lives("CPU-0") == []


def test_other_interpreter_is_lent_this_package(stage, drive):
    """One that has nothing installed but what it is lent."""
    python = stage.folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    (stage.folder / "loader.py").write_text(
        "import json, os, preloadd; where = os.path.dirname(preloadd.__path__[0])\n"
        "print(json.dumps({'problem': f'beside it {os.listdir(where)}'}))"
    )
    stage.script("CPU-0", [["serve"]])
    with drive(memory="auto", python=str(python)) as launcher:
        launcher.wait_for("engines connect")
        launcher.process.terminate()
        launcher.end()
    assert "beside it ['preloadd']" in launcher.shown
