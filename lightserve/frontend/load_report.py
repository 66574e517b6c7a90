"""The server's load in the head of an answer, for load balancers that ask for it.

Open Request Cost Aggregation (ORCA): a request with `endpoint-load-metrics-format: JSON` or `TEXT`
is answered with `endpoint-load-metrics: JSON {"named_metrics": {...}}` or `TEXT
named_metrics.NAME=VALUE, ...`, under the names that vLLM has in the same place. It shows what all
clients together do, so that it needs the key of an operator or of a gateway where there are keys.
"""

from __future__ import annotations

import json

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightserve.errors import InvalidRequest
from lightserve.frontend.errors import error_response
from lightserve.frontend.json_body import show
from lightserve.frontend.middleware import caller_of
from lightserve.frontend.service import Service
from lightserve.messages.frontend_router import RouterStatus

FORMAT_HEADER = b"endpoint-load-metrics-format"
REPORT_HEADER = b"endpoint-load-metrics"
FORMATS = ("JSON", "TEXT")


class LoadReport:
    """Adds the report to answers of requests that ask for it."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; its answer has the load as it is when the head is sent."""
        values = [value for name, value in scope["headers"] if name == FORMAT_HEADER]
        if not values:
            await self._app(scope, receive, send)
            return
        try:
            style = _format_of(values)
            _check_caller(scope)
        except InvalidRequest as refusal:
            await error_response(refusal, scope)(scope, receive, send)
            return

        async def reporting_send(message: Message) -> None:
            status = self._service.router.status
            if message["type"] == "http.response.start" and status is not None:
                report = (REPORT_HEADER, load_report(status, style).encode())
                message = {**message, "headers": [*message.get("headers", ()), report]}
            await send(message)

        await self._app(scope, receive, reporting_send)


def load_report(status: RouterStatus, style: str) -> str:
    """Return the header's value; `style` is one of FORMATS."""
    slots = status.num_kv_slots
    metrics = {
        "kv_cache_usage_perc": status.num_used_slots / slots if slots else 0.0,
        "num_requests_waiting": float(sum(load.num_waiting for load in status.load.values())),
        "num_requests_running": float(sum(load.num_running for load in status.load.values())),
    }
    if style == "JSON":
        return "JSON " + json.dumps({"named_metrics": metrics})
    return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())


def _format_of(values: list[bytes]) -> str:
    text = b", ".join(values).decode("latin-1")
    if text.upper() not in FORMATS:
        name = FORMAT_HEADER.decode()
        raise InvalidRequest(
            f"the header {name} must be {' or '.join(FORMATS)}, got {show(text)}", param=name
        )
    return text.upper()


def _check_caller(scope: Scope) -> None:
    caller = caller_of(scope)
    if not (caller.is_admin or caller.is_gateway):
        name = FORMAT_HEADER.decode()
        raise InvalidRequest(
            f"the header {name} needs the key of an operator or of a gateway",
            param=name,
            code="gateway_key_required",
            status=403,
        )
