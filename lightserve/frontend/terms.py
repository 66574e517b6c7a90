"""On what terms a request is served: its class, targets, priority and timeout.

Targets come in the body's `slo` or in headers; where both say something it has to be the same.
What a real-time request says nothing about holds as the server promises it. Times and targets are
checked here, once, for all routes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter
from starlette.datastructures import Headers

from lightserve.config import ServeConfig
from lightserve.config.fields import flag_name
from lightserve.errors import InvalidRequest
from lightserve.frontend.json_body import UNKNOWN_PARAMETER, Integer, StrictModel, show
from lightserve.types import MTPOT_FACTOR, NO_SLO, SLO, RequestClass

MAX_TARGET_MS = 3_600_000.0
MAX_SECONDS = 86_400.0
MAX_PRIORITY = 1000

TargetMs = Annotated[float, Field(gt=0.0, le=MAX_TARGET_MS)]
Seconds = Annotated[float, Field(gt=0.0, le=MAX_SECONDS)]
Priority = Annotated[Integer, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]

TOKEN_TARGETS = ("ttft_ms", "tpot_ms", "mtpot_ms")
"""Fields of `slo` that are about tokens; the other one is about the whole."""
_HEADER_PREFIX = "x-slo-"
TARGET_HEADERS = {
    f"{_HEADER_PREFIX}{name.replace('_', '-')}": name for name in SLO.__struct_fields__
}
"""Headers, in lower case, and the fields of `slo` that they stand for."""
_NUMBER = re.compile(r"\d{1,32}(\.\d{1,32})?([eE][+-]?\d{1,3})?", re.ASCII)


class SLOFields(StrictModel):
    """`slo`; null is the same as absent."""

    ttft_ms: TargetMs | None = None
    tpot_ms: TargetMs | None = None
    mtpot_ms: TargetMs | None = None
    completion_s: Seconds | None = None


def header_schemas() -> list[dict[str, Any]]:
    """Return the headers as parameters of OpenAPI."""
    schemas = {
        name: TypeAdapter(TargetMs if name in TOKEN_TARGETS else Seconds).json_schema()
        for name in SLO.__struct_fields__
    }
    return [
        {"name": header, "in": "header", "required": False, "schema": schemas[name]}
        for header, name in TARGET_HEADERS.items()
    ]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a request, and all its completions, may expect."""

    request_class: RequestClass
    arrival_s: float
    """Monotonic time at which the headers were there."""
    slo: SLO = NO_SLO
    """The server's targets included."""
    priority: int = 0
    timeout_s: float | None = None
    """From its arrival to its last token; what is not done by then ends with an error."""

    @property
    def left_s(self) -> float | None:
        """Seconds until it times out; None: it never does."""
        if self.timeout_s is None:
            return None
        return max(0.0, self.arrival_s + self.timeout_s - time.monotonic())


@dataclass(frozen=True, kw_only=True)
class TermFields:
    """What the body of a request says about its terms; None: nothing."""

    request_class: RequestClass
    slo: SLOFields | None
    priority: int | None
    timeout_s: float | None
    param_prefix: str = ""
    """Of the names of these fields in the body."""

    def resolve(self, headers: Headers, config: ServeConfig, *, arrival_s: float) -> Terms:
        """Return the terms. Raises InvalidRequest."""
        asked = _join(_from_headers(headers), self._from_body())
        _check_class(asked, self.request_class)
        _check_least(asked, config)
        slo = _with_defaults(asked, self.request_class, config)
        if slo.mtpot_ms is not None and slo.mtpot_ms < (slo.tpot_ms or 0.0):
            place = asked["mtpot_ms"].place
            raise InvalidRequest(
                f"{place} must be at least the target of the mean, {slo.tpot_ms:g}, got"
                f" {slo.mtpot_ms:g}",
                param=place,
            )
        return Terms(
            request_class=self.request_class,
            arrival_s=arrival_s,
            slo=slo,
            priority=self.priority or 0,
            timeout_s=self.timeout_s,
        )

    def _from_body(self) -> dict[str, _Asked]:
        slo = self.slo or SLOFields()
        values = {name: getattr(slo, name) for name in SLO.__struct_fields__}
        return {
            name: _Asked(value, f"{self.param_prefix}slo.{name}")
            for name, value in values.items()
            if value is not None
        }


