"""Books a planned step: who is paused, from whom memory is taken, who starts, which slots."""

from __future__ import annotations

from lightserve.messages.common import Int32Array
from lightserve.messages.router_worker import StepPlan
from lightserve.router.counters import KVCounters, SkipCounters
from lightserve.router.events import PlannedStep
from lightserve.router.kv.cache import KVStore
from lightserve.router.kv.host import MAX_AHEAD_PER_PLAN
from lightserve.router.pipeline import Pipeline
from lightserve.router.plan_builder import build_plan
from lightserve.router.queue import WaitingQueue
from lightserve.router.request import RUNNING, WAITING, Request
from lightserve.router.request_table import RequestTable
from lightserve.router.waits import WaitForecast
from lightserve.types import BE, RequestClass

AHEAD_FACTOR = 4
"""Tails are copied ahead once less than this many times what is to be clean is free or cached:
before that nobody will lose anything soon, and the copies would be for nothing."""
AHEAD_STEPS = 256
"""Steps after memory was last taken from somebody in which tails are copied ahead: where nobody
loses anything, every best-effort newcomer would still be the next victim for a moment."""


class StepBooking:
    """Carries out what `StepPlanner` decided, in the order that copies rely on.

    Memory is taken first (its saves run before all else in the step), then requests start or come
    nearer to it (loads run after the saves), then slots are given out, and at last tails are copied
    ahead.
    """

    def __init__(
        self, waiting: WaitingQueue, rows: RequestTable, pipeline: Pipeline, waits: WaitForecast
    ) -> None:
        self._waiting = waiting
        self._rows = rows
        self._pipeline = pipeline
        self._waits = waits
        self._steps_since_take = AHEAD_STEPS + 1
        self.counters = {request_class: KVCounters() for request_class in RequestClass}
        self.skip_counters = SkipCounters()

    def book(self, step: PlannedStep, kv: KVStore, now_s: float) -> StepPlan:
        """Book a step planned since the last event; return the message to send."""
        self.skip_counters.note(step)
        self._make_room(step, kv)
        self._steps_since_take = 0 if step.takes else self._steps_since_take + 1
        newcomers = [r for r, _ in step.chunks if r.state is WAITING]
        for request in newcomers:
            self._start(request, kv)
        for request, _ in step.loads:
            kv.hold(request)
        for request in newcomers:
            num_loaded = kv.load(request, request.num_loaded_by_start)
            self.counters[request.request_class].loaded_tokens += num_loaded
            request.state = RUNNING
        for request, num_tokens in step.loads:
            self.counters[request.request_class].loaded_tokens += kv.load_ahead(request, num_tokens)
        decode_slots = kv.acquire_one_each(step.decodes.rows)
        chunk_slots = kv.acquire(step.chunks)
        _note_slots(step, decode_slots, chunk_slots)
        self._copy_ahead(kv, sum(num_tokens for _, num_tokens in step.loads))
        plan = build_plan(
            step,
            decode_slots=decode_slots,
            chunk_slots=chunk_slots,
            newcomers=set(newcomers),
            copies=kv.take_copies(),
            left_rows=self._rows.take_left(),
        )
        self._pipeline.push(step, plan, now_s)
        self._rows.send(step.decodes.rows)
        for (request, num_tokens), samples in zip(step.chunks, step.num_samples, strict=True):
            request.num_inflight_samples += samples
            request.num_inflight_tokens += num_tokens
            request.next_position += num_tokens
            request.num_inflight_steps += 1
        return plan

    def _start(self, request: Request, kv: KVStore) -> None:
        """Take a waiting request out of its queue and give it a row and what there is of its KV."""
        self._waiting.admit(request)
        if not request.is_paused:
            kv.forget(request)
        self._waits.note_started(request)
        self._rows.acquire(request)
        computed_anew = max(0, request.num_kept_tokens - request.num_computed_tokens)
        self.counters[request.request_class].lost_tokens += computed_anew
        kv.start(request)
        request.set_awaits_grammar(request.constraint is not None)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens

    # ---------------------------------------------------------------- pausing and taking

    def _make_room(self, step: PlannedStep, kv: KVStore) -> None:
        """Pause and take; who stops heads the queue of its class, in order of admission."""
        for request in step.stops:
            self._rows.release(request)
            self.counters[request.request_class].num_pauses += 1
            request.pause()
        self._waiting.requeue(step.stops[::-1])
        for request, num_tokens in step.takes:
            counters = self.counters[request.request_class]
            num_kept = request.num_kept_tokens
            num_saved = kv.take(request, num_tokens)
            counters.num_evictions += 1
            if num_saved is None:  # neither are the copies made before
                counters.lost_tokens += num_kept - request.num_kept_tokens
            else:
                counters.taken_tokens += num_tokens
                counters.saved_tokens += num_saved
        for request in step.drops:
            counters = self.counters[request.request_class]
            counters.num_evictions += 1
            counters.lost_tokens += request.num_kept_tokens
            kv.release(request, keep=False)
            request.lose_kv()
            kv.expect(request)

    def _copy_ahead(self, kv: KVStore, num_loading: int) -> None:
        """Save tails of the next best-effort victims, paused ones first, while nobody waits.

        The link is shared with what is loaded.
        """
        if self._steps_since_take > AHEAD_STEPS:
            return
        if kv.num_available > AHEAD_FACTOR * kv.options.num_clean_ahead(kv.num_slots):
            return
        paused = list(self._waiting.paused(BE))[::-1]
        running = [
            request
            for request in self._rows
            if request.request_class is BE
            and request.state is RUNNING
            and request.num_computed_tokens >= request.num_prompt_tokens  # or its tail still moves
        ][::-1]
        num_copied = kv.copy_ahead([*paused, *running], MAX_AHEAD_PER_PLAN - num_loading)
        self.counters[BE].ahead_tokens += num_copied


def _note_slots(step: PlannedStep, decode_slots: Int32Array, chunk_slots: Int32Array) -> None:
    """Write into the table of each request what its new tokens get."""
    positions = step.decodes.table.next_position[step.decodes.rows].tolist()
    places = zip(step.decodes.requests, positions, decode_slots.tolist(), strict=True)
    for request, position, slot in places:
        request.slots[position] = slot  # type: ignore[index]
    offset = 0
    for request, num_tokens in step.chunks:
        table, start = request.slots, request.next_position
        assert table is not None
        table[start : start + num_tokens] = chunk_slots[offset : offset + num_tokens]
        offset += num_tokens
