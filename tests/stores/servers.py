"""Mooncake's own servers, a master and a pool that owns memory: killed, stopped and restarted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

from preloadd.linux.owner import Owner
from tests.ports import free_port

PATIENCE_S = 20.0
_LISTENING = "0A"
MASTER = {
    "rpc_address": "127.0.0.1",
    "metrics_host": "127.0.0.1",
    "rpc_thread_num": 2,
    "default_kv_lease_ttl": 5000,
    "client_ttl": 2,
    "put_start_discard_timeout_sec": 30,
    "put_start_release_timeout_sec": 60,
    "enable_metric_reporting": "false",
}


class Server(Owner):
    """One of the programs that come with the library, which answers at `health`."""

    def __init__(self, name: str, health: int, folder: Path, **flags: object) -> None:
        found = find_spec("mooncake")
        assert found is not None
        assert found.origin is not None
        program = Path(found.origin).with_name(name)
        program.chmod(program.stat().st_mode | 0o111)
        self._argv = [str(program), "--logtostderr=true", *(f"--{k}={v}" for k, v in flags.items())]
        self._health = health
        self._log = folder / f"{name}.log"
        self._start()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Let it hang."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        self.kill()
        self._start()

    def close(self) -> None:
        self.kill()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        until = time.monotonic() + PATIENCE_S
        while not self._healthy():
            ended = self._process.poll() is not None
            if ended or time.monotonic() > until:
                self.kill()
                raise AssertionError(f"{self._argv}: {self._log.read_text()[-2000:]}")
            time.sleep(0.02)

    def _healthy(self) -> bool:
        with suppress(OSError):
            with urlopen(f"http://127.0.0.1:{self._health}/health", timeout=1) as answer:
                return answer.status == 200
        return False


class Mooncake(Owner):
    """A master and a pool of `size`, and the environment of those who use them."""

    def __init__(self, folder: Path, size: str = "256MB", **flags: object) -> None:
        self._folder = folder
        self._size = size
        rpc, metrics = free_port(), free_port()
        self.address = f"127.0.0.1:{rpc}"
        with ExitStack() as owned:
            settings = {**MASTER, "rpc_port": rpc, "metrics_port": metrics, **flags}
            self.master = owned.enter_context(
                Server("mooncake_master", metrics, folder, **settings)
            )
            self.pool = owned.enter_context(self._pool())
            self._owned = owned.pop_all()
        self._file = folder / "mooncake.json"
        self.environ = {**os.environ, "MOONCAKE_CONFIG_PATH": str(self._file)}
        self.configure()

    def close(self) -> None:
        self._owned.close()

    def configure(self, **changes: object) -> None:
        """Write the file that those read."""
        usual = {
            "mode": "standalone-store",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": self.address,
            "protocol": "tcp",
            "device_name": "",
            "global_segment_size": 0,
            "local_buffer_size": "64MB",
        }
        self._file.write_text(json.dumps(usual | changes))

    def _pool(self) -> Server:
        http = free_port()
        return Server(
            "mooncake_client",
            http,
            self._folder,
            host="127.0.0.1",
            port=free_port(),
            global_segment_size=self._size,
            local_buffer_size=0,
            master_server_address=self.address,
            metadata_server="P2PHANDSHAKE",
            protocol="tcp",
            enable_http_server="true",
            http_port=http,
        )


def listening(process: int | str = "thread-self") -> set[int]:
    """The ports at which anything listens on the network of this process."""
    tables = [Path(f"/proc/{process}/net/{kind}") for kind in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENING}
