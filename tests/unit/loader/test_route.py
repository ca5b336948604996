import pytest

from preloadd.loader.route import FAST, Route, Way

MIB = 1 << 20


def cold(route, count, cached=False, **rates):
    """Ways of `count` pieces, each of which is read before the next; `rates` are bytes a second."""
    chosen = []
    for _ in range(count):
        way = route.choose(cached=cached)
        if rates:
            route.learn(way, MIB, MIB / rates[way.name.lower()])
        chosen.append(way)
    return chosen


@pytest.mark.parametrize(("cache", "direct"), [(2e8, 3e8), (3e8, 2e8)])
def test_both_ways_get_a_turn_and_the_faster_one_the_rest(cache, direct):
    chosen = cold(Route(4), 20, cache=cache, direct=direct)
    assert chosen[:8] == [Way.CACHE] * 4 + [Way.DIRECT] * 4
    assert set(chosen[8:]) == {Way.DIRECT if direct > cache else Way.CACHE}


def test_what_is_cached_comes_from_there_and_is_no_turn():
    route = Route(2)
    assert cold(route, 10, cached=True) == [Way.CACHE] * 10
    assert cold(route, 4, cache=1e8, direct=1e8) == [Way.CACHE] * 2 + [Way.DIRECT] * 2


def test_where_the_kernel_does_not_tell_a_fast_cache_is_not_left():
    assert set(cold(Route(2), 20, cached=None, cache=2 * FAST, direct=3 * FAST)) == {Way.CACHE}
    chosen = cold(Route(2), 20, cached=None, cache=FAST / 2, direct=FAST)
    assert set(chosen[4:]) == {Way.DIRECT}
    chosen = cold(Route(2), 20, cached=False, cache=2 * FAST, direct=3 * FAST)
    assert set(chosen[4:]) == {Way.DIRECT}


def test_a_way_that_becomes_slower_than_the_other_was_is_left():
    route = Route(1)
    cold(route, 2, cache=1e8, direct=2e8)
    assert set(cold(route, 60, cache=1e8, direct=1e6)[-50:]) == {Way.CACHE}


def test_pieces_count_by_their_bytes():
    route = Route(1)
    for way, nbytes, seconds in [(Way.CACHE, 100 * MIB, 1.0), (Way.DIRECT, MIB, 0.02)]:
        assert route.choose(cached=False) is way
        route.learn(way, nbytes, seconds)
    assert route.choose(cached=False) is Way.CACHE


def test_turns_go_on_while_nothing_is_known():
    assert len(cold(Route(2), 20)) == 20
