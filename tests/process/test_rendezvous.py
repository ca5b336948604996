"""Groups whose ranks meet before they load: real daemons, which meet on the loopback device."""

import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest

from preloadd.domain.placement import Parallel, place
from preloadd.domain.settings import Deadlines, Digest, Rendezvous
from preloadd.protocol import messages as m
from tests.checkpoints import SHARDS, llama, rewrite, stored
from tests.leases import content
from tests.manager import Manager
from tests.waiting import PATIENCE_S, eventually

DISAGREE = 80
SILENCE_S = 2.0


@pytest.fixture
def group(manage, model, port):
    """A maker of a group's managers, one a rank, each on a node of its own."""

    def group(world: int = 2, *, models: dict[int, Path] | None = None, **changes) -> list[Manager]:
        limits = {"rendezvous": 15.0, "peer_silence": SILENCE_S, "stop": 1.0, **changes}
        parallel = Parallel(tensor=world) if world != 3 else Parallel(pipeline=3)
        return [
            manage(
                (models or {}).get(rank, model),
                digest=Digest.FULL,
                placement=place(parallel, rank),
                rank={
                    "rendezvous": Rendezvous("127.0.0.1", port, rank, world, rank, world),
                    "deadlines": Deadlines(**limits),
                },
            )
            for rank in range(world)
        ]

    return group


@pytest.fixture
def pair(group) -> list[Manager]:
    """Two ranks that serve."""
    pair = group()
    for manager in pair:
        manager.start()
    for manager in pair:
        manager.ready()
    return pair


def statuses(manager: Manager) -> str:
    return " | ".join(told["STATUS"] for told in manager.told if "STATUS" in told)


def waits_for(manager: Manager, who: str) -> None:
    manager.until(lambda: f"waiting for {who}" in statuses(manager), f"waiting for {who}")


def why(manager: Manager) -> str:
    """The one error by which a rank ended, on one line of its log."""
    assert "Traceback" not in manager.log, manager.log
    (line,) = [line for line in manager.log.splitlines() if "ERROR" in line]
    return line


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_meet_load_and_serve_their_parts(group, model, world):
    managers = group(world)
    for manager in reversed(managers):
        manager.start()
    for manager in managers:
        manager.ready()
        assert manager.status().key["checkpoint"].startswith("full")
    found = [content(manager.attach()) for manager in managers]
    norm = "model.norm.weight"
    assert any(part.get(norm) == stored(model)[norm] for part in found)
    assert managers[0].status().key["tp_rank" if world == 2 else "pp_rank"] == "0"


def test_a_rank_waits_without_filling_anything_and_says_for_whom(group):
    first, second, third = group(3)
    first.start()
    waits_for(first, "ranks 1, 2 of nodes 1, 2")
    second.start()
    waits_for(second, "rank 2 of node 2")
    waits_for(first, "rank 2 of node 2")
    assert "loading" not in first.phases
    third.start()
    for manager in (first, second, third):
        manager.ready()


def test_another_checkpoint_ends_all_and_both_values_are_told(group, model, tmp_path):
    other = llama(tmp_path / "other", seed=1)
    pair = group(models={1: other})
    for manager in pair:
        manager.start()
    for manager in pair:
        assert manager.ended() == DISAGREE
        told = why(manager)
        assert "checkpoint is 'full" in told
        assert "for rank 1 of node 1" in told
        assert "for rank 0 of node 0" in told
        assert "give all nodes the same model" in told
        assert not manager.parked
        assert not manager.loaders()


@pytest.mark.parametrize("there", [0, 1])
def test_who_does_not_come_is_named_with_the_address(group, port, there):
    manager = group(3, rendezvous=1.5)[there]
    since = time.monotonic()
    manager.start()
    assert manager.ended() == DISAGREE
    assert time.monotonic() - since < 8
    who = "rank 0 of node 0 was not reached" if there else "ranks 1, 2 of nodes 1, 2 did not come"
    assert who in why(manager)
    assert f"127.0.0.1:{port} within 1.5 s" in why(manager)
    assert "firewall" in why(manager)
    assert ("Connection refused" in why(manager)) == (there == 1)


