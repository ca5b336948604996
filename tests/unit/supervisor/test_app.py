"""The application is asked through httpx2's in-process transport: no server, no thread."""

import json
from dataclasses import replace
from datetime import UTC, datetime

import anyio
import httpx2
import pytest

from preloadd.domain.lifecycle import State
from preloadd.supervisor.app import create_app
from preloadd.supervisor.lookout import View
from preloadd.supervisor.verdict import Contact, Engine, Snapshot
from tests.unit.supervisor.given import GIB, HOSTILE

SERVING = Snapshot(
    "CPU-0",
    State.SERVING,
    pid=7,
    arena_bytes=1 << 20,
    adopted=True,
    lease_count=1,
    engines=(Engine("vllm", 9, "zero_copy"),),
)
LOADING = Snapshot("CPU-1", State.LOADING, phase="storing", done=1, total=4)
ABSENT = Snapshot("CPU-0", contact=Contact.ABSENT, problem="gone")
PATHS = ["/healthz", "/livez", "/readyz", "/metrics", "/"]
LISTS = [
    *("/v1/groups", "/v1/ranks", "/v1/leases", "/v1/devices", "/v1/events"),
    *("/v1/peers", "/v1/node"),
]


def view(*snapshots: Snapshot) -> View:
    return View(datetime.now(UTC), snapshots)


def ask_of(seen: View, method: str, path: str, **more) -> httpx2.Response:
    async def look() -> View:
        return seen

    async def once() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=create_app(look, host="node-7"))
        async with httpx2.AsyncClient(transport=transport, base_url="http://health") as client:
            return await client.request(method, path, **more)

    return anyio.run(once)


def ask(method: str, path: str, *snapshots: Snapshot) -> httpx2.Response:
    return ask_of(view(*snapshots), method, path)


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_200_only_when_every_rank_serves(path):
    assert ask("GET", path, SERVING, SERVING).status_code == 200
    assert ask("GET", path, SERVING, LOADING).status_code == 503
    assert ask("GET", path).status_code == 503


def test_healthz_tells_everything_about_every_rank():
    body = ask("GET", "/healthz", SERVING, LOADING).json()
    assert body["healthy"] is False
    assert body["reasons"] == ["CPU-1: loading, storing 1 B of 4 B (25%)"]
    first, second = body["ranks"]
    assert (first["instance"], first["state"], first["pid"]) == ("CPU-0", "serving", 7)
    assert (first["arena_bytes"], first["adopted"], first["lease_count"]) == (1 << 20, True, 1)
    assert first["engines"] == [{"client": "vllm", "pid": 9, "mode": "zero_copy"}]
    assert (second["state"], second["phase"]) == ("loading", "storing")
    assert (second["done"], second["total"]) == (1, 4)
    assert ask("GET", "/healthz", ABSENT).json()["ranks"][0]["state"] is None


def test_readyz_tells_why_not():
    assert ask("GET", "/readyz", SERVING).json() == {"ready": True, "reasons": []}
    expected = {"ready": False, "reasons": ["CPU-0: gone"]}
    assert ask("GET", "/readyz", ABSENT).json() == expected


def test_livez_looks_at_nobody():
    async def look() -> View:
        raise AssertionError("livez must not look")

    async def once() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=create_app(look))
        async with httpx2.AsyncClient(transport=transport, base_url="http://health") as client:
            return await client.get("/livez")

    response = anyio.run(once)
    assert (response.status_code, response.json()) == (200, {"alive": True})


def test_groups_have_a_verdict_each(crowd):
    good, hostile, gone = ask_of(crowd, "GET", "/v1/groups").json()["groups"]
    assert (good["name"], good["healthy"], good["serving"]) == ("good", True, 1)
    assert (good["lease_count"], good["arena_bytes"]) == (12, 8 * GIB)
    assert (hostile["name"], hostile["healthy"], hostile["serving"]) == (HOSTILE, False, 0)
    assert hostile["ranks"] == ["GPU-b.draft", "CPU-0"]
    assert gone["reasons"][0].startswith("CPU-1 of gone: preloadd@CPU-1.service has failed")


def test_ranks_are_told_with_their_condition_and_age(crowd):
    told = {r["instance"]: r for r in ask_of(crowd, "GET", "/v1/ranks").json()["ranks"]}
    conditions = [rank["condition"] for rank in told.values()]
    assert conditions == ["serving", "loading", "stuck", "failed"]
    assert told["CPU-0"]["age_seconds"] == 7.5
    assert told["CPU-1"]["age_seconds"] is None
    assert told["CPU-1"]["unit"]["restarts"] == 3


