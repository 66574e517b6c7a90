"""Scheduler: every decision and all book-keeping, behind four calls.

No I/O, no clock, no randomness, no logging: `process.py`, the simulator and the tests drive the
same object through

    on_message(event, now_s) -> [Outgoing]       a request, an abort, a death, a new worker group
    plan(now_s)              -> PlannedStep | WaitUntil          changes nothing
    commit(planned, now_s)   -> StepPlan                         books it; send the message
    on_result(result, now_s) -> [Outgoing]       a step has finished

One plan is ahead: while step i runs, plan i+1 waits at the worker. Slots and
rows that a plan in flight names are not reassigned before its result is there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import numpy as np

from lightserve.errors import ProtocolError
from lightserve.messages.frontend_router import (
    Abort,
    Acknowledge,
    BatchDue,
    ClassLoad,
    ErrorCode,
    Finish,
    KVPool,
    RouterStatus,
    Submit,
)
from lightserve.messages.images import ImageNumbers
from lightserve.messages.router_worker import NO_TOKEN, RowResult, StepPlan, StepResult
from lightserve.router.accounts import Accounts, Computed, Refusal
from lightserve.router.arrivals import ArrivalStats, HeldByRealTime
from lightserve.router.commit import KVCounters, StepCommit
from lightserve.router.config import SchedulerConfig
from lightserve.router.encoding import Encoding
from lightserve.router.events import (
    DeltaBatch,
    FromFrontend,
    FrontendGone,
    Outgoing,
    SchedulerEvent,
    StepTimesKnown,
    WorkersGone,
    WorkersReady,
)
from lightserve.router.from_submit import HeldParameters, most_tokens_in_plans, request_of
from lightserve.router.kv.block_events import BlockEvent
from lightserve.router.kv.cache import KVStore
from lightserve.router.kv.kv_map import describe_kv
from lightserve.router.pipeline import Pipeline
from lightserve.router.planner import Planner
from lightserve.router.queue import Backlog, WaitingQueue
from lightserve.router.request import (
    ENDED,
    RUNNING,
    WAITING,
    Request,
    RequestState,
    can_replay,
    until_end,
)
from lightserve.router.request_table import RequestTable
from lightserve.router.retry_after import QueueDelay, Work
from lightserve.router.scheduling_targets import RaisedTarget, SchedulingTargets
from lightserve.router.slo import CompletionLedger
from lightserve.router.step import PlannedStep, WaitUntil, each_scheduled
from lightserve.router.step_cost import StepShape
from lightserve.types import RT, FrontendId, RequestClass, RequestKey, RequestOutput, RowId


class Scheduler:
    """The router's core: requests in, plans out, results in."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._requests: dict[RequestKey, Request] = {}
        self._waiting = WaitingQueue()
        self._rows = RequestTable(config.max_num_seqs)
        self._kv: KVStore | None = None
        self._prefix_copies: dict[str, int] = {}
        self._pipeline = Pipeline(
            max_steps_in_flight=config.max_steps_in_flight,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self._waits = QueueDelay(config, self._waiting, self._rows, self._pipeline)
        self._targets = SchedulingTargets(config, self._pipeline, self._waits)
        self._parameters = HeldParameters(config.max_parameter_bytes)
        self._image_numbers = ImageNumbers()
        self._accounts = Accounts()
        self._unfinished: dict[RequestKey, Request] = {}
        """Requests whose last token was sent, but whose frontend still looks for a stop string."""
        self._demand = ArrivalStats()
        self._planner = Planner(config, self._waiting, self._rows, self._pipeline, self._demand)
        self.drafting = self._planner.drafting
        self._commit = StepCommit(
            self._waiting,
            self._rows,
            self._pipeline,
            self._waits,
            config.accepted_risk,
            drafting=self.drafting,
            shares_answers=config.shares_answers,
        )
        self._held_by_rt = HeldByRealTime(config.rt_kv_deviations)
        self.counters: Mapping[RequestClass, KVCounters] = self._commit.counters
        self.skip_counters = self._commit.skip_counters
        self.computed_tokens: Mapping[RequestClass, Work] = self._waits.computed
        self.num_raised_targets: Mapping[RaisedTarget, int] = self._targets.num_raised
        self.parameter_bytes: Mapping[RequestClass, int] = self._parameters.num_bytes
        self._num_arrivals = 0
        self.forecast_peak: int | None = None
        """Slots that the batch was expected to need at its peak at the last admission."""
        self.burst_headroom_tokens = 0
        """Slots that best-effort newcomers had to leave free in the last step."""
        self._suspects: list[Request] = []
        """Requests that were in flight when workers died: each runs alone up to a token."""

    # ---------------------------------------------------------------- events

    def on_message(self, event: SchedulerEvent, now_s: float) -> list[Outgoing]:
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
            case FromFrontend(frontend_id, BatchDue() as due):
                self._move_batch(frontend_id, due, now_s)
            case FrontendGone(frontend_id):
                self._forget_frontend(frontend_id)
            case WorkersReady() as ready:
                self._start_workers(ready, deltas)
            case StepTimesKnown(step_cost, max_num_batched_tokens):
                self._pipeline.cost.use_profile(step_cost)
                self._pipeline.encoding.use_profile(step_cost)
                self._pipeline.max_num_batched_tokens = max_num_batched_tokens
            case WorkersGone():
                self._lose_workers(deltas)
        return deltas.outgoing()

    def _submit(
        self, frontend_id: FrontendId, submit: Submit, now_s: float, deltas: DeltaBatch
    ) -> None:
        request, refusal, leaving = self._arrival(frontend_id, submit, now_s)
        self._num_arrivals += 1
        if request.key in self._requests or request.key in self._unfinished:
            raise ProtocolError(f"request {request.key} is a duplicate")
        if leaving is not None and not self._make_room(request, leaving, now_s, deltas):
            refusal = self._queue_full(request)
        if refusal is not None:
            deltas.fail(request, **refusal._asdict())
        else:
            self._requests[request.key] = request
            assert request.account is not None
            request.account.hold()
            if (budget := request.budget) is not None:
                num_tokens, is_first = request.num_prompt_tokens, submit.is_first
                budget.note_request(submit.client, now_s, num_tokens, is_first=is_first)
            self._parameters.hold(request)
            slack_s = self._targets.apply(request, self._kv)
            self._waiting.append(request)
            if request.request_class is RT:
                slo = request.scheduled_slo or request.slo
                self._demand.note_arrival(
                    now_s,
                    request.num_prompt_tokens,
                    max_output_tokens=request.max_tokens,
                    encode_s=self._pipeline.encoding.seconds_left(request, 0),
                    ttft_s=math.inf if slo.ttft_ms is None else slo.ttft_ms / 1e3,
                    gap_s=slo.mtpot_ms / 1e3 if slo.mtpot_ms and not slo.tpot_ms else math.inf,
                    slack_s=slack_s,
                    is_untimed=slo.ttft_ms is None and slo.completion_s is None,
                )
            if self._kv is not None:
                self._kv.expect(request)

    def refusal(self, frontend_id: FrontendId, submit: Submit, now_s: float) -> Refusal | None:
        """Return why a request would be refused now; None: it may come. Changes nothing.

        Where several would have to leave for it, it may be refused all the same when it comes.

        Raises:
            ProtocolError: as `on_message`.
        """
        return self._arrival(frontend_id, submit, now_s, arrives=False)[1]

    def _arrival(
        self, frontend_id: FrontendId, submit: Submit, now_s: float, *, arrives: bool = True
    ) -> tuple[Request, Refusal | None, Request | None]:
        """Return a request, why it is refused, and the first of those that have to leave for it.

        Where it does not arrive nothing changes.
        """
        numbers = self._image_numbers.of(submit.images) if arrives else [0] * len(submit.images)
        request = request_of(
            frontend_id,
            submit,
            self._parameters.share(frontend_id, submit, arrives=arrives),
            now_s=now_s,
            arrival_number=self._num_arrivals,
            admission_limit=self._config.admission_limit,
            image_numbers=numbers,
        )
        if self._kv is not None:
            request.recurrent.num_slots = self._kv.states.num_slots
        client = submit.client
        request.account = self._accounts.find(client, request.request_class, joins=arrives)
        request.budget = budget = self._accounts.budget(client, now_s, joins=arrives)
        if request.max_known_tokens > (limit := self._most_tokens(request)):
            return request, Refusal(ErrorCode.TOO_LARGE, max_tokens=limit), None
        if submit.is_first and budget and (refusal := budget.refusal(client, now_s)):
            return request, refusal, None
        leaving, limits = None, self._config.queue_limits[request.request_class]
        backlog = self._waiting.backlog(request.request_class)
        has_room = limits.has_room(backlog, request.num_prompt_tokens)
        if not self._parameters.has_room(request) or not (
            has_room or (leaving := self._leaving_for(request, now_s))
        ):
            return request, self._queue_full(request), None
        return request, None, leaving

    def _queue_full(self, request: Request) -> Refusal:
        retry_after_s = self._waits.retry_after_s(request.request_class, self._kv)
        return Refusal(ErrorCode.QUEUE_FULL, retry_after_s)

    def _leaving_for(self, request: Request, now_s: float) -> Request | None:
        """Return one in whose place a request may wait in a full queue."""
        limits = self._config.queue_limits[request.request_class]
        leaving = self._waiting.crowding(
            request, max_requests=limits.max_requests, max_tokens=limits.max_tokens
        )
        if leaving is None and self._config.last_ones_go:
            is_too_much = self._demand.outlook(self._pipeline.cost.work, now_s).load > 1.0
            leaving = self._waiting.last_to_start(request, limits.has_room, by_length=is_too_much)
        return leaving

    def _make_room(
        self, request: Request, first: Request, now_s: float, deltas: DeltaBatch
    ) -> bool:
        """Return whether a request may wait once others have left, the first of which is known."""
        limits = self._config.queue_limits[request.request_class]
        leaving: Request | None = first
        while leaving is not None:
            deltas.fail(leaving, **self._queue_full(leaving)._asdict())
            if leaving.budget is not None:
                leaving.budget.take_back(leaving.num_prompt_tokens, is_first=leaving.is_first)
            self._end(leaving)
            backlog = self._waiting.backlog(request.request_class)
            if limits.has_room(backlog, request.num_prompt_tokens):
                return True
            leaving = self._leaving_for(request, now_s)
        return False

    def _sink_late(self, now_s: float) -> None:
        """Let real-time requests that cannot be in time any more wait behind those that can."""
        if self._config.policy.meets_deadlines and self._waiting.backlog(RT).num_requests:
            self._waiting.sink_late(self._pipeline.next_end_s(now_s))

    def _finish(self, frontend_id: FrontendId, finish: Finish) -> None:
        """Learn where a request with stop strings ended, perhaps after its last token was sent."""
        key = RequestKey(frontend_id, finish.request_id)
        request = self._requests.get(key) or self._unfinished.get(key)
        if request is None:
            return
        if 1 <= finish.num_tokens <= len(request.output_token_ids):
            self._learn_length(request, finish.num_tokens)
        self._forget(request)

    def _move_batch(self, frontend_id: FrontendId, due: BatchDue, now_s: float) -> None:
        """Have all lines of a batch be due at another time, those that run as well."""
        shared = self._targets.move_batch(frontend_id, due.batch, now_s + due.due_in_s)
        if shared is not None:
            self._rows.move_batch(shared)

    def _forget(self, request: Request) -> None:
        """Drop a request in whatever state it is."""
        if self._unfinished.pop(request.key, None) is not None:
            self._parameters.release(request)
        else:
            self._end(request)

    def _forget_frontend(self, frontend_id: FrontendId) -> None:
        for request in [*self._requests.values(), *self._unfinished.values()]:
            if request.key.frontend_id == frontend_id:
                self._forget(request)
        self._parameters.forget(frontend_id)

    def _most_tokens(self, request: Request) -> int:
        """Return how many tokens a request can ever have, prompt and output together."""
        max_model_len = self._config.max_model_len
        if request.output is not RequestOutput.TOKENS:
            max_model_len += 1  # its token has no place
        most = min(max_model_len, most_tokens_in_plans(request, max_model_len))
        if self._kv is None:
            return most
        # The last token's KV is never written.
        return max(0, min(most, self._kv.num_slots + 1 - self._kv.states.num_missing(request)))

    def _start_workers(self, ready: WorkersReady, deltas: DeltaBatch) -> None:
        assert len(self._rows) == 0, "the group before was not reported as gone"
        self._pipeline.cost.use_workers(ready.step_cost, ready.graph_sizes)
        self._pipeline.overlaps_copies = ready.overlaps_copies
        self._pipeline.encoding = Encoding(ready.encoder)
        if ready.step_cost is not None:
            self._pipeline.encoding.use_profile(ready.step_cost)
        self._pipeline.max_num_batched_tokens = (
            ready.max_num_batched_tokens or self._config.max_num_batched_tokens
        )
        self._kv = KVStore(
            ready.num_kv_slots,
            self._config.kv,
            num_host_slots=ready.num_host_slots,
            num_prefix_slots=ready.num_prefix_slots,
            num_state_slots=ready.num_state_slots,
            load_is_cheaper=self._pipeline.load_is_cheaper,
        )
        if (tree := self._kv.tree) is not None and (tier := tree.tier) is not None:
            tier.num_tokens = self._prefix_copies = self._prefix_copies or tier.num_tokens
        for request in list(self._waiting):
            request.recurrent.num_slots = ready.num_state_slots
            self._kv.expect(request)
            if request.max_known_tokens > (limit := self._most_tokens(request)):
                deltas.fail(request, ErrorCode.TOO_LARGE, max_tokens=limit)
                self._end(request)

    def _lose_workers(self, deltas: DeltaBatch) -> None:
        """Replay what can be replayed, end the rest; no KV and no plan in flight is left."""
        self._pipeline.clear()
        self._kv = None
        replayed: list[Request] = []
        suspects = [request for request in self._suspects if request.row is None]
        for request in list(self._rows):
            was_in_flight = request.num_inflight_steps > 0
            self._rows.release(request)
            if request.state is ENDED:
                continue
            if not can_replay(request, was_in_flight=was_in_flight):
                deltas.fail(request, ErrorCode.WORKER_LOST)
                request.state = ENDED
                self._drop(request)
                self._parameters.release(request)
                continue
            request.num_replays += was_in_flight
            request.num_requeues += 1
            request.lose_kv()
            replayed.append(request)
            if was_in_flight:
                suspects.append(request)
        for request in self._waiting:
            request.lose_kv()
        self._waiting.requeue(replayed)
        self._suspects = suspects

    # ---------------------------------------------------------------- planning

    def plan(self, now_s: float) -> PlannedStep | WaitUntil:
        """Return the step to send now, or when to ask again; changes nothing."""
        if self._kv is None or not self._requests:
            return WaitUntil(None)
        due_s = self._pipeline.next_plan_due_s()
        if due_s is None or due_s > now_s:
            return WaitUntil(due_s)
        headroom = self._held_by_rt.headroom(self._kv.num_slots)
        planned = self._planner.plan(self._kv, self._suspects, headroom, now_s)
        if planned is None or (planned.paused and self._pipeline.oldest is not None):
            return WaitUntil(None)  # a row may only be taken from a request that is not in flight
        return planned

    def commit(self, planned: PlannedStep, now_s: float) -> StepPlan:
        """Book a step planned since the last event; return the message to send now."""
        assert self._kv is not None
        if planned.forecast_peak is not None:
            self.forecast_peak = planned.forecast_peak
        self.burst_headroom_tokens = planned.headroom
        plan = self._commit.book(planned, self._kv, now_s)
        self._accounts.charge(planned.computed())
        return plan

    # ---------------------------------------------------------------- results

    def on_result(self, result: StepResult, now_s: float) -> list[Outgoing]:
        """Take in the oldest step in flight; return the news for frontends.

        Raises:
            ProtocolError: the result is not that step's, or does not fit its plan; then nothing of
                it has been taken.
        """
        if self._kv is not None:
            self._kv.expire(now_s)
        step, output = self._pipeline.pop(result, now_s)
        assert self._kv is not None
        _, token_ids, others = output
        planned, table, deltas = step.planned, self._rows, DeltaBatch()
        accepted: list[tuple[Request, int]] = []
        rows = planned.decodes.rows
        table.receive(rows, planned.decodes.num_tokens)
        if len(planned.decodes.drafts):
            accepted = self.drafting.take_back_refused(planned, result, output, self._kv.step_back)
            self._accounts.charge(Computed(r.account, r.budget, 0, count) for r, count in accepted)
        num_computed = (table.next_position - table.inflight_tokens)[rows[table.is_rt[rows]]]
        num_held = int(num_computed.sum())
        self._demand.note_decodes(len(num_computed), num_held, now_s)
        num_held += len(num_computed) * self._kv.states.num_slots
        self._held_by_rt.note(num_held, now_s)
        tokens = token_ids[: len(rows), 0]
        is_plain = table.is_plain[rows] & table.is_running[rows] & (tokens >= 0)
        if self._suspects or token_ids.shape[1] > 1:
            is_plain[:] = False
        is_plain[is_plain] = ~table.ends_with(rows[is_plain], tokens[is_plain])
        if is_plain.any():
            table.append(rows[is_plain], tokens[is_plain], now_s)
            deltas.add_plain(table, rows[is_plain], tokens[is_plain])
        own = token_ids.tolist() if not is_plain.all() or planned.chunks else []
        for index in np.flatnonzero(~is_plain).tolist():
            request, row = planned.decodes.requests[index], RowId(int(rows[index]))
            row_result = others.get(row) or RowResult(row, _tokens(own[index]))
            self._take_in(request, 0, row_result, deltas, now_s)
        sampled = iter(own[len(rows) :])
        for (request, num_tokens), samples, plan_row in zip(
            planned.chunks, planned.num_samples, step.plan.rows, strict=True
        ):
            request.num_inflight_samples -= samples
            request.num_inflight_tokens -= num_tokens  # computed from now on
            request.num_inflight_steps -= 1
            if request.state is RUNNING and self._kv.states.are_due(request):
                self._kv.learn_prompt(request)  # others need not wait for the rest
            tokens_of_row = _tokens(next(sampled)) if samples else []
            found = others.get(plan_row.row) or RowResult(plan_row.row, tokens_of_row)
            self._take_in(
                request,
                plan_row.start_position,
                found if plan_row.output else None,
                deltas,
                now_s,
                samples=samples,
            )
        self._waits.note_step(planned, step.shape, accepted)
        self._targets.foresee(r for r, _ in each_scheduled([planned.decodes, *planned.chunks]))
        self._sink_late(now_s)
        self._pipeline.note_work(bool(self._requests))
        return deltas.outgoing()

    def _take_in(
        self,
        request: Request,
        start_position: int,
        result: RowResult | None,
        deltas: DeltaBatch,
        now_s: float,
        *,
        samples: int = 1,
    ) -> None:
        """Take in what one row gave, which may be its end; None: it wanted nothing."""
        if request.state is ENDED:
            self._release_if_idle(request)
        elif result is not None:
            self._advance(request, start_position, result, deltas, now_s, samples=samples)
            if (row := request.row) is not None:
                self._rows.is_plain[row] = (
                    request.is_prompt_shared
                    and not request.awaits_grammar
                    and not request.parameters.prediction
                    and bool(request.output_token_ids)
                    and not isinstance(request.deadlines, CompletionLedger)
                )

    def _advance(
        self,
        request: Request,
        start_position: int,
        result: RowResult,
        deltas: DeltaBatch,
        now_s: float,
        *,
        samples: int,
    ) -> None:
        """Append a live request's new tokens; end it where they end it."""
        assert self._kv is not None
        if result.error is not None:
            deltas.fail(request, ErrorCode[result.error.name])
            request.keeps_kv = False
            self._end(request)
            return
        if result.prompt_logprobs and (
            news := request.take_prompt_logprobs(start_position, result.prompt_logprobs)
        ):
            deltas.add_prompt_logprobs(request, news)
        if result.token_ids:
            if self._suspects:
                self._clear(request)
            request.set_awaits_grammar(False)
            self._kv.states.settle(request)
            if not request.is_prompt_shared:
                self._kv.learn_prompt(request)  # all of it has been computed by now
                self._kv.retain(request, now_s)
            token_ids, reason = until_end(request, result.token_ids)
            deltas.add_tokens(request, token_ids, reason, result, self.drafting.predicted(request))
            request.add_output(token_ids)
            if token_ids:
                self._rows.on_tokens(request, len(token_ids), now_s)
            if reason is not None:
                self._complete(request)
        elif request.awaits_grammar and samples:
            self._kv.step_back([(request, 1)])
            if not request.is_prompt_shared:
                self._kv.learn_prompt(request)  # but for its last token; others need not wait

    def _complete(self, request: Request) -> None:
        """End a request that has all its tokens; a frontend that looks for stop strings may yet
        shorten it, so that its length becomes history with `Finish`."""
        if request.num_acknowledged_tokens is None:
            self._learn_length(request, len(request.output_token_ids))
        else:
            self._unfinished[request.key] = request
        self._end(request)

    def _learn_length(self, request: Request, num_tokens: int) -> None:
        """Learn how long an output became, where there is one."""
        if request.output is not RequestOutput.TOKENS:
            return
        num_reasoning = request.parameters.num_reasoning(request.output_token_ids[:num_tokens])
        self._config.lengths.record(num_tokens, request.prediction_key, num_reasoning)
        self._waits.note_length(request, num_tokens)

    def _end(self, request: Request) -> None:
        """Forget a request, whatever state it is in; its slots wait for plans in flight."""
        self._drop(request)
        if request.key not in self._unfinished:
            self._parameters.release(request)
        self._clear(request)
        if request.num_cached_tokens is not None:  # it has started
            others_wait = request.request_class in self.skip_counters.awaiting_memory
            self._config.accepted_risk.note_ended(request.request_class, others_wait=others_wait)
            if request.request_class is RT:
                self._demand.note_end(request.num_prompt_tokens, len(request.output_token_ids))
        if request.state is WAITING:
            self._waiting.remove(request)
            if self._kv is not None and request.is_paused:
                self._kv.release(request, keep=request.keeps_kv)
            elif self._kv is not None:
                self._kv.forget(request)
        was_running = request.state is RUNNING
        request.state = ENDED
        if was_running:
            self._rows.end(request)
            self._release_if_idle(request)

    def _drop(self, request: Request) -> None:
        del self._requests[request.key]
        if request.account is not None:
            request.account.release()

    def _clear(self, request: Request) -> None:
        """Suspect a request no longer: it has yielded a token, or it is gone."""
        if request in self._suspects:
            self._suspects.remove(request)

    def _release_if_idle(self, request: Request) -> None:
        if request.num_inflight_steps > 0:
            return
        assert self._kv is not None
        self._kv.release(request, keep=request.keeps_kv)
        self._rows.release(request)

    # ---------------------------------------------------------------- what operators see

    @property
    def running(self) -> list[Request]:
        """Requests that hold rows and have not ended, in order of admission."""
        return self._rows.of(self._rows.rows)

    @property
    def num_preemptions(self) -> int:
        """Times that a request lost KV to another."""
        return sum(counters.num_evictions for counters in self.counters.values())

    @property
    def num_preempted_tokens(self) -> int:
        """Tokens that these have to compute again, unless they find them as cache."""
        return sum(counters.lost_tokens for counters in self.counters.values())

    def predicted_wait_s(self, request_class: RequestClass) -> float:
        """Return the predicted time until all of a class that waits has begun."""
        return self._waits.seconds(request_class, self._kv)

    @property
    def num_used_slots(self) -> int:
        """Slots of the KV pool that requests hold."""
        return 0 if self._kv is None else self._kv.num_used

    @property
    def predicted_step_s(self) -> float:
        """Predicted time of the oldest step in flight; 0: there is none."""
        oldest = self._pipeline.oldest
        return 0.0 if oldest is None else oldest.predicted_s

    @property
    def kv(self) -> KVStore | None:
        """The KV pool with its share of the host, to be read; None without workers."""
        return self._kv

    @property
    def num_unfinished(self) -> int:
        """Requests that have ended here, but whose frontend has not said at which token."""
        return len(self._unfinished)

    def kv_map(self) -> KVPool | None:
        """Return what every slot of the pool is for; None without workers."""
        return None if self._kv is None else describe_kv([*self._rows, *self._waiting], self._kv)

    def take_kv_events(self) -> list[BlockEvent]:
        """Return what of the prefix cache came and went since the last call."""
        return [] if self._kv is None else self._kv.take_events()

    def status(self, now_s: float) -> RouterStatus:
        """Return the pulse that frontends are told."""
        return router_status(self._waiting, self._rows, self._kv, self._pipeline, now_s)

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls."""
        check_integrity(self._requests, self._waiting, self._rows, self._kv)
        held = [*self._requests.values(), *self._unfinished.values()]
        for request_class, num_bytes in self._parameters.num_bytes.items():
            kept = {r.parameters for r in held if r.request_class is request_class}
            assert num_bytes == sum(parameters.num_bytes for parameters in kept)


def _tokens(entries: list[int]) -> list[int]:
    """Return the tokens among a row's entries."""
    return [token_id for token_id in entries if token_id != NO_TOKEN]


_USUAL_TOKENS = 512
"""Tokens of a usual sequence, for capacity in one number."""

# What must hold between any two calls of the core. Pure.


def check_integrity(
    requests: Mapping[RequestKey, Request],
    waiting: WaitingQueue,
    rows: RequestTable,
    kv: KVStore | None,
) -> None:
    """Assert that every slot, row and request has its one place."""
    if kv is not None:
        kv.check_integrity([*rows, *(request for request in waiting if request.is_paused)])
    for request in rows:
        ended = request.state is RequestState.ENDED
        assert ended == (request.key not in requests)
        assert not ended or request.num_inflight_steps > 0, "an ended request holds its row"
        assert request.row is not None and rows.requests[request.row] is request
        assert rows.is_running[request.row] == (not ended)
        assert rows.num_output[request.row] == len(request.output_token_ids)
        assert rows.outputs[request.row] is request.output_token_ids
    live = sum(request.state is RequestState.RUNNING for request in rows)
    assert len(waiting) + live == len(requests), "a request is in no queue"


def router_status(
    waiting: WaitingQueue, rows: RequestTable, kv: KVStore | None, pipeline: Pipeline, now_s: float
) -> RouterStatus:
    """Return what frontends are told; `kv` is None while there are no workers."""
    num_running = Counter(request.request_class for request in rows)
    num_decodes = 1 if kv is None else min(rows.num_rows, max(1, kv.num_slots // _USUAL_TOKENS))
    decodes = StepShape().plus_decodes(num_decodes, num_decodes * _USUAL_TOKENS // 2)
    prompt = StepShape().plus(0, _USUAL_TOKENS)
    return RouterStatus(
        workers_ready=kv is not None,
        load={
            request_class: _load(waiting.backlog(request_class), num_running[request_class])
            for request_class in RequestClass
        },
        num_used_slots=0 if kv is None else kv.num_used,
        num_kv_slots=0 if kv is None else kv.num_slots,
        num_state_slots=0 if kv is None else kv.states.num_slots,
        num_snapshot_slots=0 if kv is None else kv.states.num_in_snapshots,
        num_steps=pipeline.num_finished,
        stalled_s=pipeline.stalled_s(now_s),
        worker_busy_s=pipeline.busy_s,
        worker_idle_s=pipeline.idle_s,
        prompt_token_s=pipeline.cost.seconds(prompt) / _USUAL_TOKENS,
        output_token_s=pipeline.cost.seconds(decodes) / num_decodes,
    )


def _load(backlog: Backlog, num_running: int) -> ClassLoad:
    return ClassLoad(backlog.num_requests, backlog.num_tokens, num_running)
