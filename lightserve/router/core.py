"""RouterCore: every decision and all book-keeping, behind four calls.

No I/O, no clock, no randomness, no logging: `process.py`, the simulator and the tests drive the
same object through

    on_message(event, now_s) -> [Outgoing]       a request, an abort, a death, a new worker group
    plan(now_s)              -> PlannedStep | WaitUntil          changes nothing
    commit(planned, now_s)   -> StepPlan                         books it; send the message
    on_result(result, now_s) -> [Outgoing]       a step has finished

One plan is ahead (architecture 4): while step i runs, plan i+1 waits at the worker. Slots and
rows that a plan in flight names are not reassigned before its result is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightserve.errors import ProtocolError
from lightserve.messages.frontend_router import (
    Abort,
    Acknowledge,
    ErrorCode,
    Finish,
    RouterStatus,
    Submit,
)
from lightserve.messages.router_worker import PlanRow, RowResult, StepPlan, StepResult
from lightserve.router.admission.base import PoolView
from lightserve.router.core_config import CoreConfig
from lightserve.router.deltas import DeltaBatch
from lightserve.router.endings import can_replay, until_end
from lightserve.router.events import (
    CoreEvent,
    FromFrontend,
    FrontendGone,
    Outgoing,
    PlannedStep,
    WaitUntil,
    WorkersGone,
    WorkersReady,
)
from lightserve.router.intake import Intake, request_of
from lightserve.router.integrity import check_integrity
from lightserve.router.kv.store import KVStore
from lightserve.router.pipeline import Pipeline
from lightserve.router.plan_builder import build_plan, num_samples
from lightserve.router.policies.base import StepLimits
from lightserve.router.preemption import Fit, fit_into_memory
from lightserve.router.prompt_logprobs import cap_positions, take_news
from lightserve.router.queues import RowTable, WaitingQueue
from lightserve.router.request import Request, RequestState
from lightserve.router.status import router_status
from lightserve.types import FrontendId, RequestKey


class RouterCore:
    """See the module's docstring."""

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self._requests: dict[RequestKey, Request] = {}
        self._waiting = WaitingQueue()
        self._rows = RowTable(config.max_num_seqs)
        self._kv: KVStore | None = None
        self._pipeline = Pipeline(max_steps_in_flight=config.max_steps_in_flight)
        self._intake = Intake(config.queue_limits)
        self._unfinished: dict[RequestKey, Request] = {}
        """Requests whose last token was sent, but whose frontend still looks for a stop string."""
        self._num_arrivals = 0
        self._suspects: list[Request] = []
        """Requests that were in flight when workers died: each runs alone up to a token."""
        self.num_preemptions = 0
        self.num_preempted_tokens = 0

    # ---------------------------------------------------------------- events

    def on_message(self, event: CoreEvent, now_s: float) -> list[Outgoing]:
        """Take in what happened outside; return the news for frontends."""
        deltas = DeltaBatch()
        match event:
            case FromFrontend(frontend_id, Submit() as submit):
                self._submit(frontend_id, submit, now_s, deltas)
            case FromFrontend(frontend_id, Acknowledge(progress=progress)):
                for request_id, num_tokens in progress:
                    if request := self._requests.get(RequestKey(frontend_id, request_id)):
                        request.acknowledge(num_tokens)
            case FromFrontend(frontend_id, Finish() as finish):
                self._finish(frontend_id, finish)
            case FromFrontend(frontend_id, Abort(request_id=request_id)):
                key = RequestKey(frontend_id, request_id)
                if (request := self._requests.get(key) or self._unfinished.get(key)) is not None:
                    self._forget(request)
            case FrontendGone(frontend_id):
                for request in [*self._requests.values(), *self._unfinished.values()]:
                    if request.key.frontend_id == frontend_id:
                        self._forget(request)
            case WorkersReady(num_kv_slots):
                self._start_workers(num_kv_slots, deltas)
            case WorkersGone():
                self._lose_workers(deltas)
        return deltas.outgoing()

    def _submit(
        self, frontend_id: FrontendId, submit: Submit, now_s: float, deltas: DeltaBatch
    ) -> None:
        request = request_of(
            frontend_id,
            submit,
            now_s=now_s,
            arrival_number=self._num_arrivals,
            admission_limit=self._config.admission_limit,
        )
        self._num_arrivals += 1
        if request.key in self._requests:
            raise ProtocolError(f"request {request.key} is a duplicate")
        backlog = self._waiting.backlog(request.request_class)
        if not self._can_ever_fit(request):
            deltas.fail(request, ErrorCode.TOO_LARGE)
        elif (retry_after_s := self._intake.retry_after_s(request, backlog)) is not None:
            deltas.fail(request, ErrorCode.QUEUE_FULL, retry_after_s=retry_after_s)
        else:
            self._requests[request.key] = request
            self._waiting.append(request)
            self._intake.note_waiting(request, now_s)
            if self._kv is not None:
                self._kv.expect(request)

    def _finish(self, frontend_id: FrontendId, finish: Finish) -> None:
        """Learn where a request with stop strings ended, perhaps after its last token was sent."""
        key = RequestKey(frontend_id, finish.request_id)
        request = self._requests.get(key) or self._unfinished.get(key)
        if request is None:
            return
        self._config.lengths.record(finish.num_tokens, request.prediction_key)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        """Drop a request in whatever state it is."""
        self._unfinished.pop(request.key, None)
        if request.key in self._requests:
            self._end(request)

    def _can_ever_fit(self, request: Request) -> bool:
        if request.num_prompt_tokens + request.max_tokens > self._config.max_model_len:
            return False
        return self._kv is None or request.max_kv_tokens <= self._kv.num_slots

    def _start_workers(self, num_kv_slots: int, deltas: DeltaBatch) -> None:
        assert len(self._rows) == 0, "the group before was not reported as gone"
        self._kv = KVStore(num_kv_slots, order=self._config.cache_order)
        for request in list(self._waiting):
            self._kv.expect(request)
            if not self._can_ever_fit(request):
                deltas.fail(request, ErrorCode.TOO_LARGE)
                self._end(request)

    def _lose_workers(self, deltas: DeltaBatch) -> None:
        """Replay what can be replayed, end the rest; no KV and no plan in flight is left."""
        self._pipeline.clear()
        self._kv = None
        replayed: list[Request] = []
        suspects = [request for request in self._suspects if request.row is None]
        for request in list(self._rows):
            self._rows.release(request)
            if request.state is RequestState.ENDED:
                continue
            was_in_flight = request.num_inflight_steps > 0
            if not can_replay(request, was_in_flight=was_in_flight):
                deltas.fail(request, ErrorCode.WORKER_LOST)
                request.state = RequestState.ENDED
                del self._requests[request.key]
                continue
            request.num_replays += was_in_flight
            request.back_to_waiting()
            replayed.append(request)
            if was_in_flight:
                suspects.append(request)
        self._waiting.requeue(replayed)
        self._suspects = suspects

    # ---------------------------------------------------------------- planning

    def plan(self, now_s: float) -> PlannedStep | WaitUntil:
        """Return the step to send now, or when to ask again. Changes nothing."""
        if self._kv is None or not self._requests:
            return WaitUntil(None)
        due_s = self._pipeline.next_plan_due_s()
        if due_s is None or due_s > now_s:
            return WaitUntil(due_s)
        fit = self._choose()
        if not fit.allotments or (fit.victims and not self._pipeline.is_empty):
            return WaitUntil(None)
        return PlannedStep(
            step_id=self._pipeline.next_step_id,
            allotments=fit.allotments,
            num_samples=tuple(num_samples(*part) for part in fit.allotments),
            victims=fit.victims,
            planned_at_s=now_s,
            predicted_s=self._pipeline.cost.predict(fit.allotments),
        )

    def _choose(self) -> Fit:
        """Return who advances: a suspect alone if there is one, else whom the policy selects."""
        if not self._suspects:
            return self._select(self.running, self._waiting) or self._select(self.running, ())
        suspect = self._suspects[0]
        if suspect.state is RequestState.RUNNING:
            return self._select([suspect], ())
        if not self._pipeline.is_empty:
            return Fit(())
        # Where there is no room for it, those before it that were cleared make some.
        return self._select([], [suspect]) or self._select(self.running, ())

    def _select(self, running: Sequence[Request], waiting: Iterable[Request]) -> Fit:
        """Ask the policy who of these advances, and see that it fits; falsy if nobody can."""
        assert self._kv is not None
        limits = StepLimits(
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            num_free_rows=self._rows.num_free,
        )
        admission = self._config.admission.begin(
            list(self._rows), PoolView(self._kv.num_slots), self._pipeline.next_step_id
        )
        looked_up = map(self._kv.look_up, waiting)
        chosen = cap_positions(self._config.policy.select(running, looked_up, limits, admission))
        victims_first = self.running[::-1]
        return fit_into_memory(chosen, self._kv.num_available, victims_first, self._kv.num_freed_by)

    def commit(self, planned: PlannedStep, now_s: float) -> StepPlan:
        """Book a step planned since the last event; return the message to send now."""
        assert self._kv is not None
        self._preempt(planned.victims)
        newcomers = [r for r, _ in planned.allotments if r.state is RequestState.WAITING]
        for request in newcomers:
            self._start(request, now_s)
        slots = self._kv.acquire(sum(part.num_tokens for part in planned.allotments))
        offset = 0
        for request, num_tokens in planned.allotments:
            assert request.slots is not None
            start = request.next_position
            request.slots[start : start + num_tokens] = slots[offset : offset + num_tokens]
            offset += num_tokens
        plan = build_plan(
            planned.step_id, planned.allotments, planned.num_samples, slots, set(newcomers)
        )
        self._pipeline.push(planned, plan, now_s)
        for (request, num_tokens), samples in zip(
            planned.allotments, planned.num_samples, strict=True
        ):
            request.num_inflight_samples += samples
            request.num_inflight_tokens += num_tokens
            request.num_inflight_steps += 1
        return plan

    def _start(self, request: Request, now_s: float) -> None:
        """Take a waiting request out of its queue and give it a row and its cached prefix."""
        assert self._kv is not None
        self._waiting.admit(request)
        self._kv.forget(request)
        backlog = self._waiting.backlog(request.request_class)
        self._intake.note_started(request, backlog, now_s)
        self._rows.acquire(request)
        request.state = RequestState.RUNNING
        self._kv.start(request)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens

    def _preempt(self, victims: Sequence[Request]) -> None:
        """Free the victims' KV; they keep their text and head the queue, in order of admission."""
        assert self._kv is not None
        for request in victims:
            self.num_preempted_tokens += request.next_position
            self._kv.release(request, keep=False)
            self._rows.release(request)
            request.back_to_waiting()
            self._kv.expect(request)
        self._waiting.requeue(victims[::-1])
        self.num_preemptions += len(victims)

    # ---------------------------------------------------------------- results

    def on_result(self, result: StepResult, now_s: float) -> list[Outgoing]:
        """Take in the oldest step in flight; return the news for frontends.

        Raises:
            ProtocolError: the result is not that step's.
        """
        step = self._pipeline.pop(result, now_s)
        deltas = DeltaBatch()
        rows = iter(result.rows)
        for (request, num_tokens), samples, row in zip(
            step.planned.allotments, step.planned.num_samples, step.plan.rows, strict=True
        ):
            request.num_inflight_samples -= samples
            request.num_inflight_tokens -= num_tokens
            request.num_inflight_steps -= 1
            request.num_computed_tokens += num_tokens
            row_result = next(rows, None) if row.output else None
            if row.output and (row_result is None or row_result.row != request.row):
                raise ProtocolError(f"step {result.step_id}: no result for row {request.row}")
            if request.state is RequestState.ENDED:
                self._release_if_idle(request)
            elif row_result is not None:
                self._advance(request, row, row_result, deltas)
        self._pipeline.note_work(bool(self._requests))
        return deltas.outgoing()

    def _advance(
        self, request: Request, row: PlanRow, result: RowResult, deltas: DeltaBatch
    ) -> None:
        """Append a live request's new tokens; end it where they end it."""
        assert self._kv is not None
        if result.error is not None:
            deltas.fail(request, ErrorCode[result.error.name])
            request.keeps_kv = False
            self._end(request)
            return
        if news := take_news(request, row.start_position, result.prompt_logprobs):
            deltas.add_prompt_logprobs(request, news)
        if result.token_ids:
            self._clear(request)
            if not request.output_token_ids:
                self._kv.learn_prompt(request)  # all of it has just been computed
            token_ids, reason = until_end(request, result.token_ids)
            deltas.add_tokens(request, token_ids, reason, result.logprobs[: len(token_ids)])
            request.output_token_ids.extend(token_ids)
            if reason is not None:
                self._complete(request)

    def _complete(self, request: Request) -> None:
        """End a request that has all its tokens; a frontend that looks for stop strings may yet
        shorten it, so that its length becomes history with `Finish`."""
        if request.num_acknowledged_tokens is None:
            self._config.lengths.record(len(request.output_token_ids), request.prediction_key)
        else:
            self._unfinished[request.key] = request
        self._end(request)

    def _end(self, request: Request) -> None:
        """Forget a request, whatever state it is in; its slots wait for plans in flight."""
        del self._requests[request.key]
        self._clear(request)
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
            if self._kv is not None:
                self._kv.forget(request)
        was_running = request.state is RequestState.RUNNING
        request.state = RequestState.ENDED
        if was_running:
            self._release_if_idle(request)

    def _clear(self, request: Request) -> None:
        """Suspect a request no longer: it has yielded a token, or it is gone."""
        if self._suspects and request in self._suspects:
            self._suspects.remove(request)

    def _release_if_idle(self, request: Request) -> None:
        if request.num_inflight_steps > 0:
            return
        assert self._kv is not None
        self._kv.release(request, keep=request.keeps_kv)
        self._rows.release(request)

    # ---------------------------------------------------------------- state for operators

    @property
    def running(self) -> list[Request]:
        """Requests that hold rows and have not ended, in order of admission."""
        return [request for request in self._rows if request.state is RequestState.RUNNING]

    @property
    def num_used_slots(self) -> int:
        """Slots of the KV pool that somebody holds."""
        return 0 if self._kv is None else self._kv.num_used

    @property
    def forecast_peak(self) -> int | None:
        """Slots that the batch was expected to need, when somebody was last admitted."""
        return self._config.admission.forecast_peak

    @property
    def num_cached_slots(self) -> int:
        """Slots whose KV is kept although no live request reads it."""
        return 0 if self._kv is None else self._kv.num_cached

    @property
    def num_unfinished(self) -> int:
        """Requests that have ended here, but whose frontend has not said at which token."""
        return len(self._unfinished)

    def status(self, now_s: float) -> RouterStatus:
        """Return the pulse that frontends are told."""
        return router_status(self._waiting, self._rows, self._kv, self._pipeline, now_s)

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls (architecture 6, invariant 1)."""
        check_integrity(self._requests, self._waiting, self._rows, self._kv)
