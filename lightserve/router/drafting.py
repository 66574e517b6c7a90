"""How many drafts each decode of a step has: as many as pay.

A draft is one more token of the step, and yields one more token of output if it, and those before
it, are what the model draws (`lightserve.worker.drafts`). What it costs, the cost model says: next
to nothing while a step is bound by reading weights, as much as any other token beyond, and its
logits always. What it is worth is the time in which decodes alone would have made as many tokens
as it is expected to. So drafts come and go with the load, by the same measured times as everything
else in a step.

    worth   (seconds of the decodes alone / decodes) * expected accepted tokens
    cost    MARGIN * (seconds with the drafts - seconds without) + LEAST_WON_S

The chance that a row's next draft is accepted is learnt from its own last drafts, and where it had
few, from those of its key: requests of one program are alike.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from lightserve.cost.model import StepShape
from lightserve.messages.common import MAX_INT32, unpack_int32
from lightserve.messages.frontend_router import NOTHING_PREDICTED
from lightserve.messages.router_worker import NO_TOKEN, StepOutput, StepResult
from lightserve.router.output_lengths import MAX_KEYS
from lightserve.router.request import ENDED, Request, until_end
from lightserve.router.request_table import NO_ROWS, BoolArray, Decodes, FloatArray, RequestTable
from lightserve.router.request_table import Rows as IntArray
from lightserve.router.step import PlannedStep
from lightserve.router.step_cost import FADING, StepCost
from lightserve.types import DraftSource, RequestClass, RequestKey, RequestOutput, RowId

MARGIN = 1.25
"""Drafts are to be worth so much more than they cost: predictions err, and other rows wait. Not in
rows whose token is late."""
LEAST_WON_S = 1.5e-4
"""Drafts are to win so much at least: planning and guessing them takes as long."""
FIRST_CHANCE = 0.6
"""Chance of a draft of which nothing is known: what is never tried is never known."""
PRIOR_DRAFTS = 3.0
"""Drafts that what is known of the key counts for, in a row; and FIRST_CHANCE, of a key."""
ROW_MEMORY = 0.85
"""Weight of what is known of a row after a result with drafts; FADING, of its key."""
RETRY_STEPS = 320
"""Steps of which one takes each row to have FIRST_CHANCE at least. With it drafts are worth 1.5
steps of the decodes alone at most, and cost no more: a retry takes under 0.5 % of the time."""
QUIET_STEPS = 3
"""Steps behind one without drafts that have none either, without looking: planning takes time."""


@dataclass(slots=True)
class Chance:
    """Drafts that were accepted and refused of late; at first PRIOR_DRAFTS with FIRST_CHANCE."""

    accepted: float = PRIOR_DRAFTS * FIRST_CHANCE
    tried: float = PRIOR_DRAFTS

    def learn(self, accepted: float, tried: float, memory: float) -> None:
        """Count the drafts of one result; without any, what is known fades to the first chance."""
        first = 0.0 if tried else (1.0 - memory) * PRIOR_DRAFTS
        self.accepted = memory * self.accepted + accepted + first * FIRST_CHANCE
        self.tried = memory * self.tried + tried + first

    @property
    def value(self) -> float:
        """The chance that a draft is accepted whose predecessors are."""
        return self.accepted / self.tried


class Drafting:
    """Chances of drafts by row, and the choice for a step. Pure."""

    def __init__(self, most: int, table: RequestTable) -> None:
        """`most` drafts of a row, 0: none has any; `table` has the requests that run."""
        self.most = most
        self._table = table
        self._limits = np.zeros(table.num_rows, dtype=np.int64)
        """Most drafts of each in a step, …"""
        self._priors = np.zeros(table.num_rows)
        """… and what was last known of its key."""
        self._steps = np.arange(1, most + 1)
        self._num_quiet = 0
        """Next steps that are to have no drafts."""
        self._num_until_retry = RETRY_STEPS
        """Steps before the next one that tries all rows again."""
        self._retried: set[int] = set()
        """Rows that were tried again, of which no result is there."""
        self._accepted = np.zeros(table.num_rows)
        self._tried = np.zeros(table.num_rows)
        self._keys: OrderedDict[Hashable, Chance] = OrderedDict()
        self.of_all = Chance()
        """Drafts of all rows since boot."""
        self.num_drafted = Counter[tuple[RequestClass, DraftSource]]()
        """Drafts since boot by class and source, …"""
        self.num_accepted = Counter[tuple[RequestClass, DraftSource]]()
        """… and accepted ones."""
        self._predicted: dict[RequestKey, tuple[int, int]] = {}
        """Tokens of predictions that were right and wrong in the last result."""

    def take_back_refused(
        self,
        planned: PlannedStep,
        result: StepResult,
        output: StepOutput,
        step_back: Callable[[Sequence[tuple[Request, int]]], None],
    ) -> list[tuple[Request, int]]:
        """Learn what came of a step's drafts, and take back what was booked for refused ones.

        `step_back` forgets the last tokens of requests. Returns how many of each were accepted.
        """
        refused, accepted = [], []
        decodes, num_planned = planned.decodes, planned.decodes.drafts
        self._predicted.clear()
        num_tokens = (output.token_ids[: len(decodes)] != NO_TOKEN).sum(axis=1)
        num_drafted, sources = unpack_int32(result.drafted).reshape(2, -1)
        # What is not proposed costs nothing where it is not computed.
        num_wasted = int(result.num_verified == num_planned.sum())
        for index in np.flatnonzero(num_planned).tolist():
            request, row = decodes.requests[index], RowId(int(decodes.rows[index]))
            source = DraftSource(int(sources[index]))
            self.num_drafted[request.request_class, source] += int(num_drafted[index])
            if request.state is ENDED:  # all that it holds is given back at once
                continue
            token_ids = output.token_ids[index, : num_tokens[index]].tolist()
            if row in output.others:
                token_ids = output.others[row].token_ids
            num_accepted = max(0, len(token_ids) - 1)
            # What stands behind its end is none of the request's output.
            num_right = max(0, len(until_end(request, token_ids)[0]) - 1)
            self.num_accepted[request.request_class, source] += num_right
            if source is DraftSource.PREDICTION:
                self._predicted[request.key] = num_right, int(num_drafted[index]) - num_right
            num_tried = min(num_accepted + 1, int(num_drafted[index])) or num_wasted
            self._learn(request, num_tried, num_accepted)
            refused.append((request, int(num_planned[index]) - num_accepted))
            accepted.append((request, num_right))
        step_back(refused)
        return accepted

    def predicted(self, request: Request) -> tuple[int, int]:
        """Return how many tokens of its prediction were right and wrong in the last result."""
        return self._predicted.pop(request.key, NOTHING_PREDICTED)

    def begin(self, request: Request) -> None:
        """Take in a request that has got a row."""
        row = request.row
        assert row is not None
        self._retried.discard(row)
        self._accepted[row] = self._tried[row] = 0.0
        self._limits[row] = self.most * can_draft(request)
        self._priors[row] = self._of_key(request).value

    @property
    def rests(self) -> bool:
        """Whether the next step has no drafts, as one shortly before it had none."""
        return self._num_quiet > 0

    def note(self, decodes: Decodes) -> None:
        """Take in the decodes of a step that is sent."""
        self._num_until_retry -= 1
        if self._num_quiet:
            self._num_quiet -= 1
            return
        if self._num_until_retry < 0:
            self._num_until_retry = RETRY_STEPS
            self._retried = set(decodes.rows[decodes.drafts.nonzero()].tolist())
        if not len(decodes.drafts):
            self._accepted[decodes.rows] *= FADING
            self._tried[decodes.rows] *= FADING
            self._num_quiet = QUIET_STEPS

    def choose(
        self,
        decodes: Decodes,
        shape: StepShape,
        cost: StepCost,
        *,
        room: int,
        limit_s: float,
        is_late: Callable[[], BoolArray] | None = None,
    ) -> IntArray:
        """Return how many drafts each decode has, int64 [n]; empty: none has any.

        There are `room` drafts at most, for want of slots and tokens, and the step may take
        `limit_s`, unless it takes longer without drafts, which are not in `shape`. `is_late` tells
        whether the token of a row is late, bool [n]; None: no row's is.
        """
        if room <= 0 or not cost.is_settled:
            return NO_ROWS  # were all steps to have drafts, none would show what one takes without
        rows, most, alone_s = decodes.rows, self._most_of(decodes), cost.seconds(shape.decodes)
        chances = self._chances(rows)
        # Where drafts are wrong most of the time, to see so is to take a small part of a plan's.
        each_won = MARGIN * chances / np.maximum(1.0 - chances, 1.0 / self.most)
        if each_won[most > 0].sum() * alone_s <= LEAST_WON_S * len(rows):
            return NO_ROWS
        room = min(room, int(most.sum()))
        gains = chances[:, None].repeat(self.most, axis=1).cumprod(axis=1)
        gains *= self._steps <= most[:, None]
        if is_late is not None:
            gains[is_late()] *= MARGIN
        # Falling along a row, so that no draft comes before its predecessors.
        order = (-gains).ravel().argsort(kind="stable")[:room]
        owners = rows[order // self.most]
        if shape.num_new + room > cost.pivot:
            # Beyond what reading weights takes anyway, best-effort rows buy none.
            is_free = np.arange(room) < cost.pivot - shape.num_new
            is_taken = is_free | self._table.is_rt[owners]
            order, owners = order[is_taken], owners[is_taken]
        worth_s = gains.ravel()[order].cumsum() * (alone_s / len(rows))
        pairs = self._table.next_position[owners].cumsum()
        times_s, added_s = cost.seconds_with_drafts(shape, pairs)
        won_s = worth_s - MARGIN * added_s
        if cost.seconds(shape) <= limit_s:
            won_s[times_s > limit_s] = 0.0
        if not len(won_s) or won_s[best := int(won_s.argmax())] <= LEAST_WON_S:
            return NO_ROWS
        return np.bincount(order[: best + 1] // self.most, minlength=len(rows)).astype(np.int64)

    def _learn(self, request: Request, num_tried: int, num_accepted: int) -> None:
        """Take in how many drafts of a running request were looked at, and accepted."""
        row, of_key = request.row, self._of_key(request)
        assert row is not None
        if row in self._retried:
            self._retried.remove(row)
            self._priors[row] = FIRST_CHANCE
        self._accepted[row] = ROW_MEMORY * self._accepted[row] + num_accepted
        self._tried[row] = ROW_MEMORY * self._tried[row] + num_tried
        self.of_all.learn(num_accepted, num_tried, 1.0)
        of_key.learn(num_accepted, num_tried, FADING)
        self._priors[row] = max(of_key.value, self._priors[row] if num_accepted else 0.0)

    def _most_of(self, decodes: Decodes) -> IntArray:
        """Return how many drafts each may have at most: none beyond the last token it can have."""
        table, rows = self._table, decodes.rows
        left = table.stop_at[rows] - table.num_output[rows] - table.inflight_samples[rows] - 1
        most: IntArray = np.maximum(0, np.minimum(left, self._limits[rows]))
        return most

    def _chances(self, rows: IntArray) -> FloatArray:
        accepted = self._accepted[rows] + PRIOR_DRAFTS * self._priors[rows]
        chances: FloatArray = accepted / (self._tried[rows] + PRIOR_DRAFTS)
        return chances if self._num_until_retry > 0 else np.maximum(chances, FIRST_CHANCE)

    def _of_key(self, request: Request) -> Chance:
        # Who says what comes is right more often.
        keys, key = self._keys, (request.prediction_key, bool(request.parameters.prediction))
        if (chance := keys.get(key)) is None:
            chance = keys[key] = Chance()
            if len(keys) > MAX_KEYS:
                keys.popitem(last=False)
        keys.move_to_end(key)
        return chance


def scope_of(request: Request) -> int:
    """Return the number of the requests whose answers may be guesses of this one's, see
    `AddSequence`: those of its account, key and prefix salt."""
    names, account = [request.prefix_salt], request.account
    while account is not None:
        names.append(account.name)
        account = account.parent
    known = repr((names, request.prediction_key)).encode()
    return int.from_bytes(hashlib.blake2b(known, digest_size=7).digest()) | 1


def can_draft(request: Request) -> bool:
    """Return whether tokens can be drafted: no grammar and no budget has to see each before."""
    thinking = request.parameters.thinking
    return (
        request.output is RequestOutput.TOKENS
        and request.constraint is None
        and (thinking is None or thinking.budget == MAX_INT32)
    )
