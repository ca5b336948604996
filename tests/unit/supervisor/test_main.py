"""The supervisor as a process: serves on a socket it is given or opens, and stops when told to."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from preloadd.linux.notify import NotifySocket
from preloadd.linux.process import Child, spawn
from tests.checkout import ROOT
from tests.ports import free_port
from tests.rank_stand_in import Ranks

ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT)}
COMMAND = [sys.executable, "-m", "preloadd.supervisor"]
PATIENCE_S = 20.0

Serve = Callable[..., tuple[Child, str]]


def get(url: str) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env={**ENVIRON, **environ},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a supervisor on a socket that it inherits, with more arguments and environment."""
    with ExitStack() as owned:

        def start(*arguments: str, **environ: str) -> tuple[Child, str]:
            listener = owned.enter_context(socket.create_server(("127.0.0.1", 0)))
            command = [*COMMAND, *arguments, "--listen-fd", "http"]
            passed = [("http", listener.fileno())]
            child = spawn(command, fds=passed, environ={**ENVIRON, **environ})
            owned.enter_context(child)
            return child, f"http://127.0.0.1:{listener.getsockname()[1]}"

        yield start


@pytest.mark.slow
def test_serves_on_the_inherited_socket_until_sigterm(serve, socket_dir):
    child, url = serve("--socket-dir", str(socket_dir), "--instance", "CPU-0")
    assert get(f"{url}/livez") == (200, {"alive": True})
    status, body = get(f"{url}/healthz")
    child.signal(signal.SIGTERM)
    assert child.wait(10) == 128 + signal.SIGTERM
    assert status == 503
    assert body["ranks"][0]["instance"] == "CPU-0"
    assert str(socket_dir) in body["reasons"][0]


@pytest.mark.slow
def test_opens_a_socket_of_its_own(socket_dir):
    port = free_port()
    command = [*COMMAND, "--socket-dir", str(socket_dir), "--instance", "CPU-0"]
    with spawn([*command, "--port", str(port)], environ=ENVIRON) as child:
        until = time.monotonic() + 10
        while time.monotonic() < until:
            try:
                assert get(f"http://127.0.0.1:{port}/livez")[0] == 200
                break
            except urllib.error.URLError:
                time.sleep(0.02)
        child.signal(signal.SIGINT)
        assert child.wait(10) in (0, 128 + signal.SIGINT)


def no_socket(owned: ExitStack) -> int:
    return owned.enter_context(Path(os.devnull).open("rb")).fileno()


def a_path(owned: ExitStack) -> int:
    fd = os.open("/", os.O_PATH)
    owned.callback(os.close, fd)
    return fd


def connected(owned: ExitStack) -> int:
    listener = owned.enter_context(socket.create_server(("127.0.0.1", 0)))
    return owned.enter_context(socket.create_connection(listener.getsockname())).fileno()


def unbound(owned: ExitStack) -> int:
    return owned.enter_context(socket.socket()).fileno()


def datagrams(owned: ExitStack) -> int:
    sock = owned.enter_context(socket.socket(type=socket.SOCK_DGRAM))
    sock.bind(("127.0.0.1", 0))
    return sock.fileno()


def packets(owned: ExitStack) -> int:
    sock = owned.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    sock.bind("")
    sock.listen()
    return sock.fileno()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("passed", "why"),
    [
        (no_socket, "is no socket (Socket operation on non-socket)"),
        (a_path, "is no socket (Bad file descriptor)"),
        (connected, "is a socket that does not listen"),
        (unbound, "is a socket that does not listen"),
        (datagrams, "is a socket of another kind"),
        (packets, "is a socket of another kind"),
    ],
)
def test_what_nobody_could_connect_to_is_told_in_a_line(socket_dir, tmp_path, passed, why):
    log = tmp_path / "log"
    with ExitStack() as owned:
        command = [*COMMAND, "--socket-dir", str(socket_dir), "--listen-fd", "http"]
        fds = [("http", passed(owned))]
        stderr = owned.enter_context(log.open("wb")).fileno()
        child = owned.enter_context(spawn(command, fds=fds, environ=ENVIRON, stderr=stderr))
        assert child.wait(PATIENCE_S) == 78
    remedy = "pass a stream socket that listens, or give --host and --port"
    [line] = log.read_text().splitlines()
    assert f"--listen-fd http: descriptor 3 {why}: {remedy}" in line


