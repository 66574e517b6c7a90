"""A queue of requests through the real Scheduler: how many decode steps, how many evictions.

The setting of Past-Future's Table 1: requests come in order (all at the start, unless the
workload says when), prompts are prefilled whole between decode steps, and what counts is decode
steps, memory, and evictions. A step is planned on the results of all steps before it. With
`paper_artifact` newcomers are let in every ten decode steps and at most 32,768 prompt tokens at a
time, and the length history starts with 500 entries of 512, as in the authors' published
simulation. Identical decode steps are advanced at once.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError
from lightserve.messages.common import TokenSegment, pack_int32
from lightserve.messages.frontend_router import Submit
from lightserve.messages.router_worker import NO_TOKEN, StepPlan, StepResult, sampling_rows
from lightserve.router.admission import ADMISSION_RULES
from lightserve.router.admission.base import AdmissionRound, AdmissionRule, PoolView
from lightserve.router.admission.baselines import OracleAdmission
from lightserve.router.admission.peak import PeakAdmission, PeakRound
from lightserve.router.config import SchedulerConfig, make_accepted_risk
from lightserve.router.events import FromFrontend, Outgoing, WorkersReady
from lightserve.router.from_submit import QueueLimits
from lightserve.router.future_memory import IntArray
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.policies import POLICIES
from lightserve.router.policies.base import Policy, Step, Waiting
from lightserve.router.queue import WaitingQueue
from lightserve.router.request import Request
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep
from lightserve.sim.report import Measurements, Report
from lightserve.sim.traffic import DISTRIBUTION_MAX_TOKENS, Workload, load_workload
from lightserve.sim.virtual_gpus import A100_LLAMA2_7B, VirtualHardware
from lightserve.types import FrontendId, RequestClass, RequestId, SamplingParams

# Runs of identical decode steps in one plan, with the decisions that single steps would bring.
#
# Between two events (a request ends, memory is full, one arrives) decode steps differ only in
# what admission answers. `WatchedAdmission` stands around the rule and sees the answers;
# `RunPolicy` stands around the policy and makes its decode steps as long as the answer stays no.
# It finds out by asking the very rule about the batch as it will be, skipping the steps for which
# the answer cannot change.
#
# A refusal lasts where outputs are forecast steadily: the forecast total length of a request only
# grows as it generates. Let d steps pass in which nothing ends. What was alive at the old peak
# holds as much at that moment or more, except for the newcomer, which starts d steps later and has
# grown d tokens less. So no peak falls by more than 1 per step, and a newcomer that was e tokens
# too much will still be too much after e - 1 steps. (But where `risk` reckons with more than the
# highest of its futures: there it goes by their spread, which may shrink.)

OnAdmission = Callable[[Sequence[Request], IntArray | None], None]
"""Told of a batch with a newcomer in it, and of the rule's forecast of its peaks."""

RunLimit = Callable[[Sequence[Request]], int]
"""The most decode steps (>= 1) of these requests to the next event."""


