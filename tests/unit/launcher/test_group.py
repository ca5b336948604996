"""Groups of stand-in ranks: real processes, sockets, signals and descriptors."""

import os
import signal
import socket
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from preloadd.domain.ids import Instance
from preloadd.errors import EXIT_STATUS, ErrorCode
from preloadd.launcher import ranks
from preloadd.launcher.group import Launch
from preloadd.launcher.health import Health, listen
from preloadd.launcher.policy import Restarts
from preloadd.linux.locks import Lock

READY = ["notify", "READY=1"]
SERVE = ["serve"]


def is_ready(shown: str) -> bool:
    return "ready: " in shown


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Whether the process still runs a moment from now; a zombie, which others reap, does not."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state == "Z":
            return False
        time.sleep(0.01)
    return True


def test_group_is_ready_once_every_rank_serves(stage):
    stage.script("CPU-0", [SERVE])
    stage.script("CPU-1", [["sleep", 0.2], SERVE])
    outcome = stage.run(stage.launch("CPU-0", "CPU-1"), until=is_ready)
    assert outcome.code == 0
    assert "ready: tiny, 2 ranks, 6.0 MiB, after " in outcome.shown
    assert f"CPU-0  loaded 3.0 MiB in 1.50 s  {stage.socket_dir}/CPU-0/rank.sock" in outcome.shown
    assert f"CPU-1  loaded 3.0 MiB in 1.50 s  {stage.socket_dir}/CPU-1/rank.sock" in outcome.shown
    assert f"PRELOADD_SOCKET_DIR={stage.socket_dir}" in outcome.shown


def test_ranks_that_are_ready_at_the_same_moment_do_not_serve_again(stage):
    """The launcher finds both messages in one turn of its loop, which is held up until then."""
    ranks = ("CPU-0", "CPU-1")
    for rank in ranks:
        stage.script(rank, [["sleep", 0.1], READY, ["mark"]])

    def until(shown: str) -> bool:
        give_up = time.monotonic() + 10
        while all(map(stage.lives, ranks)) and time.monotonic() < give_up:
            if all((stage.folder / f"{rank}.mark").exists() for rank in ranks):
                break
            time.sleep(0.002)
        return is_ready(shown)

    outcome = stage.run(stage.launch(*ranks), until=until)
    assert outcome.shown.count("ready: ") == 1
    assert "serves again" not in outcome.shown


def test_one_rank_alone_does_not_make_the_group_ready(stage):
    stage.script("CPU-0", [SERVE])
    stage.script("CPU-1", [["notify", "X_PRELOADD_PROGRESS=waiting;0;0"]])
    outcome = stage.run(
        stage.launch("CPU-0", "CPU-1"),
        until=lambda shown: "CPU-1: waiting" in shown and stage.lives("CPU-0"),
    )
    assert not is_ready(outcome.shown)


def test_rank_is_given_its_settings_its_own_group_and_its_line_to_the_manager(stage):
    stage.script("CPU-0", [READY])
    stage.run(stage.launch("CPU-0"), until=is_ready)
    (life,) = stage.lives("CPU-0")
    assert list(life["given"]) == ["settings"]
    assert '"instance":"CPU-0"' in life["given"]["settings"][0]
    assert life["group"] == life["pid"]
    assert life["parent"] == os.getpid()


def test_progress_is_shown(stage):
    stage.script("CPU-0", [["notify", "STATUS=x\nX_PRELOADD_PROGRESS=reading;1024;4096"], READY])
    outcome = stage.run(stage.launch("CPU-0"), until=is_ready)
    assert "CPU-0: reading 1.0 KiB of 4.0 KiB (25%)\n" in outcome.shown


