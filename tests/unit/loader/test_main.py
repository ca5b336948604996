"""The loader as a process: what it is started with, and what it ends with."""

import json
import os
import socket
import subprocess
import sys
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from preloadd.domain.devices import Probe
from preloadd.domain.settings import Memory, Rendezvous
from preloadd.linux.fds import OwnedFd
from preloadd.linux.memfd import read_sealed
from preloadd.linux.process import spawn
from preloadd.protocol import messages as m
from preloadd.protocol import payload
from tests.checkout import ROOT
from tests.checkpoints import SHARDS, stored
from tests.driver_stand_in import build
from tests.listening import listen


@pytest.fixture
def environ(tmp_path):
    return os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.fixture
def loader(ends, environ):
    """A loader that is linked to the rank."""
    _, sock = ends

    def loader(prelude="", python=(sys.executable,)):
        shell = ("/bin/sh", "-c", f'{prelude} exec "$@"', "sh")
        argv = [*shell, *python, "-m", "preloadd.loader"]
        child = spawn(argv, environ=environ, fds=[("link", sock.fileno())])
        sock.close()
        children.append(child)
        return child

    children = []
    yield loader
    for child in children:
        child.close()


def test_it_obeys_and_ends_well(ends, loader, settings):
    rank, _ = ends
    child = loader()
    rank.order(settings)
    assert isinstance(rank.heard()[-1], m.ManifestWritten)
    assert child.wait(10) == 0


def test_what_is_wrong_is_reported_and_becomes_its_status(ends, loader, settings, model):
    rank, _ = ends
    (model / SHARDS[1]).write_bytes(b"")
    child = loader()
    rank.order(settings)
    (failed,) = [report for report in rank.heard() if isinstance(report, m.Failed)]
    assert (failed.code, SHARDS[1] in failed.detail) == ("checkpoint", True)
    assert child.wait(10) == 65


def test_a_model_that_is_not_there_is_told_as_the_user_named_it(ends, loader, settings, tmp_path):
    rank, _ = ends
    model = replace(settings.model, path="org/none", name="org/none")
    child = loader(f"export HF_HUB_CACHE={tmp_path};")
    place = Rendezvous("192.0.2.1", 29600, rank=1, world=2, node=1, nodes=2)
    rank.order(replace(settings, model=model, rendezvous=place))
    (failed,) = [report for report in rank.heard() if isinstance(report, m.Failed)]
    told = "org/none, revision main, is neither a local folder nor in the Hugging Face cache"
    assert (failed.code, f"{told} {tmp_path}" in failed.detail) == ("not-found", True)
    assert child.wait(10) == 66


def test_an_order_that_is_none_is_refused(ends, loader):
    rank, _ = ends
    child = loader()
    rank.link.send(b"\x01noise")
    (failed,) = rank.heard()
    assert failed.code == "protocol"
    assert child.wait(10) == 76


def test_too_few_descriptors_are_said(ends, loader, settings):
    rank, _ = ends
    child = loader("ulimit -n 7;")
    rank.order(settings)
    (failed,) = [report for report in rank.heard() if isinstance(report, m.Failed)]
    assert (failed.code, "may have 7 open files" in failed.detail) == ("no-descriptors", True)
    assert child.wait(10) == 71


def test_a_rank_that_is_gone_ends_it_without_a_fuss(ends, loader, capfd):
    rank, _ = ends
    child = loader()
    rank.link.close()
    assert child.wait(10) == 76
    assert "Traceback" not in capfd.readouterr().err


DEVICES = {
    Memory.CUDA: [f"GPU-{uuid.uuid4()}" for _ in range(2)],
    Memory.HIP: [f"GPU-{uuid.uuid4().hex[:16]}" for _ in range(2)],
}
"""The GPU of the rank and another one, as each kind of driver names them; nobody else's."""


