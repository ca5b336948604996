from preloadd.warmup.seeding.kinds import Outcome, Seeded


def test_what_was_fetched_is_not_shown():
    assert "secret" not in repr(Seeded(Outcome.FETCHED, "", "secret"))
