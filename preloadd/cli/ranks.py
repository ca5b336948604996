"""Ranks as their sockets tell: where those are, and all asked at once, none waiting for another."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from preloadd.cli.overview import Condition, Holder, Rank
from preloadd.domain.ids import Instance
from preloadd.errors import AccessDenied, ConfigError, InsecurePath, PreloadError, Unavailable
from preloadd.linux.locks import FILE_NAME, holder
from preloadd.linux.paths import derived_dirs, socket_dirs, trusted_dir
from preloadd.linux.threads import starting
from preloadd.protocol.messages import Reply, Request, StatusTold
from preloadd.transport.blocking import connect
from preloadd.transport.status import ask_status
from preloadd.transport.unheard import Unheard, unheard

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class RankAddress:
    """Where a rank listens or will listen. `pid` holds its lock; None if nobody does."""

    instance: Instance
    socket: Path
    pid: int | None

    @classmethod
    def of(cls, rank: Rank) -> Self:
        """That of a rank that was seen."""
        return cls(Instance.parse(rank.instance), Path(rank.socket), rank.pid or None)


@dataclass(frozen=True, slots=True)
class Folders:
    """The folders to look in, in order, and what is wrong with those that were left out."""

    paths: tuple[Path, ...]
    notes: tuple[str, ...] = ()


def folders(environ: Mapping[str, str], uid: int, chosen: Path | None) -> Folders:
    """Where to look: the folder somebody chose, else every one where engines look, if it is fit.

    A chosen folder is not judged: an operator may look at what belongs to another user.
    """
    if chosen is not None:
        if not chosen.is_dir():
            raise ConfigError(f"--socket-dir {chosen}: there is no such folder")
        return Folders((chosen.absolute(),))
    found, notes = [], []
    derived = derived_dirs(environ, uid)
    for path in socket_dirs(environ, uid):
        try:
            trusted_dir(path, derived=path in derived)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError:
            notes.append(f"{path}: no permission to look there")
        except (InsecurePath, ConfigError) as error:
            notes.append(f"not looked into: {error}")
        else:
            found.append(path)
    return Folders(tuple(dict.fromkeys(found)), tuple(notes))


def addresses(paths: Iterable[Path]) -> list[RankAddress]:
    """Every rank that has left a trace in one of the folders: a socket, or a lock that is held."""
    return [found for path in paths for found in _addresses(path)]


def ask_all(found: Sequence[RankAddress], *, timeout: float) -> list[Rank]:
    """How each rank is, in order. Blocks until the slowest has answered or its time is over."""
    return in_parallel(lambda address: look_at(address, timeout=timeout), found)


def in_parallel(work: Callable[[Asked], Answer], asked: Sequence[Asked]) -> list[Answer]:
    """`work` done for each of `asked` in a thread of its own; it handles its own errors."""
    answers: dict[int, Answer] = {}

    def run(number: int) -> None:
        answers[number] = work(asked[number])

    threads = [threading.Thread(target=run, args=[n], daemon=True) for n in range(len(asked))]
    with starting("asking the ranks"):
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join()
    return [answers[number] for number in range(len(asked))]


def look_at(address: RankAddress, *, timeout: float) -> Rank:
    """How the rank there is; whatever keeps it from telling becomes its condition. Blocks."""
    try:
        status = ask_status(address.socket, timeout=timeout)
    except PreloadError as error:
        condition, detail = _silent(address, error, timeout)
    except OSError as error:
        condition, detail = Condition.UNCLEAR, str(error)
    else:
        return _from_told(address, status)
    return Rank(
        str(address.instance),
        condition,
        detail=detail,
        socket=str(address.socket),
        pid=address.pid or 0,
    )


def request(socket: Path, wanted: Request, *, timeout: float, patience: float) -> Reply:
    """One request and its answer; Unavailable, AccessDenied, ProtocolViolation.

    `timeout` is for connecting, `patience` for the answer.
    """
    with connect(socket, timeout=timeout) as client:
        answer = client.call(wanted, timeout=patience)
    for fd in answer.fds:
        fd.close()
    return answer.reply


def _addresses(folder: Path) -> Iterator[RankAddress]:
    for path in _entries(folder):
        try:
            instance = Instance.parse(path.name)
        except ConfigError:
            continue
        socket, pid = path / instance.socket_name, None
        try:
            pid = holder(path / FILE_NAME)
            if pid is None and not socket.is_socket():
                continue
        except OSError:
            pass  # connecting will say what is wrong
        yield RankAddress(instance, socket, pid)


def _entries(folder: Path) -> list[Path]:
    with suppress(FileNotFoundError):  # removed meanwhile, by a `preloadd run` that ended
        return sorted(folder.iterdir())
    return []


def _silent(address: RankAddress, error: PreloadError, timeout: float) -> tuple[Condition, str]:
    """The condition of a rank that could not be asked, and what to tell of it."""
    who = f"process {address.pid}" if address.pid is not None else "its process"
    match error:
        case Unavailable() if isinstance(error.__cause__, TimeoutError):
            return Condition.STUCK, f"{who} does not answer within {timeout:g} s"
        case Unavailable():
            return _unheard(address.socket, address.pid)
        case AccessDenied():
            return Condition.DENIED, f"user {os.geteuid()} may not ask it: run this as root"
        case _:
            return Condition.UNCLEAR, str(error)


def _unheard(socket: Path, pid: int | None) -> tuple[Condition, str]:
    if pid is None:
        return Condition.ABSENT, f"its daemon has ended: nobody listens on {socket}"
    found, text = unheard(socket, pid)
    return Condition.STARTING if found is Unheard.STARTING else Condition.UNCLEAR, text


def _from_told(address: RankAddress, told: StatusTold) -> Rank:
    wrong = told.instance != str(address.instance)
    facts = told.shared_with(Rank) | {
        "instance": str(address.instance),
        "condition": Condition.UNCLEAR if wrong else Condition(told.state),
        "detail": f"its socket answers as {told.instance}" if wrong else told.detail,
        "socket": str(address.socket),
        "leases": tuple(
            Holder(lease.client, lease.pid, lease.mode.value, lease.generation, lease.profiling)
            for lease in told.leases
        ),
    }
    return Rank(**facts)
