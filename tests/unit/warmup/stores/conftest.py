"""A pool of the stand-in for Mooncake's library, and a master that can be reached."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkout import ROOT

STAND_IN = ROOT / "tests/mooncake_stand_in"


class Pool:
    """What stand-ins share, and what they are told to do."""

    def __init__(self, folder: Path, master: socket.socket) -> None:
        self.folder = folder
        self.master = f"127.0.0.1:{master.getsockname()[1]}"
        self.file = folder / "mooncake.json"
        self.configure()
        self.environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(STAND_IN), str(ROOT)]),
            "STAND_IN_POOL": str(folder),
            "MOONCAKE_CONFIG_PATH": str(self.file),
        }

    def configure(self, **changes: object) -> None:
        usual = {
            "mode": "standalone-store",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": self.master,
            "protocol": "tcp",
            "global_segment_size": 0,
            "local_buffer_size": "1MB",
        }
        self.file.write_text(json.dumps(usual | changes))

    def script(self, **calls: object) -> None:
        """What calls do from now on."""
        (self.folder / "script.json").write_text(json.dumps(calls))

    @property
    def calls(self) -> list[str]:
        """Those that were made."""
        return (self.folder / "calls").read_text().split()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    folder = tmp_path / "pool"
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as master:
        yield Pool(folder, master)