class _Asked(NamedTuple):
    """A target of a request."""

    value: float
    place: str
    """Header or field that has it."""


def server_slo(config: ServeConfig) -> SLO:
    """Return what the server promises real-time requests that bring no targets of their own."""
    mtpot_ms = config.mtpot_slo_ms or MTPOT_FACTOR * config.tpot_slo_ms
    return SLO(config.ttft_slo_ms or None, config.tpot_slo_ms or None, mtpot_ms or None)


def _from_headers(headers: Headers) -> dict[str, _Asked]:
    asked: dict[str, _Asked] = {}
    for header, text in headers.items():
        if not header.startswith(_HEADER_PREFIX):
            continue
        if header not in TARGET_HEADERS:
            raise InvalidRequest(
                f"the header {header[:64]} is not supported; known are {', '.join(TARGET_HEADERS)}",
                param=header[:64],
                code=UNKNOWN_PARAMETER,
            )
        name = TARGET_HEADERS[header]
        if name in asked:
            raise InvalidRequest(f"the header {header} must be given once", param=header)
        value = float(text) if _NUMBER.fullmatch(text) else 0.0
        is_ms = name in TOKEN_TARGETS
        most, unit = (MAX_TARGET_MS, "milliseconds") if is_ms else (MAX_SECONDS, "seconds")
        if not 0.0 < value <= most:
            raise InvalidRequest(
                f"the header {header} must be a number of {unit} greater than 0 and at most"
                f" {most:.0f}, got {show(text)}",
                param=header,
            )
        asked[name] = _Asked(value, header)
    return asked


def _join(headers: Mapping[str, _Asked], body: Mapping[str, _Asked]) -> dict[str, _Asked]:
    for name in headers.keys() & body.keys():
        (given, header), (other, field) = headers[name], body[name]
        if given != other:
            raise InvalidRequest(
                f"the header {header} ({given:g}) and {field} ({other:g}) must be equal, or only"
                " one of them given",
                param=field,
            )
    return {**headers, **body}


def _check_class(asked: Mapping[str, _Asked], request_class: RequestClass) -> None:
    """Refuse targets that a class does not have, and those that exclude each other."""
    of_tokens = [asked[name].place for name in TOKEN_TARGETS if name in asked]
    if not of_tokens:
        return
    if request_class is RequestClass.BE:
        raise InvalidRequest(
            f"{of_tokens[0]} is for real-time requests; best-effort ones (service_tier flex) may"
            " have slo.completion_s",
            param=of_tokens[0],
        )
    if "completion_s" in asked:
        job = asked["completion_s"].place
        raise InvalidRequest(f"{job} cannot be combined with {of_tokens[0]}", param=job)


def _check_least(asked: Mapping[str, _Asked], config: ServeConfig) -> None:
    """Refuse targets below what the server lets clients ask for."""
    for name, option in (
        ("ttft_ms", "min_ttft_slo_ms"),
        ("tpot_ms", "min_tpot_slo_ms"),
        ("mtpot_ms", "min_tpot_slo_ms"),
    ):
        least_ms: float = getattr(config, option)
        if name in asked and asked[name].value < least_ms:
            value, place = asked[name]
            raise InvalidRequest(
                f"{place} must be at least {least_ms:g}, as this server sets it"
                f" ({flag_name(option)}), got {value:g}",
                param=place,
            )


def _with_defaults(
    asked: Mapping[str, _Asked], request_class: RequestClass, config: ServeConfig
) -> SLO:
    """Return the targets; where a request says nothing, the server's hold, if any can."""
    own = SLO(**{name: target.value for name, target in asked.items()})
    if request_class is RequestClass.BE or own.completion_s is not None:
        return own
    server = server_slo(config)
    mtpot_ms = own.mtpot_ms
    if mtpot_ms is None:
        mtpot_ms = server.mtpot_ms if own.tpot_ms is None else MTPOT_FACTOR * own.tpot_ms
    return SLO(own.ttft_ms or server.ttft_ms, own.tpot_ms or server.tpot_ms, mtpot_ms)