@pytest.mark.parametrize("before", [[], [READY]], ids=["starting", "serving"])
@pytest.mark.parametrize(
    ("last", "code"),
    [
        (["exit", 7], 7),
        (["exit", 0], 1),
        (["kill", int(signal.SIGKILL)], 137),
        (["kill", int(signal.SIGSEGV)], 139),
    ],
)
def test_one_ranks_end_ends_the_group_with_its_code(stage, before, last, code):
    stage.script("CPU-0", [SERVE])
    stage.script("CPU-1", [*before, ["sleep", 0.05], last])
    outcome = stage.run(stage.launch("CPU-0", "CPU-1"))
    assert outcome.code == code
    assert "stopping: CPU-1 ended with status" in outcome.shown
    assert "killing" not in outcome.shown


@pytest.mark.parametrize(
    ("status", "told"),
    [
        ("loading 37%", "stopping: CPU-0 ended with status 7 while loading 37%\n"),
        ("serving a model", "stopping: CPU-0 ended with status 7\n"),
    ],
)
def test_what_a_rank_was_doing_when_it_ended_is_told(stage, status, told):
    stage.script(
        "CPU-0", [["notify", "STATUS=opening"], ["notify", f"STATUS={status}"], ["exit", 7]]
    )
    assert told in stage.run(stage.launch("CPU-0")).shown


def test_reason_that_a_rank_gave_for_its_end_is_told(stage):
    stage.script("CPU-0", [["notify", "STATUS=failed: no \x1b disk"], ["exit", 75]])
    outcome = stage.run(stage.launch("CPU-0"))
    assert "stopping: CPU-0 ended with status 75: no \\x1b disk\n" in outcome.shown


def test_reason_of_a_rank_that_fails_after_the_first_one_is_told_as_well(stage):
    stage.script("CPU-0", [["sleep", 0.2], ["exit", 3]])
    stage.script(
        "CPU-1", [["ignore"], ["sleep", 0.6], ["notify", "STATUS=failed: no disk"], ["exit", 4]]
    )
    outcome = stage.run(stage.launch("CPU-0", "CPU-1"))
    assert outcome.code == 3
    assert "\nCPU-1 ended with status 4: no disk\n" in outcome.shown


def test_process_that_cannot_be_started_for_want_of_descriptors_is_told(stage, descriptors_left):
    stage.script("CPU-0", [READY])
    launch = stage.launch("CPU-0")
    with descriptors_left(9):
        outcome = stage.run(launch)
    assert outcome.code == EXIT_STATUS[ErrorCode.NO_DESCRIPTORS]
    assert "a process cannot be started" in outcome.shown
    assert "ulimit -n" in outcome.shown


def test_the_first_rank_to_fail_gives_the_code(stage):
    stage.script("CPU-0", [["exit", 3]])
    stage.script("CPU-1", [["sleep", 0.3], ["exit", 4]])
    assert stage.run(stage.launch("CPU-0", "CPU-1")).code == 3


def test_command_that_cannot_be_executed_ends_the_group(stage):
    launch = stage.launch("CPU-0")
    broken = Launch(launch.ranks, lambda _: ["/nonexistent/python"], launch.environ)
    outcome = stage.run(broken)
    assert outcome.code == 127
    assert "CPU-0 ended with status 127" in outcome.shown


def test_rank_that_ignores_sigterm_is_killed_after_a_while(stage):
    stage.script("CPU-0", [["ignore"], READY])
    outcome = stage.run(stage.launch("CPU-0", stop=0.3), until=is_ready)
    (life,) = stage.lives("CPU-0")
    assert 0.3 <= outcome.seconds < 2.0
    assert f"process {life['pid']} still runs: killing it" in outcome.shown


def test_what_a_rank_left_in_its_process_group_is_killed(stage):
    stage.script("CPU-0", [["stray"], READY])
    stage.run(stage.launch("CPU-0"), until=is_ready)
    stray = int((stage.folder / "CPU-0.stray").read_text())
    assert not alive(stray)


def test_nothing_of_the_launcher_stays_on_disk(stage, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(stage.folder))
    stage.script("CPU-0", [SERVE])
    stage.run(stage.launch("CPU-0"), until=is_ready)
    assert not list(stage.folder.glob("preloadd-run-*"))
    assert not (stage.socket_dir / "CPU-0" / "rank.sock").exists()


