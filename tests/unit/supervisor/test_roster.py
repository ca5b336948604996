import os
import resource
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from preloadd.domain.ids import Instance
from preloadd.errors import ConfigError, OutOfDescriptors
from preloadd.supervisor.roster import Expected, Roster, Wanted, found, socket_path


def put(socket_dir: Path, folder: str, name: str = "rank.sock") -> None:
    (socket_dir / folder).mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(socket_dir / folder / name))


def expected(name: str, group: str = "") -> Expected:
    return Expected(Instance.parse(name), group)


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    with Path(os.devnull).open() as lowest:
        free, (soft, hard) = lowest.fileno(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ranks_are_found_by_their_sockets_in_order(socket_dir):
    for name in ("CPU-10", "CPU-9", "CPU-0"):
        put(socket_dir, name)
    put(socket_dir, "CPU-0.draft", "rank_draft.sock")
    names = [str(rank.instance) for rank in found(socket_dir)]
    assert names == ["CPU-0", "CPU-9", "CPU-10", "CPU-0.draft"]


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("notes", "rank.sock"),
        ("CPU-0", "rank_draft.sock"),
        ("CPU-0.draft", "rank.sock"),
        ("CPU-0", "~ank.sock"),
        ("CPU-0", "rank_other.sock"),
    ],
)
def test_other_sockets_are_no_ranks(socket_dir, folder, name):
    put(socket_dir, folder, name)
    assert found(socket_dir) == ()


def test_a_missing_folder_has_no_ranks(socket_dir):
    assert found(socket_dir / "gone") == ()


def test_ranks_that_come_and_go_while_it_looks_disturb_nothing(socket_dir):
    put(socket_dir, "CPU-9")
    over = threading.Event()

    def churn() -> None:
        while not over.is_set():
            for number in range(8):
                put(socket_dir, f"CPU-{number}")
            for number in range(8):
                shutil.rmtree(socket_dir / f"CPU-{number}")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        seen = [found(socket_dir) for _ in range(300)]
    finally:
        over.set()
        thread.join()
    assert all(expected("CPU-9") in ranks for ranks in seen)


def test_without_a_descriptor_nothing_is_said_to_be_missing(socket_dir):
    put(socket_dir, "CPU-0")
    with no_descriptor_left(), pytest.raises(OutOfDescriptors, match="ulimit -n") as caught:
        found(socket_dir)
    assert str(socket_dir) in str(caught.value)


def test_a_name_of_a_file_that_is_no_text_can_be_told(socket_dir):
    odd = Wanted((), "b\udcff.toml: bad\nc.toml: bad")
    trouble = Roster(socket_dir, lambda: odd, scan=False)().trouble
    assert trouble == "b\\udcff.toml: bad\nc.toml: bad"


def test_configured_ranks_come_first_and_once(socket_dir):
    put(socket_dir, "CPU-0")
    put(socket_dir, "CPU-1")
    wanted = Wanted((expected("CPU-1", "llama"), expected("CPU-7", "llama")))
    ranks = Roster(socket_dir, lambda: wanted, scan=True)().ranks
    assert ranks == (expected("CPU-1", "llama"), expected("CPU-7", "llama"), expected("CPU-0"))
    assert Roster(socket_dir, lambda: wanted, scan=False)().ranks == wanted.ranks


def test_a_broken_configuration_leaves_the_last_good_one(socket_dir, caplog):
    answers = [Wanted((expected("CPU-0", "a"),)), ConfigError("a.toml: bad"), Wanted(())]

    def configured() -> Wanted:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    roster = Roster(socket_dir, configured, scan=False)
    assert roster() == Wanted((expected("CPU-0", "a"),))
    kept = roster()
    assert kept.ranks == (expected("CPU-0", "a"),)
    assert "a.toml: bad" in kept.trouble
    assert "a.toml: bad" in caplog.text
    assert roster() == Wanted(())


def test_the_same_trouble_is_logged_once(socket_dir, caplog):
    roster = Roster(socket_dir, lambda: Wanted((), "x.toml: bad"), scan=False)
    roster()
    roster()
    assert caplog.text.count("x.toml: bad") == 1


def test_names_of_unit_and_socket():
    rank = expected("GPU-1.draft")
    assert rank.unit == "preloadd@GPU-1.draft.service"
    assert socket_path(Path("/run"), rank.instance) == Path("/run/GPU-1.draft/rank_draft.sock")
