"""The HTTP face: bodies for programs, metrics for Prometheus, a page for people; reading only."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.routing import APIRoute

from preloadd import __version__
from preloadd.supervisor import introduction, metrics, models, page
from preloadd.supervisor.lookout import View
from preloadd.supervisor.verdict import groups, judge

Look = Callable[[], Awaitable[View]]
"""What is known now; waits for no rank."""

_UNHEALTHY: dict[int | str, dict[str, Any]] = {
    503: {"description": "some rank does not serve; the body is the same"}
}
_DESCRIPTION = (
    "How the ranks are that hold model weights on this host. Nothing can be changed here."
)


def create_app(look: Look, *, host: str = "", identity: str = "") -> FastAPI:
    """The application over `look`. Nobody is looked at for `/livez`.

    `/healthz` tells everything about every rank; `/readyz` decides alike and tells only why not.
    Other nodes are told of apart, and decide nothing. `host` names this host to people, `identity`
    this process to other supervisors.
    """
    app = FastAPI(
        title="preloadd",
        version=__version__,
        description=_DESCRIPTION,
        docs_url=None,
        redoc_url=None,
    )
    _add_health(app, look)
    _add_lists(app, look)
    _add_nodes(app, look, host, identity)
    _add_metrics(app, look)
    _add_page(app, look, host)
    _answer_head(app)
    return app


def _add_health(app: FastAPI, look: Look) -> None:
    @app.get("/livez", tags=["health"])
    async def livez() -> models.Alive:
        """Whether the supervisor runs."""
        return models.Alive()

    @app.get("/healthz", tags=["health"], response_model=models.Health, responses=_UNHEALTHY)
    async def healthz() -> Response:
        """Whether every rank serves, and all that is known of each."""
        body = models.Health.of(await look())
        return _answer(body, healthy=body.healthy)

    @app.get("/readyz", tags=["health"], response_model=models.Ready, responses=_UNHEALTHY)
    async def readyz() -> Response:
        """Whether every rank serves, and why not."""
        verdict = judge((await look()).ranks)
        body = models.Ready(ready=verdict.healthy, reasons=verdict.reasons)
        return _answer(body, healthy=verdict.healthy)


def _add_lists(app: FastAPI, look: Look) -> None:
    @app.get("/v1/groups", tags=["v1"])
    async def list_groups() -> models.Groups:
        """The groups on this host."""
        told = groups((await look()).ranks)
        return models.Groups(groups=tuple(map(models.GroupTold.of, told)))

    @app.get("/v1/ranks", tags=["v1"])
    async def list_ranks() -> models.Ranks:
        """The ranks on this host."""
        return models.Ranks(ranks=tuple(map(models.RankTold.of, (await look()).ranks)))

    @app.get("/v1/leases", tags=["v1"])
    async def list_leases() -> models.Leases:
        """The engines that hold weights."""
        return models.Leases.of((await look()).ranks)

    @app.get("/v1/devices", tags=["v1"])
    async def list_devices() -> models.Devices:
        """The memory that weights lie in, and the health of the hardware behind it."""
        return models.Devices(devices=tuple(map(models.DeviceTold.of, (await look()).devices)))

    @app.get("/v1/events", tags=["v1"])
    async def list_events() -> models.Events:
        """What happened to the ranks, newest first."""
        return models.Events(events=tuple(map(models.EventTold.of, (await look()).happenings)))


def _add_nodes(app: FastAPI, look: Look, host: str, identity: str) -> None:
    @app.get(introduction.PATH, tags=["v1"])
    async def introduce() -> introduction.NodeIntroduced:
        """This node in short, as the supervisors of others ask for it."""
        ranks = (await look()).ranks
        return introduction.NodeIntroduced.of(
            ranks, identity=identity, host=host, version=__version__
        )

    @app.get("/v1/peers", tags=["v1"])
    async def list_peers(group: str | None = None) -> models.Peers:
        """Other nodes as they are known here; with `group`, without their other groups."""
        return models.Peers.of((await look()).peers, group)


def _add_metrics(app: FastAPI, look: Look) -> None:
    @app.get("/metrics", tags=["metrics"], response_class=Response)
    async def scrape(request: Request) -> Response:
        """Everything in numbers, in a format of Prometheus that the client accepts."""
        body, kind = metrics.exposition(await look(), request.headers.get("accept", ""))
        return Response(body, headers={"content-type": kind})


def _add_page(app: FastAPI, look: Look, host: str) -> None:
    @app.get("/", include_in_schema=False)
    async def status_page(*, bare: bool = False) -> HTMLResponse:
        nonce = "" if bare else secrets.token_urlsafe(16)
        return HTMLResponse(
            page.render(await look(), host=host, nonce=nonce), headers=page.headers(nonce)
        )


def _answer_head(app: FastAPI) -> None:
    """Take HEAD wherever GET is taken; what is served drops the body."""
    for route in [route for route in app.routes if isinstance(route, APIRoute)]:
        app.head(route.path, include_in_schema=False)(route.endpoint)


def _answer(body: models.Body, *, healthy: bool) -> JSONResponse:
    status = HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE
    return JSONResponse(body.model_dump(mode="json"), status)