def test_leases_are_told_with_their_ranks(crowd):
    leases = ask_of(crowd, "GET", "/v1/leases").json()["leases"]
    assert len(leases) == 12
    assert leases[0] == {
        "client": f"{HOSTILE}0",
        "pid": 9,
        "mode": "zero_copy",
        "id": "0" * 16,
        "generation": "a" * 32,
        "group": "good",
        "instance": "GPU-a",
    }


def test_devices_and_events(crowd):
    devices = ask_of(crowd, "GET", "/v1/devices").json()["devices"]
    assert [device["id"] for device in devices] == ["host", "GPU-a", "GPU-b"]
    assert devices[1]["xids"] == {"79": 1, "94": 3}
    (event,) = ask_of(crowd, "GET", "/v1/events").json()["events"]
    assert datetime.fromisoformat(event["at"]) < crowd.at
    assert event["text"] == HOSTILE


def test_other_nodes_are_told_with_their_age_and_what_is_wrong(crowd):
    well, ill, silent, never = ask_of(crowd, "GET", "/v1/peers").json()["peers"]
    assert (well["address"], well["reachable"], well["healthy"]) == ("node-8:9470", True, True)
    assert (well["host"], well["version"], well["age_seconds"]) == ("node-8", "0.1.0", 0.8)
    assert (well["groups"][0]["serving"], len(well["groups"][0]["ranks"])) == (8, 8)
    assert (ill["healthy"], [group["serving"] for group in ill["groups"]]) == (False, [8, 3])
    assert ill["groups"][1]["ranks"][3] == {"instance": "GPU-c", "condition": "failed"}
    assert (silent["reachable"], silent["problem"]) == (False, "no answer within 2 s")
    assert (silent["age_seconds"], silent["groups"]) == (200.0, well["groups"])
    assert (never["healthy"], never["age_seconds"], never["groups"]) == (None, None, [])


def test_other_nodes_may_be_asked_about_one_group(crowd):
    told = ask_of(crowd, "GET", "/v1/peers?group=gone").json()["peers"]
    assert [len(peer["groups"]) for peer in told] == [0, 1, 0, 0]
    assert ask_of(crowd, "GET", "/v1/peers?group=nope").json()["peers"][1]["groups"] == []


def test_other_nodes_decide_nothing(crowd):
    good = replace(crowd, ranks=(SERVING,))
    for path in ("/healthz", "/readyz"):
        response = ask_of(good, "GET", path)
        assert response.status_code == 200
        assert "node-" not in response.text


def test_a_node_introduces_itself_whatever_its_state(crowd):
    for seen, healthy in ((view(SERVING), True), (view(LOADING), False), (crowd, False)):
        response = ask_of(seen, "GET", "/v1/node")
        assert response.status_code == 200
        assert response.json()["healthy"] is healthy
        assert response.json()["host"] == "node-7"
        assert "9470" not in response.text, "of its own peers it tells nothing"


def test_metrics_come_in_the_format_that_is_asked_for(crowd):
    plain = ask_of(crowd, "GET", "/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=")
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    new = ask_of(crowd, "GET", "/metrics", headers=accept)
    assert new.headers["content-type"].startswith("application/openmetrics-text")
    assert new.text.endswith("# EOF\n")


def test_the_page_is_protected_and_never_kept(crowd):
    response = ask_of(crowd, "GET", "/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["cache-control"] == "no-store"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert ask_of(crowd, "GET", "/").text != response.text, "a nonce must not be used twice"


@pytest.mark.parametrize("path", PATHS + LISTS)
def test_head_answers_and_nothing_may_be_written(path):
    assert ask("HEAD", path, SERVING).status_code == 200
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert ask(method, path, SERVING).status_code == 405


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/v1", "/v1/ranks/CPU-0"])
def test_nothing_else_is_served(path):
    assert ask("GET", path, SERVING).status_code == 404


def test_openapi_documents_every_address():
    schema = ask("GET", "/openapi.json").json()
    assert set(schema["paths"]) == {*LISTS, "/healthz", "/livez", "/readyz", "/metrics"}
    for path, operations in schema["paths"].items():
        assert list(operations) == ["get"]
        assert operations["get"]["description"], path
    properties = schema["components"]["schemas"]["RankTold"]["properties"]
    assert "stuck" in properties["condition"]["enum"]
    assert "http://" not in json.dumps(schema)
    assert "https://" not in json.dumps(schema)


def test_bodies_are_json():
    response = ask("GET", "/healthz", SERVING)
    assert response.headers["content-type"] == "application/json"
    assert json.loads(response.content)["healthy"] is True


def test_a_stuck_rank_is_never_healthy():
    stuck = replace(SERVING, contact=Contact.STUCK, state=None)
    assert ask("GET", "/healthz", stuck).status_code == 503
