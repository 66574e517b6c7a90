"""Routes for operators: /, /livez, /readyz and /health (what is observed, never constants), /load,
/metrics and /version.

Live: the event loop turns (it answers), and the router is heard of and makes progress; while
there is none, the supervisor has the time of a start to bring one. A server that is draining,
loading or restarting workers is live. Ready: a request sent now would be taken.
"""

from __future__ import annotations

import platform
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

import lightserve
from lightserve.frontend.access import caller_of
from lightserve.frontend.failures import not_ready
from lightserve.frontend.service import Service
from lightserve.messages.common import PROTOCOL_VERSION
from lightserve.metrics.families import ENGINE_ID

MAX_SILENCE_S = 8.0
"""The router says something every second; a pause of a few seconds is latency, not death."""


def not_live_because(service: Service) -> str | None:
    """Return why this server makes no progress, None if it does."""
    router, config = service.router, service.config
    if (disconnected_s := router.disconnected_s) is not None:
        if disconnected_s > config.start_timeout_s:
            return f"no router for {disconnected_s:.1f} s"
        return None
    silent_s = router.silent_s or 0.0
    if silent_s > MAX_SILENCE_S:
        return f"router silent for {silent_s:.1f} s"
    if router.status is not None and router.status.stalled_s > config.step_timeout_s:
        return f"no step finished for {router.status.stalled_s:.1f} s"
    return None


def not_ready_because(service: Service) -> str | None:
    """Return why a request sent now would be refused, None if it would be taken."""
    if service.in_flight.is_draining:
        return "shutting down"
    if service.router.disconnected_s is not None:
        return "no router"
    if not service.router.is_ready:
        return "workers are not ready"
    return not_live_because(service)


def _answer(reason: str | None, details: dict[str, Any] | None = None) -> JSONResponse:
    body = {"status": "ok" if reason is None else "unavailable", "reason": reason}
    return JSONResponse(body | (details or {}), status_code=200 if reason is None else 503)


def current_load(service: Service) -> dict[str, Any]:
    """Return the body of /load, about a second old. Raises RequestFailed without a router."""
    status = service.router.status
    if status is None:
        raise not_ready()
    return {
        "engine_id": ENGINE_ID,
        "model": service.model.names[0],
        "workers_ready": status.workers_ready,
        "num_in_flight": service.in_flight.count,
        "num_used_slots": status.num_used_slots,
        "num_kv_slots": status.num_kv_slots,
        "classes": {
            request_class.value: {
                "num_waiting": load.num_waiting,
                "num_waiting_tokens": load.num_waiting_tokens,
                "num_running": load.num_running,
            }
            for request_class, load in status.load.items()
        },
    }


def operations_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.get("/")
    async def root() -> JSONResponse:
        """Say what this is, and where its description is."""
        docs = {"docs": "/docs"} if service.config.enable_docs else {}
        return JSONResponse(
            {
                "server": "lightserve",
                "version": lightserve.__version__,
                "model": service.model.names[0],
                "api": "OpenAI's (/v1/chat/completions, /v1/completions, /v1/models) and TGI's"
                " (/generate, /generate_stream); docs/api.md describes them",
                "openapi": "/openapi.json",
                **docs,
            }
        )

    @router.get("/livez")
    async def livez() -> JSONResponse:
        """Say whether the server makes progress."""
        return _answer(not_live_because(service))

    @router.get("/readyz")
    async def readyz() -> JSONResponse:
        """Say whether the server takes requests."""
        return _answer(not_ready_because(service))

    @router.get("/health")
    async def health(request: Request) -> JSONResponse:
        """Say the same as /readyz; to operators with the router's figures."""
        if not caller_of(request.scope).is_admin:
            return _answer(not_ready_because(service))
        status = service.router.status
        details: dict[str, Any] = {"num_in_flight": service.in_flight.count}
        if status is not None:
            details |= {
                "num_running": sum(load.num_running for load in status.load.values()),
                "num_waiting": sum(load.num_waiting for load in status.load.values()),
                "num_steps": status.num_steps,
                "worker_busy_s": status.worker_busy_s,
                "worker_idle_s": status.worker_idle_s,
            }
        return _answer(not_ready_because(service), details)

    @router.get("/load")
    async def load() -> JSONResponse:
        """Say how much work there is, for load balancers."""
        return JSONResponse(current_load(service))

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return the whole server's metrics, in Prometheus's text format."""
        answer = await service.observation.scrapes.ask()
        return Response(answer.text, headers={"content-type": answer.content_type})

    @router.get("/version")
    async def version() -> JSONResponse:
        """Say what is running, and on what, which is null until the workers have said it."""
        device = service.router.device
        return JSONResponse(
            {
                "version": lightserve.__version__,
                "protocol": PROTOCOL_VERSION,
                "model": service.model.names[0],
                "engine_id": ENGINE_ID,
                "python": platform.python_version(),
                "device": None if device is None else msgspec.to_builtins(device),
            }
        )

    return router
