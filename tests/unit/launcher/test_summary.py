from collections.abc import Iterator
from pathlib import Path

import pytest

from preloadd.launcher.summary import Told, again_text, ready_text, told_by
from tests.rank_stand_in import Ranks

SOCKETS = Path("/run/x")


@pytest.fixture
def ranks(socket_dir: Path) -> Iterator[Ranks]:
    ranks = Ranks(socket_dir)
    yield ranks
    ranks.close()


def test_one_rank():
    told = Told("CPU-0", SOCKETS / "CPU-0/rank.sock", adopted=False, nbytes=3 << 20, seconds=1.234)
    assert ready_text("tiny", [told], seconds=2.0, socket_dir=SOCKETS).splitlines() == [
        "ready: tiny, 1 rank, 3.0 MiB, after 2.0 s",
        "  CPU-0  loaded 3.0 MiB in 1.23 s  /run/x/CPU-0/rank.sock",
        "engines connect with PRELOADD_SOCKET_DIR=/run/x (or the option socket_dir)",
    ]


def test_several_ranks_stand_in_columns():
    ranks = [
        Told(name, SOCKETS / name, adopted=True, nbytes=1 << 20, seconds=0.1)
        for name in ("CPU-0", "CPU-10")
    ]
    lines = ready_text("tiny", ranks, seconds=0.2, socket_dir=SOCKETS).splitlines()
    assert lines[0] == "ready: tiny, 2 ranks, 2.0 MiB, after 0.2 s"
    assert lines[1] == "  CPU-0   adopted 1.0 MiB in 0.10 s  /run/x/CPU-0"
    assert lines[2] == "  CPU-10  adopted 1.0 MiB in 0.10 s  /run/x/CPU-10"


def test_rank_that_does_not_answer_is_told_of_without_numbers(socket_dir):
    told = told_by("CPU-0", socket_dir / "rank.sock", timeout=0.1)
    assert told == Told("CPU-0", socket_dir / "rank.sock")
    assert again_text(told) == "CPU-0 serves again"


@pytest.mark.parametrize(
    ("adopted", "counters", "seconds"),
    [
        (False, {"generation_load_ms": 270}, 0.27),
        (True, {"generation_load_ms": 270}, 1.5),
        (False, {}, 1.5),
    ],
)
def test_a_load_takes_what_preloadctl_says(ranks, adopted, counters, seconds):
    rank = ranks.serve("CPU-0", adopted=adopted, counters=counters, ready_s=1.5)
    told = told_by("CPU-0", rank.path, timeout=5)
    assert (told.adopted, told.seconds) == (adopted, seconds)


def test_what_is_not_known_is_not_told_as_nothing():
    ranks = [Told("CPU-0", SOCKETS / "a", adopted=True, nbytes=9), Told("CPU-1", SOCKETS / "b")]
    first, *_ = ready_text("tiny", ranks, seconds=0.2, socket_dir=SOCKETS).splitlines()
    assert first == "ready: tiny, 2 ranks, size not known, after 0.2 s"


def test_line_breaks_in_paths_break_no_line():
    told = Told("CPU-0", Path("/run/a\nb/CPU-0/rank.sock"), adopted=True)
    lines = ready_text("ti\nny", [told], seconds=0, socket_dir=Path("/run/a\nb")).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("ready: ti\\nny, 1 rank")
    assert "PRELOADD_SOCKET_DIR=/run/a\\nb " in lines[2]