def test_one_that_is_missing_is_named_on_all_nodes(group):
    first, second, _ = group(3, rendezvous=3.0)
    first.start()
    second.start()
    for manager in (first, second):
        assert manager.ended() == DISAGREE
        assert "rank 2 of node 2 did not come" in why(manager)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_while_all_gather_ends_the_others(group, victim):
    managers = group(3)[:2]
    for manager in managers:
        manager.start()
    waits_for(managers[0], "rank 2 of node 2")
    waits_for(managers[1], "rank 2 of node 2")
    managers[victim].kill()
    other = managers[1 - victim]
    assert other.ended() == DISAGREE
    assert f"rank {victim}" in why(other)
    assert "was lost while gathering: it hung up" in why(other)


@pytest.fixture
def stuck(group) -> list[Manager]:
    """Two ranks in the middle of loads that do not go on, and a third that serves already."""
    first, second, third = managers = group(3)
    for manager in (first, second):
        manager.start()
        waits_for(manager, "rank 2 of node 2" if manager is second else "ranks 1, 2 of nodes 1, 2")
        os.kill(loader_of(manager), signal.SIGSTOP)
    third.start()
    third.ready()
    return managers


def loader_of(manager: Manager) -> int:
    (pid,) = manager.loaders()
    return pid


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_while_all_load_ends_those_that_still_do(stuck, victim):
    stuck[victim].kill()
    other = stuck[1 - victim]
    assert other.ended() == DISAGREE
    assert f"rank {victim}" in why(other)
    assert "was lost while loading: it hung up" in why(other)
    assert not other.loaders()
    assert not other.parked
    assert stuck[2].status().state == "serving"
    assert stuck[2].child.poll() is None


def test_the_loss_of_a_rank_0_that_serves_ends_no_load(group):
    first, second = group()
    second.start()
    waits_for(second, "rank 0 of node 0")
    loader = loader_of(second)
    os.kill(loader, signal.SIGSTOP)
    first.start()
    first.ready()
    first.kill()
    time.sleep(0.5)
    os.kill(loader, signal.SIGCONT)
    second.ready()
    first.start()
    first.ready()


def test_a_loader_that_dies_is_told_on_the_other_nodes(stuck):
    os.kill(loader_of(stuck[1]), signal.SIGKILL)
    assert stuck[1].ended() == 128 + signal.SIGKILL
    assert stuck[0].ended() == DISAGREE
    assert "rank 1 of node 1 failed: the loader was killed by signal 9" in why(stuck[0])


def test_a_loader_that_dies_while_all_gather_is_told_as_well(group):
    first, second, _ = group(3)
    for manager in (first, second):
        manager.start()
        waits_for(manager, "rank")
    waits_for(second, "rank 2 of node 2")
    os.kill(loader_of(first), signal.SIGKILL)
    assert first.ended() == 128 + signal.SIGKILL
    assert second.ended() == DISAGREE
    assert "rank 0 of node 0 failed: the loader was killed by signal 9" in why(second)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_without_a_checkpoint_ends_all_in_its_own_words(group, tmp_path, victim):
    gone = tmp_path / "gone"
    managers = group(models={victim: gone}, rendezvous=60.0)
    since = time.monotonic()
    for manager in managers:
        manager.start()
    assert managers[victim].ended() not in (0, DISAGREE)
    assert managers[1 - victim].ended() == DISAGREE
    assert time.monotonic() - since < 8
    told = "gone, revision main, is neither a local folder nor in the Hugging Face cache"
    assert f"rank {victim} of node {victim} failed: {told}" in why(managers[1 - victim])
    assert told in why(managers[victim])


def test_a_group_may_have_another_name_on_another_node(manage, model, port):
    pair = [
        manage(
            model,
            placement=place(Parallel(tensor=2), rank),
            rank={
                "group": f"model-{rank}",
                "rendezvous": Rendezvous("127.0.0.1", port, rank, 2, rank, 2),
            },
        )
        for rank in range(2)
    ]
    for manager in pair:
        manager.start()
    for manager in pair:
        manager.ready()