@pytest.fixture(scope="module")
def drivers(tmp_path_factory):
    """Environments in which drivers of our own stand in for those of a GPU."""
    folder = tmp_path_factory.mktemp("drivers")
    build.hip(folder)
    environ = build.cuda(folder) | {"STAND_IN_MEMORY": str(64 << 20)}
    return {
        Memory.CUDA: environ
        | {"CUDA_VISIBLE_DEVICES": DEVICES[Memory.CUDA][0], "HIP_VISIBLE_DEVICES": "-1"},
        Memory.HIP: environ | {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": ""},
    }


@pytest.fixture(params=[Memory.CUDA, Memory.HIP])
def on_gpu(request, drivers, environ, settings_of, model):
    """Settings of a rank on a GPU; the loader's environment has that GPU, and another one."""
    devices = DEVICES[request.param]
    environ.update(drivers[request.param] | {"STAND_IN_DEVICES": ",".join(devices)})
    return settings_of(model, instance=devices[0], memory=request.param, chunk_bytes=2 << 20)


@pytest.mark.slow
def test_a_model_is_loaded_into_the_memory_of_a_gpu(ends, loader, on_gpu, model):
    rank, _ = ends
    child = loader()
    rank.order(on_gpu)
    *_, last = rank.heard()
    assert isinstance(last, m.ManifestWritten), last
    assert child.wait(10) == 0
    *chunks, written = rank.fds
    manifest = payload.decode(read_sealed(written.fileno(), payload.MAX_NBYTES))
    assert manifest.backend == on_gpu.model.memory.value
    tensors = {}
    for name in manifest.tensors.name:
        chunk, offset, nbytes = manifest.locate(name)
        tensors[name] = os.pread(chunks[chunk].fileno(), nbytes, offset)
    assert tensors == stored(model)


@pytest.mark.slow
def test_a_gpu_that_is_full_is_said_before_anything_is_loaded(ends, loader, environ, on_gpu):
    rank, _ = ends
    environ["STAND_IN_MEMORY"] = str((8 << 30) + 4096)
    environ["STAND_IN_PROCESSES"] = f"{os.getpid()}:{6 << 30}"
    with OwnedFd(os.memfd_create(f"stand-in:{on_gpu.instance}")) as taken:
        os.ftruncate(taken.fileno(), 8 << 30)
        child = loader()
        rank.order(on_gpu)
        failed = rank.heard()[-1]
    assert (failed.code, on_gpu.instance in failed.detail) == ("no-room", True), failed
    assert " leaves 4,096, so " in failed.detail
    if on_gpu.model.memory is Memory.CUDA:  # AMD's driver tells nobody who has its memory
        assert f"where pid {os.getpid()} (" in failed.detail
        assert ") holds 6.0 GiB, 2.0 GiB are of no process" in failed.detail
    assert child.wait(10) == 73
    assert not rank.fds


@pytest.mark.slow
def test_a_part_of_a_gpu_has_no_more_room_than_it_has(
    ends, loader, environ, drivers, settings_of, model
):
    rank, _ = ends
    part = f"MIG-{uuid.uuid4()}"
    settings = settings_of(model, instance=part, memory=Memory.CUDA, chunk_bytes=2 << 20)
    environ.update(drivers[Memory.CUDA])
    # The whole GPU has 64 MiB, of which the model needs less than one.
    environ.update(STAND_IN_DEVICES=part, CUDA_VISIBLE_DEVICES=part, STAND_IN_MEMORY=str(1 << 16))
    child = loader()
    rank.order(settings)
    failed = rank.heard()[-1]
    assert failed.code == "no-room", failed
    assert f"{part} (NVIDIA Stand-In MIG 1g.18gb) leaves 65,536, so " in failed.detail
    assert child.wait(10) == 73
    assert not rank.fds


@pytest.mark.slow
def test_a_gpu_that_is_lost_in_the_midst_is_said(ends, loader, environ, on_gpu):
    rank, _ = ends
    wait = {Memory.CUDA: "cuStreamSynchronize", Memory.HIP: "hipStreamSynchronize"}
    environ["STAND_IN_FAIL"] = f"{wait[on_gpu.model.memory]}:700"
    child = loader()
    rank.order(on_gpu)
    failed = rank.heard()[-1]
    assert (failed.code, "Xid" in failed.detail) == ("device-failed", True), failed
    assert child.wait(10) == 79


@pytest.mark.slow
def test_another_gpu_than_the_one_ordered_is_not_taken(ends, loader, environ, on_gpu):
    rank, _ = ends
    environ["STAND_IN_DEVICES"] = DEVICES[on_gpu.model.memory][1]
    environ["CUDA_VISIBLE_DEVICES"] = "0"
    child = loader()
    rank.order(on_gpu)
    (failed,) = rank.heard()
    assert (failed.code, on_gpu.instance in failed.detail) == ("no-device", True), failed
    assert child.wait(10) == 68


@pytest.mark.slow
@pytest.mark.parametrize("memory", [Memory.CUDA, Memory.HIP])
def test_the_probe_lists_what_the_drivers_show(environ, drivers, memory):
    seen = environ | drivers[memory] | {"STAND_IN_DEVICES": ",".join(DEVICES[memory])}
    done = run(seen, "--probe")
    (device,) = msgspec.json.decode(done.stdout, type=Probe).devices
    assert (device.id, device.memory, device.problem) == (DEVICES[memory][0], memory, "")


LOOKING = """
import os, sys
from pathlib import Path
from preloadd.loader.__main__ import look
found = look(os.environ, Path(sys.argv[1]))
print(len(found.devices), found.problem, found.hint, found.amd_problem, sep="\\n")
"""


def looked(environ, root):
    """How many devices are seen, why there is none, the hint, and why there is none of AMD's."""
    command = [sys.executable, "-c", LOOKING, root]
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.mark.slow
def test_why_no_gpu_is_seen_is_told_of_both_makers_where_both_can_be(environ, drivers, tmp_path):
    hidden = environ | drivers[Memory.HIP] | {"STAND_IN_DEVICES": ""}
    _, problem, hint, amd = looked(hidden, tmp_path)
    assert "CUDA_VISIBLE_DEVICES hides all" in problem
    assert "AMD" not in problem
    assert "no AMD GPU can be used" in amd
    assert "there is no /dev/kfd: load the driver amdgpu" in amd
    assert hint == "CUDA_VISIBLE_DEVICES="
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    count, problem, hint, amd = looked(hidden, tmp_path)
    assert count == "0"
    assert "CUDA_VISIBLE_DEVICES hides all" in problem
    assert amd
    assert amd in problem
    assert "/dev/kfd:" not in amd
    assert hint == "CUDA_VISIBLE_DEVICES=; HIP_VISIBLE_DEVICES=0"


@pytest.mark.slow
def test_why_none_of_nvidia_is_seen_is_told_beside_those_of_amd(environ, drivers, tmp_path):
    amd = environ | drivers[Memory.HIP] | {"STAND_IN_DEVICES": DEVICES[Memory.HIP][0]}
    count, problem, hint, _ = looked(amd, tmp_path)
    assert (count, problem) == ("1", "")
    assert hint.startswith("no GPU can be used, ")
    assert "CUDA_VISIBLE_DEVICES hides all" in hint
    assert hint.endswith("; CUDA_VISIBLE_DEVICES=; HIP_VISIBLE_DEVICES=0")


@pytest.mark.slow
def test_why_none_of_amd_is_seen_is_told_beside_those_of_nvidia(environ, drivers, tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    nvidia = environ | drivers[Memory.CUDA] | {"STAND_IN_DEVICES": DEVICES[Memory.CUDA][0]}
    count, problem, hint, amd = looked(nvidia, tmp_path)
    assert (count, problem) == ("1", "")
    assert "no AMD GPU can be used" in amd
    assert hint == f"CUDA_VISIBLE_DEVICES={DEVICES[Memory.CUDA][0]}; HIP_VISIBLE_DEVICES=-1"
    (tmp_path / "dev/kfd").unlink()
    *_, amd = looked(nvidia, tmp_path)
    assert "there is no /dev/kfd: load the driver amdgpu" in amd


@pytest.mark.slow
def test_a_variable_that_hides_gpus_of_both_makers_is_told_once(environ, drivers, tmp_path):
    hidden = environ | drivers[Memory.HIP] | {"STAND_IN_DEVICES": DEVICES[Memory.HIP][0]}
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    hidden |= {"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "7"}
    count, _, hint, amd = looked(hidden, tmp_path)
    assert (count, "or CUDA_VISIBLE_DEVICES or" in amd) == ("0", True)
    assert hint == "CUDA_VISIBLE_DEVICES=7; HIP_VISIBLE_DEVICES="


@pytest.mark.slow
def test_gpus_of_both_makers_are_seen_side_by_side(environ, drivers):
    cuda, hip = (DEVICES[memory][0] for memory in (Memory.CUDA, Memory.HIP))
    both = environ | drivers[Memory.HIP] | {"STAND_IN_DEVICES": f"{hip},{cuda}"}
    done = run(both | {"CUDA_VISIBLE_DEVICES": "1"}, "--probe")
    found = msgspec.json.decode(done.stdout, type=Probe)
    assert [(device.id, device.memory) for device in found.devices] == [
        (cuda, Memory.CUDA),
        (hip, Memory.HIP),
    ]
    assert found.hint == "CUDA_VISIBLE_DEVICES=1; HIP_VISIBLE_DEVICES=0"


@pytest.mark.parametrize("memory", [Memory.CUDA, Memory.HIP])
def test_a_gpu_that_is_not_to_be_seen_is_said(ends, loader, settings_of, model, memory):
    rank, _ = ends
    child = loader("CUDA_VISIBLE_DEVICES= HIP_VISIBLE_DEVICES=")
    rank.order(settings_of(model, instance=DEVICES[memory][0], memory=memory))
    (failed,) = rank.heard()
    assert failed.code == "no-device", failed
    assert child.wait(10) == 68


@pytest.mark.slow
def test_the_probe_is_one_line_even_where_there_is_no_gpu(environ):
    done = run(environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}, "--probe")
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stderr
    probe = msgspec.json.decode(done.stdout, type=Probe)
    assert probe.problem
    assert not probe.devices


BARE = (sys.executable, "-S")
"""A Python that has nothing but its own library."""


def test_a_python_without_the_packages_is_told_in_one_line(environ):
    done = run(environ, python=BARE)
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.count("\n") == 1, done.stderr
    named = f"{sys.executable} cannot run a loader (No module named 'blake3')"
    assert done.stderr.startswith(f"preloadd-loader: {named}: install the packages blake3 and msg")


def test_a_python_without_the_packages_tells_its_rank(ends, loader, settings):
    rank, _ = ends
    child = loader(python=BARE)
    with suppress(ConnectionError):
        rank.order(settings)
    (failed,) = rank.heard()
    assert failed.code == "config"
    assert failed.detail.startswith(
        f"{sys.executable} cannot run a loader (No module named 'blake3'): install the packages"
    )
    assert "or name another interpreter (--python" in failed.detail
    assert child.wait(10) == 78


def test_a_python_without_the_packages_tells_whoever_wants_a_model_fetched(environ):
    done = run(environ, "fetch", "org/name", "--revision", "main", python=BARE)
    assert (done.returncode, done.stderr) == (78, "")
    assert done.stdout.startswith(f"{sys.executable} cannot run a loader")
    assert done.stdout.count("\n") == 1


def test_a_python_without_the_packages_looks_for_no_gpu_and_says_so(environ):
    done = run(environ, "--probe", python=BARE)
    assert (done.returncode, done.stderr) == (0, "")
    probe = msgspec.json.decode(done.stdout, type=Probe)
    assert not probe.answered
    assert "(No module named 'blake3'): install the packages" in probe.problem


def run(environ, *arguments, python=(sys.executable,)):
    return subprocess.run(
        [*python, "-m", "preloadd.loader", *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "started by its rank, which passes it a socket"),
        (["load"], "it knows no arguments ['load']"),
        (["fetch", "org/name"], "it knows no arguments ['fetch', 'org/name']"),
    ],
)
def test_people_are_told_that_it_is_not_for_them(environ, arguments, why):
    done = run(environ, *arguments)
    assert (done.returncode, done.stdout, why in done.stderr) == (78, "", True), done.stderr


def file(_):
    return Path(os.devnull).open("rb")


def unconnected(_):
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def listening(folder):
    return listen(folder / "s", 0o600, 1)


NO_LINKS = [file, unconnected, listening]
"""What may be passed by mistake where a connected socket is expected."""


@pytest.mark.slow
@pytest.mark.parametrize("no_link", NO_LINKS)
@pytest.mark.parametrize(
    ("command", "who"),
    [
        (["preloadd.loader"], "the loader"),
        (["preloadd.loader", "send"], "a sender"),
        (["preloadd.loader.vllm.rehearse"], "this engine"),
    ],
)
def test_a_link_to_nobody_is_told_in_a_line(environ, tmp_path, socket_dir, command, who, no_link):
    with (
        no_link(socket_dir) as other,
        (tmp_path / "log").open("wb") as log,
        spawn(
            [sys.executable, "-m", *command],
            environ=environ,
            fds=[("link", other.fileno())],
            stderr=log.fileno(),
        ) as child,
    ):
        assert child.wait(60) == 78
    [line] = (tmp_path / "log").read_text().splitlines()
    assert f"{who} is started by its rank, which passes it a socket to talk over" in line


@pytest.mark.slow
@pytest.mark.parametrize("no_link", NO_LINKS)
def test_a_link_to_a_peer_that_is_none_is_told_to_the_rank(
    ends, environ, settings, socket_dir, no_link
):
    rank, sock = ends
    with (
        no_link(socket_dir) as other,
        spawn(
            [sys.executable, "-m", "preloadd.loader"],
            environ=environ,
            fds=[("link", sock.fileno()), ("peer", other.fileno())],
        ) as child,
    ):
        sock.close()
        with suppress(ConnectionError):
            rank.order(settings)
        (failed,) = rank.heard()
        assert child.wait(10) == 76
    assert failed.code == "protocol"
    assert "the rank passes as peer " in failed.detail
    assert "it is to pass a socket to talk over" in failed.detail


@pytest.mark.slow
@pytest.mark.parametrize("no_link", NO_LINKS)
def test_a_python_without_the_packages_and_a_link_to_nobody_tells_people(
    environ, tmp_path, socket_dir, no_link
):
    with (
        no_link(socket_dir) as other,
        (tmp_path / "log").open("wb") as log,
        spawn(
            [*BARE, "-m", "preloadd.loader"],
            environ=environ,
            fds=[("link", other.fileno())],
            stderr=log.fileno(),
        ) as child,
    ):
        assert child.wait(60) == 78
    [line] = (tmp_path / "log").read_text().splitlines()
    assert line.startswith(f"preloadd-loader: {sys.executable} cannot run a loader")


@pytest.mark.slow
def test_it_fetches_a_model_and_prints_its_folder_alone(environ, tmp_path):
    commit = "0" * 40
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({}))
    refs = tmp_path / "hub" / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    offline = environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = run(offline, "fetch", "org/name", "--revision", "")
    assert (done.returncode, done.stdout) == (0, f"{snapshot}\n"), done.stderr
    done = run(offline, "fetch", "org/other", "--revision", "")
    assert done.returncode == 66
    told = done.stdout.splitlines()[-1]
    assert "org/other is not in the Hugging Face cache and could not be downloaded" in told
    assert "Traceback" not in done.stderr
