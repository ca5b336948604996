"""The supervisor under systemd while a rank of the demo model stands still: it delays nobody."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.system import demo
from tests.system.demo import A, B
from tests.system.host import Boot, Host, rank

REQUESTS = 10_000
RATE = 200
STUCK_S = 5.0
P99_MS = 50.0

PROBE = f"""
import anyio, json
from bench.healthz import probe
took, statuses = anyio.run(probe, 9470, {REQUESTS}, {RATE})
print(json.dumps({{"took": sorted(took), "statuses": list(statuses)}}))
"""


@pytest.fixture(scope="module")
def host(boot_once: Boot) -> Iterator[Host]:
    """A machine with both groups, and a rank that no watchdog looks after."""
    with demo.booted(boot_once) as host:
        host.machine.write(
            f"/run/systemd/system/{rank(A[1])}.d/watchdog.conf", "[Service]\nWatchdogSec=0\n"
        )
        host.machine.systemctl("daemon-reload")
        host.machine.systemctl("restart", rank(A[1]))
        yield host


@pytest.fixture
def stuck(host: Host) -> Iterator[float]:
    """When that rank was stopped; it goes on afterwards."""
    host.until(lambda: host.health()[0] == 200, "health")
    host.kill(A[1], "STOP")
    yield time.monotonic()
    host.kill(A[1], "CONT")
    host.until(lambda: host.health()[0] == 200, "health")


def conditions(host: Host) -> dict[str, str]:
    return {told["instance"]: told["condition"] for told in host.health()[1]["ranks"]}


def test_a_stuck_rank_is_told_of_soon_and_is_the_only_one(host: Host, stuck: float) -> None:
    host.until(lambda: conditions(host)[A[1]] == "stuck", "word of the stuck rank")
    took = time.monotonic() - stuck
    print(f"told of after {took:.1f} s")
    assert took <= STUCK_S
    assert conditions(host) == {A[0]: "serving", A[1]: "stuck", B[0]: "serving"}
    assert host.health()[0] == 503
    done = host.ctl("status")
    assert done.returncode == 1
    assert f"a {A[1]} is stuck" in done.stdout


@pytest.mark.timeout(180)
def test_ten_thousand_probes_wait_for_no_rank(host: Host, stuck: float) -> None:
    host.until(lambda: conditions(host)[A[1]] == "stuck", "word of the stuck rank")
    found = probed(host)
    took = found["took"]
    assert found["statuses"] == [503]
    assert len(took) == REQUESTS
    p99_ms = 1000 * took[int(0.99 * REQUESTS)]
    print(f"p99 {p99_ms:.1f} ms, median {500 * (took[4999] + took[5000]):.1f} ms")
    assert p99_ms <= P99_MS


def probed(host: Host) -> dict[str, list[float]]:
    """What came of all the requests; each is timed from when it was due."""
    command = ["env", "PYTHONPATH=/usr/lib/preloadd:/opt/tests", "/opt/venv/bin/python"]
    with host.machine.running(*command, "-c", PROBE) as probe:
        out, err = probe.communicate(timeout=REQUESTS / RATE + 60)
    assert probe.returncode == 0, err
    return json.loads(out)
