"""Ranks that others may ask, as an operator starts them: who is answered, who sees the token."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from preloadd.config.tokens import VARIABLE
from preloadd.transport.status import ask_status
from preloadd.warmup.seeding import messages as m
from preloadd.warmup.seeding.frames import framed
from tests.certificates import authority, certificate, key_of
from tests.checkout import ROOT
from tests.waiting import PATIENCE_S

TOKEN = "plt_hunter2-hunter2"
FIELDS = {"config_hash": "ab" * 32, "dp_rank": 0, "rank": 0}
HERE = "127.0.0.1"


class Launcher:
    """`preloadd run` with a model in host memory; every loader notes what others see of it."""

    def __init__(self, folder: Path, model: Path, *flags: str, **environ: str) -> None:
        self.seen = folder / "seen"
        self.seen.mkdir()
        self.sockets = folder / "run"
        self.sockets.mkdir(mode=0o700)
        python = folder / "python"
        dump = f"cat /proc/$$/environ /proc/$$/cmdline > {self.seen}/$$"
        python.write_text(f'#!/bin/sh\n{dump}\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "preloadd.launcher", str(model), "--memory", "host"),
                *("--python", str(python), "--weight-cache-socket-dir", str(self.sockets), *flags),
            ],
            cwd=ROOT,
            env={**os.environ, "XDG_CACHE_HOME": str(folder), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said = ""

    def ready(self) -> None:
        while "engines connect" not in self.said:
            line = self.process.stdout.readline()
            assert line, f"it ended: {self.said}"
            self.said += line

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        self.said += self.process.communicate(timeout=PATIENCE_S)[0]
        return self.process.returncode

    @property
    def family(self) -> list[int]:
        """The numbers of its ranks, and of what those started."""
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found[1:]


@pytest.fixture
def launch(tmp_path: Path, model: Path) -> Iterator[Callable[..., Launcher]]:
    with ExitStack() as owned:

        def launch(*flags: str, **environ: str) -> Launcher:
            folder = tmp_path / f"launcher{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            launcher = Launcher(folder, model, *flags, **environ)
            owned.enter_context(launcher.process)
            owned.callback(launcher.process.kill)
            return launcher

        yield launch


@pytest.fixture
def listening(port: int) -> tuple[str, ...]:
    return ("--seed-listen-host", HERE, "--seed-listen-port", str(port))


def asked(port: int, token: str) -> dict[str, object]:
    with socket.create_connection((HERE, port), timeout=PATIENCE_S) as sock:
        sock.sendall(framed(m.request("flashinfer_autotune", FIELDS, token)))
        with sock.makefile("rb") as file:
            return json.loads(file.read()[8:])


@pytest.mark.parametrize("how", ["flag", "equals", "variable", "file"])
def test_nobody_sees_the_token_and_whoever_has_it_is_answered(
    launch, listening, port, how, tmp_path
):
    file = tmp_path / "tokens"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    flags, environ = {
        "flag": (("--seed-token", TOKEN), {}),
        "equals": ((f"--seed-token={TOKEN}",), {}),
        "variable": ((), {VARIABLE: TOKEN}),
        "file": (("--seed-token-file", str(file)), {}),
    }[how]
    launcher = launch(*listening, *flags, "--log-level", "debug", **environ)
    launcher.ready()
    assert asked(port, TOKEN) == {"status": "miss"}
    assert asked(port, TOKEN[:-1])["message"] == m.UNAUTHORIZED
    family = launcher.family
    assert family
    for pid in [launcher.process.pid, *family]:
        assert TOKEN.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    for pid in family:
        assert TOKEN.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    seen = [path.read_bytes() for path in launcher.seen.iterdir()]
    assert any(b"preloadd.loader" in each for each in seen)
    assert not any(TOKEN.encode() in each for each in seen)
    found = launcher.sockets / "CPU-0" / "rank.sock"
    assert TOKEN not in str(ask_status(found, timeout=PATIENCE_S))
    written = [path for path in launcher.sockets.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in path.read_bytes() for path in written)
    assert launcher.end() == 130
    assert TOKEN not in launcher.said
    warned = (
        "--seed-token: everybody on this host could read it (`ps`) until now: give" in launcher.said
    )
    assert warned is (how in ("flag", "equals"))


def test_a_rank_that_is_started_again_still_has_the_token(launch, listening, port):
    launcher = launch(*listening, "--seed-token", TOKEN, "--restart-ranks")
    launcher.ready()
    (rank,) = launcher.family
    os.kill(rank, signal.SIGKILL)
    while "starting it again" not in launcher.said:
        launcher.said += launcher.process.stdout.readline()
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            told = asked(port, TOKEN)
        except (ConnectionError, json.JSONDecodeError):
            assert time.monotonic() < until
            time.sleep(0.05)
            continue
        break
    assert told == {"status": "miss"}
    assert launcher.end() == 130


@pytest.mark.parametrize(
    ("flags", "environ", "status", "told"),
    [
        ((), {}, 78, "--seed-token-file: must be given, since ranks are seeded with a token only"),
        (("--seed-token", ""), {}, 78, "--seed-token: is empty: give the token, or leave it out"),
        (("--seed-token",), {}, 78, "--seed-token: is empty"),
        (
            ("--seed-token", "--restart-ranks"),
            {},
            78,
            "--seed-token: is followed by another option",
        ),
        (("--seed-token", "a", "--seed-token=b"), {}, 78, "--seed-token: is given with different"),
        (("--seed-token", "plt_" + "x" * 4096), {}, 78, "--seed-token: is longer than 4,096 bytes"),
        ((), {VARIABLE: " "}, 78, f"${VARIABLE} is empty"),
        (("--seed-token-file", "/none"), {}, 78, "--seed-token-file: /none: there is no such file"),
        (
            ("--seed-token", "a", "--seed-tls-cert", "/none"),
            {},
            78,
            "--seed-tls-cert: /none cannot be read (No such file or directory): correct the path",
        ),
        (
            ("--seed-token", "a", "--seed-tls-key", "/k"),
            {},
            78,
            "--seed-tls-key: is the key of no certificate: give that as well",
        ),
        (
            ("--seed-token", "a", "--seed-tls-cert", "/dev/null"),
            {},
            78,
            "--seed-tls-cert: /dev/null is no regular file: give the path of a PEM file",
        ),
    ],
)
def test_what_could_not_work_is_said_before_anything_starts(
    launch, listening, flags, environ, status, told
):
    launcher = launch(*listening, *flags, **environ)
    said, _ = launcher.process.communicate(timeout=PATIENCE_S)
    assert launcher.process.returncode == status
    assert said.startswith(f"preloadd run: {told}"), said
    assert "plt_" not in said
    assert not list(launcher.seen.iterdir())


def test_a_token_without_anybody_to_show_it_to_is_a_fault(launch):
    launcher = launch("--seed-token", TOKEN)
    said, _ = launcher.process.communicate(timeout=PATIENCE_S)
    assert "--seed-token: is for seeding, but there is no host to listen on or ask" in said
    assert TOKEN not in said


def test_others_are_answered_over_tls_alone_if_there_are_files_for_that(
    launch, listening, port, tmp_path
):
    ca = authority(tmp_path, "ca")
    cert = certificate(ca, "source")
    tls = ("--seed-tls-cert", str(cert), "--seed-tls-key", str(key_of(cert)))
    launcher = launch(*listening, "--seed-token", TOKEN, *tls, "--seed-tls-ca", str(ca))
    launcher.ready()
    assert asked(port, TOKEN)["message"] == m.TLS_ONLY
    mine = certificate(ca, "target")
    told = subprocess.run(
        [
            *("openssl", "s_client", "-connect", f"{HERE}:{port}", "-CAfile", str(ca), "-quiet"),
            *("-verify_return_error", "-cert", str(mine), "-key", str(key_of(mine))),
        ],
        input=framed(m.request("flashinfer_autotune", FIELDS, TOKEN)),
        capture_output=True,
        timeout=PATIENCE_S,
    ).stdout
    assert json.loads(told[8:]) == {"status": "miss"}
    assert launcher.end() == 130
    assert not re.search("Traceback|plt_", launcher.said)


def test_a_certificate_that_is_replaced_by_a_fifo_hangs_nothing(launch, listening, port, tmp_path):
    ca = authority(tmp_path, "ca")
    cert = certificate(ca, "source")
    tls = ("--seed-tls-cert", str(cert), "--seed-tls-key", str(key_of(cert)))
    launcher = launch(*listening, "--seed-token", TOKEN, *tls)
    launcher.ready()
    cert.unlink()
    os.mkfifo(cert)
    context = ssl.create_default_context(cafile=ca)
    for _ in range(2):
        with (
            socket.create_connection((HERE, port), timeout=PATIENCE_S) as sock,
            context.wrap_socket(sock, server_hostname=HERE) as private,
        ):
            private.sendall(framed(m.request("flashinfer_autotune", FIELDS, TOKEN)))
            with private.makefile("rb") as file:
                assert json.loads(file.read()[8:]) == {"status": "miss"}
    (rank,) = launcher.family
    os.kill(rank, signal.SIGTERM)
    launcher.said += launcher.process.communicate(timeout=PATIENCE_S)[0]
    assert launcher.said.count(f"seed.tls_cert: {cert} is no regular file") == 1
