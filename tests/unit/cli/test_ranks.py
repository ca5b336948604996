import os
import time
from dataclasses import fields

import pytest

from preloadd.cli.overview import Condition, Rank
from preloadd.cli.ranks import addresses, ask_all, folders, in_parallel, request
from preloadd.domain.lifecycle import State
from preloadd.errors import ConfigError, PreloadError
from preloadd.linux.locks import Lock
from preloadd.linux.seqpacket import Reservation
from preloadd.protocol.messages import Done, Release, StatusTold
from tests.threads import threads_left

GPU = "GPU-53b1d48b-de77-970d-5f91-576155feee6c"


def look(folder, timeout=0.2):
    return {rank.instance: rank for rank in ask_all(addresses([folder]), timeout=timeout)}


def test_places_are_sockets_and_held_locks_and_nothing_else(ranks, socket_dir):
    ranks.serve(f"{GPU}.draft")
    ranks.leave("CPU-1")
    for name in ("CPU-2", "not-a-rank", "CPU-3"):
        (socket_dir / name).mkdir()
    (socket_dir / "CPU-4").touch()
    with Lock.take(socket_dir / "CPU-3", "CPU-3"):
        found = {str(place.instance): place for place in addresses([socket_dir])}
    assert sorted(found) == ["CPU-1", "CPU-3", f"{GPU}.draft"]
    assert [found[name].pid for name in sorted(found)] == [None, os.getpid(), os.getpid()]
    assert found[f"{GPU}.draft"].socket.name == "rank_draft.sock"


def test_conditions(ranks, socket_dir):
    ranks.serve("CPU-0", state=State.LOADING)
    ranks.hang("CPU-1")
    ranks.leave("CPU-2")
    ranks.serve("CPU-3").become(instance="CPU-9")
    (socket_dir / "CPU-4").mkdir()
    with Lock.take(socket_dir / "CPU-4", "CPU-4"):
        seen = look(socket_dir)
    assert [rank.condition for rank in seen.values()] == [
        Condition.LOADING,
        Condition.STUCK,
        Condition.ABSENT,
        Condition.UNCLEAR,
        Condition.STARTING,
    ]
    assert seen["CPU-1"].detail == f"process {os.getpid()} does not answer within 0.2 s"
    assert seen["CPU-3"].detail == "its socket answers as CPU-9"


def test_a_rank_whose_socket_was_removed_is_told_from_one_that_starts(socket_dir):
    folder = socket_dir / "CPU-0"
    folder.mkdir()
    with Lock.take(folder, "CPU-0"), Reservation(folder / "rank.sock", 0o600) as reserved:
        assert look(socket_dir)["CPU-0"].condition is Condition.STARTING
        with reserved.listen(8):
            (folder / "rank.sock").unlink()
            seen = look(socket_dir)["CPU-0"]
        assert look(socket_dir)["CPU-0"].condition is Condition.STARTING
    assert seen.condition is Condition.UNCLEAR
    assert f"its socket {folder}/rank.sock was removed" in seen.detail
    assert "`preloadctl restart`" in seen.detail


def test_what_a_rank_tells_is_kept(ranks, socket_dir):
    told = {"pid": 7, "version": "1", "model": "m", "backend": "host", "builder": "native"}
    sizes = {"tensors": 2, "tensor_bytes": 3, "arena_bytes": 4, "done": 5, "total": 6}
    sizes["phase"] = "storing"
    rest = {"generation": "a" * 32, "adopted": True, "uptime_s": 1.0, "ready_s": 2.0, "detail": "d"}
    shown = told | sizes | rest | {"counters": {"loads": 1}, "key": {"dtype": "bf16"}}
    ranks.serve("CPU-0").become(**shown, lease_count=9)
    (rank,) = ask_all(addresses([socket_dir]), timeout=2)
    assert {name: getattr(rank, name) for name in shown} == shown
    assert (rank.lease_count, rank.group, rank.socket) == (
        9, "smol", str(socket_dir / "CPU-0" / "rank.sock"),
    )  # fmt: skip


def test_nothing_that_is_told_is_left_out_unawares():
    left = set(StatusTold.__struct_fields__) - {field.name for field in fields(Rank)}
    assert left == {"device", "role", "state", "chunks"}


def test_what_answers_nonsense_is_unclear(ranks, socket_dir):
    ranks.serve("CPU-0").become(state="serving", tensors="many")
    assert look(socket_dir)["CPU-0"].condition is Condition.UNCLEAR


def test_ranks_that_hang_delay_nobody_for_longer_than_one_of_them(ranks, socket_dir):
    for number in range(8):
        ranks.hang(f"CPU-{number}")
    began = time.monotonic()
    assert len(look(socket_dir, timeout=0.3)) == 8
    assert time.monotonic() - began < 1.5


@pytest.mark.skipif(os.geteuid() != 0, reason="root is let in everywhere else")
def test_a_rank_of_another_user_is_denied(ranks, socket_dir):
    ranks.serve("CPU-0")
    socket_dir.chmod(0o755)
    os.seteuid(65534)
    try:
        seen = look(socket_dir)
    finally:
        os.seteuid(0)
    assert seen["CPU-0"].condition is Condition.DENIED
    assert "user 65534" in seen["CPU-0"].detail
    assert seen["CPU-0"].in_use is None


def test_a_request_and_its_answer(ranks):
    rank = ranks.serve("CPU-0")
    assert request(rank.path, Release(), timeout=5, patience=5) == Done()


def test_answers_come_in_the_order_of_the_questions():
    assert in_parallel(lambda n: n * n, [3, 1, 2]) == [9, 1, 4]
    assert in_parallel(lambda n: n, []) == []


def test_without_threads_nobody_is_asked():
    with threads_left(0), pytest.raises(PreloadError, match=r"asking the ranks: .*ulimit"):
        in_parallel(lambda n: n, [1])


def test_a_chosen_folder_is_looked_into_whoevers_it_is(socket_dir):
    socket_dir.chmod(0o777)
    assert folders({}, os.geteuid(), socket_dir).paths == (socket_dir,)
    with pytest.raises(ConfigError, match="--socket-dir"):
        folders({}, os.geteuid(), socket_dir / "none")


def test_folders_that_are_there_and_fit(socket_dir):
    mine, open_to_all = socket_dir / "preloadd", socket_dir / f"preloadd-{os.geteuid()}"
    mine.mkdir(mode=0o700)
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    environ = {"XDG_RUNTIME_DIR": str(socket_dir), "TMPDIR": str(socket_dir)}
    found = folders(environ, os.geteuid(), None)
    assert mine in found.paths
    assert open_to_all not in found.paths
    assert any("chmod 700" in note for note in found.notes)