@pytest.mark.slow
def test_a_closed_descriptor_is_told_in_a_line(socket_dir):
    meant = 'LISTEN_PID=$$ exec "$@" 3>&-'
    command = ["sh", "-c", meant, "sh", *COMMAND, "--socket-dir", str(socket_dir)]
    done = subprocess.run(
        [*command, "--listen-fd", "http"],
        env={**ENVIRON, "LISTEN_FDS": "1", "LISTEN_FDNAMES": "http"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 78
    [line] = done.stderr.splitlines()
    assert "--listen-fd http: 0 descriptors of that name were inherited: pass exactly one" in line


@pytest.mark.slow
def test_serves_on_a_socket_in_a_folder(socket_dir):
    path = socket_dir / "http"
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as owned:
        listener.bind(os.fspath(path))
        listener.listen()
        command = [*COMMAND, "--socket-dir", str(socket_dir), "--listen-fd", "http"]
        owned.enter_context(spawn(command, fds=[("http", listener.fileno())], environ=ENVIRON))
        client = owned.enter_context(socket.socket(socket.AF_UNIX))
        client.settimeout(PATIENCE_S)
        client.connect(os.fspath(path))
        client.sendall(b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.slow
def test_a_socket_that_listens_no_more_is_told_in_a_line(socket_dir, tmp_path):
    log = tmp_path / "log"
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        log.open("wb") as stderr,
        spawn(
            [*COMMAND, "--socket-dir", str(socket_dir), "--listen-fd", "http"],
            fds=[("http", listener.fileno())],
            environ=ENVIRON,
            stderr=stderr.fileno(),
        ) as child,
    ):
        up(f"http://127.0.0.1:{listener.getsockname()[1]}")
        listener.shutdown(socket.SHUT_RDWR)
        assert child.wait(PATIENCE_S) == 1
    told = log.read_text()
    assert "the socket to listen on is none: [Errno 22]" in told
    assert "Traceback" not in told


@pytest.mark.slow
def test_the_configuration_says_what_to_watch(serve, socket_dir, tmp_path):
    (tmp_path / "groups.d").mkdir()
    (tmp_path / "preloadd.toml").write_text(f'socket_dir = "{socket_dir}"\n')
    group = 'model = "/srv/m"\ngpus = ["CPU-0", "CPU-1"]\n[parallel]\ntensor_parallel_size = 2\n'
    (tmp_path / "groups.d/llama.toml").write_text(group)
    _, url = serve(PRELOADD_CONFIG_DIR=str(tmp_path))
    status, body = get(f"{url}/healthz")
    assert status == 503
    assert [group["name"] for group in body["groups"]] == ["llama"]
    assert body["reasons"][1].startswith("CPU-1 of llama: ")


@pytest.mark.slow
def test_the_service_manager_is_told(serve, socket_dir):
    with NotifySocket(socket_dir / "notify") as manager:
        child, _ = serve(
            *("--socket-dir", str(socket_dir), "--instance", "CPU-0"),
            NOTIFY_SOCKET=str(manager.path),
            WATCHDOG_USEC="200000",
        )
        told: dict[str, str] = {}
        until = time.monotonic() + PATIENCE_S
        while not {"READY", "STATUS", "WATCHDOG"} <= set(told) and time.monotonic() < until:
            message = manager.receive()
            if message is None:
                time.sleep(0.01)
            else:
                assert message.pid == child.pid
                told |= message.fields
    assert told["READY"] == told["WATCHDOG"] == "1"
    assert told["STATUS"].startswith("CPU-0: ")


@pytest.mark.slow
def test_nothing_is_judged_before_every_rank_was_looked_at(serve, ranks):
    """Of a rank that takes its time for the first answer, probes wait for that."""

    async def main(manager: NotifySocket) -> tuple[int, list[str]]:
        _, url = serve("--socket-dir", str(ranks.socket_dir), NOTIFY_SOCKET=str(manager.path))
        async with anyio.create_task_group() as tasks:
            status: list[int] = []

            async def probe() -> None:
                status.append((await anyio.to_thread.run_sync(get, f"{url}/healthz"))[0])
                tasks.cancel_scope.cancel()

            await anyio.wait_readable(slow)
            tasks.start_soon(probe)
            await anyio.sleep(0.5)
            early = [name for message in iter(manager.receive, None) for name in message.fields]
            tasks.start_soon(ranks.serve, slow, "CPU-0")
        return status[0], early

    with ranks.listen("CPU-0") as slow, NotifySocket(ranks.socket_dir / "notify") as manager:
        status, early = anyio.run(main, manager)
    assert status == 200
    assert "READY" not in early


@pytest.mark.slow
def test_a_stuck_rank_delays_no_probe(serve, ranks):
    """The short version of bench/healthz.py."""
    _, url = serve("--socket-dir", str(ranks.socket_dir))

    def probe() -> tuple[list[str], int]:
        deadline = time.monotonic() + PATIENCE_S
        conditions: list[str] = []
        while "stuck" not in conditions and time.monotonic() < deadline:
            conditions = [rank["condition"] for rank in get(f"{url}/healthz")[1]["ranks"]]
        before = ranks.asked["CPU-1"]
        assert [get(f"{url}/healthz")[0] for _ in range(200)] == [503] * 200
        return conditions, ranks.asked["CPU-1"] - before

    async def main() -> tuple[list[str], int]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ranks.serve, answering, "CPU-1")
            try:
                return await anyio.to_thread.run_sync(probe)
            finally:
                tasks.cancel_scope.cancel()

    with ranks.listen("CPU-0"), ranks.listen("CPU-1") as answering:
        conditions, asked = anyio.run(main)
    assert conditions == ["stuck", "serving"]
    assert asked < 50, "probes must not reach the ranks"


def up(url: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        with suppress(urllib.error.URLError):
            assert get(f"{url}/livez")[0] == 200
            return
        time.sleep(0.02)
    raise AssertionError(f"nothing serves at {url}")


def heard(url: str, *, reachable: bool = True) -> list[dict]:
    """The one peer of a supervisor that has left itself out, once that is `reachable` or not."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        told = get(f"{url}/v1/peers")[1]["peers"]
        if [peer["reachable"] for peer in told] == [reachable]:
            return told
        time.sleep(0.02)
    raise AssertionError(f"never so: {told}")


@pytest.mark.slow
def test_two_nodes_that_list_each_other(serve, socket_dir):
    """Both have the same list; neither tells the other what that said, nor suffers from it."""
    ranks, nodes = [Ranks(socket_dir / name) for name in "ab"], []
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in ranks]
    addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    listing = [word for address in addresses for word in ("--peer", address)]
    for listener in listeners:
        listener.close()
    with ExitStack() as owned:
        for here, address in zip(ranks, addresses, strict=True):
            owned.callback(here.close)
            here.socket_dir.mkdir()
            port = address.rpartition(":")[2]
            command = [*COMMAND, "--socket-dir", str(here.socket_dir), "--port", port, *listing]
            nodes.append((command, f"http://{address}"))
        ranks[0].serve("CPU-0")
        ranks[1].serve("CPU-0", state="loading", done=1, total=4)
        children = [owned.enter_context(spawn(c, environ=ENVIRON)) for c, _ in nodes]
        (a, b), (url_a, url_b) = addresses, (url for _, url in nodes)
        for url in (url_a, url_b):
            up(url)
        (told,) = heard(url_a)
        assert (told["address"], told["healthy"]) == (b, False)
        assert told["groups"][0]["ranks"] == [{"instance": "CPU-0", "condition": "loading"}]
        (told,) = heard(url_b)
        assert (told["address"], told["healthy"], told["reasons"]) == (a, True, [])
        assert get(f"{url_a}/readyz") == (200, {"ready": True, "reasons": []})
        assert get(f"{url_b}/readyz")[0] == 503
        assert "peers" not in get(f"{url_b}/v1/node")[1]

        children[1].signal(signal.SIGKILL)
        children[1].wait(10)
        told = heard(url_a, reachable=False)[0]
        assert told["problem"] == "connection refused"
        assert told["groups"][0]["name"] == "smol"
        assert told["age_seconds"] > 0
        assert get(f"{url_a}/healthz")[0] == 200


@pytest.mark.slow
def test_what_waits_to_be_read_is_not_lost_by_sigterm(socket_dir):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while os.write(writing, b"." * 4096):
            pass
    os.set_blocking(writing, True)
    port = str(free_port())
    command = [*COMMAND, "--socket-dir", str(socket_dir), "--port", port, "--log-level", "debug"]
    with os.fdopen(reading, "rb") as reader:
        with subprocess.Popen(command, env=ENVIRON, stderr=writing) as process:
            os.close(writing)
            up(f"http://127.0.0.1:{port}")
            process.send_signal(signal.SIGTERM)
            time.sleep(0.6)  # it would have ended if it did not wait
            said = reader.read().decode()
        assert process.returncode == -signal.SIGTERM
    # asyncio's, and the first that there is.
    assert "DEBUG asyncio: Using selector" in said


@pytest.mark.slow
def test_half_sent_requests_keep_nobody_out(socket_dir, capfd):
    """Far more of them than this process may have files open; each once, none ever goes on."""
    many = 100
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as owned:
        address = listener.getsockname()
        limited = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", *COMMAND]
        command = [*limited, "--socket-dir", str(socket_dir), "--listen-fd", "http"]
        # The shell stays the process, so that the descriptor is meant for it.
        child = owned.enter_context(
            spawn(command, fds=[("http", listener.fileno())], environ=ENVIRON)
        )
        url = f"http://127.0.0.1:{address[1]}"
        up(url)
        for _ in range(many):
            client = owned.enter_context(socket.create_connection(address, timeout=PATIENCE_S))
            client.sendall(b"GET /livez HT")
        assert [get(f"{url}/livez")[0] for _ in range(20)] == [200] * 20
        assert get(f"{url}/healthz")[1]["trouble"] == ""
        child.signal(signal.SIGTERM)
        assert child.wait(10) == 128 + signal.SIGTERM
    told = capfd.readouterr().err
    assert told.count("16 HTTP clients are connected") == 1
    assert "Traceback" not in told


@pytest.mark.parametrize("port", ["99999", "-1", "http", "9" * 5000])
def test_what_is_no_port_is_said(socket_dir, port):
    done = run("--socket-dir", str(socket_dir), f"--port={port}")
    assert done.returncode == 2
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_no_host_is_said(socket_dir):
    done = run("--socket-dir", str(socket_dir), "--host", "a..b")
    assert done.returncode == 78
    assert "--host a..b: no name of a host: give an address of this host" in done.stderr
    assert "Traceback" not in done.stderr


def test_taken_port_is_said(socket_dir):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = run("--socket-dir", str(socket_dir), "--instance", "CPU-0", "--port", port)
    assert done.returncode == 78
    assert f"--port {port}" in done.stderr


def test_missing_descriptor_is_said(socket_dir):
    done = run("--socket-dir", str(socket_dir), "--instance", "CPU-0", "--listen-fd", "http")
    assert done.returncode == 78
    assert "--listen-fd http" in done.stderr


def test_wrong_instance_is_said(socket_dir):
    done = run("--socket-dir", str(socket_dir), "--instance", "TPU:0")
    assert done.returncode == 78
    assert "TPU:0" in done.stderr


def test_wrong_peer_is_said(socket_dir):
    done = run("--socket-dir", str(socket_dir), "--peer", "node-2")
    assert done.returncode == 78
    assert "--peer 'node-2': write a host and its port" in done.stderr


def test_broken_configuration_is_said(tmp_path):
    (tmp_path / "preloadd.toml").write_text("[supervisor]\nport = 0\ntypo = 1\n")
    done = run(PRELOADD_CONFIG_DIR=str(tmp_path))
    assert done.returncode == 78
    assert "supervisor.port" in done.stderr
    assert "supervisor.typo" in done.stderr
    assert "Traceback" not in done.stderr
