"""A stand-in for a rank: a real process that does what a script tells it, life by life.

    python stand_in.py FOLDER INSTANCE

FOLDER/INSTANCE.json holds a list of lives, each a list of steps; the last life is lived again when
more are begun. Each life adds what it was given to FOLDER/INSTANCE.log, as one line of JSON. After
its steps a life waits for SIGTERM and exits with 0. Of preloadd only the wire format is used.
"""

import array
import json
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

from preloadd.domain.lifecycle import State
from preloadd.protocol import codec
from preloadd.protocol.messages import StatusTold

FOLDER, INSTANCE = Path(sys.argv[1]), sys.argv[2]


def connect_manager() -> socket.socket:
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.connect(os.environ["NOTIFY_SOCKET"])
    return manager


MANAGER = connect_manager()


def notify(text: str, *fds: int) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    MANAGER.sendmsg([text.encode()], rights)


def inherited() -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    if os.environ.get("LISTEN_PID") == str(os.getpid()):
        for number, name in enumerate(os.environ["LISTEN_FDNAMES"].split(":"), start=3):
            found.setdefault(name, []).append(number)
    return found


def content(fd: int) -> str:
    try:
        return os.pread(fd, 1 << 20, 0).decode()
    except OSError:
        return str(Path(f"/proc/self/fd/{fd}").readlink()).partition(":")[0]


def park(name: str, text: str) -> None:
    fd = os.memfd_create(name)
    os.write(fd, text.encode())
    notify(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", fd)


def park_connection(name: str, path: str) -> None:
    """Be connected to an engine and have that kept until the engine hangs up."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        notify(f"FDSTORE=1\nFDNAME={name}", connection.fileno())


def barrier() -> None:
    ours, theirs = os.pipe()
    notify("BARRIER=1", theirs)
    os.close(theirs)
    os.read(ours, 1)
    (FOLDER / f"{INSTANCE}.barrier").touch()


def foreign(text: str) -> None:
    """Send `text` in another process's name."""
    pid = os.fork()
    if not pid:
        notify(text)
        os._exit(0)
    os.waitpid(pid, 0)


def mark() -> None:
    """Leave a sign that all before was done."""
    (FOLDER / f"{INSTANCE}.mark").touch()


def clean() -> None:
    """Remove the folder of the manager's socket, and be somebody who puts another one there."""
    path = Path(os.environ["NOTIFY_SOCKET"])
    shutil.rmtree(path.parent)
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as planted:
        planted.bind(str(path))


def stray() -> None:
    """Leave a process in this one's group that nothing but a kill ends."""
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
        os._exit(0)
    (FOLDER / f"{INSTANCE}.stray").write_text(str(pid))


def bind(socket_dir: str) -> socket.socket:
    name = "rank_draft.sock" if INSTANCE.endswith(".draft") else "rank.sock"
    path = Path(socket_dir, INSTANCE, name)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()
    return listener


def serve(socket_dir: str, *, adopted: bool) -> None:
    """Become ready and answer every request as if it had asked for the status."""
    listener = bind(socket_dir)
    notify("READY=1")
    while True:
        client, _ = listener.accept()
        client.recv(1 << 16)
        told = StatusTold(
            group="tiny",
            instance=INSTANCE,
            device=INSTANCE,
            role="target",
            pid=os.getpid(),
            version="0",
            state=State.SERVING,
            adopted=adopted,
            arena_bytes=3 << 20,
            ready_s=1.5,
        )
        client.send(codec.encode(told))
        client.close()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    given = inherited()
    record = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "group": os.getpgid(0),
        "given": {name: [content(fd) for fd in fds] for name, fds in given.items()},
    }
    log = FOLDER / f"{INSTANCE}.log"
    with log.open("a") as stream:
        stream.write(f"{json.dumps(record)}\n")
    lives = json.loads((FOLDER / f"{INSTANCE}.json").read_text())
    life = len(log.read_text().splitlines()) - 1
    settings = json.loads(content(given["settings"][0]))
    for verb, *arguments in lives[min(life, len(lives) - 1)]:
        match verb:
            case "serve":
                serve(settings["socket_dir"], adopted="manifest.a" in given)
            case "kill":
                os.kill(os.getpid(), arguments[0])
            case "ignore":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            case _:
                STEPS[verb](*arguments)
    while True:
        signal.pause()


STEPS = {
    "notify": notify,
    "park": park,
    "park_connection": park_connection,
    "barrier": barrier,
    "foreign": foreign,
    "clean": clean,
    "mark": mark,
    "stray": stray,
    "sleep": time.sleep,
    "exit": sys.exit,
}

main()
