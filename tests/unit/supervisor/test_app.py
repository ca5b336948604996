"""The application is asked through httpx2's in-process transport: no server, no thread."""

import json

import anyio
import httpx2
import pytest

from preloadd.domain.lifecycle import State
from preloadd.supervisor.app import create_app
from preloadd.supervisor.verdict import Engine, Snapshot

SERVING = Snapshot(
    "CPU-0",
    State.SERVING,
    pid=7,
    arena_bytes=1 << 20,
    adopted=True,
    lease_count=1,
    engines=(Engine("vllm", 9, "zero_copy"),),
)
LOADING = Snapshot("CPU-1", State.LOADING, done=1, total=4)


def ask(method: str, path: str, *snapshots: Snapshot) -> httpx2.Response:
    async def look() -> tuple[Snapshot, ...]:
        return snapshots

    async def once() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=create_app(look))
        async with httpx2.AsyncClient(transport=transport, base_url="http://health") as client:
            return await client.request(method, path)

    return anyio.run(once)


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_200_only_when_every_rank_serves(path):
    assert ask("GET", path, SERVING, SERVING).status_code == 200
    assert ask("GET", path, SERVING, LOADING).status_code == 503
    assert ask("GET", path).status_code == 503


def test_healthz_tells_everything_about_every_rank():
    body = ask("GET", "/healthz", SERVING, LOADING).json()
    assert body["healthy"] is False
    assert body["reasons"] == ["CPU-1: loading, 1 of 4 bytes (25%)"]
    first, second = body["ranks"]
    assert (first["instance"], first["state"], first["pid"]) == ("CPU-0", "serving", 7)
    assert (first["arena_bytes"], first["adopted"], first["lease_count"]) == (1 << 20, True, 1)
    assert first["engines"] == [{"client": "vllm", "pid": 9, "mode": "zero_copy"}]
    assert (second["state"], second["done"], second["total"]) == ("loading", 1, 4)


def test_readyz_tells_why_not():
    assert ask("GET", "/readyz", SERVING).json() == {"ready": True, "reasons": []}
    assert ask("GET", "/readyz", Snapshot("CPU-0", problem="gone")).json() == {
        "ready": False,
        "reasons": ["CPU-0: gone"],
    }


def test_livez_asks_no_rank():
    async def look() -> tuple[Snapshot, ...]:
        raise AssertionError("livez must not look")

    async def once() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=create_app(look))
        async with httpx2.AsyncClient(transport=transport, base_url="http://health") as client:
            return await client.get("/livez")

    response = anyio.run(once)
    assert (response.status_code, response.json()) == (200, {"alive": True})


@pytest.mark.parametrize("path", ["/healthz", "/livez", "/readyz"])
def test_head_answers_without_a_problem_and_nothing_may_be_written(path):
    assert ask("HEAD", path, SERVING).status_code == 200
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert ask(method, path, SERVING).status_code == 405


@pytest.mark.parametrize("path", ["/", "/docs", "/openapi.json", "/redoc"])
def test_nothing_else_is_served(path):
    assert ask("GET", path, SERVING).status_code == 404


def test_bodies_are_json():
    response = ask("GET", "/healthz", SERVING)
    assert response.headers["content-type"] == "application/json"
    assert json.loads(response.content)["healthy"] is True
