from preloadd.warmup.stores.backoff import Backoff


def test_each_failure_in_a_row_doubles_the_pause_up_to_the_longest():
    backoff, now, pauses = Backoff(5, 300), 1000.0, []
    for _ in range(9):
        backoff = backoff.failed(now)
        pauses.append(backoff.until - now)
        assert backoff.waits(now)
        assert not backoff.waits(backoff.until)
        now = backoff.until
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300]


def test_a_success_begins_anew():
    backoff = Backoff(5, 300).failed(0).failed(10).worked()
    assert not backoff.waits(0)
    assert backoff.failed(100).until == 105


def test_any_number_of_failures():
    backoff = Backoff(5, 300)
    for _ in range(5000):
        backoff = backoff.failed(0)
    assert backoff.until == 300
