"""The steps in flight: at most one running and one waiting behind it.

Knows when the next plan should leave: when the predicted rest of the running step is under
max(1 ms, 3 x measured router time), and what a GPU's host takes to launch a step, so that an
arrival is seen as late as possible and the worker still never waits.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from lightserve.errors import ProtocolError
from lightserve.messages.common import MAX_INT32, unpack_int32
from lightserve.messages.router_worker import (
    OutputKind,
    PlanRow,
    RowResult,
    StepOutput,
    StepPlan,
    StepResult,
    read_result,
    unpack_decodes,
)
from lightserve.router.arrivals import TimeShare
from lightserve.router.encoding import Encoding
from lightserve.router.policies.step_budget import NO_LIMIT
from lightserve.router.request import Request
from lightserve.router.step import PlannedStep
from lightserve.router.step_cost import RATIO_MEMORY, CopyCost, StepCost, StepShape
from lightserve.types import DraftSource, RequestOutput, StepId

MAX_STEPS_IN_FLIGHT = 2
MIN_LEAD_S = 1e-3
LEAD_FACTOR = 3.0
"""The lead covers so many times what the router took of late, and the mean error of predictions."""


@dataclass(slots=True)
class SentStep:
    """A step that the workers have, or have finished."""

    planned: PlannedStep
    plan: StepPlan
    shape: StepShape
    start_s: float | None
    """When it began, as far as the router can know; None while it waits at the worker."""
    ahead: bool
    """Whether it was sent while another step ran."""
    behind_s: float
    """By how much, as predicted, copies that it does not wait for hold up the next step."""
    saves_s: float = 0.0
    """Predicted time of saves of prefixes that its slots were taken from, unknown when it was
    planned."""

    @property
    def predicted_s(self) -> float:
        """Predicted execution time."""
        return self.planned.predicted_s + self.saves_s


class Pipeline:
    """Steps sent and not yet answered, in order; their timing; the cost model that learns it."""

    def __init__(
        self,
        *,
        max_steps_in_flight: int = MAX_STEPS_IN_FLIGHT,
        max_num_batched_tokens: int = NO_LIMIT,
    ) -> None:
        self._max_steps_in_flight = max_steps_in_flight
        self.max_num_batched_tokens = max_num_batched_tokens
        """Most tokens of a step that the workers are prepared for."""
        self.cost = StepCost()
        self._copy_cost = CopyCost()
        self.encoding = Encoding()
        """Progress of images that the workers encode, and what that takes."""
        self.best_effort_time = TimeShare()
        self.num_steps_in_time = 0
        """Steps sent since one that `PlannedStep.hits_limit`."""
        self.overlaps_copies = False
        """Whether the workers make such copies beside the steps, see `WorkerHello`."""
        self.next_step_id = StepId(0)
        self.num_finished = 0
        self.busy_s = 0.0
        self.average_step_s = 0.0
        """Execution time of recent steps."""
        self.idle_s = 0.0
        self._in_flight: deque[SentStep] = deque()
        self._router_s = 0.0
        self._launch_s = 0.0
        """Longest recent time that a worker's host took to launch a step."""
        self._had_work = False
        self._shape = StepShape()
        """Shape of the step that finished last."""

    @property
    def oldest(self) -> SentStep | None:
        """The oldest step in flight, which is running; None: there is none."""
        return self._in_flight[0] if self._in_flight else None

    def next_plan_due_s(self) -> float | None:
        """Return when the next plan should leave (-inf: now), None: not before a result."""
        if not self._in_flight:
            return float("-inf")
        if len(self._in_flight) >= self._max_steps_in_flight:
            return None
        running = self._in_flight[0]
        assert running.start_s is not None
        lead_s = max(MIN_LEAD_S, LEAD_FACTOR * self._router_s) + self._launch_s
        lead_s += LEAD_FACTOR * self.cost.error_s
        return running.start_s + running.predicted_s - lead_s

    def next_start_s(self, now_s: float) -> float:
        """Return when a step planned now will start, as predicted."""
        if not self._in_flight:
            return now_s
        start_s = self._in_flight[0].start_s
        assert start_s is not None
        steps_s = sum([sent.predicted_s + sent.behind_s for sent in self._in_flight])
        return max(now_s, start_s + steps_s)

    def next_end_s(self, now_s: float) -> float:
        """Return when a step planned now will end if it is like the last one, with the guard."""
        return self.next_start_s(now_s) + self.cost.guard * self.cost.seconds(self._shape)

    def predict(self, shape: StepShape, num_copied: int) -> float:
        """Return the predicted seconds of a step that waits for so many copied tokens."""
        return self.cost.seconds(shape) + self.copy_seconds(num_copied)

    def copy_seconds(self, num_tokens: int) -> float:
        """Return the predicted seconds that a step waits for copies of so many tokens.

        Until copies have been seen, what a profile says of loads.
        """
        predicted_s = self._copy_cost.predict(num_tokens)
        return predicted_s or self.cost.load_seconds(num_tokens)

    def load_seconds(self, num_tokens: int) -> float:
        """Return the predicted seconds that a step waits for loads of so many tokens.

        No less than a profile says: what was learnt from a few tokens may be far too little.
        """
        profiled_s = self.cost.load_seconds(num_tokens)
        return max(self._copy_cost.predict(num_tokens), profiled_s)

    def ahead_seconds(self, num_tokens: int) -> float:
        """Return the predicted seconds of copies of so many tokens that no step waits for.

        In proportion to their number: no step tells how long they took, so that an overhead that
        is believed to be too large, for which there is never time, would never be corrected.
        """
        profiled_s = self.cost.load_seconds(num_tokens)
        return profiled_s or self._copy_cost.mean_rate_s * num_tokens

    def load_is_cheaper(self, num_tokens: int, start: int, num_loaded: int) -> bool:
        """Whether loading so many slots costs less than computing tokens from `start` on, or may.

        Where copies overlap hardly any step waits for loads, so that their overhead does not count.
        """
        computed_s = self.cost.seconds(self._shape.plus(start, num_tokens))
        computed_s -= self.cost.seconds(self._shape)
        predict = self.ahead_seconds if self.overlaps_copies else self._copy_cost.predict
        return computed_s == 0.0 or predict(num_loaded) <= computed_s

    def push(
        self, planned: PlannedStep, plan: StepPlan, now_s: float, *, num_prefix_saves: int = 0
    ) -> None:
        """Book a step that leaves at `now_s`; before its requests have moved.

        `num_prefix_saves`: tokens of prefixes among its saves.
        """
        assert planned.step_id == plan.step_id == self.next_step_id, (
            "planned before the last commit"
        )
        self.best_effort_time.observe(planned.predicted_s, planned.best_effort_s)
        self.num_steps_in_time = 0 if planned.hits_limit else self.num_steps_in_time + 1
        ahead = bool(self._in_flight)
        saves_s = 0.0
        if num_prefix_saves:
            num_copied = _num_copied(plan)
            saves_s = self.copy_seconds(num_copied)
            saves_s -= self.copy_seconds(num_copied - num_prefix_saves)
        behind_s = self.ahead_seconds(len(plan.ahead_loads.slots) // 4)
        if self.overlaps_copies:
            behind_s = max(0.0, behind_s - planned.predicted_s - saves_s)
        start_s = None if ahead else now_s
        self._in_flight.append(
            SentStep(planned, plan, planned.shape, start_s, ahead, behind_s, saves_s)
        )
        self.next_step_id = StepId(self.next_step_id + 1)
        self._router_s += RATIO_MEMORY * (now_s - planned.planned_at_s - self._router_s)

    def note_work(self, has_work: bool) -> None:
        """Say whether requests are left after a result: then waiting for a plan is idling."""
        self._had_work = has_work

    def pop(self, result: StepResult, now_s: float) -> tuple[SentStep, StepOutput]:
        """Take out the oldest step, with what its rows gave; the one behind it has started.

        Raises:
            ProtocolError: `result` is not the oldest step's, or does not fit its plan; then nothing
                has changed.
        """
        if not self._in_flight or self._in_flight[0].plan.step_id != result.step_id:
            raise ProtocolError(f"result of step {result.step_id} out of order")
        try:
            output = _read(self._in_flight[0], result)
        except ProtocolError as error:
            raise ProtocolError(f"result of step {result.step_id}: {error}") from None
        done = self._in_flight.popleft()
        self._shape = _computed_shape(done, result)
        computed_s = max(0.0, result.exec_s - result.copy_s - result.encode_s)
        # Clocks may give an encoder all of the time, and a step may have nothing else.
        if self._shape.num_new and (computed_s or not result.encode_s):
            self.cost.observe(self._shape, computed_s)
        self._copy_cost.observe(_num_copied(done.plan), result.copy_s)
        self.encoding.observe(result.encode_s, result.encoded)
        self.num_finished += 1
        self.busy_s += result.exec_s
        self._launch_s = max(result.launch_s, (1.0 - RATIO_MEMORY) * self._launch_s)
        newest = max(RATIO_MEMORY, 1.0 / self.num_finished)
        self.average_step_s += newest * (result.exec_s - self.average_step_s)
        if done.ahead or self._had_work:
            self.idle_s += result.idle_s
        if self._in_flight:
            self._in_flight[0].start_s = now_s + done.behind_s
        return done, output

    def clear(self) -> None:
        """Forget the steps in flight: their worker is gone."""
        self._in_flight.clear()
        self._had_work = False

    def stalled_s(self, now_s: float) -> float:
        """Return how long the running step has been running, 0 without one."""
        if not self._in_flight:
            return 0.0
        start_s = self._in_flight[0].start_s
        assert start_s is not None
        return max(0.0, now_s - start_s)


def _computed_shape(sent: SentStep, result: StepResult) -> StepShape:
    """Return the shape of what was computed: where too little was proposed, less than planned."""
    drafts = sent.planned.decodes.drafts
    if result.num_verified == drafts.sum():
        return sent.shape
    missing = drafts - unpack_int32(result.drafted)[: len(drafts)]
    starts = unpack_decodes(sent.plan.decodes).start_positions
    return sent.shape.plus_drafts(-int(missing.sum()), -int((missing * starts).sum()))


def _read(sent: SentStep, result: StepResult) -> StepOutput:
    """Return what a result says. Raises ProtocolError if it is not as its plan wants it."""
    of_images = (result.encode_s, result.encoded)
    times_s = (result.exec_s, result.idle_s, result.copy_s, result.launch_s, *of_images)
    if not all(0.0 <= time_s < math.inf for time_s in times_s):  # nor one that is no number
        raise ProtocolError("times must be finite and not negative")
    output = read_result(sent.plan, result)
    if len(result.drafted) != 2 * len(sent.plan.decodes.num_drafts):
        raise ProtocolError(f"{len(result.drafted)} bytes of drafted")
    drafts = sent.planned.decodes.drafts
    num_drafted, sources = unpack_int32(result.drafted).reshape(2, -1)
    if ((num_drafted < 0) | (num_drafted > drafts)).any():
        raise ProtocolError("drafted: more than planned")
    if result.num_verified not in (drafts.sum(), num_drafted.sum()):
        raise ProtocolError(f"{result.num_verified} drafts, which are not those of the plan")
    if not {*map(int, sources)} <= {*DraftSource}:
        raise ProtocolError("drafted: a source that is none")
    planned, (rows, token_ids, others) = sent.planned, output
    if token_ids.shape[1] > 1:
        most = np.ones(len(token_ids), dtype=np.int64)
        most[: len(planned.decodes)] = planned.decodes.num_tokens
        most[len(planned.decodes) :] = [count for count in planned.num_samples if count]
        if ((token_ids >= 0).sum(axis=1) > most).any():
            raise ProtocolError("a row has more tokens than were wanted")
    if (planned.decodes.table.wants_logprobs[rows] & (token_ids[:, 0] >= 0)).any():
        raise ProtocolError("a row has no log-probabilities")
    if others:
        plan_rows = {row.row: row for row in sent.plan.rows}
        most_of_each = planned.decodes.num_tokens.tolist()
        samples = dict(zip(planned.decodes.rows.tolist(), most_of_each, strict=True))
        for (request, _), count in zip(planned.chunks, planned.num_samples, strict=True):
            assert request.row is not None, "a step in flight names it"
            samples[request.row] = count
        for row, other in others.items():
            holder = planned.decodes.table.requests[row]
            assert holder is not None, "a step in flight names it"
            _check_other(holder, plan_rows.get(row), other, samples[row])
    return output


def _check_other(request: Request, row: PlanRow | None, other: RowResult, num_samples: int) -> None:
    """Raise ProtocolError if a row that has more to say says what was not asked.

    `row` is None for a decode.
    """
    token_ids = other.token_ids
    if len(token_ids) > num_samples:
        raise ProtocolError(
            f"{len(token_ids)} tokens of row {other.row}, at most {num_samples} were wanted"
        )
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= MAX_INT32:
        raise ProtocolError(f"a token of row {other.row} that is none")
    if other.error is not None:
        return
    is_for_vector = request.output is not RequestOutput.TOKENS
    if bool(other.vector) != (is_for_vector and bool(token_ids)):
        raise ProtocolError(f"{len(other.vector)} bytes of a vector of row {other.row}")
    wants_logprobs = request.sampling.num_logprobs is not None
    if len(other.logprobs) != (len(token_ids) if wants_logprobs else 0):
        raise ProtocolError(f"{len(other.logprobs)} log-probabilities of row {other.row}")
    num_positions = 0
    if row is not None and row.output & OutputKind.PROMPT_LOGPROBS:
        end = min(row.start_position + row.num_tokens, request.num_prompt_tokens - 1)
        num_positions = end - row.start_position
    if len(other.prompt_logprobs) != num_positions:
        raise ProtocolError(
            f"{len(other.prompt_logprobs)} log-probabilities of the prompt of row {other.row}"
        )


def _num_copied(plan: StepPlan) -> int:
    """Return how many tokens' copies a step waits for."""
    return (len(plan.saves.slots) + len(plan.loads.slots)) // 4
