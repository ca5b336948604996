"""Fetching, against a hub of our own on this machine; in a process of its own, because the hub's
library reads its settings when it is imported."""

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.checkout import ROOT

COMMIT = "0123456789" * 4
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"the same weights",
    "README.md": b"words",
}

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
from preloadd.errors import PreloadError
from preloadd.loader.fetch import fetch
try:
    print(fetch(sys.argv[1], sys.argv[2]))
except PreloadError as error:
    print(type(error).__name__, error)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """One model, org/name, as the hub serves it."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/name/revision/"):
            told = {"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": n} for n in FILES]}
            self._send(200, json.dumps(told).encode(), body=body)
        elif path.startswith("/api/models/org/name/tree/"):
            told = [
                {"type": "file", "path": name, "size": len(data), "oid": name}
                for name, data in FILES.items()
            ]
            self._send(200, json.dumps(told).encode(), body=body)
        elif path.startswith(f"/org/name/resolve/{COMMIT}/"):
            self._send(200, FILES[path.rpartition("/")[2]], body=body)
        else:
            self._send(404, b"{}", body=body)

    def _send(self, status: int, data: bytes, *, body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hash(data):x}"')
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def fetched(tmp_path: Path, endpoint: str, model: str, revision: str = "", **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, model, revision],
        env=os.environ
        | {
            "HF_ENDPOINT": endpoint,
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": str(ROOT),
            "no_proxy": "127.0.0.1",
        }
        | environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def test_a_model_is_downloaded_without_the_other_formats_of_its_weights(tmp_path, hub):
    folder = Path(fetched(tmp_path, hub, "org/name"))
    assert folder == tmp_path / "hub" / "models--org--name" / "snapshots" / COMMIT
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_a_model_that_the_hub_does_not_have_is_said(tmp_path, hub):
    told = fetched(tmp_path, hub, "org/none", "v1")
    assert told.startswith("ModelNotFound org/none is not in the Hugging Face cache and could not")
    assert "Check the name, the network and the access token, or give a local folder" in told
    assert "\n" not in told


def test_a_name_that_cannot_be_one_is_said(tmp_path, hub):
    assert fetched(tmp_path, hub, "a/b/c").startswith("ModelNotFound a/b/c is not in the")


def test_a_python_without_the_hubs_library_says_what_to_install(tmp_path, hub):
    (tmp_path / "huggingface_hub.py").write_text(
        "raise ModuleNotFoundError('no', name='huggingface_hub')"
    )
    told = fetched(tmp_path, hub, "org/name", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert told.startswith(
        "ModelNotFound org/name is not in the Hugging Face cache, and to download"
    )
    assert f"{sys.executable} lacks the package huggingface_hub: install it there" in told
    assert "or give a local folder" in told
