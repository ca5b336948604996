from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from preloadd.domain.access import Policy
from preloadd.domain.settings import Access
from preloadd.errors import ConfigError
from preloadd.linux import peers, seqpacket
from tests.listening import listen


def test_a_pair_knows_its_maker() -> None:
    left, right = seqpacket.pair()
    with left, right:
        found = peers.peer(left)
    assert (found.pid, found.uid) == (os.getpid(), os.geteuid())
    assert found.gids == {os.getegid(), *os.getgroups()}


CONNECTING = "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
CONNECTING += "s.connect(sys.argv[1]); s.recv(1)"


def test_a_client_is_who_connected(socket_dir: Path) -> None:
    path = socket_dir / "rank.sock"
    with listen(path, 0o600, 5) as listener:
        child = subprocess.Popen([sys.executable, "-I", "-S", "-c", CONNECTING, path])
        served, _ = listener.accept()
        with served:
            assert peers.peer(served).pid == child.pid
        assert child.wait() == 0


def test_a_listener_is_known_to_its_clients_unanswered(socket_dir: Path) -> None:
    path = socket_dir / "rank.sock"
    with listen(path, 0o600, 5), seqpacket.connect(path) as client:
        assert peers.peer(client).pid == os.getpid()


MANY = """
import os, sys
from preloadd.linux import peers, seqpacket
os.setgroups(range(5000, 5000 + int(sys.argv[1])))
found = peers.peer(seqpacket.pair()[0])
print(len(found.gids), min(found.gids), max(found.gids))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes its groups")
@pytest.mark.parametrize("count", [256, 257, 3000])
def test_any_number_of_groups_is_seen(count: int) -> None:
    done = subprocess.run([sys.executable, "-c", MANY, str(count)], capture_output=True, text=True)
    # The primary group is the lowest.
    expected = [count + 1, os.getegid(), 4999 + count]
    assert [int(n) for n in done.stdout.split()] == expected, done.stderr


def test_users_and_groups_are_given_by_name_or_number() -> None:
    assert peers.user_id("root") == 0
    assert peers.group_id("root") == 0
    assert peers.user_id("4711") == 4711
    assert peers.group_id("4712") == 4712


@pytest.mark.parametrize("name", ["no-such-name", "", "-1", "٣"])
def test_an_unknown_name_is_told(name: str) -> None:
    with pytest.raises(ConfigError, match="no user") as caught:
        peers.user_id(name)
    assert repr(name) in str(caught.value)
    with pytest.raises(ConfigError, match="no group"):
        peers.group_id(name)


def test_settings_become_a_policy() -> None:
    access = Access(groups=("root", "70"), users=("71",))
    assert peers.policy(access, 5) == Policy(5, frozenset({71}), frozenset({0, 70}))