def test_long_temporary_folder_is_not_used_for_sockets(stage, monkeypatch):
    deep = stage.folder / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    stage.script("CPU-0", [READY])
    assert is_ready(stage.run(stage.launch("CPU-0"), until=is_ready).shown)


def test_socket_of_another_daemon_is_left_alone(stage):
    stage.script("CPU-0", [["exit", EXIT_STATUS[ErrorCode.ALREADY_RUNNING]]])
    folder = stage.socket_dir / "CPU-0"
    folder.mkdir(mode=0o700)
    with Lock.take(folder, "CPU-0"), socket.socket(socket.AF_UNIX) as other:
        other.bind(str(folder / "rank.sock"))
        outcome = stage.run(stage.launch("CPU-0"))
        assert (folder / "rank.sock").is_socket()
    assert outcome.code == 75


KILLED = [["park", "chunk.0", "weights"], ["park", "manifest.a", "map"], READY, ["kill", 9]]


def test_restarted_rank_gets_back_what_it_parked(stage):
    stage.script("CPU-0", KILLED, [SERVE])
    stage.script("CPU-1", [SERVE])
    outcome = stage.run(
        stage.launch("CPU-0", "CPU-1", restarts=Restarts()),
        until=lambda shown: "serves again" in shown or "adopted" in shown,
    )
    first, second = stage.lives("CPU-0")
    assert outcome.code == 0
    assert first["given"].keys() == {"settings"}
    assert second["given"]["chunk.0"] == ["weights"]
    assert second["given"]["manifest.a"] == ["map"]
    assert second["given"]["settings"] == first["given"]["settings"]
    assert len(stage.lives("CPU-1")) == 1
    assert "CPU-0 ended with status 137 (SIGKILL): starting it again" in outcome.shown
    assert "adopted 3.0 MiB in 1.50 s" in outcome.shown


def test_serving_again_is_told_after_the_group_was_ready(stage):
    stage.script("CPU-0", [["park", "manifest.a", ""], SERVE])

    killed = []

    def until(shown: str) -> bool:
        if is_ready(shown) and not killed:
            killed.append(stage.lives("CPU-0")[0]["pid"])
            kill(killed[0])
        return "CPU-0 serves again: adopted 3.0 MiB in 1.50 s" in shown

    outcome = stage.run(stage.launch("CPU-0", restarts=Restarts()), until=until)
    assert outcome.shown.count("ready: ") == 1
    assert outcome.code == 0


def test_without_restarts_a_killed_rank_is_not_started_again(stage):
    stage.script("CPU-0", KILLED)
    assert stage.run(stage.launch("CPU-0")).code == 137
    assert len(stage.lives("CPU-0")) == 1


def test_restarts_have_an_end_and_the_last_code_counts(stage):
    stage.script("CPU-0", [["exit", 5]], [["exit", 6]], [["exit", 9]])
    restarts = Restarts(limit=2, first_pause=0.01)
    assert stage.run(stage.launch("CPU-0", restarts=restarts)).code == 9
    assert len(stage.lives("CPU-0")) == 3


@pytest.mark.parametrize("code", [ErrorCode.CONFIG, ErrorCode.ALREADY_RUNNING])
def test_what_a_restart_cannot_mend_ends_the_group(stage, code):
    stage.script("CPU-0", [["exit", EXIT_STATUS[code]]])
    outcome = stage.run(stage.launch("CPU-0", restarts=Restarts()))
    assert outcome.code == EXIT_STATUS[code]
    assert len(stage.lives("CPU-0")) == 1


def test_clean_exit_is_not_restarted(stage):
    stage.script("CPU-0", [READY, ["exit", 0]])
    assert stage.run(stage.launch("CPU-0", restarts=Restarts())).code == 1
    assert len(stage.lives("CPU-0")) == 1


