"""Who may attach, and who may release and load: other users as real processes."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from preloadd.domain.lifecycle import State
from preloadd.domain.settings import Access
from preloadd.protocol import messages as m
from tests.checkout import ROOT
from tests.manager import Manage, Manager

NOBODY = 65534
OTHER = 54320
GROUP, OTHER_GROUP = 54321, 54322

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user"),
]


def guest(manager: Manager, *requests: str, uid: int = NOBODY, groups: str = "65534"):
    """What another user is answered."""
    script = Path(__file__).with_name("guest.py")
    done = subprocess.run(
        [sys.executable, str(script), str(uid), groups, str(manager.socket), *requests],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert not done.returncode, done.stderr
    return [tuple(answer) for answer in json.loads(done.stdout)]


@pytest.fixture
def open_to(manage: Manage, model: Path):
    """A rank with these access settings, in a folder that everybody may pass through."""

    def open_to(**access: tuple[str, ...]) -> Manager:
        manager: Manager = manage(model, rank={"access": Access(**access)})
        manager.folder.chmod(0o711)
        Path(manager.settings.socket_dir).chmod(0o711)
        manager.start()
        manager.ready()
        return manager

    return open_to


def modes(manager: Manager) -> tuple[int, int]:
    paths = (manager.socket.parent, manager.socket)
    return tuple(stat.S_IMODE(os.lstat(path).st_mode) for path in paths)


def test_by_default_others_cannot_even_connect(open_to):
    manager = open_to()
    assert modes(manager) == (0o700, 0o600)
    ((code, why),) = guest(manager, "status")
    assert code == "denied"
    assert why == (
        f"user {NOBODY} may not connect to {manager.socket}: list the user in the daemon's "
        "access.users or one of its groups in access.groups"
    )


@pytest.mark.parametrize("listed", ["nobody", str(NOBODY)])
def test_a_listed_user_attaches_but_is_no_operator(open_to, listed):
    manager = open_to(users=(listed,))
    assert modes(manager) == (0o711, 0o666)
    answers = guest(manager, "status", "release", "load", "attach")
    assert [kind for kind, _ in answers] == ["status-told", "refused", "refused", "granted"]
    assert "only the sole lease holder, root or the daemon's own user" in answers[1][1]
    assert "only root or the daemon's own user may ask for a load" in answers[2][1]
    assert manager.status().state is State.SERVING


def test_a_listed_user_may_release_what_it_alone_holds(open_to):
    """That is copy mode."""
    manager = open_to(users=("nobody",))
    answers = guest(manager, "status", "copy", "release", "load")
    assert [kind for kind, _ in answers] == ["status-told", "granted", "done", "refused"]
    assert manager.status().state is State.RELEASED


def test_others_are_told_why_the_daemon_refuses_them(open_to):
    manager = open_to(users=("daemon",))
    ((kind, why),) = guest(manager, "status")
    assert kind == "refused"
    assert why == (
        f"user {NOBODY} may not use CPU-0: list the user or one of its groups in the daemon's "
        "access settings"
    )
    assert f"turned away: user {NOBODY}" in manager.log
    assert guest(manager, "status", uid=1)[0][0] == "status-told"
    assert guest(manager, "status", uid=0)[0][0] == "status-told"


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (str(GROUP), "status-told"),
        (f"{OTHER_GROUP},{GROUP}", "status-told"),
        (str(OTHER_GROUP), "denied"),
    ],
    ids=["primary", "supplementary", "none"],
)
def test_members_of_the_one_listed_group_get_in(open_to, groups, expected):
    manager = open_to(groups=(str(GROUP),))
    assert modes(manager) == (0o750, 0o660)
    assert {os.lstat(path).st_gid for path in (manager.socket.parent, manager.socket)} == {GROUP}
    assert guest(manager, "status", groups=groups)[0][0] == expected


def test_of_several_groups_every_member_gets_in_and_nobody_else(open_to):
    manager = open_to(groups=(str(GROUP), str(OTHER_GROUP)))
    assert modes(manager) == (0o711, 0o666)
    assert guest(manager, "status", groups=f"65534,{OTHER_GROUP}")[0][0] == "status-told"
    assert guest(manager, "status")[0][0] == "refused"


def test_a_user_that_does_not_exist_is_named_before_loading(manage, model):
    manager: Manager = manage(model, rank={"access": Access(users=("nemo",))})
    manager.start()
    assert manager.ended() == 78
    assert "there is no user 'nemo' on this host" in manager.log
    assert manager.phases == []


def test_access_that_changed_holds_for_a_parked_listener_too(open_to):
    manager = open_to()
    manager.kill()
    manager.settings = _with_access(manager, users=("nobody",))
    manager.start()
    manager.ready()
    assert modes(manager) == (0o711, 0o666)
    assert guest(manager, "status")[0][0] == "status-told"
    manager.kill()
    manager.settings = _with_access(manager)
    manager.start()
    manager.ready()
    assert modes(manager)[1] == 0o600
    assert guest(manager, "status")[0][0] == "denied"


def _with_access(manager: Manager, **access: tuple[str, ...]):
    return dataclasses.replace(manager.settings, access=Access(**access))


CROWD = """
import os, sys
from pathlib import Path
from preloadd.protocol import messages as m
from preloadd.transport.blocking import connect
os.setgroups([])
os.setresuid(65534, 65534, 65534)
held = []
for _ in range(300):
    client = connect(Path(sys.argv[1]), timeout=10)
    reply = client.call(m.Watch(), timeout=10).reply
    if isinstance(reply, m.StateChanged):
        held.append(client)
    else:
        client.close()
print(len(held), reply.detail, flush=True)
sys.stdin.read()
"""


def test_who_watches_without_end_keeps_neither_root_nor_others_out(open_to):
    manager = open_to(users=("nobody", str(OTHER)))
    with subprocess.Popen(
        [sys.executable, "-c", CROWD, str(manager.socket)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as crowd:
        held, told = crowd.stdout.readline().split(" ", 1)
        assert held == "85"
        assert f"user {NOBODY} has 85 connections already" in told
        answers = guest(manager, "status", "attach", uid=OTHER, groups=str(OTHER))
        assert [kind for kind, _ in answers] == ["status-told", "granted"]
        assert manager.ask(m.Release()) == m.Done()
        crowd.stdin.close()
