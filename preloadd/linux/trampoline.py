"""Runs between fork and exec of a service: hands it descriptors as systemd does, from 3 on.

A spawn call alone cannot: $LISTEN_PID is known in the new process only. `process.spawn` executes
this file by its path in an isolated interpreter, so it imports the standard library only:

    python -I -S trampoline.py IDENTITY PARENT SIGNAL FAILED COUNT NUMBER:NAME... COMMAND...

IDENTITY is UID:GID:GROUP,... of who the process becomes, or '' to stay who it is. Unless PARENT is
0, the kernel sends the process SIGNAL when the thread that spawned it ends. FAILED is a pipe that
gets a byte if COMMAND cannot be executed: its own exit status says nothing of that.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Callable, Sequence

_FIRST_FD = 3
_PR_SET_PDEATHSIG = 1
NOT_EXECUTABLE = 126
NOT_FOUND = 127


def main(arguments: list[str]) -> int:
    """Prepare this process and become COMMAND; returns a shell's exit status if that fails."""
    identity, *numbers = arguments[:5]
    parent, death_signal, failed, count = map(int, numbers)
    passed = [text.partition(":") for text in arguments[5 : 5 + count]]
    command = arguments[5 + count :]
    control = process_control() if parent else None
    failed = out_of_the_way(failed, len(passed))
    renumber([int(number) for number, _, _ in passed])
    announce([name for _, _, name in passed])
    reset_signals()
    try:
        if identity:
            become(identity)
        if control is not None:
            # Not before: with who it is, a process loses this.
            die_with(control, parent, death_signal)
        os.execvp(command[0], command)  # noqa: S606 the whole point
    except OSError as error:
        os.write(failed, b"!")
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror or error}\n")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE


def process_control() -> Callable[[int, int], int]:
    """prctl(2), found while the process may still read its own interpreter's files."""
    import ctypes  # costs some milliseconds that not every start needs

    control: Callable[[int, int], int] = ctypes.CDLL(None).prctl
    return control


def become(identity: str) -> None:
    """Be another user for good, which only root can."""
    # `os.execvp` does so, by when this interpreter's files may be out of reach.
    import warnings  # noqa: F401

    user, group, groups = identity.split(":")
    os.setgroups([int(each) for each in groups.split(",") if each])
    os.setgid(int(group))
    os.setuid(int(user))


def die_with(control: Callable[[int, int], int], parent: int, death_signal: int) -> None:
    """Be sent `death_signal` when the spawning thread of `parent` ends, or now if it is gone."""
    if control(_PR_SET_PDEATHSIG, death_signal):
        raise OSError("prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        # It ended before the call above: no signal will come.
        os.kill(os.getpid(), death_signal)


def out_of_the_way(number: int, count: int) -> int:
    """The descriptor `number` above those that `count` others get, and gone once COMMAND runs."""
    moved = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD + count)
    os.close(number)
    return moved


def renumber(numbers: Sequence[int]) -> None:
    """Move the descriptors `numbers` to 3, 4, …, inheritable, and close the originals.

    One at a time, since their number may come close to how many this process may open.
    """
    above = _FIRST_FD + len(numbers)
    todo = list(numbers)
    for target in range(_FIRST_FD, above):
        source = todo.pop(0)
        if target in todo:
            # It is to be moved later, and made way for what comes here.
            moved = fcntl.fcntl(target, fcntl.F_DUPFD_CLOEXEC, above)
            todo = [moved if number == target else number for number in todo]
        if source == target:
            os.set_inheritable(target, True)  # noqa: FBT003
        else:
            os.dup2(source, target)
            if source > 2 and source not in todo:
                os.close(source)


def announce(names: Sequence[str]) -> None:
    """Describe the descriptors from 3 on in this process's environment, or that there are none."""
    for variable in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        os.environ.pop(variable, None)
    if names:
        os.environ["LISTEN_PID"] = str(os.getpid())
        os.environ["LISTEN_FDS"] = str(len(names))
        os.environ["LISTEN_FDNAMES"] = ":".join(names)


def reset_signals() -> None:
    """Undo what the interpreter ignores for itself: exec would hand that on."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