def test_end_during_the_pause_before_a_restart_is_not_delayed(stage):
    stage.script("CPU-0", [["exit", 5]])
    restarts = Restarts(first_pause=60.0, longest_pause=60.0)
    outcome = stage.run(
        stage.launch("CPU-0", restarts=restarts),
        until=lambda _: len(stage.lives("CPU-0")) == 2,
    )
    assert outcome.seconds < 2.0


def test_leases_of_engines_that_left_are_not_kept(stage):
    """The test is the engine: it accepts both connections and hangs up the first."""
    path = str(stage.folder / "engine")
    stage.script(
        "CPU-0",
        [["park_connection", "lease.left", path], ["park_connection", "lease.stays", path], READY],
        [READY],
    )
    connections, killed = [], []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as engine:
        engine.bind(path)
        engine.listen()

        def until(shown: str) -> bool:
            if is_ready(shown) and not connections:
                connections.extend(engine.accept()[0] for _ in range(2))
                connections[0].close()
            elif connections and not killed:
                killed.append(stage.lives("CPU-0")[0]["pid"])
                kill(killed[0])
            return len(stage.lives("CPU-0")) == 2

        stage.run(stage.launch("CPU-0", restarts=Restarts()), until=until)
        assert stage.lives("CPU-0")[1]["given"].keys() == {"settings", "lease.stays"}
        # Nobody holds the other end any more.
        assert connections[1].recv(1) == b""
        connections[1].close()


def test_more_than_a_rank_may_park_is_told(stage, monkeypatch):
    monkeypatch.setattr(ranks, "MAX_PARKED", 1)
    stage.script(
        "CPU-0", [["park", "chunk.0", ""], ["park", "chunk.1", ""], READY, ["kill", 9]], [READY]
    )
    outcome = stage.run(
        stage.launch("CPU-0", restarts=Restarts()), until=lambda _: len(stage.lives("CPU-0")) == 2
    )
    assert "CPU-0: 1 more descriptors (chunk.1) do not fit" in outcome.shown
    assert stage.lives("CPU-0")[1]["given"].keys() == {"settings", "chunk.0"}


def park_all(stage, names: list[str]) -> tuple[list[str], str]:
    """What a rank is given in its second life of what it parked in its first; what was shown."""
    stage.script("CPU-0", [*(["park", name, ""] for name in names), READY, ["kill", 9]], [READY])
    outcome = stage.run(
        stage.launch("CPU-0", restarts=Restarts()), until=lambda _: len(stage.lives("CPU-0")) == 2
    )
    given = stage.lives("CPU-0")[1]["given"]
    return [name for name in names if name in given], outcome.shown


def test_what_is_parked_leaves_room_for_starting_the_rank_again(stage, descriptors_left):
    chunks = [f"chunk.{number}" for number in range(40)]
    with descriptors_left(45):
        kept, shown = park_all(stage, chunks)
    assert 10 < len(kept) < 40
    assert shown.count("is not kept for a next life") == 40 - len(kept)
    assert f"CPU-0: {chunks[len(kept)]} is not kept" in shown
    assert "ulimit -n" in shown


@pytest.mark.parametrize("kind", ["lease", "profiling"])
def test_what_engines_are_the_cause_of_leaves_room_for_weights(stage, descriptors_left, kind):
    engines = [f"{kind}.{number}" for number in range(100)]
    weights = [*(f"chunk.{number}" for number in range(20)), "manifest.0"]
    used = max(int(fd.name) for fd in Path("/proc/self/fd").iterdir())
    with descriptors_left(used + 120):  # whatever this process uses, engines have some 60
        kept, shown = park_all(stage, [*engines, *weights])
    assert kept[-21:] == weights
    assert kept[:-21] == engines[: len(kept) - 21]
    assert 10 < len(kept[:-21]) < 100
    # One line tells it: whoever connects in a loop does not fill the terminal.
    assert shown.count("is not kept for a next life") == 1
    assert f"CPU-0: {engines[len(kept) - 21]} is not kept" in shown


