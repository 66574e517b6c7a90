"""GET /v1/requests/ID/timeline: what became of a request, for its own key."""

from __future__ import annotations

import re
from typing import Literal

from fastapi import APIRouter, Request
from msgspec import to_builtins
from pydantic import Field

from lightserve.errors import InvalidRequest
from lightserve.frontend.json_body import StrictModel, show
from lightserve.frontend.middleware import caller_of
from lightserve.frontend.service import Service
from lightserve.messages.frontend_router import RequestLife

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_COMPUTES = "computes"

Class = Literal["rt", "be"]


class TimelineTargets(StrictModel):
    """What the request was to be served in."""

    ttft_ms: float | None
    tpot_ms: float | None
    mtpot_ms: float | None
    completion_s: float | None


class StretchObject(StrictModel):
    """Steps in a row in which the same happened to it."""

    what: str
    at_s: float
    seconds: float = Field(ge=0)
    num_steps: int
    num_tokens: int
    tokens_of_others: dict[Class, int]
    predicted_s: float
    observed_s: float


class DecisionObject(StrictModel):
    """Something that a step did with it once."""

    what: Literal["starts", "paused", "checkpointed", "preempted", "resumes"]
    at_s: float
    num_tokens: int


class CompletionTimeline(StrictModel):
    """One completion."""

    request_class: Class
    state: Literal["alive", "ended"]
    end: str | None
    age_s: float
    targets: TimelineTargets
    missed: list[Literal["ttft", "tpot", "mtpot", "completion"]]
    first_token_s: float | None
    mean_gap_s: float | None
    max_gap_s: float | None
    num_output_tokens: int
    held_up_by: str | None
    before_first_token: dict[str, float]
    after_first_token: dict[str, float]
    stretches: list[StretchObject]
    decisions: list[DecisionObject]


class TimelineObject(StrictModel):
    """The answer."""

    id: str
    object: Literal["request.timeline"]
    completions: list[CompletionTimeline]


def timeline_router(service: Service) -> APIRouter:
    """Return the route."""
    router = APIRouter()

    @router.get("/v1/requests/{request_id}/timeline")
    async def timeline(request: Request, request_id: str) -> TimelineObject:
        """Say what a request waited for, and what was served meanwhile."""
        if not service.config.request_timelines:
            raise InvalidRequest(
                "this server keeps no timelines (--request-timelines)",
                code="timelines_off",
                status=404,
            )
        caller = caller_of(request.scope)
        lives = []
        if _NAME.fullmatch(request_id):
            client_key = None if caller.is_admin else caller.client.key
            lives = await service.router.describe_request(request_id, client_key)
        if not lives:
            raise InvalidRequest(
                f"there is no request {show(request_id)} among the last"
                f" {service.config.request_timelines} (--request-timelines)",
                param="request_id",
                code="request_not_found",
                status=404,
            )
        completions = [_completion(life) for life in lives]
        return TimelineObject(id=request_id, object="request.timeline", completions=completions)

    return router


def _completion(life: RequestLife) -> CompletionTimeline:
    missed = _missed(life)
    is_late_later = bool(missed) and "ttft" not in missed
    sums = life.after_first_token if is_late_later else life.before_first_token
    waits = {what: seconds for what, seconds in sums.items() if what != _COMPUTES}
    has_gaps = life.num_output_tokens > 1
    return CompletionTimeline(
        request_class=life.request_class.value,
        state="alive" if life.end is None else "ended",
        end=life.end,
        age_s=life.age_s,
        targets=TimelineTargets(
            ttft_ms=life.slo.ttft_ms,
            tpot_ms=life.slo.tpot_ms,
            mtpot_ms=life.slo.mtpot_ms,
            completion_s=life.slo.completion_s,
        ),
        missed=missed,
        first_token_s=life.first_token_s,
        mean_gap_s=life.token_span_s / (life.num_output_tokens - 1) if has_gaps else None,
        max_gap_s=life.max_gap_s if has_gaps else None,
        num_output_tokens=life.num_output_tokens,
        held_up_by=max(waits, key=lambda what: waits[what]) if waits else None,
        before_first_token=life.before_first_token,
        after_first_token=life.after_first_token,
        stretches=[
            StretchObject(
                what=each.what,
                at_s=each.at_s,
                seconds=each.seconds,
                num_steps=each.num_steps,
                num_tokens=each.num_tokens,
                tokens_of_others={c.value: n for c, n in each.tokens_of_others.items()},
                predicted_s=each.predicted_s,
                observed_s=each.observed_s,
            )
            for each in life.stretches
        ],
        decisions=[DecisionObject.model_validate(to_builtins(each)) for each in life.moments],
    )


def _missed(life: RequestLife) -> list[Literal["ttft", "tpot", "mtpot", "completion"]]:
    """Return which targets it has missed so far."""
    slo = life.slo
    found: list[Literal["ttft", "tpot", "mtpot", "completion"]] = []
    first_s = life.age_s if life.first_token_s is None else life.first_token_s
    if slo.ttft_ms is not None and 1e3 * first_s > slo.ttft_ms:
        found.append("ttft")
    num_gaps = life.num_output_tokens - 1
    if (
        slo.tpot_ms is not None
        and num_gaps > 0
        and 1e3 * life.token_span_s / num_gaps > slo.tpot_ms
    ):
        found.append("tpot")
    if slo.mtpot_ms is not None and 1e3 * life.max_gap_s > slo.mtpot_ms:
        found.append("mtpot")
    if slo.completion_s is not None and life.age_s > slo.completion_s:
        found.append("completion")
    return found
