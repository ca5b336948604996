import pytest

from preloadd.domain.access import Peer, Policy, is_no_id, is_operator, may_attach

OWN = Policy(owner=1000)
GROUPS = Policy(owner=1000, gids=frozenset({50}))
USERS = Policy(owner=1000, uids=frozenset({2000}))


def peer(uid, *gids):
    return Peer(pid=1, uid=uid, gids=frozenset(gids))


@pytest.mark.parametrize("text", ["4294967295", "99999999999999999999", "9" * 5000])
def test_numbers_of_nobody(text):
    assert is_no_id(text)


@pytest.mark.parametrize("text", ["0", "4294967294", "0" * 5000 + "7", "vllm", "-1", "²", ""])
def test_numbers_of_somebody_and_names(text):
    assert not is_no_id(text)


@pytest.mark.parametrize(
    ("policy", "who", "attach", "operate"),
    [
        (OWN, peer(0), True, True),
        (OWN, peer(1000), True, True),
        (OWN, peer(2000, 1000), False, False),
        (GROUPS, peer(2000, 7, 50), True, False),
        (GROUPS, peer(2000, 7), False, False),
        (USERS, peer(2000), True, False),
        (USERS, peer(2001, 2000), False, False),
    ],
)
def test_who_may_attach_and_who_may_operate(policy, who, attach, operate):
    assert may_attach(policy, who) is attach
    assert is_operator(policy, who) is operate


@pytest.mark.parametrize(
    ("policy", "group", "folder", "socket"),
    [
        (OWN, None, 0o700, 0o600),
        (GROUPS, 50, 0o750, 0o660),
        (USERS, None, 0o711, 0o666),
        (Policy(owner=1000, gids=frozenset({50}), may_give=False), None, 0o711, 0o666),
        (Policy(owner=1000, may_give=False), None, 0o700, 0o600),
        (Policy(owner=1000, gids=frozenset({50, 51})), None, 0o711, 0o666),
        (Policy(owner=1000, uids=frozenset({2000}), gids=frozenset({50})), None, 0o711, 0o666),
    ],
)
def test_modes_are_as_narrow_as_the_policy_allows(policy, group, folder, socket):
    assert (policy.group, policy.folder_mode, policy.socket_mode) == (group, folder, socket)
