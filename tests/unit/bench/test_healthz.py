"""What the benchmark of the health endpoint says of its promises."""

from bench.healthz import verdict


def test_every_promise_is_told_and_which_was_missed():
    good = {"requests": 10, "stuck after, s": 2.5, "p99, ms": 50.0, "worst, ms": 900.0}
    met = ["stuck after, s: 2.5, promised at most 5: met", "p99, ms: 50, promised at most 50: met"]
    assert verdict(good) == (False, met)
    missed, lines = verdict({**good, "p99, ms": 50.1})
    assert (missed, lines[1]) == (True, "p99, ms: 50.1, promised at most 50: MISSED")
