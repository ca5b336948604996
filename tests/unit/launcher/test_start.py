"""The whole launcher as a process of its own, which is sent signals and killed."""

import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from preloadd.domain.settings import Deadlines, ModelSettings, RankSettings, Rendezvous
from preloadd.errors import EXIT_STATUS, ErrorCode
from preloadd.launcher.start import fetch_command, rank_command
from tests.checkpoints import CONFIG, llama

PR_SET_CHILD_SUBREAPER = 36
BECOME = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl({PR_SET_CHILD_SUBREAPER}, 1, 0, 0, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
AS_SUBREAPER = [sys.executable, "-c", BECOME]
"""What the kernel gives orphans to, as it does to PID 1 of a container; exec does not end that."""

SERVE = ["serve"]


def gone(pid: int) -> bool:
    """Whether the process has ended, given a moment; a zombie has, whoever is to reap it."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        if stat.rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_signal_ends_everything_with_its_code(stage, drive, number):
    stage.script("CPU-0", [SERVE])
    stage.script("CPU-1", [SERVE])
    with drive(tensor_parallel_size="2") as launcher:
        launcher.wait_for("engines connect")
        launcher.process.send_signal(number)
        assert launcher.end() == 128 + number
    assert f"stopping: received {number.name}" in launcher.shown
    for instance in ("CPU-0", "CPU-1"):
        (life,) = stage.lives(instance)
        assert gone(life["pid"])
        assert not (stage.socket_dir / instance / "rank.sock").exists()
    assert not list((stage.folder / "tmp").iterdir())


def test_signal_while_ranks_start(stage, drive):
    stage.script("CPU-0", [["notify", "X_PRELOADD_PROGRESS=reading;1;2"]])
    with drive() as launcher:
        launcher.wait_for("CPU-0: reading")
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.end() == 143


def test_second_signal_kills_at_once(stage, drive):
    stage.script("CPU-0", [["ignore"], SERVE])
    with drive() as launcher:
        launcher.wait_for("engines connect")
        began = time.monotonic()
        launcher.process.send_signal(signal.SIGINT)
        launcher.wait_for("stopping")
        time.sleep(0.6)
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.end() == 130
    assert time.monotonic() - began < 5
    assert "still runs: killing it" in launcher.shown


def test_ranks_die_with_a_killed_launcher(stage, drive):
    stage.script("CPU-0", [["ignore"], SERVE])
    with drive() as launcher:
        launcher.wait_for("engines connect")
        launcher.process.kill()
        launcher.end()
    assert gone(stage.lives("CPU-0")[0]["pid"])


def test_next_launcher_removes_what_a_killed_one_left(stage, drive):
    stage.script("CPU-0", [SERVE])
    for _ in range(2):
        with drive() as launcher:
            launcher.wait_for("engines connect")
            assert len(list((stage.folder / "tmp").iterdir())) == 1
            launcher.process.kill()
            launcher.end()
        assert gone(stage.lives("CPU-0")[-1]["pid"])


def test_orphans_of_a_killed_rank_are_reaped(stage, drive):
    stage.script("CPU-0", [["stray"], ["kill", 9]], [SERVE])
    with drive(before=AS_SUBREAPER, restart_ranks="true") as launcher:
        launcher.wait_for("engines connect")
        stray = Path("/proc", (stage.folder / "CPU-0.stray").read_text())
        until = time.monotonic() + 5
        while stray.exists():
            assert time.monotonic() < until, (stray / "status").read_text()
            time.sleep(0.01)
        launcher.process.terminate()
        assert launcher.end() == 143
    assert "CPU-0 ended with status 137" in launcher.shown


@pytest.mark.parametrize("mask", [0o000, 0o777])
def test_mask_of_the_caller_changes_nothing(stage, drive, mask):
    """A plain user could not even enter a folder that a mask of 777 has left."""
    stage.script("CPU-0", [SERVE])
    (stage.folder / "tmp").mkdir()
    chosen = stage.folder / "chosen"
    before = os.umask(mask)
    try:
        with drive(weight_cache_socket_dir=str(chosen)) as launcher:
            launcher.wait_for("engines connect")
            (private,) = (stage.folder / "tmp").iterdir()
            modes = [path.stat().st_mode & 0o777 for path in (chosen, private, private / "0")]
            launcher.process.terminate()
            assert launcher.end() == 143
    finally:
        os.umask(before)
    assert modes == [0o700, 0o700, 0o700]


def test_failed_rank_gives_the_exit_code(stage, drive):
    stage.script("CPU-0", [SERVE])
    stage.script("CPU-1", [["exit", 65]])
    with drive(tensor_parallel_size="2") as launcher:
        assert launcher.end() == 65


def test_failed_rank_is_restarted_if_asked(stage, drive):
    stage.script("CPU-0", [["park", "manifest.a", ""], ["kill", 9]], [SERVE])
    with drive(restart_ranks="true") as launcher:
        launcher.wait_for("CPU-0  adopted")
        launcher.process.terminate()
        assert launcher.end() == 143
    assert len(stage.lives("CPU-0")) == 2


def test_taken_health_port_is_said_before_anything_starts(stage, drive):
    stage.script("CPU-0", [SERVE])
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        with drive(weight_cache_health_port=port) as launcher:
            assert launcher.end() == EXIT_STATUS[ErrorCode.CONFIG]
    assert f"--weight-cache-health-port: 127.0.0.1 port {port}" in launcher.shown
    assert stage.lives("CPU-0") == []


def test_stores_that_are_none_are_said_before_anything_starts(stage, drive):
    with drive(warmup_cache_stores="moncake") as launcher:
        assert launcher.end() == EXIT_STATUS[ErrorCode.CONFIG]
    assert launcher.shown == (
        "preloadd run: --warmup-cache-stores: moncake: there is no store 'moncake': did you mean "
        "'mooncake'?\n"
    )
    assert stage.lives("CPU-0") == []


def test_missing_model_is_said_before_anything_starts(stage, drive):
    with drive(model="/nonexistent") as launcher:
        assert launcher.end() == EXIT_STATUS[ErrorCode.NOT_FOUND]
    assert launcher.shown == "preloadd run: /nonexistent: no such folder: correct the path\n"
    assert stage.lives("CPU-0") == []


def test_a_model_that_its_ranks_cannot_divide_is_told_before_anything_starts(stage, drive):
    model = llama(stage.folder / "model")
    with drive(model=str(model), tensor_parallel_size="3") as launcher:
        assert launcher.end() == EXIT_STATUS[ErrorCode.CONFIG]
    assert "attention heads do not divide by 3 tensor-parallel ranks" in launcher.shown
    assert stage.lives("CPU-0") == []


def test_heads_that_vllm_cannot_divide_are_told_before_anything_starts(stage, drive):
    model = llama(stage.folder / "model")
    with drive(model=str(model), tensor_parallel_size="3", builder="vllm") as launcher:
        assert launcher.end() == EXIT_STATUS[ErrorCode.CONFIG]
    heads = CONFIG["num_attention_heads"]
    assert f"{heads} attention heads do not divide by 3 tensor-parallel ranks" in launcher.shown
    assert "tensor parallel sizes that divide them: 1, 2" in launcher.shown
    assert stage.lives("CPU-0") == []


def test_what_needs_no_gpu_is_checked_before_gpus_are_looked_for(stage, drive):
    """A driver that hangs, here a loader that does, is waited for for a minute."""
    (stage.folder / "loader.py").write_text("import time; time.sleep(60)")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        with drive(memory="auto", weight_cache_health_port=port) as launcher:
            assert launcher.end() == EXIT_STATUS[ErrorCode.CONFIG]
    assert launcher.shown.startswith("preloadd run: --weight-cache-health-port: ")
    with drive(memory="auto", model="/nonexistent") as launcher:
        assert launcher.end() == EXIT_STATUS[ErrorCode.NOT_FOUND]
    assert launcher.shown.startswith("preloadd run: /nonexistent: no such folder")


def test_nothing_is_downloaded_for_gpus_that_are_not_there(stage, drive):
    (stage.folder / "loader.py").write_text("print('{}')")
    (stage.folder / "fetch.py").write_text(f"open({str(stage.folder / 'fetched')!r}, 'w')")
    with drive(memory="cuda", model="org/tiny") as launcher:
        assert launcher.end() == EXIT_STATUS[ErrorCode.NO_DEVICE]
    assert "fetching" not in launcher.shown
    assert not (stage.folder / "fetched").exists()


def test_signal_ends_a_download(stage, drive):
    pid = stage.folder / "fetching"
    (stage.folder / "fetch.py").write_text(
        f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    )
    with drive(model="org/tiny") as launcher:
        launcher.wait_for("fetching org/tiny")
        while not pid.exists() or not pid.read_text():
            time.sleep(0.01)
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.end() == 130
    assert gone(int(pid.read_text()))
    assert stage.lives("CPU-0") == []


def test_fetched_model_is_served(stage, drive):
    stage.script("CPU-0", [SERVE])
    (stage.folder / "fetch.py").write_text(f"print({str(stage.folder)!r})")
    with drive(model="org/tiny") as launcher:
        launcher.wait_for("engines connect")
        launcher.process.terminate()
        assert launcher.end() == 143
    assert f'"path":"{stage.folder}"' in stage.lives("CPU-0")[0]["given"]["settings"][0]
    assert '"name":"org/tiny"' in stage.lives("CPU-0")[0]["given"]["settings"][0]


def test_commands_are_those_of_the_packages():
    settings = RankSettings(
        group="g",
        instance="CPU-3",
        socket_dir="/x",
        derived=False,
        model=ModelSettings("/m", "m"),
        deadlines=Deadlines(),
    )
    assert rank_command(settings) == [sys.executable, "-m", "preloadd.rank", "CPU-3"]
    assert fetch_command("/py") == ["/py", "-m", "preloadd.loader", "fetch"]


EAGLE = '--speculative-config={{"method": "{}", "model": "{}", "num_speculative_tokens": 2}}'


def test_a_draft_is_a_rank_like_the_others(stage, drive):
    for instance in ("CPU-0", "CPU-0.draft"):
        stage.script(instance, [SERVE])
    with drive(EAGLE.format("eagle3", stage.folder / "tmp"), builder="vllm") as launcher:
        launcher.wait_for("engines connect")
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.end() == 130
    assert f"its draft {stage.folder}/tmp into host memory" in launcher.shown
    assert ", 2 ranks, " in launcher.shown
    assert "  CPU-0.draft  " in launcher.shown
    assert "/CPU-0.draft/rank_draft.sock\n" in launcher.shown


def test_the_end_of_a_draft_ends_its_group(stage, drive):
    stage.script("CPU-0", [SERVE])
    stage.script("CPU-0.draft", [["exit", 3]])
    with drive(EAGLE.format("eagle", stage.folder / "tmp"), builder="vllm") as launcher:
        assert launcher.end() == 3
    assert "stopping: CPU-0.draft ended with status 3" in launcher.shown


@pytest.mark.parametrize(
    ("method", "more", "told"),
    [
        ("ngram", {}, "the draft has no ranks: speculative-config names method 'ngram'"),
        ("eagle", {"no_draft": "true"}, "loading"),
    ],
)
def test_a_draft_that_is_not_held_has_no_rank(stage, drive, method, more, told):
    stage.script("CPU-0", [SERVE])
    with drive(EAGLE.format(method, "org/none"), builder="vllm", **more) as launcher:
        launcher.wait_for("engines connect")
        launcher.process.send_signal(signal.SIGINT)
        launcher.end()
    assert told in launcher.shown
    assert ", 1 rank, " in launcher.shown


def test_a_draft_that_is_not_there_is_told_before_anything_starts(stage, drive):
    with drive(EAGLE.format("eagle", "/srv/none"), builder="vllm") as launcher:
        assert launcher.end() == EXIT_STATUS[ErrorCode.NOT_FOUND]
    assert "/srv/none: no such folder" in launcher.shown


def test_a_node_launches_its_own_ranks_and_says_where_all_meet(stage, drive):
    for instance in ("CPU-0", "CPU-1"):
        stage.script(instance, [SERVE])
    meeting = {"master_addr": "10.0.0.1", "weight_cache_master_port": "29600"}
    with drive(tensor_parallel_size="4", nnodes="2", node_rank="1", **meeting) as launcher:
        launcher.wait_for("engines connect")
        launcher.process.terminate()
        assert launcher.end() == 143
    assert "ranks 2 to 3 of 4 are here; all meet at 10.0.0.1 port 29600\n" in launcher.shown
    (life,) = stage.lives("CPU-1")
    told = json.loads(life["given"]["settings"][0])
    met = Rendezvous(address="10.0.0.1", port=29600, rank=3, world=4, node=1, nodes=2)
    assert told["rendezvous"] == asdict(met)
    assert told["peers"] == ["CPU-0"]


def test_a_model_that_is_missing_on_one_of_several_nodes_is_for_its_ranks_to_tell(stage, drive):
    stage.script("CPU-0", [SERVE])
    meeting = {"master_addr": "10.0.0.1", "weight_cache_master_port": "29600"}
    sizes = {"tensor_parallel_size": "2", "nnodes": "2", "node_rank": "1"}
    with drive(model="/nonexistent", **sizes, **meeting) as launcher:
        launcher.wait_for("engines connect")
        launcher.process.terminate()
        assert launcher.end() == 143
    (life,) = stage.lives("CPU-0")
    assert json.loads(life["given"]["settings"][0])["model"]["path"] == "/nonexistent"


def test_nothing_starts_where_a_node_is_told_what_cannot_be(stage, drive):
    stage.script("CPU-0", [SERVE])
    with drive(tensor_parallel_size="4", nnodes="3", node_rank="0") as launcher:
        assert launcher.end() == EXIT_STATUS[ErrorCode.CONFIG]
    assert "--nnodes: is 3, but data 1 x pipeline 1 x tensor 4 = 4 ranks" in launcher.shown
    assert stage.lives("CPU-0") == []
