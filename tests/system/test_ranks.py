"""Real ranks and the real supervisor under systemd: weights that stay, and when they go."""

from __future__ import annotations

from typing import Any

import pytest

from tests.system.host import Host, group

A = ("CPU-0", "CPU-1")
B = ("CPU-2", "CPU-3")


@pytest.fixture
def serving(real: Host) -> Host:
    """Two groups that serve."""
    real.write_real_group("a", A)
    real.write_real_group("b", B)
    real.start()
    return real


def ranks(host: Host) -> dict[str, dict[str, Any]]:
    """Every rank as the supervisor tells of it, by instance, once all of them serve."""
    host.until(lambda: host.health()[0] == 200, "health")
    return {told["instance"]: told for told in host.health()[1]["ranks"]}


def generations(host: Host) -> list[str]:
    """What is served, by rank."""
    told = ranks(host)
    return [told[instance]["generation"] for instance in (*A, *B)]


def verdicts(host: Host) -> tuple[int, dict[str, bool]]:
    """Whether all is well, as a status, and which groups are."""
    code, told = host.health()
    return code, {group["name"]: group["healthy"] for group in told["groups"]}


def test_all_is_well_once_the_target_is_started(serving: Host) -> None:
    told = ranks(serving)
    assert {rank["state"] for rank in told.values()} == {"serving"}
    assert {rank["adopted"] for rank in told.values()} == {False}
    # Manifest, one chunk, listener.
    assert {serving.stored(instance) for instance in (*A, *B)} == {3}


def test_a_killed_rank_comes_back_with_its_group_and_nothing_is_read(serving: Host) -> None:
    before, old, others = generations(serving), serving.pids(A), serving.pids(B)
    serving.kill(A[0])
    assert serving.until_back(A, old) < 3
    assert generations(serving) == before
    told = ranks(serving)
    assert {told[instance]["adopted"] for instance in A} == {True}
    assert serving.pids(B) == others


@pytest.mark.parametrize("what", ["preloadd.target", group("a")])
def test_a_restart_adopts(serving: Host, what: str) -> None:
    before = generations(serving)
    serving.machine.systemctl("daemon-reexec")
    serving.machine.systemctl("restart", what)
    assert generations(serving) == before


def test_a_stop_frees_and_a_start_loads(serving: Host) -> None:
    before = generations(serving)
    serving.machine.systemctl("stop", "preloadd.target", "preloadd@*.service")
    assert {serving.stored(instance) for instance in (*A, *B)} == {0}
    serving.start()
    assert not set(before) & set(generations(serving))


def test_a_group_without_its_model_fails_the_start_while_the_other_serves(real: Host) -> None:
    real.write_real_group("b", B)
    real.write_group("a", A[:1], more='model = "/srv/missing"', burst=2)
    assert real.machine.systemctl("start", "preloadd.target", check=False).returncode != 0
    assert real.states(B) == {"active"}
    assert any("/srv/missing" in text for text in real.machine.messages(f"preloadd@{A[0]}"))
    real.until(lambda: verdicts(real) == (503, {"a": False, "b": True}), "verdict on each group")
