"""Books a planned step: what is paused, loses memory or starts, and which slots are given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from lightserve.messages.common import MAX_INT32, Int32Array, TokenSegment, pack_int32
from lightserve.messages.images import without_pixels
from lightserve.messages.router_worker import (
    NO_DECODES,
    AddSequence,
    DecodeRows,
    OutputKind,
    PlanRow,
    SlotRange,
    StepPlan,
    pack_decodes,
)
from lightserve.router.admission.risk import AcceptedRisk
from lightserve.router.drafting import Drafting, scope_of
from lightserve.router.kv.cache import KVStore
from lightserve.router.kv.host import PlanCopies
from lightserve.router.kv.states import NO_STATE_CHANGES, StateChanges, States
from lightserve.router.pipeline import Pipeline
from lightserve.router.queue import WaitingQueue
from lightserve.router.request import RUNNING, WAITING, Found, Request
from lightserve.router.request_table import RequestTable
from lightserve.router.retry_after import QueueDelay
from lightserve.router.step import Loading, PlannedStep, Reason
from lightserve.types import RT, RequestClass, RowId

# From allotments to the message that workers execute.

_NONE, _SAMPLE = OutputKind.NONE, OutputKind.SAMPLE


def build_plan(
    step: PlannedStep,
    *,
    decode_slots: Int32Array,
    chunk_slots: Int32Array,
    newcomers: Container[Request],
    copies: PlanCopies,
    left_rows: tuple[RowId, ...],
    states: StateChanges = NO_STATE_CHANGES,
    shares_answers: bool = False,
) -> StepPlan:
    """Return the plan that moves each request by its part of a step.

    Args:
        step: requests, with their rows and slots, how many tokens they compute and yield.
        decode_slots: what its decodes write to, int32 [n].
        chunk_slots: what its chunks write to, one after the other, int32 [sum of num_tokens].
        newcomers: those that the workers do not know yet.
        copies: what is copied for them, and for others.
        left_rows: those that were given up since the last plan.
        states: what becomes of states of recurrent layers.
        shares_answers: whether answers to requests of a key may be guesses of others.
    """
    offset = 0
    sequences: list[AddSequence] = []
    slot_ranges: list[SlotRange] = []
    plan_rows: list[PlanRow] = []
    for (request, num_tokens), num_wanted in zip(step.chunks, step.num_samples, strict=True):
        row, start = request.row, request.next_position
        assert row is not None and request.slots is not None
        if request in newcomers:
            sequences.append(_sequence(request, row, scope_of(request) if shares_answers else 0))
            if start > 0:
                slot_ranges.append(SlotRange(row, 0, pack_int32(request.slots[:start])))
        end = offset + num_tokens
        slot_ranges.append(SlotRange(row, start, pack_int32(chunk_slots[offset:end])))
        offset = end
        output = _SAMPLE if num_wanted else _NONE
        if request.wants_prompt_logprobs(start):
            output |= OutputKind.PROMPT_LOGPROBS
        plan_rows.append(PlanRow(row, start, num_tokens, output))
    return StepPlan(
        step_id=step.step_id,
        encodes=step.encodes,
        sequences=sequences,
        slot_ranges=[*states.slot_ranges, *slot_ranges],
        rows=plan_rows,
        decodes=_decode_rows(step, decode_slots),
        saves=copies.saves,
        loads=copies.loads,
        ahead_loads=copies.ahead_loads,
        left_rows=left_rows,
        state_loads=states.state_loads,
        state_saves=states.state_saves,
    )


def _decode_rows(step: PlannedStep, slots: Int32Array) -> DecodeRows:
    decodes = step.decodes
    if not len(decodes):
        return NO_DECODES
    starts = decodes.table.next_position[decodes.rows]
    columns = (decodes.rows.astype(np.int32), starts.astype(np.int32), slots)
    return pack_decodes(*columns, step.decodes.drafts.astype(np.int32))


def _sequence(request: Request, row: RowId, draft_scope: int) -> AddSequence:
    thinking = request.parameters.thinking
    if thinking is not None and request.constraint is None and thinking.budget == MAX_INT32:
        thinking = None  # nothing of it is enforced
    return AddSequence(
        row,
        [TokenSegment(token_ids=pack_int32(request.known_token_ids()))],
        request.sampling,
        request.num_prompt_tokens,
        sorted(request.eos_token_ids),
        request.constraint,
        is_real_time=request.request_class is RT,
        output=request.output,
        thinking=thinking,
        prediction=request.parameters.prediction,
        draft_scope=draft_scope,
        images=tuple(
            image if image.end > request.next_position else without_pixels(image)
            for image in request.parameters.images
        ),
    )


# What happened to requests' KV, and why they waited, counted per class since boot.


@dataclass(slots=True)
class KVCounters:
    """Counters of one request class; tokens are those of its own requests."""

    num_pauses: int = 0
    """Times that a running request lost its row or memory to another."""
    num_evictions: int = 0
    """Times that a request, running or paused, lost KV to another."""
    num_evicted: int = 0
    """Requests that did at all."""
    taken_tokens: int = 0
    """Tokens whose slots went to another request, and which are on the host."""
    saved_tokens: int = 0
    """Taken tokens that had to be copied in the step that took them."""
    loaded_tokens: int = 0
    """Tokens that came back from the host."""
    lost_tokens: int = 0
    """Tokens whose KV was given up, and has to be computed again unless it is found as cache."""
    num_snapshots: int = 0
    """Snapshots of states that steps have made at the ends of chunks."""


class SkipCounters:
    """Requests that steps left out, and why."""

    def __init__(self) -> None:
        self.skipped: Mapping[RequestClass, Counter[Reason]]
        """Times that a request was considered for a step and left out."""
        self.skipped = {request_class: Counter() for request_class in RequestClass}
        self.unseen: Mapping[RequestClass, Counter[Reason]]
        """Times that a request was not considered for a step, by what had stopped the scan."""
        self.unseen = {request_class: Counter() for request_class in RequestClass}
        self.awaiting_memory: set[RequestClass] = set()
        """Classes of which the last step left some out for want of memory to come."""

    def note(self, step: PlannedStep) -> None:
        """Count a step that is sent."""
        self.awaiting_memory.clear()
        if step.left_out:
            for request_class, counts in step.left_out.count().items():
                self.skipped[request_class].update(counts)
                if Reason.KV_FUTURE in counts:
                    self.awaiting_memory.add(request_class)
        for request_class, (num_requests, stopped_by) in step.unseen.items():
            if stopped_by is not None:
                self.unseen[request_class][stopped_by] += num_requests
                if stopped_by is Reason.KV_FUTURE:
                    self.awaiting_memory.add(request_class)


class StepCommit:
    """Carries out what `Planner` decided, in the order that copies rely on.

    Memory is taken first (its saves run before all else in the step), then requests start or come
    nearer to it (loads run after the saves), then slots are given out.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        rows: RequestTable,
        pipeline: Pipeline,
        waits: QueueDelay,
        risk: AcceptedRisk,
        *,
        drafting: Drafting,
        shares_answers: bool,
    ) -> None:
        self._waiting = waiting
        self._rows = rows
        self._pipeline = pipeline
        self._waits = waits
        self._risk = risk
        self._drafting = drafting
        self._shares_answers = shares_answers
        self.counters = {request_class: KVCounters() for request_class in RequestClass}
        self.skip_counters = SkipCounters()

    def book(self, step: PlannedStep, kv: KVStore, now_s: float) -> StepPlan:
        """Book a step planned since the last event; return the message to send."""
        self.skip_counters.note(step)
        tier, loaded = None if kv.tree is None else kv.tree.tier, step.loaded
        num_saved = 0 if tier is None else tier.num_tokens["saved"]
        beside = {request for request, _ in loaded} if tier and step.checkpointed else ()
        kv.begin_plan(found for request, found in step.found.items() if request not in beside)
        self._make_room(step, kv, now_s)
        if beside:
            loaded = _left_by_paused(step, kv)
        newcomers = [r for r, _ in step.chunks if r.state is WAITING]
        for request in newcomers:
            self._start(request, kv, step.found[request], in_turn=request not in step.urgent)
        for request, _ in loaded:
            kv.hold(request, step.found[request])
        for request in newcomers:
            found = step.found[request]
            kv.load(request, found.start - found.num_there)
            self.counters[request.request_class].loaded_tokens += found.num_loaded
            request.state = RUNNING
        for request, num_tokens in loaded:
            num_left = step.found[request].num_loaded - num_tokens
            num_loaded = kv.load(request, num_tokens, is_ahead=True, left=num_left)
            self.counters[request.request_class].loaded_tokens += num_loaded
        if self._drafting.most and len(step.decodes):
            self._drafting.note(step.decodes)
        num_tokens_each = step.decodes.num_tokens
        if len(step.decodes.drafts):
            each = zip(step.decodes.requests, num_tokens_each.tolist(), strict=True)
            decode_slots = kv.acquire(list(each))
        else:
            decode_slots = kv.acquire_one_each(step.decodes.rows)
        chunk_slots = kv.acquire(step.chunks)
        _note_slots(step, decode_slots, chunk_slots)
        if kv.states.num_slots:
            self._note_states(step, kv.states)
        plan = build_plan(
            step,
            decode_slots=decode_slots,
            chunk_slots=chunk_slots,
            newcomers=set(newcomers),
            copies=kv.take_copies(),
            states=kv.states.take_changes(),
            left_rows=self._rows.take_left(),
            shares_answers=self._shares_answers,
        )
        num_saved = 0 if tier is None else tier.num_tokens["saved"] - num_saved
        self._pipeline.push(step, plan, now_s, num_prefix_saves=num_saved)
        self._rows.send(step.decodes.rows, num_tokens_each)
        for (request, num_tokens), samples in zip(step.chunks, step.num_samples, strict=True):
            if request.parameters.images:
                self._pipeline.encoding.note_chunk(request, num_tokens)
            request.num_inflight_samples += samples
            request.num_inflight_tokens += num_tokens
            request.next_position += num_tokens
            request.num_inflight_steps += 1
        self._pipeline.encoding.note_orders(step.encodes)  # encoded behind the forward pass
        return plan

    def _note_states(self, step: PlannedStep, states: States) -> None:
        """Copy states that may be wanted again, from before the step or from its end."""
        for request in step.decodes.requests:
            if request.awaits_grammar:
                states.keep_for_retry(request)
        for (request, num_tokens), samples in zip(step.chunks, step.num_samples, strict=True):
            if samples and request.awaits_grammar:
                states.keep_for_retry(request)
            elif states.end_chunk(request, num_tokens):
                self.counters[request.request_class].num_snapshots += 1

    def _start(self, request: Request, kv: KVStore, found: Found, *, in_turn: bool) -> None:
        """Take a waiting request out of its queue and give it a row and what there is of its KV."""
        self._waiting.admit(request, in_turn=in_turn)
        if not request.is_paused:
            kv.forget(request)
        self._waits.note_started(request, found.start)
        self._rows.acquire(request)
        if self._drafting.most:
            self._drafting.begin(request)
        computed_anew = max(0, request.num_kept_tokens - found.start)
        self.counters[request.request_class].lost_tokens += computed_anew
        kv.start(request, found)
        request.set_awaits_grammar(request.constraint is not None)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = found.start

    # ---------------------------------------------------------------- pausing and taking

    def _make_room(self, step: PlannedStep, kv: KVStore, now_s: float) -> None:
        """Pause and take; who stops heads the queue of its class, in order of admission."""
        for request in step.paused:
            self._rows.release(request)
            self.counters[request.request_class].num_pauses += 1
            request.pause()
        for request in step.seats_given:
            request.gave_seat_s = now_s
        self._waiting.requeue(step.paused[::-1])
        for request, num_tokens in step.checkpointed:
            counters = self.counters[request.request_class]
            num_kept = request.num_kept_tokens
            num_saved = kv.take(request, num_tokens)
            self._note_evicted(request)
            if num_saved is None:  # neither are the copies made before
                counters.lost_tokens += num_kept - request.num_kept_tokens
            else:
                counters.taken_tokens += num_tokens
                counters.saved_tokens += num_saved
        for request in step.preempted:
            self._note_evicted(request)
            self.counters[request.request_class].lost_tokens += request.num_kept_tokens
            kv.release(request, keep=False)
            request.lose_kv()
            kv.expect(request)

    def _note_evicted(self, request: Request) -> None:
        counters = self.counters[request.request_class]
        counters.num_evictions += 1
        if not request.was_evicted:
            request.was_evicted = True
            counters.num_evicted += 1
            self._risk.note_evicted(request.request_class)


