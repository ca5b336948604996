"""Shared stores in the sandbox of a rank."""

from __future__ import annotations

import json
from importlib.util import find_spec

from tests.needs import impossible
from tests.stores.servers import MASTER, listening
from tests.system import installed
from tests.system.host import Boot, Host, rank

UNIT = rank("CPU-0")
SCRIPT = f"/usr/bin/preloadd-python {installed.TESTS}/inside/stores.py"
TOLD = "/run/told"
RPC, METRICS, CLIENT, HEALTH = 50051, 19003, 50052, 19300
ADDRESS = f"127.0.0.1:{RPC}"


def run(host: Host, group: str, *stores: str) -> str:
    """What the script tells of `stores`, in the place of a rank whose group has the one store."""
    host.machine.write(
        f"/run/systemd/system/{UNIT}.d/90-script.conf",
        f"[Service]\nType=oneshot\nRestart=no\nExecStart=\nExecStart={SCRIPT} {' '.join(stores)}\n"
        f"StandardOutput=truncate:{TOLD}\nStandardError=journal\n",
    )
    host.write_group("a", ["CPU-0"], more=f"[warmup]\nstores = {json.dumps([group])}\n")
    host.machine.systemctl("start", UNIT, check=False)
    return host.machine.path(TOLD).read_text()


def test_the_folder_that_a_group_names_can_be_written_and_no_other(boot_once: Boot) -> None:
    with boot_once() as host:
        for name in ("cache", "other"):
            host.machine.run("install", "-d", "-o", "preloadd", "-m", "755", f"/srv/{name}")
        assert json.loads(run(host, "file:/srv/cache", "file:/srv/cache")) == [True, []]
        assert host.machine.run("find", "/srv", "-type", "f").stdout.startswith("/srv/cache/vllm-")
        assert run(host, "file:/srv/cache", "file:/srv/other") == ""
        assert "file:/srv/other: user" in "".join(host.machine.messages(UNIT))


def test_mooncake(boot_once: Boot) -> None:
    found = find_spec("mooncake")
    if found is None or found.origin is None:
        impossible("Mooncake is not installed")
        return
    settings = {
        "mode": "standalone-store",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": ADDRESS,
        "protocol": "tcp",
        "global_segment_size": 0,
        "local_buffer_size": "64MB",
    }
    files = {
        "/etc/preloadd/mooncake.json": json.dumps(settings),
        "/etc/default/preloadd": "MOONCAKE_CONFIG_PATH=/etc/preloadd/mooncake.json\n",
    }
    with boot_once(files=files) as host:
        for name, flags in SERVERS.items():
            (path,) = host.machine.path(installed.VENV).glob(f"lib/*/site-packages/mooncake/{name}")
            program = f"/{path.relative_to(host.machine.root)}"
            argv = [program, *(f"--{key}={value}" for key, value in flags.items())]
            host.machine.run("systemd-run", "--property=KillSignal=KILL", *argv)
        host.until(lambda: {RPC, HEALTH} <= listening(host.machine.pid), "servers")
        assert json.loads(run(host, "mooncake", "mooncake")) == [True, []]


SERVERS = {
    "mooncake_master": {**MASTER, "rpc_port": RPC, "metrics_port": METRICS},
    "mooncake_client": {
        "host": "127.0.0.1",
        "port": CLIENT,
        "global_segment_size": "64MB",
        "local_buffer_size": 0,
        "master_server_address": ADDRESS,
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "enable_http_server": "true",
        "http_port": HEALTH,
    },
}
