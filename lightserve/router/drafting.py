"""How many drafts each decode of a step has: as many as pay.

A draft is one more token of the step, and yields one more token of output if it, and those before
it, are what the model draws (`lightserve.worker.drafts`). What it costs, the cost model says: next
to nothing while a step is bound by reading weights, as much as any other token beyond. What it is
worth is the time in which decodes alone would have made as many tokens as it is expected to. So
drafts come and go with the load, by the same measured times as everything else in a step.

    worth   (seconds of the decodes alone / decodes) * expected accepted tokens
    cost    MARGIN * (seconds with the drafts - seconds without)

The chance that a row's next draft is accepted is learnt from its own last drafts, and where it had
few, from those of its key: requests of one program are alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from lightserve.cost.model import StepShape
from lightserve.messages.common import unpack_int32
from lightserve.messages.router_worker import NO_TOKEN, StepOutput, StepResult
from lightserve.router.accounts import Computed
from lightserve.router.output_lengths import MAX_KEYS
from lightserve.router.request import ENDED, Request
from lightserve.router.request_table import NO_ROWS, BoolArray, Decodes, FloatArray, RequestTable
from lightserve.router.request_table import Rows as IntArray
from lightserve.router.step import PlannedStep
from lightserve.types import MAX_DRAFTS, RequestClass, RequestOutput, RowId

MARGIN = 1.25
"""Drafts are to be worth so much more than they cost: predictions err, and other rows wait. Not in
rows whose token is late."""
FIRST_CHANCE = 0.4
"""Chance of a draft of which nothing is known."""
PRIOR_DRAFTS = 3.0
"""Drafts that what is known of the key counts for, in a row; and FIRST_CHANCE, of a key."""
ROW_MEMORY, KEY_MEMORY = 0.85, 0.98
"""Weight of what is known after a result with drafts: of the row, of the key."""
FADING = 0.995
"""Weight after a step without drafts, in which nothing was learnt: so a row tries again."""


@dataclass(slots=True)
class Chance:
    """Drafts that were accepted and refused of late."""

    accepted: float = 0.0
    tried: float = 0.0

    def learn(self, accepted: float, tried: float, memory: float) -> None:
        """Count the drafts of one result."""
        self.accepted = memory * self.accepted + accepted
        self.tried = memory * self.tried + tried

    @property
    def value(self) -> float:
        """The chance that a draft is accepted whose predecessors are."""
        return (self.accepted + PRIOR_DRAFTS * FIRST_CHANCE) / (self.tried + PRIOR_DRAFTS)


@dataclass(slots=True)
class DraftCounts:
    """Drafts of a class since boot."""

    num_drafted: int = 0
    num_accepted: int = 0


class Drafting:
    """Chances of drafts by row, and the choice for a step. Pure."""

    def __init__(self, most: int, table: RequestTable) -> None:
        """`most` drafts of a row, 0: none has any; `table` has the requests that run."""
        self.most = most
        """Drafts that a row may have; 0: none has any."""
        self._table = table
        self._occupants = np.full(table.num_rows, -1, dtype=np.int64)
        """Numbers of the requests that the other columns are about."""
        self._can_draft = np.zeros(table.num_rows, dtype=np.bool_)
        self._accepted = np.zeros(table.num_rows)
        self._tried = np.zeros(table.num_rows)
        self._keys: OrderedDict[Hashable, Chance] = OrderedDict()
        self.counts = {request_class: DraftCounts() for request_class in RequestClass}

    def take_back_refused(
        self,
        planned: PlannedStep,
        result: StepResult,
        output: StepOutput,
        step_back: Callable[[Request, int], None],
    ) -> Iterator[Computed]:
        """Learn what came of a step's drafts, and take back what was booked for refused ones.

        `step_back` forgets the last tokens of a request. Yields what accepted drafts have computed.
        """
        decodes, num_planned = planned.decodes, planned.decodes.drafts
        num_tokens = (output.token_ids[: len(decodes)] != NO_TOKEN).sum(axis=1)
        num_drafted = unpack_int32(result.num_drafted)
        # What is not proposed costs nothing where it is not computed.
        num_wasted = int(result.num_verified == num_planned.sum())
        for index in np.flatnonzero(num_planned).tolist():
            request, row = decodes.requests[index], RowId(int(decodes.rows[index]))
            counts = self.counts[request.request_class]
            counts.num_drafted += int(num_drafted[index])
            if request.state is ENDED:  # all that it holds is given back at once
                continue
            found = output.others.get(row)
            count = int(num_tokens[index]) if found is None else len(found.token_ids)
            num_accepted = max(0, count - 1)
            counts.num_accepted += num_accepted
            num_tried = min(num_accepted + 1, int(num_drafted[index])) or num_wasted
            self._learn(request, num_tried, num_accepted)
            step_back(request, int(num_planned[index]) - num_accepted)
            yield Computed(request.account, request.budget, 0, num_accepted)

    def choose(
        self,
        decodes: Decodes,
        shape: StepShape,
        seconds: Callable[[StepShape], float],
        *,
        room: int,
        limit_s: float,
        is_late: BoolArray | None = None,
    ) -> IntArray:
        """Return how many drafts each decode has, int64 [n]; empty: none has any.

        Args:
            decodes: rows of the step that compute one token, at least one.
            shape: of the whole step without drafts.
            seconds: predicts the time of a step.
            room: most drafts of the step, for want of slots and tokens.
            limit_s: what the step may take, unless it takes longer without drafts.
            is_late: bool [n], whether the token of a row is late.
        """
        if room <= 0:
            return NO_ROWS
        base_s, alone_s = seconds(shape), seconds(shape.decodes)
        most, chances = self._most_of(decodes), self._chances(decodes)
        steps = np.arange(1, self.most + 1)
        gains = chances[:, None] ** steps * (steps <= most[:, None])
        if is_late is not None:
            gains *= np.where(is_late, MARGIN, 1.0)[:, None]
        # Falling along a row, so that no draft comes before its predecessors.
        order = np.argsort(-gains, axis=None, kind="stable")
        order = order[: min(room, int(most.sum()))]
        worth_s = np.cumsum(gains.ravel()[order]) * (alone_s / len(decodes))
        contexts = self._table.next_position[decodes.rows]
        pairs = np.cumsum(contexts[order // self.most])
        best, best_s = 0, 0.0
        for count in _numbers_up_to(len(order)):
            time_s = seconds(shape.plus_drafts(count, int(pairs[count - 1])))
            won_s = float(worth_s[count - 1]) - MARGIN * (time_s - base_s)
            if won_s > best_s and (time_s <= limit_s or base_s > limit_s):
                best, best_s = count, won_s
        if not best:
            self._fade(decodes.rows)
            return NO_ROWS
        return np.bincount(order[:best] // self.most, minlength=len(decodes)).astype(np.int64)

    def _learn(self, request: Request, num_tried: int, num_accepted: int) -> None:
        """Take in how many drafts of a running request were looked at, and accepted."""
        row, tried = request.row, float(num_tried)
        assert row is not None
        self._accepted[row] = ROW_MEMORY * self._accepted[row] + num_accepted
        self._tried[row] = ROW_MEMORY * self._tried[row] + tried
        self._of_key(request).learn(num_accepted, tried, KEY_MEMORY)

    def _most_of(self, decodes: Decodes) -> IntArray:
        """Return how many drafts each may have at most: none beyond the last token it can have."""
        table, rows = self._table, decodes.rows
        if len(new := rows[self._occupants[rows] != table.arrival_number[rows]]):
            self._occupants[new] = table.arrival_number[new]
            self._accepted[new] = self._tried[new] = 0.0
            self._can_draft[new] = [can_draft(request) for request in table.of(new)]
        left = table.stop_at[rows] - table.num_output[rows] - table.inflight_samples[rows] - 1
        return np.where(self._can_draft[rows], np.clip(left, 0, self.most), 0)

    def _chances(self, decodes: Decodes) -> FloatArray:
        rows = decodes.rows
        priors = np.array([self._of_key(request).value for request in decodes.requests])
        accepted = self._accepted[rows] + PRIOR_DRAFTS * priors
        chances: FloatArray = accepted / (self._tried[rows] + PRIOR_DRAFTS)
        return chances

    def _fade(self, rows: IntArray) -> None:
        self._accepted[rows] *= FADING
        self._tried[rows] *= FADING

    def _of_key(self, request: Request) -> Chance:
        keys, key = self._keys, request.prediction_key
        if (chance := keys.get(key)) is None:
            chance = keys[key] = Chance()
            if len(keys) > MAX_KEYS:
                keys.popitem(last=False)
        keys.move_to_end(key)
        return chance


def can_draft(request: Request) -> bool:
    """Return whether tokens can be drafted: no grammar has to see each before."""
    return (
        request.output is RequestOutput.TOKENS
        and request.constraint is None
        and request.parameters.thinking is None
    )


def _numbers_up_to(most: int) -> list[int]:
    """Return numbers of drafts to try, up to `most`: the small ones all, then powers of two."""
    numbers = {*range(1, MAX_DRAFTS), *(1 << power for power in range(3, most.bit_length())), most}
    return sorted(number for number in numbers if 0 < number <= most)