def _left_by_paused(step: PlannedStep, kv: KVStore) -> tuple[Loading, ...]:
    """Return the loads beside a step whose copies are still there, as requests have paused.

    These go before prefixes; the requests of others go on waiting, as they would have.
    """
    left = []
    for request, num_tokens in step.loaded:
        found = step.found[request]
        if found.hit is not None and found.hit.num_on_host:
            now = kv.look_up(request)
            if now.num_there != found.num_there or now.num_loaded < num_tokens:
                continue
            kv.begin_plan([now])
        left.append(Loading(request, num_tokens))
    return tuple(left)


def _note_slots(step: PlannedStep, decode_slots: Int32Array, chunk_slots: Int32Array) -> None:
    """Write into the table of each request what its new tokens get."""
    if len(step.decodes.drafts):
        each = zip(step.decodes.requests, step.decodes.num_tokens.tolist(), strict=True)
        _note_ranges(each, decode_slots)
    else:
        positions = step.decodes.table.next_position[step.decodes.rows].tolist()
        places = zip(step.decodes.requests, positions, decode_slots.tolist(), strict=True)
        for request, position, slot in places:
            request.slots[position] = slot  # type: ignore[index]
    _note_ranges(step.chunks, chunk_slots)


def _note_ranges(parts: Iterable[tuple[Request, int]], slots: Int32Array) -> None:
    """Write what the next tokens of requests get, one request's after the other's."""
    offset = 0
    for request, num_tokens in parts:
        table, start = request.slots, request.next_position
        assert table is not None
        table[start : start + num_tokens] = slots[offset : offset + num_tokens]
        offset += num_tokens
