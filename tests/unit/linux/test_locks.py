from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from preloadd.errors import AlreadyRunning, ConfigError, InsecurePath, OutOfDescriptors
from preloadd.linux import locks
from preloadd.linux.locks import FILE_NAME, Lock

HOLDING = """
import sys
from pathlib import Path
from preloadd.linux.locks import Lock
lock = Lock.take(Path(sys.argv[1]), "CPU-0")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until its standard input ends or it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        yield child
        child.kill()


def test_the_holder_is_written_down_privately(tmp_path: Path) -> None:
    with Lock.take(tmp_path, "CPU-0"):
        path = tmp_path / FILE_NAME
        assert path.read_text() == f"{os.getpid()}\n"
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_second_daemon_fails_at_once_and_names_the_first(tmp_path: Path) -> None:
    with holder(tmp_path) as child:
        with pytest.raises(AlreadyRunning) as caught:
            Lock.take(tmp_path, "CPU-0")
        assert caught.value.pid == child.pid
        for part in ("CPU-0", str(child.pid), str(tmp_path / FILE_NAME), "stop that daemon"):
            assert part in str(caught.value)
        assert (tmp_path / FILE_NAME).read_text() == f"{child.pid}\n"


def test_the_same_process_cannot_take_it_twice(tmp_path: Path) -> None:
    with Lock.take(tmp_path, "CPU-0"), pytest.raises(AlreadyRunning):
        Lock.take(tmp_path, "CPU-0")


def test_a_holder_without_a_readable_number_is_still_a_holder(tmp_path: Path) -> None:
    with Lock.take(tmp_path, "CPU-0"):
        (tmp_path / FILE_NAME).write_text("who knows")
        with pytest.raises(AlreadyRunning, match="another process") as caught:
            Lock.take(tmp_path, "CPU-0")
        assert caught.value.pid is None


def test_closing_gives_it_back_and_keeps_the_file(tmp_path: Path) -> None:
    Lock.take(tmp_path, "CPU-0").close()
    first = (tmp_path / FILE_NAME).stat().st_ino
    Lock.take(tmp_path, "CPU-0").close()
    assert (tmp_path / FILE_NAME).stat().st_ino == first


def test_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    with holder(tmp_path) as child:
        child.send_signal(signal.SIGKILL)
        child.wait()
        with Lock.take(tmp_path, "CPU-0"):
            pass


def test_a_zombie_holds_no_lock(tmp_path: Path) -> None:
    with holder(tmp_path) as child:
        child.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        os.kill(child.pid, 0)  # a zombie is still there
        with Lock.take(tmp_path, "CPU-0"):
            pass


def test_a_stale_number_that_belongs_to_another_process_means_nothing(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(f"{os.getppid()}\nand more of an older format\n")
    with Lock.take(tmp_path, "CPU-0"):
        assert (tmp_path / FILE_NAME).read_text() == f"{os.getpid()}\n"


def test_a_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = Lock.take(tmp_path, "CPU-0")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False):
        lock.close()
        with Lock.take(tmp_path, "CPU-0"):
            pass


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("data")
    (tmp_path / FILE_NAME).symlink_to(target)
    with pytest.raises(InsecurePath, match=r"symbolic link.*remove it") as caught:
        Lock.take(tmp_path, "CPU-0")
    assert str(tmp_path / FILE_NAME) in str(caught.value)
    assert target.read_text() == "data"


def test_the_holder_is_told_without_touching_the_lock(tmp_path):
    path = tmp_path / FILE_NAME
    assert locks.holder(path) is None
    with Lock.take(tmp_path, "CPU-0"):
        assert locks.holder(path) == os.getpid()
    assert locks.holder(path) is None  # the number is still written there


def test_a_lock_on_another_file_is_no_holder(tmp_path):
    (tmp_path / "other").mkdir()
    with Lock.take(tmp_path / "other", "CPU-0"):
        (tmp_path / FILE_NAME).write_text(f"{os.getpid()}\n")
        assert locks.holder(tmp_path / FILE_NAME) is None


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\xff\n"])
def test_a_file_that_names_nobody_has_no_holder(tmp_path, content):
    (tmp_path / FILE_NAME).write_bytes(content)
    assert locks.holder(tmp_path / FILE_NAME) is None
    assert locks.holder(tmp_path / FILE_NAME / "below") is None


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


@pytest.mark.parametrize("plant", [Path.mkdir, os.mkfifo, a_socket])
def test_what_is_no_file_is_told_with_the_remedy(socket_dir, plant):
    plant(socket_dir / FILE_NAME)
    with pytest.raises((ConfigError, InsecurePath), match="remove it") as caught:
        Lock.take(socket_dir, "CPU-0")
    assert str(socket_dir / FILE_NAME) in str(caught.value)


def test_a_folder_that_is_gone_is_told(tmp_path):
    with pytest.raises(ConfigError, match="choose a socket directory") as caught:
        Lock.take(tmp_path / "gone", "CPU-0")
    assert str(tmp_path / "gone" / FILE_NAME) in str(caught.value)


def test_a_number_that_cannot_be_written_is_done_without(tmp_path):
    """A limit of file sizes stands for a full disk."""
    code = "import resource, sys; from pathlib import Path; from preloadd.linux.locks import Lock; "
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); Lock.take(Path(sys.argv[1]), 'x')"
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, timeout=20)
    assert (tmp_path / FILE_NAME).read_text() == ""


def test_a_limit_of_descriptors_is_told(tmp_path, descriptors_left):
    with descriptors_left(0), pytest.raises(OutOfDescriptors, match="ulimit -n") as caught:
        Lock.take(tmp_path, "CPU-0")
    assert str(tmp_path / FILE_NAME) in str(caught.value)


AGAIN = """
import sys
from pathlib import Path
from preloadd.linux import lending, locks, seqpacket
folder = Path(sys.argv[1])
with locks.Lock.take(folder, "CPU-0"):
    try:
        locks.Lock.take(folder, "CPU-0")
    except locks.AlreadyRunning:
        print("held")
if sys.argv[2:] == ["first"]:
    seqpacket.Reservation(folder / "rank.sock", 0o660).listen(1).close()
seqpacket.set_access(folder / "rank.sock", 0o660)
lending.lend(folder / "python", {})
"""


def test_what_is_there_does_for_another_life_on_a_disk_that_has_become_read_only(
    tmp_path: Path,
) -> None:
    command = f"{sys.executable} -c '{AGAIN}' {tmp_path}"
    script = [
        f"mount -t tmpfs none {tmp_path} || exit 99",
        f"{command} first && mount -o remount,ro {tmp_path} && ! touch {tmp_path}/x 2>&1",
        command,
    ]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", "\n".join(script)],
        cwd=Path(locks.__file__).parents[2],
        capture_output=True,
        text=True,
    )
    if os.geteuid() != 0 or done.returncode == 99:
        pytest.skip("nothing can be mounted here")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "held"
    assert "Read-only" in done.stdout
