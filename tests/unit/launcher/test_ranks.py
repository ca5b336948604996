"""A rank without a group: what it owns and lets go of. How it is told things: test_group."""

import pytest

from preloadd.errors import ConfigError
from preloadd.launcher.ranks import Rank
from preloadd.linux.lending import LENT, lend
from preloadd.linux.locks import Lock


def rank(stage, path=None) -> Rank:
    settings = stage.settings("CPU-0")
    return Rank(settings, stage.command(settings), stage.environ, path or stage.folder / "notify")


def test_where_it_is_found(stage):
    with rank(stage) as made:
        assert made.socket == stage.socket_dir / "CPU-0" / "rank.sock"


def test_notify_socket_lasts_as_long_as_the_rank(stage):
    with rank(stage):
        assert (stage.folder / "notify").is_socket()
    assert not (stage.folder / "notify").exists()


def test_notify_path_that_is_too_long_is_said_and_nothing_is_left(stage):
    with pytest.raises(ConfigError, match="107"):
        rank(stage, stage.folder / ("n" * 107))


@pytest.mark.parametrize("started", [True, False])
def test_what_is_left_is_removed_if_the_rank_was_started(stage, started):
    folder = stage.socket_dir / "CPU-0"
    folder.mkdir(mode=0o700)
    stage.script("CPU-0", [["exit", 0]])
    with rank(stage) as made:
        if started:
            made.start()
            made.end()
        made.socket.touch()
        half_way = made.folder / "~ank.sock"
        half_way.touch()
        lend(made.folder / LENT, {})
    assert (made.folder / LENT).exists() is not started
    assert made.socket.exists() is not started
    assert half_way.exists() is not started


def test_socket_of_whoever_holds_the_lock_is_left_alone(stage):
    folder = stage.socket_dir / "CPU-0"
    folder.mkdir(mode=0o700)
    stage.script("CPU-0", [["exit", 0]])
    made = rank(stage)
    made.start()
    made.end()
    made.socket.touch()
    with Lock.take(folder, "CPU-0"):
        made.close()
        assert made.socket.exists()


def test_nothing_is_heard_before_the_first_life(stage):
    with rank(stage) as made:
        assert list(made.news()) == []
        assert not made.ready
