"""Scenes for policies: requests at a stage, a queue of them, admission that needs no memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lightserve.router.admission.base import AdmissionRound
from lightserve.router.kv.cache import KVOptions, KVStore
from lightserve.router.memory_plan import MemoryPlan
from lightserve.router.policies.base import Policy, Step
from lightserve.router.policies.step_budget import NO_LIMIT, Pool, Starts, StepLimits
from lightserve.router.request import Found, FoundOf, Request, RequestState, progress
from lightserve.router.request_table import NO_ROWS, Decodes, RequestTable, Running
from lightserve.router.step import PlannedStep, Scheduled, nums_of_samples, shape_of
from lightserve.types import (
    FrontendId,
    RequestClass,
    RequestId,
    RequestKey,
    SamplingParams,
    StepId,
)

RT, BE = RequestClass.RT, RequestClass.BE


def make_request(
    number: int,
    request_class: RequestClass = RT,
    *,
    prompt: int = 8,
    computed: int | None = None,
    output: int | None = None,
) -> Request:
    """Return a request: waiting, or (with `computed` tokens) running; decoding if that is all.

    With `output`, it has so many output tokens, of which the last one is not computed.
    """
    request = Request(
        key=RequestKey(FrontendId(0), RequestId(number)),
        prompt_token_ids=np.zeros(prompt, dtype=np.int32),
        max_tokens=1000,
        eos_token_ids=frozenset(),
        sampling=SamplingParams(),
        request_class=request_class,
        arrival_s=float(number),
        arrival_number=number,
    )
    if output is not None:
        computed = prompt + output - 1
    if computed is not None:
        request.state = RequestState.RUNNING
        request.num_computed_tokens = computed
        request.output_token_ids = [1] * max(0, computed - prompt + 1)
    return request


def loading(num_loaded: Mapping[Request, int]) -> FoundOf:
    """Return a look-up in which some requests would load so many of the tokens before them."""

    def found(request: Request) -> Found:
        return progress(request)._replace(num_loaded=num_loaded.get(request, 0))

    return found


def running_of(requests: Iterable[Request]) -> Running:
    """Return requests that run, in a table of their own; they may be in another one before."""
    requests = list(requests)
    table = RequestTable(len(requests) + 1)
    for request in requests:
        if request.row is not None:
            request.leave()
        table.acquire(request)
    return Running(table)


def make_limits(
    max_num_batched_tokens: int,
    num_free_rows: int = 0,
    *,
    num_yielding_rows: int = 0,
    max_be: int = NO_LIMIT,
    num_slots: int = 0,
    num_free_slots: int = 0,
    num_cached_slots: int = 0,
    num_wanted_slots: int = 0,
    **others: Any,
) -> StepLimits:
    """Return limits by single numbers; `max_be` best-effort requests may start."""
    return StepLimits(
        max_num_batched_tokens,
        Starts(num_free_rows + num_yielding_rows, num_free_rows, max_be),
        pool=Pool(num_slots, num_free_slots, num_cached_slots, num_wanted_slots),
        **others,
    )


def filled(
    policy: Policy,
    running: Running,
    waiting: Queue,
    limits: StepLimits,
    admission: AdmissionRound,
    *,
    found: FoundOf = progress,
) -> Step:
    """Return a step as a policy fills it where slots are no limit."""
    step = begun(policy, running, waiting, limits, admission, found=found)
    policy.fill(step)
    step.note_rest()
    parts = step.budget.parts
    assert len({request for request, _ in parts}) == len(parts)
    return step


def begun(
    policy: Policy,
    running: Running,
    waiting: Queue,
    limits: StepLimits,
    admission: AdmissionRound,
    *,
    found: FoundOf = progress,
    num_slots: int = 1 << 17,
) -> Step:
    """Return such a step before anything is in it."""
    by_rank = sorted(running, key=lambda request: request.request_class is BE)
    memory = MemoryPlan(
        KVStore(num_slots, KVOptions()),
        running.table,
        lambda: by_rank,
        found,
        0,
        is_class_aware=policy.is_class_aware,
    )
    memory._num_rows = limits.starts.be
    return Step(
        running,
        waiting,
        limits,
        memory,
        admission,
        found=found,
        is_class_aware=policy.is_class_aware,
        meets_deadlines=policy.meets_deadlines,
    )


def planned_step(
    allotments: Sequence[Scheduled], *, step_id: int = 0, now_s: float = 0.0, predicted_s: float = 0
) -> PlannedStep:
    """Return a step of these, none of them as a row of decodes."""
    samples = nums_of_samples(allotments)
    tables = RequestTable(16)
    decodes = Decodes(tables, NO_ROWS)
    return PlannedStep(
        StepId(step_id),
        decodes,
        tuple(allotments),
        samples,
        (),
        (),
        (),
        now_s,
        shape_of(allotments),
        predicted_s,
    )


class Queue:
    """See `policies.base.Waiting`."""

    def __init__(self, requests: Sequence[Request], late: Collection[Request] = ()) -> None:
        """`late` are the last of `requests`."""
        self._requests = requests
        self._late = late
        self.queue = self

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def of(self, request_class: RequestClass) -> Iterator[Request]:
        return (r for r in self._requests if r.request_class is request_class)

    def jobs(self) -> Iterator[Request]:
        return self.of(RequestClass.BE)

    def lines(self) -> Iterator[Request]:
        return self.of(RequestClass.BE)

    def late(self) -> Iterator[Request]:
        return (r for r in self._requests if r in self._late)

    def is_prefix_in_flight(self, request: Request, start: int) -> bool:
        return False


class Admitting:
    """Admits all but the given numbers."""

    def __init__(self, refused: Collection[int] = ()) -> None:
        self._refused = refused
        self.asked: list[int] = []

    forecast_peak = None

    def admit(self, request: Request) -> bool:
        self.asked.append(request.key.request_id)
        return request.key.request_id not in self._refused


def select(
    policy: Policy,
    requests: Sequence[Request],
    *,
    budget: int = 10,
    rows: int = 4,
    yielding: int = 0,
    max_be: int = 1000,
    refused: Collection[int] = (),
    step_number: int = 0,
) -> list[tuple[int, int]]:
    """Return (request number, tokens) in the policy's order."""
    running = running_of([r for r in requests if r.state is RequestState.RUNNING])
    waiting = Queue([r for r in requests if r.state is RequestState.WAITING])
    limits = make_limits(
        budget,
        rows,
        num_yielding_rows=yielding,
        max_be=max_be - len(running.of(BE)),
        step_number=step_number,
    )
    step = filled(policy, running, waiting, limits, Admitting(refused))
    return [(request.key.request_id, num_tokens) for request, num_tokens in step.budget.parts]