def test_a_rank_that_goes_deaf_is_lost_after_a_while(group):
    first, second, _ = group(3)
    first.start()
    second.start()
    waits_for(first, "rank 2 of node 2")
    waits_for(second, "rank 2 of node 2")
    second.signal(signal.SIGSTOP)
    since = time.monotonic()
    assert first.ended() == DISAGREE
    assert time.monotonic() - since < 8
    assert "rank 1 of node 1 was lost while gathering: it was silent for 2 s" in why(first)
    second.signal(signal.SIGCONT)
    assert second.ended() == DISAGREE


def test_a_taken_port_is_named_at_once(group, port):
    with socket.create_server(("127.0.0.1", port)):
        first = group()[0]
        first.start()
        assert first.ended() == DISAGREE
    assert f"port {port} is taken" in why(first)
    assert "give all nodes another weight_cache_master_port" in why(first)
    assert not first.loaders()


def test_a_rank_that_is_told_to_stop_while_it_gathers_does_so_at_once(group):
    for manager, who in zip(group(), ("rank 1 of node 1", "rank 0 of node 0"), strict=True):
        manager.start()
        waits_for(manager, who)
        since = time.monotonic()
        manager.signal(signal.SIGTERM)
        assert manager.ended() == 0
        assert time.monotonic() - since < 2
        assert not manager.loaders()


def test_a_failed_meeting_can_be_followed_by_a_good_one(group):
    first, second = group(rendezvous=1.0)
    second.start()
    assert second.ended() == DISAGREE
    for manager in (second, first):
        manager.start()
    for manager in (first, second):
        manager.ready()


# -- after all serve --


def lose(manager: Manager) -> None:
    """End a rank together with its weights."""
    manager.kill()
    for name in list(manager.parked):
        manager.unpark(name)


def test_losses_do_not_matter_once_all_serve(pair):
    lose(pair[0])
    time.sleep(1.5 * SILENCE_S)
    assert pair[1].status().state == "serving"
    assert pair[1].child.poll() is None


@pytest.mark.parametrize("victim", [0, 1])
def test_one_rank_loads_again_while_the_other_serves(pair, victim):
    lose(pair[victim])
    pair[victim].start()
    pair[victim].ready()
    assert not pair[victim].status().adopted
    assert pair[1 - victim].child.poll() is None


def test_one_rank_loads_again_after_rank_0_has_adopted(pair):
    pair[0].restart()
    assert pair[0].status().adopted
    lose(pair[1])
    pair[1].start()
    pair[1].ready()


def test_all_of_one_node_load_again_after_all_others_have_adopted(pair):
    pair[1].restart()
    lose(pair[0])
    pair[0].start()
    pair[0].ready()
    assert pair[1].status().adopted


def test_a_rank_with_other_weights_than_those_served_is_turned_away(pair, tmp_path):
    lose(pair[1])
    model = Path(pair[1].settings.model.path)
    shard = model / SHARDS[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    rewrite(shard, bytes(data))
    pair[1].start()
    assert pair[1].ended() == DISAGREE
    assert "checkpoint is" in why(pair[1])
    assert pair[0].status().state == "serving"


def test_released_ranks_load_again_one_by_one(pair):
    for manager in pair:
        assert isinstance(manager.ask(m.Release()), m.Done)
    for manager in pair:
        assert isinstance(manager.ask(m.Load()), m.Done)
        eventually(
            lambda m=manager: m.status().state == "serving",
            lambda m=manager: f"serving in {PATIENCE_S} s: {m.account()}",
        )


def test_garbage_at_the_port_is_no_harm(group, port):
    first, second = group()
    first.start()
    waits_for(first, "rank 1 of node 1")
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x02\xc1\xc1", b"\0\0\0\0"):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as stranger:
            stranger.sendall(data)
            # Its end, or a reset; who is left waiting fails by the timeout.
            with suppress(ConnectionError):
                while stranger.recv(4096):
                    pass
    second.start()
    for manager in (first, second):
        manager.ready()
