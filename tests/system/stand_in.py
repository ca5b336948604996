#!/usr/bin/python3 -IS
"""Stands in for preloadd in tests of its units: tells, parks and ends as a rank does, and no more.

What an instance does beyond that is written in /etc/stand-in/INSTANCE, a JSON object read at each
start: `load_s`, how long a load takes; `exit`, with what status it ends instead of becoming ready;
`stop_s`, how long it takes to end; `deaf`, whether it does not end when asked to. SIGUSR1 makes it
end with status 0, SIGUSR2 makes it hang.

It refuses to start where a rendezvous has been used before, and waits there for its whole group, so
that it becomes ready only if no rank waits for another one's being ready.
"""

import json
import os
import signal
import socket
import sys
import time
import tomllib
from array import array
from pathlib import Path


def main(arguments):
    match arguments:
        case ["rank", instance]:
            rank(instance)
        case ["supervisor"]:
            notify("READY=1")
            live()


def rank(instance):
    behaviour = read(Path("/etc/stand-in", instance), {})
    stop_s = behaviour.get("stop_s", 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour.get("deaf") else stopping(stop_s))
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
    signal.signal(signal.SIGUSR2, lambda *_: time.sleep(3600))
    tell("began")
    rendezvous(instance)
    if "exit" in behaviour:
        sys.exit(behaviour["exit"])
    weights = inherited() or load(behaviour.get("load_s", 0))
    notify(f"READY=1\nSTATUS=serving {weights}")
    live()


def rendezvous(instance):
    """Meet all ranks of this attempt."""
    folder = Path(os.environ["PRELOADD_RENDEZVOUS"])
    (folder / instance).touch(exist_ok=False)
    group = os.environ["PRELOADD_GROUP"]
    settings = tomllib.loads(Path(f"/etc/preloadd/groups.d/{group}.toml").read_text())
    expected = len(settings["gpus"]) * (2 if "engine_args" in settings else 1)
    while len(list(folder.iterdir())) < expected:
        time.sleep(0.01)


def inherited():
    """What an earlier life parked; empty if nothing."""
    names = os.environ.get("LISTEN_FDNAMES", "")
    return names.replace(":", " ") if os.environ.get("LISTEN_PID") == str(os.getpid()) else ""


def load(seconds):
    """Park something new."""
    for step in range(int(seconds * 10)):
        notify(f"EXTEND_TIMEOUT_USEC=500000\nSTATUS=loading {step}")
        time.sleep(0.1)
    name = f"weights.{os.urandom(4).hex()}"
    fd = os.memfd_create(name)
    notify(f"FDSTORE=1\nFDNAME={name}", [fd])
    # As a rank's socket: for a group of the host if there is one, else for nobody else.
    path = Path(os.environ["RUNTIME_DIRECTORY"], "socket")
    path.touch(mode=0o600)
    if groups := set(os.getgroups()) - {os.getgid()}:
        path.chmod(0o660)
        os.chown(path, -1, groups.pop())
    return name


def live():
    interval = int(os.environ.get("WATCHDOG_USEC", "60000000")) / 4_000_000
    while True:
        notify("WATCHDOG=1")
        time.sleep(interval)


def stopping(seconds):
    def stop(*_):
        time.sleep(seconds)
        tell("ended")
        sys.exit(0)

    return stop


def tell(what):
    print(f"{what} at {time.monotonic():.6f}", flush=True)


def notify(text, fds=()):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect(os.environ["NOTIFY_SOCKET"])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        sock.sendmsg([text.encode()], rights)


def read(path, default):
    return json.loads(path.read_text()) if path.exists() else default


if __name__ == "__main__":
    main(sys.argv[1:])
