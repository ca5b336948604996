"""The HTTP face: three addresses, JSON bodies, reading only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from http import HTTPStatus

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from preloadd.supervisor.verdict import Snapshot, judge

Look = Callable[[], Awaitable[Sequence[Snapshot]]]
"""Asks every rank how it is; returns within a deadline whatever the ranks do."""

READ = ["GET", "HEAD"]


def create_app(look: Look) -> FastAPI:
    """The application over `look`. Nothing is asked of the ranks for `/livez`.

    `/healthz` tells everything about every rank; `/readyz` decides alike and tells only why not.
    """
    app = FastAPI(title="preloadd", docs_url=None, redoc_url=None, openapi_url=None)

    @app.api_route("/livez", methods=READ)
    async def livez() -> JSONResponse:
        return JSONResponse({"alive": True})

    @app.api_route("/healthz", methods=READ)
    async def healthz() -> JSONResponse:
        snapshots = await look()
        verdict = judge(snapshots)
        body = {**asdict(verdict), "ranks": [asdict(snapshot) for snapshot in snapshots]}
        return JSONResponse(body, _status(healthy=verdict.healthy))

    @app.api_route("/readyz", methods=READ)
    async def readyz() -> JSONResponse:
        verdict = judge(await look())
        body = {"ready": verdict.healthy, "reasons": verdict.reasons}
        return JSONResponse(body, _status(healthy=verdict.healthy))

    return app


def _status(*, healthy: bool) -> HTTPStatus:
    return HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE
