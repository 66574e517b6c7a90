"""A queue of requests through the real RouterCore: how many decode steps, how many evictions.

The setting of Past-Future's Table 1: all requests wait in order at the start, prompts are
prefilled whole between decode steps, and what counts is decode steps, memory, and evictions.
A step is planned on the results of all steps before it. With `paper_artifact` newcomers are
let in every ten decode steps and at most 32,768 prompt tokens at a time, and the length history
starts with 500 entries of 512, as in the authors' published simulation; the ten steps between
two admissions are then advanced at once, in as far as memory lasts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError
from lightserve.messages.common import TokenSegment, pack_int32
from lightserve.messages.frontend_router import Submit
from lightserve.messages.router_worker import RowResult, StepPlan, StepResult
from lightserve.router.admission.base import AdmissionRound, AdmissionRule
from lightserve.router.admission.oracle import OracleAdmission
from lightserve.router.admission.registry import ADMISSION_RULES
from lightserve.router.core import RouterCore
from lightserve.router.core_config import CoreConfig
from lightserve.router.events import FromFrontend, PlannedStep, WorkersReady
from lightserve.router.future_memory import IntArray, peak_memory
from lightserve.router.intake import QueueLimits
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.policies.base import Allotment, Policy, StepLimits
from lightserve.router.policies.registry import POLICIES
from lightserve.router.request import Request
from lightserve.sim.hardware import A100_LLAMA2_7B, VirtualHardware
from lightserve.sim.workload import DISTRIBUTION_MAX_TOKENS, Workload
from lightserve.types import FrontendId, RequestClass, RequestId, SamplingParams

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
    """Whether the steps between two admissions of the artifact go into one plan."""
    seed: int = 0
    hardware: VirtualHardware = A100_LLAMA2_7B


@dataclass(frozen=True)
class OfflineReport:
    """What a run came to; percentages are of the pool's capacity, means over decode steps."""

    decode_steps: int
    consumed_pct: float
    future_pct: float
    """True peak of the running batch."""
    evicted_pct: float
    """Evictions per request, in percent."""
    recomputed_tokens: int
    total_work_s: float
    """Execution time of all steps on the virtual hardware, recomputed prompts included."""
    finished: int
    cpu_ms_p50: float
    """Router time per step: plan, commit, result."""
    cpu_ms_p99: float
    max_overtaken: int


def run_offline(
    workload: Workload,
    config: OfflineConfig,
    *,
    progress: Callable[[int], None] | None = None,
) -> OfflineReport:
    """Run all rows (but the warm-up) to their end; `progress` is told of finished requests.

    Raises:
        ConfigError: a row can never fit into the pool.
    """
    needed = int((workload.prompt_tokens + workload.max_tokens).max()) - 1
    if needed > config.capacity_tokens:
        raise ConfigError(
            f"--capacity-tokens must be at least {needed}, what one request of --workload may come"
            f" to need, got {config.capacity_tokens}"
        )
    return _Run(workload, config).run(progress)


class _Run:
    """One run: the core, the policy around it, and what is measured."""

    def __init__(self, workload: Workload, config: OfflineConfig) -> None:
        self._config = config
        self._rows = workload.rows(config.num_warm_up, len(workload))
        limits = np.maximum(workload.max_tokens, workload.output_tokens)
        longest = int((workload.prompt_tokens + limits).max())
        self._lengths = OutputLengths(max_output_tokens=int(workload.max_tokens.max()))
        warm_up = workload.rows(0, config.num_warm_up)
        history = ARTIFACT_HISTORY if config.paper_artifact else ()
        for length in history:
            self._lengths.record(length)
        for length, client in zip(warm_up.output_tokens.tolist(), warm_up.clients, strict=True):
            self._lengths.record(length, (config.request_class, client))
        self._policy = _IntervalPolicy(
            POLICIES[config.policy](),
            interval=ARTIFACT_INTERVAL_STEPS if config.paper_artifact else 1,
            steps_at_once=config.steps_at_once,
        )
        self._core = RouterCore(
            CoreConfig(
                max_model_len=longest,
                max_num_seqs=len(self._rows),
                max_num_batched_tokens=ARTIFACT_PROMPT_BUDGET if config.paper_artifact else 1 << 40,
                queue_limits=dict.fromkeys(RequestClass, _UNBOUNDED),
                policy=self._policy,
                admission=self._make_admission(),
                lengths=self._lengths,
                max_steps_in_flight=1,
                admission_limit=DISTRIBUTION_MAX_TOKENS if config.paper_artifact else None,
            )
        )
        self._measured = _Measurements(
            config.capacity_tokens, self._rows.output_tokens, config.hardware
        )

    def _make_admission(self) -> AdmissionRule:
        config = self._config
        if config.admission == "oracle":
            outputs = self._rows.output_tokens
            return OracleAdmission(lambda request: int(outputs[request.key.request_id]))
        options = ServeConfig(admission=config.admission, **config.admission_options)  # type: ignore[arg-type]
        return ADMISSION_RULES[config.admission](options, self._lengths, config.seed)

    def run(self, progress: Callable[[int], None] | None) -> OfflineReport:
        core, measured = self._core, self._measured
        core.on_message(WorkersReady(self._config.capacity_tokens), 0.0)
        self._submit_all()
        now_s = 0.0
        num_finished = 0
        while num_finished < len(self._rows):
            start_s = time.process_time()
            step = core.plan(now_s)
            router_s = time.process_time() - start_s
            assert isinstance(step, PlannedStep), f"nothing can advance: {core.status(now_s)}"
            outputs, exec_s = self._execute(step)
            now_s += exec_s
            start_s = time.process_time()
            plan = core.commit(step, now_s)
            result = _result_of(plan, outputs, exec_s)
            news = core.on_result(result, now_s)
            measured.router_s.append(router_s + time.process_time() - start_s)
            ended = sum(d.finish_reason is not None for out in news for d in out.message.requests)
            if ended:
                measured.ended()
                num_finished += ended
                if progress is not None:
                    progress(ended)
        return measured.report(num_finished, core)

    def _execute(self, step: PlannedStep) -> tuple[list[list[int]], float]:
        """Return the tokens of each row that yields any, and the virtual hardware's seconds."""
        outputs = [
            _tokens(request, num_samples)
            for (request, _), num_samples in zip(step.allotments, step.num_samples, strict=True)
            if num_samples
        ]
        if any(not request.is_decoding for request, _ in step.allotments):
            exec_s = self._measured.prompts(step)
        else:
            num_steps = max(map(len, outputs))
            core = self._core
            exec_s = self._measured.decodes(step, num_steps, core.num_used_slots, core.running)
            self._policy.advance(num_steps)
        return outputs, exec_s

    def _submit_all(self) -> None:
        rows = self._rows
        columns = (rows.prompt_tokens, rows.output_tokens, rows.max_tokens)
        artifact = self._config.paper_artifact
        for number, (prompt, output, limit) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            submit = Submit(
                request_id=RequestId(number),
                prompt=[TokenSegment(token_ids=pack_int32(np.zeros(prompt, dtype=np.int32)))],
                max_tokens=max(limit, output) if artifact else limit,
                eos_token_ids=[_EOS],
                sampling=SamplingParams(seed=prompt + output),
                request_class=self._config.request_class,
                prediction_key=rows.clients[number],
                age_s=0.0,
            )
            self._core.on_message(FromFrontend(_FRONTEND, submit), 0.0)


class _IntervalPolicy:
    """Lets another policy admit only every `interval` decode steps, and decode on meanwhile."""

    def __init__(self, inner: Policy, *, interval: int, steps_at_once: bool) -> None:
        self._inner = inner
        self._interval = interval
        self._steps_at_once = steps_at_once
        self._steps_left = 0

    def advance(self, num_steps: int) -> None:
        """Say that decode steps have been made."""
        remaining = self._steps_left or self._interval
        self._steps_left = max(0, remaining - num_steps)

    def select(
        self,
        running: Collection[Request],
        waiting: Iterable[Request],
        limits: StepLimits,
        admission: AdmissionRound,
    ) -> list[Allotment]:
        """See `Policy.select`."""
        may_admit = self._steps_left == 0 or not running
        chosen = self._inner.select(running, waiting if may_admit else (), limits, admission)
        if not self._steps_at_once or any(not part.request.is_decoding for part in chosen):
            return chosen
        num_steps = self._steps_left or self._interval
        return [
            Allotment(request, min(num_steps, request.max_tokens - len(request.output_token_ids)))
            for request, _ in chosen
        ]


def _result_of(plan: StepPlan, outputs: Sequence[list[int]], exec_s: float) -> StepResult:
    """Return a plan's result; `outputs` are in the order of its rows that want any."""
    rows = [row.row for row in plan.rows if row.output]
    return StepResult(
        step_id=plan.step_id,
        generation=0,
        rows=[RowResult(row, tokens) for row, tokens in zip(rows, outputs, strict=True)],
        exec_s=exec_s,
        idle_s=0.0,
    )


def _tokens(request: Request, num_samples: int) -> list[int]:
    """Return what a worker that knows only lengths yields: tokens, EOS as the last one."""
    length = request.sampling.seed - request.num_prompt_tokens
    missing = length - len(request.output_token_ids)
    if num_samples < missing:
        return [_TOKEN] * num_samples
    return [_TOKEN] * (missing - 1) + [_EOS]


class _Measurements:
    """Sums over a run."""

    def __init__(self, capacity_tokens: int, outputs: IntArray, hardware: VirtualHardware) -> None:
        self.router_s: list[float] = []
        self._capacity = capacity_tokens
        self._outputs = outputs
        self._hardware = hardware
        self._decode_steps = 0
        self._work_s = 0.0
        self._consumed = 0.0
        self._future = 0.0
        self._peak: float | None = None
        self._max_overtaken = 0

    def prompts(self, step: PlannedStep) -> float:
        """Take in a step of prompts; returns its seconds."""
        self._peak = None
        parts = [(request.next_position, num_tokens) for request, num_tokens in step.allotments]
        num_new = sum(num_tokens for _, num_tokens in parts)
        pairs = sum(num_tokens * (start + num_tokens // 2) for start, num_tokens in parts)
        self._max_overtaken = max(
            self._max_overtaken, *(request.num_overtaken for request, _ in step.allotments)
        )
        return self._spend(self._hardware.seconds(num_new, chunk_context=pairs))

    def decodes(
        self, step: PlannedStep, num_steps: int, num_used: int, live: Sequence[Request]
    ) -> float:
        """Take in decode steps, before they are booked; returns their seconds."""
        if step.victims:
            self._peak = None
        if self._peak is None:
            self._peak = self._true_peak(
                [request for request in live if request not in step.victims]
            )
        num_rows = len(step.allotments)
        held = sum(request.next_position for request, _ in step.allotments)
        freed = sum(victim.next_position for victim in step.victims)
        growth = num_rows * num_steps * (num_steps + 1) / 2
        self._decode_steps += num_steps
        self._consumed += num_steps * (num_used - freed) + growth
        self._future += num_steps * self._peak
        one_s = self._hardware.seconds(num_rows, decode_context=held + num_rows * num_steps // 2)
        return self._spend(one_s * num_steps)

    def ended(self) -> None:
        """A request has left the batch."""
        self._peak = None

    def report(self, num_finished: int, core: RouterCore) -> OfflineReport:
        """Return what the run came to."""
        share = 100.0 / (self._capacity * max(1, self._decode_steps))
        p50, p99 = np.percentile(self.router_s, [50, 99]) * 1e3
        return OfflineReport(
            decode_steps=self._decode_steps,
            consumed_pct=self._consumed * share,
            future_pct=self._future * share,
            evicted_pct=100.0 * core.num_preemptions / num_finished,
            recomputed_tokens=core.num_preempted_tokens,
            total_work_s=self._work_s,
            finished=num_finished,
            cpu_ms_p50=float(p50),
            cpu_ms_p99=float(p99),
            max_overtaken=self._max_overtaken,
        )

    def _spend(self, seconds: float) -> float:
        self._work_s += seconds
        return seconds

    def _true_peak(self, live: Sequence[Request]) -> float:
        """Return the memory that the batch will need at its peak, by the true lengths."""
        base = np.array([request.num_known_tokens for request in live], dtype=np.int64)
        truth = self._outputs[[request.key.request_id for request in live]]
        generated = np.array([len(request.output_token_ids) for request in live], dtype=np.int64)
        return float(peak_memory(base, (truth - generated)[None])[0])
