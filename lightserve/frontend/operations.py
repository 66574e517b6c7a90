"""GET /livez, /readyz and /health: what is observed, never constants.

Live: the event loop turns (it answers), and the router is heard of and makes progress; while
there is none, the supervisor has the time of a start to bring one. A server that is draining,
loading or restarting workers is live. Ready: a request sent now would be taken.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse

from lightserve.frontend.service import Service

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


def operations_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.get("/livez")
    async def livez() -> JSONResponse:
        """Say whether the server makes progress."""
        return _answer(not_live_because(service))

    @router.get("/readyz")
    async def readyz() -> JSONResponse:
        """Say whether the server takes requests."""
        return _answer(not_ready_because(service))

    @router.get("/health")
    async def health() -> JSONResponse:
        """Say the same as /readyz, with the router's figures."""
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

    return router
