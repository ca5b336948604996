"""The supervisor as a process: serves on a socket it is given or opens, and stops when told to."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import preloadd
from preloadd.linux.process import spawn

ROOT = Path(preloadd.__file__).parents[1]
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT)}
COMMAND = [sys.executable, "-m", "preloadd.supervisor"]


def get(url: str) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], env=ENVIRON, capture_output=True, text=True, timeout=20
    )


@pytest.mark.slow
def test_serves_on_the_inherited_socket_until_sigterm(socket_dir):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = [*COMMAND, "--socket-dir", str(socket_dir), "--instance", "CPU-0"]
        with spawn(
            [*command, "--listen-fd", "http"], fds=[("http", listener.fileno())], environ=ENVIRON
        ) as child:
            assert get(f"http://127.0.0.1:{port}/livez") == (200, {"alive": True})
            status, body = get(f"http://127.0.0.1:{port}/healthz")
            child.signal(signal.SIGTERM)
            assert child.wait(10) == 128 + signal.SIGTERM
    assert status == 503
    assert body["ranks"][0]["instance"] == "CPU-0"
    assert str(socket_dir) in body["reasons"][0]


@pytest.mark.slow
def test_opens_a_socket_of_its_own(socket_dir):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
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
