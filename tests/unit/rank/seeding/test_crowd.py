import pytest

from preloadd.rank.seeding.crowd import MOST, MOST_EACH, Crowd, most_of, of_one_peer


def test_the_oldest_of_the_same_address_makes_room():
    crowd = Crowd()
    assert crowd.arrived(0, "other") is None
    assert [crowd.arrived(n, "a") for n in range(1, MOST_EACH + 1)] == [None] * MOST_EACH
    assert crowd.arrived(100, "a") == 1
    assert crowd.arrived(101, "a") == 2
    assert len(crowd) == MOST_EACH + 1


def test_who_has_asked_stays_as_long_as_others_have_not():
    crowd = Crowd()
    for n in range(MOST_EACH):
        crowd.arrived(n, "a")
    crowd.asked(0)
    assert crowd.arrived(100, "a") == 1
    for n in (*range(2, MOST_EACH), 100):
        crowd.asked(n)
    assert crowd.arrived(101, "a") == 0


def test_of_all_addresses_that_with_most_makes_room():
    crowd = Crowd()
    for n in range(MOST_EACH):
        crowd.arrived(n, "many")
    for n in range(MOST_EACH, MOST):
        crowd.arrived(n, f"one {n}")
    assert crowd.arrived(MOST, "new") == 0
    assert len(crowd) == MOST


def test_where_few_files_may_be_open_few_come_in():
    assert [most_of(files) for files in (1 << 20, 4 * MOST, 256, 3)] == [MOST, MOST, 64, 1]
    crowd = Crowd(most_of(8))
    assert [crowd.arrived(n, "a") for n in range(4)] == [None, None, 0, 1]
    assert len(crowd) == 2


def test_who_left_takes_no_room():
    crowd = Crowd()
    for n in range(MOST_EACH):
        crowd.arrived(n, "a")
    crowd.left(5)
    crowd.left(5)
    crowd.asked(5)
    assert crowd.arrived(100, "a") is None


@pytest.mark.parametrize(
    ("host", "peer"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("::1", "::"),
        ("", ""),
    ],
)
def test_a_peer_has_one_address_or_one_network(host, peer):
    assert of_one_peer(host) == peer
