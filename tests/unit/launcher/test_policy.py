import signal

import pytest

from preloadd.errors import EXIT_STATUS, ErrorCode
from preloadd.launcher.policy import Restarts, describe, exit_code, mendable


@pytest.mark.parametrize(
    ("status", "code"),
    [(0, 1), (1, 1), (70, 70), (255, 255), (128 + signal.SIGKILL, 137)],
)
def test_exit_code_is_the_ranks_own(status, code):
    assert exit_code(status) == code


def test_restarts_are_bounded_in_a_window():
    restarts, pauses = Restarts(limit=5, window=60.0), []
    for now in range(5):
        granted = restarts.grant(now=float(now))
        assert granted is not None
        restarts, pause = granted
        pauses.append(pause)
    assert restarts.grant(now=5.0) is None
    assert restarts.grant(now=59.9) is None
    assert restarts.grant(now=60.0) is not None
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0]


def test_restarts_far_apart_are_always_granted_at_once():
    restarts = Restarts(limit=2, window=10.0)
    for now in range(0, 200, 10):
        granted = restarts.grant(now=float(now))
        assert granted is not None
        restarts, pause = granted
        assert pause == 0.0
    assert len(restarts.granted) == 1


def test_pause_has_an_end():
    restarts = Restarts(limit=100, window=1000.0)
    pause = 0.0
    for now in range(50):
        granted = restarts.grant(now=float(now))
        assert granted is not None
        restarts, pause = granted
    assert pause == 4.0


@pytest.mark.parametrize("served", [True, False])
def test_clean_exit_is_not_mended(served):
    assert not mendable(0, served=served)


@pytest.mark.parametrize("status", [1, 70, 74, 73, 137, 139])
@pytest.mark.parametrize("served", [True, False])
def test_failures_are_mended(status, served):
    assert mendable(status, served=served)


@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.CONFIG,
        ErrorCode.ALREADY_RUNNING,
        ErrorCode.INSECURE,
        ErrorCode.UNSUPPORTED,
        ErrorCode.NOT_FOUND,
        ErrorCode.CHECKPOINT,
    ],
)
def test_what_a_restart_cannot_mend_is_only_restarted_after_it_served(code):
    assert not mendable(EXIT_STATUS[code], served=False)
    assert mendable(EXIT_STATUS[code], served=True)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "ended with status 0"),
        (3, "ended with status 3"),
        (128, "ended with status 128"),
        (137, "ended with status 137 (SIGKILL)"),
        (255, "ended with status 255"),
    ],
)
def test_ends_are_described(status, text):
    assert describe(status) == text
