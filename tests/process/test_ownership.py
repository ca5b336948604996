"""One daemon an instance, in folders that nobody else could have prepared."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest

from preloadd.domain.lifecycle import State
from preloadd.domain.settings import Access
from tests.manager import Manage, Manager

NOBODY = 65534


# -- a second daemon --


def test_a_second_daemon_ends_at_once_and_names_the_first(manager, manage, model):
    folder = manager.socket.parent
    before = (os.lstat(manager.socket), os.lstat(folder).st_mode)
    second = manage(
        model,
        rank={"socket_dir": manager.settings.socket_dir, "access": Access(users=("nobody",))},
    )
    second.start()
    assert second.ended() == 75
    assert f"CPU-0 is already served by process {manager.pid} (lock {folder}/" in second.log
    assert "stop that daemon first" in second.log
    assert second.phases == []
    assert (os.lstat(manager.socket), os.lstat(folder).st_mode) == before
    manager.attach().close()


def test_a_second_daemon_is_refused_while_the_first_still_loads(manage, model):
    first = manage(model)
    first.start()
    first.until_phase("opening")
    second = manage(model, rank={"socket_dir": first.settings.socket_dir})
    second.start()
    assert second.ended() == 75
    assert f"process {first.pid}" in second.log
    first.ready()


def test_what_a_killed_daemon_left_is_replaced(manage, model):
    """By a manager that keeps nothing; the number in the lock file is another process's by now."""
    first: Manager = manage(model)
    first.start()
    first.ready()
    left = os.lstat(first.socket)
    first.kill()
    lock = first.socket.with_name("rank.lock")
    lock.write_text(f"{os.getpid()}\n")
    second = manage(model, rank={"socket_dir": first.settings.socket_dir})
    second.start()
    second.ready()
    assert os.lstat(second.socket).st_ino != left.st_ino
    assert lock.read_text() == f"{second.pid}\n"
    second.attach().close()


def test_a_zombie_holds_no_lock(manage, model):
    first: Manager = manage(model)
    first.start()
    first.ready()
    first.signal(signal.SIGKILL)
    second = manage(model, rank={"socket_dir": first.settings.socket_dir})
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    assert _state(first.pid) == "Z"
    second.start()
    second.ready()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# -- folders --


def refused(manage: Manage, model: Path, folder: Path, status: int, *, derived: bool = False):
    """The log of a rank that does not accept `folder` for its socket, and has done nothing."""
    manager: Manager = manage(model, rank={"socket_dir": str(folder), "derived": derived})
    manager.start()
    assert manager.ended() == status
    assert manager.phases == []
    assert not manager.parked
    return manager.log


def test_a_path_that_is_too_long_is_said_before_loading(manage, model, socket_dir):
    folder = socket_dir / ("x" * (107 - len(f"{socket_dir}//CPU-0/rank.sock") + 1))
    log = refused(manage, model, folder, 78)
    assert f"{folder}/CPU-0/rank.sock has 108 bytes, the kernel takes 107 at most" in log
    assert not folder.exists()


def test_the_longest_path_is_served(manage, model, socket_dir):
    folder = socket_dir / ("x" * (107 - len(f"{socket_dir}//CPU-0/rank.sock")))
    manager = manage(model, rank={"socket_dir": str(folder)})
    manager.start()
    manager.ready()
    assert len(os.fsencode(manager.socket)) == 107
    manager.attach().close()


def test_a_link_is_no_folder_for_sockets(manage, model, socket_dir):
    (socket_dir / "real").mkdir(0o700)
    link = socket_dir / "link"
    link.symlink_to("real")
    assert f"{link} is a symbolic link" in refused(manage, model, link, 77)
    (socket_dir / "real" / "CPU-0").symlink_to(socket_dir)
    log = refused(manage, model, socket_dir / "real", 77)
    assert f"{socket_dir}/real/CPU-0 is a symbolic link" in log


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give away files")
def test_a_folder_of_somebody_else_is_refused(manage, model, socket_dir):
    os.chown(socket_dir, NOBODY, -1)
    log = refused(manage, model, socket_dir, 77)
    assert f"{socket_dir} belongs to user {NOBODY}, trusted are 0" in log
    os.chown(socket_dir, 0, -1)


@pytest.mark.parametrize(
    ("mode", "derived", "why"),
    [
        (0o770, True, "open to group or others (mode 0770) though it was chosen automatically"),
        (0o750, True, "open to group or others (mode 0750) though it was chosen automatically"),
        (0o770, False, "writable for group or others (mode 0770)"),
        (0o702, False, "writable for group or others (mode 0702)"),
    ],
)
def test_an_open_folder_is_refused(manage, model, socket_dir, mode, derived, why):
    socket_dir.chmod(mode)
    log = refused(manage, model, socket_dir, 77, derived=derived)
    assert f"{socket_dir} is {why}" in log
    assert "choose" in log


def test_a_folder_without_a_parent_is_named(manage, model, socket_dir):
    log = refused(manage, model, socket_dir / "none" / "s", 78)
    assert f"the socket directory {socket_dir}/none/s cannot be used: No such file" in log
    (socket_dir / "file").touch()
    log = refused(manage, model, socket_dir / "file", 78)
    assert f"the socket directory {socket_dir}/file cannot be used: Not a directory" in log


def test_folder_and_socket_are_private_unless_others_have_access(manager):
    modes = [stat.S_IMODE(os.lstat(p).st_mode) for p in (manager.socket.parent, manager.socket)]
    assert modes == [0o700, 0o600]
    assert manager.status().state is State.SERVING
