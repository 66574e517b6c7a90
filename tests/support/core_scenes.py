"""Small scenes for the core: requests of known length, a simulated worker that checks slots."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from lightserve.decisions.records import CoreCalls
from lightserve.errors import ProtocolError
from lightserve.messages.common import TokenSegment, pack_int32
from lightserve.messages.frontend_router import Abort, Submit
from lightserve.messages.router_worker import (
    NO_TOKEN,
    OutputKind,
    RowResult,
    StepPlan,
    StepResult,
    plan_rows,
)
from lightserve.router.admission.base import AdmissionRule, PoolView
from lightserve.router.admission.baselines import ConservativeAdmission
from lightserve.router.config import KEYS_TAKE_TURNS, SchedulerConfig
from lightserve.router.events import FromFrontend, WorkersReady
from lightserve.router.from_submit import QueueLimits
from lightserve.router.kv.cache import KVOptions
from lightserve.router.kv.prefix_node import EvictionOrder
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.policies import POLICIES
from lightserve.router.request import Request
from lightserve.router.scheduler import Scheduler
from lightserve.router.slo import SLOClock, curve_clock
from lightserve.sim.simulation import Frontend, Outcome, Simulation, TimedEvent
from lightserve.sim.worker import EOS_TOKEN_ID, SimulatedWorker, sampled_token
from lightserve.types import (
    FinishReason,
    FrontendId,
    RequestClass,
    RequestId,
    SamplingParams,
)

NUM_SLOTS, MAX_LEN, MAX_SEQS = 120, 64, 6


@dataclass(frozen=True)
class Arrival:
    """A request of a random scene."""

    time_s: float
    num_prompt: int
    num_output: int
    max_tokens: int
    frontend_id: int = 0
    abort_after_s: float | None = None
    request_class: RequestClass = RequestClass.RT
    family: int | None = None
    """Prompts of a family begin alike; None: the prompt is like no other."""


class RecklessAdmission:
    """Admits all requests, so that memory runs out and requests are preempted."""

    forecast_peak = None

    def begin(self, live: Collection[Request], pool: PoolView) -> RecklessAdmission:
        return self

    def admit(self, request: Request) -> bool:
        return True


def make_core(
    policy: str,
    budget: int = 16,
    *,
    max_waiting: int = 1000,
    admission: AdmissionRule | None = None,
    lengths: OutputLengths | None = None,
    cache_order: EvictionOrder | None = None,
    kv: KVOptions | None = None,
    slo_clock: SLOClock = curve_clock,
    rt_kv_deviations: float = 0.0,
    max_model_len: int = MAX_LEN,
    max_num_seqs: int = MAX_SEQS,
    max_parameter_bytes: int = 1 << 30,
) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            queue_limits=dict.fromkeys(RequestClass, QueueLimits(max_waiting, 1 << 30)),
            last_ones_go=policy == "unified",
            keys_take_turns=policy in KEYS_TAKE_TURNS,
            max_parameter_bytes=max_parameter_bytes,
            policy=POLICIES[policy](),
            slo_clock=slo_clock,
            rt_kv_deviations=rt_kv_deviations,
            kv=kv or KVOptions(cache_order=cache_order),
            admission=admission or ConservativeAdmission(),
            lengths=OutputLengths(max_output_tokens=MAX_LEN) if lengths is None else lengths,
        )
    )


def step_time(plan: StepPlan) -> float:
    return 0.004 + 0.0005 * sum(row.num_tokens for row in plan_rows(plan))


def make_simulation(core: CoreCalls, frontend: Frontend | None = None) -> Simulation:
    worker = SimulatedWorker(num_slots=NUM_SLOTS, max_num_seqs=MAX_SEQS, max_model_len=MAX_LEN)
    return Simulation(core, worker, step_time, WorkersReady(NUM_SLOTS), frontend=frontend)


def prompt_of(number: int, arrival: Arrival) -> list[int]:
    if arrival.family is None:
        return [2000 + number] * arrival.num_prompt
    return [5000 + arrival.family] * (arrival.num_prompt - 1) + [6000 + number % 3]


def submit(number: int, arrival: Arrival, **fields: Any) -> Submit:
    values: dict[str, Any] = {
        "prompt": prompt_of(number, arrival),
        "age_s": 0.0,
        "sampling": SamplingParams(seed=arrival.num_prompt + arrival.num_output),
    }
    values |= fields
    prompt = values.pop("prompt")
    return Submit(
        request_id=RequestId(number),
        prompt=[TokenSegment(token_ids=pack_int32(prompt))],
        max_tokens=arrival.max_tokens,
        eos_token_ids=[EOS_TOKEN_ID],
        request_class=arrival.request_class,
        **values,
    )


def events_of(arrivals: list[Arrival]) -> list[TimedEvent]:
    events = []
    for number, arrival in enumerate(arrivals):
        frontend_id = FrontendId(arrival.frontend_id)
        request = FromFrontend(frontend_id, submit(number, arrival))
        events.append(TimedEvent(arrival.time_s, request))
        if arrival.abort_after_s is not None:
            abort = FromFrontend(frontend_id, Abort(request_id=RequestId(number)))
            events.append(TimedEvent(arrival.time_s + arrival.abort_after_s, abort))
    return events


def check_outcome(arrival: Arrival, outcome: Outcome) -> None:
    """Tokens in order, exactly once, ended where they had to end."""
    total_len = arrival.num_prompt + arrival.num_output
    count = min(arrival.num_output, arrival.max_tokens)
    expected = [sampled_token(total_len, arrival.num_prompt + i) for i in range(count)]
    assert outcome.token_ids == expected
    ended_by_eos = arrival.num_output <= arrival.max_tokens
    assert outcome.finish_reason is (FinishReason.STOP if ended_by_eos else FinishReason.LENGTH)


def pack_results(
    plan: StepPlan,
    results: Sequence[RowResult],
    *,
    incarnation: int = 0,
    exec_s: float,
    idle_s: float = 0.0,
) -> StepResult:
    """Return the message that says the same as `row_results`.

    Raises:
        ProtocolError: the results are not those of the plan's rows that want any, in its order.
    """
    wanted = [row for row in plan_rows(plan) if row.output]
    if [row.row for row in wanted] != [result.row for result in results]:
        raise ProtocolError(f"{len(results)} results for {len(wanted)} other rows")
    width = max((len(result.token_ids) for result in results), default=1) or 1
    tokens: list[list[int]] = []
    others: list[RowResult] = []
    for row, result in zip(wanted, results, strict=True):
        is_plain = result.token_ids and not (
            result.error is not None or result.logprobs or result.prompt_logprobs
        )
        if not is_plain:
            others.append(result)
        if row.output & OutputKind.SAMPLE:
            own = result.token_ids if is_plain else []
            tokens.append([*own, *[NO_TOKEN] * (width - len(own))])
    return StepResult(
        step_id=plan.step_id,
        incarnation=incarnation,
        token_ids=pack_int32([token_id for row in tokens for token_id in row]),
        exec_s=exec_s,
        idle_s=idle_s,
        tokens_per_row=width,
        rows=others,
    )
