"""Events that go into `Scheduler` besides step results, and messages that come out."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from lightserve.messages.common import (
    NO_SIZES,
    GraphSizes,
    Int32Array,
    StepCoefficients,
    TokenLogprob,
    pack_int32,
    pack_int64,
)
from lightserve.messages.frontend_router import (
    NOTHING_PREDICTED,
    Abort,
    Acknowledge,
    BatchDue,
    ErrorCode,
    Finish,
    RequestDelta,
    Submit,
    TokenDelta,
)
from lightserve.messages.images import EncoderWork
from lightserve.messages.router_worker import RowResult
from lightserve.router.request import Request
from lightserve.router.request_table import RequestTable, Rows
from lightserve.types import FinishReason, FrontendId


@dataclass(frozen=True, slots=True)
class FromFrontend:
    """A message of a frontend, with its id."""

    frontend_id: FrontendId
    message: Submit | Acknowledge | Finish | Abort | BatchDue


@dataclass(frozen=True, slots=True)
class FrontendGone:
    """A frontend died or was replaced: all its requests are to be forgotten."""

    frontend_id: FrontendId


@dataclass(frozen=True, slots=True)
class WorkersReady:
    """A fresh worker group can execute plans; its pool is empty."""

    num_kv_slots: int
    num_host_slots: int = 0
    """Tokens that the host pool of each rank holds."""
    step_cost: StepCoefficients | None = None
    """Measured step times of the workers."""
    overlaps_copies: bool = False
    """Whether copies run beside steps (`WorkerHello`)."""
    max_num_batched_tokens: int | None = None
    """Most tokens of a step; None: as configured."""
    graph_sizes: GraphSizes = NO_SIZES
    """Sizes to which steps are padded (`WorkerHello`)."""
    num_state_slots: int = 0
    """Slots that the state of a sequence takes (`WorkerHello`)."""
    encoder: EncoderWork | None = None
    """The work of their encoder of images."""
    num_prefix_slots: int = 0
    """Tokens of prefixes that it holds besides (`WorkerHello`)."""


@dataclass(frozen=True, slots=True)
class WorkersGone:
    """The worker group is lost with all its KV; plans in flight will never be answered."""


@dataclass(frozen=True, slots=True)
class StepTimesKnown:
    """The workers have measured their steps since they were ready."""

    step_cost: StepCoefficients
    max_num_batched_tokens: int
    """Most tokens of a step."""


SchedulerEvent = FromFrontend | FrontendGone | WorkersReady | StepTimesKnown | WorkersGone


@dataclass(frozen=True, slots=True)
class Outgoing:
    """News for one frontend."""

    frontend_id: FrontendId
    message: TokenDelta


# Collects one step's news: one frame per frontend.

MAX_DELTAS = 8192
"""In one message: with twenty log-probabilities each, and a step's of prompts, 3 MB."""


class DeltaBatch:
    """News by frontend, in the order in which it was added."""

    def __init__(self) -> None:
        self._by_frontend: defaultdict[FrontendId, list[RequestDelta]] = defaultdict(list)
        self._plain: dict[FrontendId, tuple[Rows, Int32Array]] = {}

    def add_tokens(
        self,
        request: Request,
        token_ids: list[int],
        reason: FinishReason | None,
        result: RowResult,
        predicted: tuple[int, int],
    ) -> None:
        """Confirmed tokens that are not among its output yet, perhaps the last ones.

        `result` may have more tokens than these, and says the rest of them; `predicted` is as in
        `RequestDelta`.
        """
        (frontend_id, request_id), logprobs = request.key, result.logprobs
        if not request.output_token_ids:
            delta = RequestDelta(
                request_id,
                token_ids,
                reason,
                num_cached_tokens=request.num_cached_tokens or 0,
                logprobs=logprobs[: len(token_ids)],
                scheduled_slo=request.scheduled_slo,
                vector=result.vector,
            )
        elif logprobs:
            delta = RequestDelta(request_id, token_ids, reason, logprobs=logprobs[: len(token_ids)])
        elif predicted is not NOTHING_PREDICTED:
            delta = RequestDelta(request_id, token_ids, reason, predicted=predicted)
        else:  # as a rule: this is done for every token of every request
            delta = RequestDelta(request_id, token_ids, reason)
        self._by_frontend[frontend_id].append(delta)

    def add_plain(self, table: RequestTable, rows: Rows, token_ids: Int32Array) -> None:
        """Confirmed tokens, one of each row, that are news to nothing but their frontends."""
        frontend_ids = table.frontend_id[rows]
        if (frontend_ids == frontend_ids[0]).all():
            self._plain[FrontendId(int(frontend_ids[0]))] = table.request_id[rows], token_ids
            return
        for frontend_id in np.unique(frontend_ids).tolist():
            own = frontend_ids == frontend_id
            self._plain[FrontendId(frontend_id)] = table.request_id[rows[own]], token_ids[own]

    def add_prompt_logprobs(self, request: Request, logprobs: list[TokenLogprob]) -> None:
        """How probable the next tokens of the prompt are."""
        self._add(request, RequestDelta(request.key.request_id, [], prompt_logprobs=logprobs))

    def fail(
        self, request: Request, error: ErrorCode, *, retry_after_s: float = 0.0, max_tokens: int = 0
    ) -> None:
        """The end of a request without its whole answer."""
        delta = RequestDelta(
            request.key.request_id,
            [],
            FinishReason.ERROR,
            error,
            retry_after_s=retry_after_s,
            max_tokens=max_tokens,
        )
        self._add(request, delta)

    def _add(self, request: Request, delta: RequestDelta) -> None:
        self._by_frontend[request.key.frontend_id].append(delta)

    def outgoing(self) -> list[Outgoing]:
        """Return one message per frontend that has news, several only if there are very many."""
        news: list[Outgoing] = []
        for frontend_id in {**self._plain, **self._by_frontend}:
            requests = self._by_frontend.get(frontend_id, [])
            plain = self._plain.get(frontend_id)
            if plain is not None:
                delta = TokenDelta(
                    request_ids=pack_int64(plain[0]),
                    token_ids=pack_int32(plain[1]),
                    requests=requests[:MAX_DELTAS],
                )
                news.append(Outgoing(frontend_id, delta))
            news += [
                Outgoing(frontend_id, TokenDelta(requests=requests[start : start + MAX_DELTAS]))
                for start in range(0 if plain is None else MAX_DELTAS, len(requests), MAX_DELTAS)
            ]
        return news