class WatchedAdmission:
    """Another rule's answers, and a memory of the last round's refusals."""

    def __init__(self, rule: AdmissionRule, on_admission: OnAdmission) -> None:
        self._rule = rule
        self._on_admission = on_admission
        self._live: list[Request] = []
        self._pool = PoolView(0)
        self._refused: list[Request] = []
        self._round: AdmissionRound | None = None

    def begin(self, live: Collection[Request], pool: PoolView) -> WatchedRound:
        """Start a round of the rule's."""
        self._live, self._pool = list(live), pool
        self._refused = []
        self._round = self._rule.begin(live, pool)
        return WatchedRound(self._round, self._live, self._refused, self._on_admission)

    def run_length(self, limit: int, interval: int) -> int:
        """Return after how many decode steps of the whole batch the rule must be asked again.

        It is asked every `interval` steps, and would answer no before; at most `limit`.
        """
        refused_until = 0
        while self._refused and refused_until < limit:
            assert self._round is not None
            num_sure = refused_until + self._num_certain()
            asked = (num_sure // interval + 1) * interval
            if asked >= limit:
                return limit
            if not self._would_refuse_after(asked):
                return asked
            refused_until = asked
        return limit

    def _num_certain(self) -> int:
        """Return for how many decode steps the last round's refusals are certain to last."""
        if not (isinstance(self._rule, PeakAdmission) and self._rule.is_steady):
            return 0
        assert isinstance(self._round, PeakRound)
        return min(map(self._round.excess.__getitem__, self._refused)) - 1

    def _would_refuse_after(self, num_steps: int) -> bool:
        """Ask about the batch as it will be; what is asked becomes the last round."""
        _grow(self._live, num_steps)
        try:
            self._round = self._rule.begin(self._live, self._pool)
            return not any(self._round.admit(request) for request in self._refused)
        finally:
            _grow(self._live, -num_steps)


class WatchedRound:
    """See `WatchedAdmission`."""

    def __init__(
        self,
        inner: AdmissionRound,
        live: Sequence[Request],
        refused: list[Request],
        on_admission: OnAdmission,
    ) -> None:
        self._inner = inner
        self._batch = list(live)
        self._refused = refused
        self._on_admission = on_admission

    @property
    def forecast_peak(self) -> int | None:
        """See `AdmissionRound.forecast_peak`."""
        return self._inner.forecast_peak

    def admit(self, request: Request) -> bool:
        """Pass on the rule's answer, and note it."""
        if not self._inner.admit(request):
            self._refused.append(request)
            return False
        self._batch.append(request)
        self._on_admission(self._batch, getattr(self._inner, "peaks", None))
        return True


class RunPolicy:
    """Another policy that may admit every `interval` decode steps; decode steps come in runs."""

    def __init__(
        self, inner: Policy, admission: WatchedAdmission, *, interval: int, limit: RunLimit | None
    ) -> None:
        self._inner = inner
        self.is_class_aware = inner.is_class_aware
        self.meets_deadlines = inner.meets_deadlines
        self._admission = admission
        self._interval = interval
        self._limit = limit
        self._steps_left = 0

    def advance(self, num_steps: int) -> None:
        """Say that decode steps have been made."""
        self._steps_left = (self._steps_left - num_steps) % self._interval

    def fill(self, step: Step) -> None:
        """See `Policy.fill`."""
        may_admit = self._steps_left == 0 or not len(step.running)
        if not may_admit:
            step.waiting = Waiting(WaitingQueue(), step.running)
        self._inner.fill(step)
        if self._limit is None or step.started:
            return
        rows = step.budget.decode_rows
        requests = step.running.table.of(rows)
        if (
            not len(rows)
            or len(rows) < step.budget.shape.num_new
            or not all(r.is_decoding for r in requests)
        ):
            return
        num_steps = max(1, self._limit(requests))
        if may_admit:
            num_steps = self._admission.run_length(num_steps, self._interval)
        else:
            num_steps = min(num_steps, self._steps_left)
        if num_steps > 1:
            step.give_way(rows)
            step.take(requests, classes=(), num_tokens=num_steps)


def _grow(requests: Iterable[Request], num_tokens: int) -> None:
    """Let requests look as if plans in flight brought them tokens (or take that back)."""
    for request in requests:
        request.num_inflight_samples += num_tokens
        request.num_inflight_tokens += num_tokens
        request.next_position += num_tokens


ARTIFACT_INTERVAL_STEPS = 10
ARTIFACT_PROMPT_BUDGET = 32_768
ARTIFACT_HISTORY = (512,) * 500

_FRONTEND = FrontendId(0)
_UNBOUNDED = QueueLimits(max_requests=1 << 60, max_tokens=1 << 60)
_EOS, _TOKEN = 0, 1


@dataclass(frozen=True, kw_only=True)
class OfflineConfig:
    """One cell of a table."""

    capacity_tokens: int
    admission: str
    """A choice of --admission, or "oracle"."""
    admission_options: dict[str, float] = field(default_factory=dict)
    """Fields of ServeConfig."""
    policy: str = "fcfs"
    request_class: RequestClass = RequestClass.RT
    num_warm_up: int = 0
    """Rows whose lengths are in the history before the rest runs."""
    paper_artifact: bool = False
    steps_at_once: bool = True
    """Whether identical decode steps go into one plan; decisions are the same."""
    num_clients: int | None = None
    """Closed loop: so many requests are there at first, and one more whenever one is finished."""
    keeps_timeline: bool = True
    seed: int = 0
    hardware: VirtualHardware = A100_LLAMA2_7B


def run_offline(
    workload: Workload, config: OfflineConfig, *, progress: Callable[[int], None] | None = None
) -> Report:
    """Run all rows (but the warm-up) to their end; `progress` is told of finished requests.

    Raises:
        ConfigError: a row can never fit into the pool.
    """
    needed = int((workload.prompt_tokens + workload.max_tokens).max()) - 1
    needed += config.hardware.num_state_slots
    if needed > config.capacity_tokens:
        raise ConfigError(
            f"--capacity-tokens must be at least {needed}, what one request of --workload may come"
            f" to need, got {config.capacity_tokens}"
        )
    return OfflineRun(workload, config).run(progress)


class _Output(NamedTuple):
    """The output of a request in a step."""

    request: Request
    num_tokens: int
    ends: bool
    """Whether the last of them is EOS."""


class OfflineRun:
    """One run: the core, the policy around it, and what is measured."""

    def __init__(
        self,
        workload: Workload,
        config: OfflineConfig,
        *,
        rule_of: Callable[[OutputLengths], AdmissionRule] | None = None,
    ) -> None:
        """`rule_of` makes the admission rule, if it is not to be the configured one."""
        self._config = config
        rows = workload.rows(config.num_warm_up, len(workload))
        self._rows = rows.arriving(rows.arrival_s - rows.arrival_s[0])
        limits = np.maximum(workload.max_tokens, workload.output_tokens)
        longest = int((workload.prompt_tokens + limits).max())
        self._lengths = OutputLengths(max_output_tokens=int(workload.max_tokens.max()))
        named = {} if config.admission == "oracle" else {"admission": config.admission}
        self._options = ServeConfig(**named, **config.admission_options)  # type: ignore[arg-type]
        self._risk = make_accepted_risk(self._options)
        warm_up = workload.rows(0, config.num_warm_up)
        history = ARTIFACT_HISTORY if config.paper_artifact else ()
        for length in history:
            self._lengths.record(length)
        for length, client in zip(warm_up.output_tokens.tolist(), warm_up.clients, strict=True):
            self._lengths.record(length, (config.request_class, client))
        self._measured = Measurements(
            config.capacity_tokens, self._rows.output_tokens, config.hardware
        )
        admission = WatchedAdmission(
            self._make_admission() if rule_of is None else rule_of(self._lengths),
            self._measured.admitted,
        )
        self._policy = RunPolicy(
            POLICIES[config.policy](),
            admission,
            interval=ARTIFACT_INTERVAL_STEPS if config.paper_artifact else 1,
            limit=self._steps_to_event if config.steps_at_once else None,
        )
        self._core = Scheduler(
            SchedulerConfig(
                max_model_len=longest,
                max_num_seqs=len(self._rows),
                max_num_batched_tokens=ARTIFACT_PROMPT_BUDGET if config.paper_artifact else 1 << 40,
                queue_limits=dict.fromkeys(RequestClass, _UNBOUNDED),
                policy=self._policy,
                admission=admission,
                lengths=self._lengths,
                accepted_risk=self._risk,
                max_steps_in_flight=1,
                admission_limit=DISTRIBUTION_MAX_TOKENS if config.paper_artifact else None,
            )
        )
        num_state_slots = config.hardware.num_state_slots
        ready = WorkersReady(config.capacity_tokens, num_state_slots=num_state_slots)
        self._core.on_message(ready, 0.0)
        self._now_s = 0.0
        self._num_submitted = 0
        self._num_finished = 0
        self._wants_first_token: dict[int, float] = {}
        """Arrival times by request."""

    def _make_admission(self) -> AdmissionRule:
        config = self._config
        if config.admission == "oracle":
            outputs = self._rows.output_tokens
            return OracleAdmission(lambda request: int(outputs[request.key.request_id]))
        make_rule = ADMISSION_RULES[config.admission]
        return make_rule(self._options, self._lengths, self._risk, config.seed)

    def run(self, progress: Callable[[int], None] | None) -> Report:
        """Run to the end."""
        while self._num_finished < len(self._rows):
            num_ended = self.step()
            if num_ended and progress is not None:
                progress(num_ended)
        return self._measured.report(self._num_finished, self._core, self._now_s)

    def step(self) -> int:
        """Run one plan, or wait for the next arrival; returns how many requests have ended."""
        core, measured = self._core, self._measured
        self._submit_arrived()
        start_s = time.process_time()
        step = core.plan(self._now_s)
        router_s = time.process_time() - start_s
        if not isinstance(step, PlannedStep):
            self._now_s = self._next_arrival_s()
            assert self._now_s < math.inf, f"nothing can advance: {core.status(self._now_s)}"
            return 0
        outputs, exec_s = self._execute(step)
        self._now_s += exec_s
        start_s = time.process_time()
        plan = core.commit(step, self._now_s)
        result = _result_of(plan, outputs, exec_s)
        num_used = core.num_used_slots
        news = core.on_result(result, self._now_s)
        measured.router_s.append(router_s + time.process_time() - start_s)
        if self._config.keeps_timeline:
            measured.planned(num_used, len(step.paused))
        return self._take_in(news)

    def _take_in(self, news: Iterable[Outgoing]) -> int:
        """Read what frontends are told; returns how many requests have ended."""
        num_ended = 0
        for delta in (delta for outgoing in news for delta in outgoing.message.each()):
            arrival_s = self._wants_first_token.pop(delta.request_id, None)
            if arrival_s is not None:
                self._measured.ttft_s.append(self._now_s - arrival_s)
            num_ended += delta.finish_reason is not None
        if num_ended:
            self._measured.ended()
            self._num_finished += num_ended
        return num_ended

    def _next_arrival_s(self) -> float:
        """Return when the next request comes: a time, now, or (in a closed loop) not yet."""
        number = self._num_submitted
        if number == len(self._rows):
            return math.inf
        if self._config.num_clients is not None:
            num_there = number - self._num_finished
            return self._now_s if num_there < self._config.num_clients else math.inf
        return float(self._rows.arrival_s[number])

    def _steps_to_event(self, decoding: Sequence[Request]) -> int:
        """Return the decode steps until a request ends, memory is full, or one arrives."""
        num_steps = min(map(_num_missing, decoding))
        num_free = self._config.capacity_tokens - self._core.num_used_slots
        num_steps = min(num_steps, num_free // len(decoding))
        left_s = self._next_arrival_s() - self._now_s
        held = sum(request.next_position for request in decoding)
        seconds = functools.partial(self._measured.decode_seconds, len(decoding), held)
        if num_steps < 1 or seconds(num_steps) < left_s:
            return num_steps
        return 1 + bisect.bisect_left(range(1, num_steps), left_s, key=seconds)

    def _execute(self, step: PlannedStep) -> tuple[list[_Output], float]:
        """Return the tokens of each request that yields any, and the virtual hardware's seconds."""
        most_of_each = (*step.decodes.num_tokens.tolist(), *step.num_samples)
        outputs = [
            _output(request, num_samples)
            for (request, _), num_samples in zip(step.scheduled, most_of_each, strict=True)
            if num_samples
        ]
        if any(not request.is_decoding for request, _ in step.scheduled):
            exec_s = self._measured.prompts(step)
        else:
            num_steps = max(output.num_tokens for output in outputs)
            core = self._core
            exec_s = self._measured.decodes(step, num_steps, core.num_used_slots, core.running)
            self._policy.advance(num_steps)
        return outputs, exec_s

    def _submit_arrived(self) -> None:
        rows, artifact = self._rows, self._config.paper_artifact
        while self._next_arrival_s() <= self._now_s:
            number = self._num_submitted
            self._num_submitted += 1
            prompt, output, limit = (
                int(column[number])
                for column in (rows.prompt_tokens, rows.output_tokens, rows.max_tokens)
            )
            # In a closed loop a request comes when the one before it has gone.
            arrival_s = float(rows.arrival_s[number])
            if self._config.num_clients is not None:
                arrival_s = self._now_s
            self._wants_first_token[number] = arrival_s
            submit = Submit(
                request_id=RequestId(number),
                prompt=[TokenSegment(token_ids=bytes(4 * prompt))],
                max_tokens=max(limit, output) if artifact else limit,
                eos_token_ids=[_EOS],
                sampling=SamplingParams(seed=prompt + output),
                request_class=self._config.request_class,
                prediction_key=rows.clients[number],
                age_s=self._now_s - arrival_s,
            )
            self._core.on_message(FromFrontend(_FRONTEND, submit), self._now_s)


def _result_of(plan: StepPlan, outputs: Sequence[_Output], exec_s: float) -> StepResult:
    """Return a plan's result; by now its requests have their rows."""
    by_row = {output.request.row: output for output in outputs}
    ordered = [by_row[row] for row in sampling_rows(plan).tolist()]
    counts = np.array([output.num_tokens for output in ordered], dtype=np.int64)
    width = int(counts.max(initial=1))
    tokens = np.where(np.arange(width) < counts[:, None], _TOKEN, NO_TOKEN)
    ending = [index for index, output in enumerate(ordered) if output.ends]
    tokens[ending, counts[ending] - 1] = _EOS
    return StepResult(
        step_id=plan.step_id,
        incarnation=0,
        token_ids=pack_int32(tokens),
        exec_s=exec_s,
        idle_s=0.0,
        tokens_per_row=width,
    )


def _output(request: Request, num_samples: int) -> _Output:
    """Return what a worker that knows only lengths yields: tokens, EOS as the last one."""
    num_missing = _num_missing(request)
    return _Output(request, min(num_samples, num_missing), num_samples >= num_missing)


def _num_missing(request: Request) -> int:
    """Return how many tokens it is still going to output."""
    length = request.sampling.seed - request.num_prompt_tokens
    return min(length, request.max_tokens) - len(request.output_token_ids)


# `sim.run(config) -> Report`: a simulation from one configuration, as `lightserve simulate`.


@dataclass(frozen=True, kw_only=True)
class SimulationConfig(OfflineConfig):
    """A cell of a table with the workload by name; see `load_workload`."""

    workload: str
    """dist1, dist2, dist3, uniform:P1-P2:O1-O2 or a trace file, joined by + for a drift."""
    num_requests: int = 3000
    """Per part of the workload, the warm-up not counted."""
    arrivals: str = "queued"
    """queued, trace, poisson:RATE (per second) or closed:CLIENTS."""


def run(config: SimulationConfig, *, progress: Callable[[int, int], None] | None = None) -> Report:
    """Run a simulation to its end; the same configuration gives the same report.

    Args:
        config: all of it.
        progress: told how many requests have just finished, and how many there are.

    Raises:
        ConfigError: a workload that cannot be, a request that can never fit, a wrong option.
    """
    closed = re.fullmatch(r"closed:([1-9]\d*)", config.arrivals)
    workload = make_workload(config, "queued" if closed else config.arrivals)
    num_rows = len(workload) - config.num_warm_up
    if num_rows <= 0:
        raise ConfigError(
            f"--warm-up-requests must be below the {len(workload)} rows of --workload,"
            f" got {config.num_warm_up}"
        )
    if closed:
        config = dataclasses.replace(config, num_clients=int(closed[1]))
    tell = None if progress is None else lambda num_finished: progress(num_finished, num_rows)
    return run_offline(workload, config, progress=tell)


def make_workload(config: SimulationConfig, arrivals: str) -> Workload:
    """Return the configured rows, those of the warm-up first."""
    return load_workload(
        config.workload,
        num_requests=config.num_requests + config.num_warm_up,
        rng=np.random.default_rng(config.seed),
        cut_outputs=not config.paper_artifact,
        arrivals=arrivals,
    )