def test_folder_that_a_cleaner_removed_is_made_anew_for_the_next_life(stage, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(stage.folder))
    first = [["park", "chunk.0", "weights"], READY, ["clean"], ["kill", 9]]
    stage.script("CPU-0", first, [["notify", "X_PRELOADD_PROGRESS=heard;0;0"], SERVE])
    outcome = stage.run(
        stage.launch("CPU-0", restarts=Restarts()), until=lambda shown: "CPU-0: heard" in shown
    )
    assert outcome.code == 0
    assert stage.lives("CPU-0")[1]["given"]["chunk.0"] == ["weights"]


def test_removed_descriptors_are_not_given_back(stage):
    stage.script(
        "CPU-0",
        [
            ["park", "chunk.0", "old"],
            ["park", "chunk.1", "kept"],
            ["notify", "FDSTOREREMOVE=1\nFDNAME=chunk.0"],
            ["barrier"],
            ["kill", 9],
        ],
        [READY],
    )
    stage.run(stage.launch("CPU-0", restarts=Restarts()), until=is_ready)
    assert stage.lives("CPU-0")[1]["given"].keys() == {"settings", "chunk.1"}
    assert (stage.folder / "CPU-0.barrier").exists()


def test_messages_of_other_processes_are_ignored(stage):
    stage.script("CPU-0", [["foreign", "READY=1"], ["barrier"], ["exit", 4]])
    outcome = stage.run(stage.launch("CPU-0"))
    assert not is_ready(outcome.shown)
    assert outcome.code == 4


def test_messages_that_make_no_sense_are_told_and_survived(stage):
    stage.script(
        "CPU-0",
        [["notify", "x" * 5000], ["notify", "X_PRELOADD_PROGRESS=a;b;c"], ["notify", "", 2], READY],
    )
    outcome = stage.run(stage.launch("CPU-0"), until=is_ready)
    assert outcome.code == 0
    assert "CPU-0: a packet of more than 4096 bytes" in outcome.shown


def get(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.fixture
def health(stage):
    made = Health(
        listen("127.0.0.1", 0),
        socket_dir=stage.socket_dir,
        instances=[Instance.parse("CPU-0")],
        environ=stage.environ,
    )
    with made:
        yield made


@pytest.mark.slow
def test_health_endpoint_is_restarted_and_its_end_costs_no_rank(stage, health):
    stage.script("CPU-0", [SERVE])
    pids = []

    def until(shown: str) -> bool:
        if not is_ready(shown) or health.process.pid in (None, *pids):
            return False
        pids.append(health.process.pid)
        kill(pids[-1])
        return len(pids) == 2

    outcome = stage.run(stage.launch("CPU-0", health=health), until=until)
    assert outcome.code == 0
    assert f"health: {health.url}" in outcome.shown
    assert "the health endpoint ended with status 137 (SIGKILL): starting it again" in outcome.shown
    assert len(stage.lives("CPU-0")) == 1


@pytest.mark.slow
def test_health_endpoint_serves_and_stops_with_the_group(stage, health):
    stage.script("CPU-0", [SERVE])
    codes = []
    stage.run(
        stage.launch("CPU-0", health=health),
        until=is_ready,
        then=lambda: codes.append(get(health.url)),
    )
    assert codes == [200]
    health.close()
    with pytest.raises(urllib.error.URLError):
        get(health.url)


def test_health_endpoint_that_fails_again_and_again_is_given_up(stage):
    stage.script("CPU-0", [READY])
    broken = {**stage.environ, "PYTHONHOME": "/nonexistent"}
    with Health(
        listen("127.0.0.1", 0), socket_dir=stage.socket_dir, instances=[], environ=broken
    ) as health:
        outcome = stage.run(
            stage.launch("CPU-0", health=health, health_restarts=Restarts(limit=1)),
            until=lambda shown: is_ready(shown) and "given up" in shown,
        )
    assert outcome.code == 0
    assert outcome.shown.count("the health endpoint ended with status 1") == 2
    with pytest.raises(urllib.error.URLError, match="refused"):
        get(health.url)
