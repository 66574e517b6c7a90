"""Updates from the router that the reader of a request has not yet taken.

News that are not read yet are merged into one pending delta per request, so a slow reader costs no
more than its tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lightserve.errors import InvalidRequest, ProtocolError
from lightserve.frontend.columns import LogprobColumns
from lightserve.frontend.errors import ClientGone, RequestFailed, from_router
from lightserve.messages.common import TokenLogprob
from lightserve.messages.frontend_router import NOTHING_PREDICTED, RequestDelta, Submit
from lightserve.types import SLO, FinishReason, RequestId, RequestOutput

MAX_TOKENS_PER_TURN = 128
"""Most tokens of one completion: 128 completions at a time keep the event loop for some 50 ms."""


QUICK_TOKENS = 16
"""So few tokens of a completion are worked on where they arrive, without a task's turn."""

MAX_TOKEN_ID = 2**31 - 1


class Reader(Protocol):
    """Takes in news of requests, each of which has an index there."""

    is_urgent: bool
    """Whether it goes before others, as it is real-time."""
    can_wait: bool
    """Whether tokens may be read some time later, together with further ones."""

    def note(self, index: int) -> bool:
        """Note news of a request; return whether these are the first to be read."""

    def read(self, now_s: float) -> None:
        """Take in what was noted, or wake the task that does so."""

    def wake(self) -> None:
        """Wake that task."""


@dataclass(slots=True)
class Delta:
    """News of a request since the last time it was asked."""

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    finish_reason: FinishReason | None = None
    logprobs: LogprobColumns | None = None
    """One for each of `token_ids`, if asked for."""
    prompt_logprobs: LogprobColumns | None = None
    """The next ones of the prompt's tokens 1 …"""
    num_cached_tokens: int = 0
    scheduled_slo: SLO | None = None
    """Targets as in `RequestDelta`."""
    vector: bytes = b""
    predicted: tuple[int, int] = NOTHING_PREDICTED
    """Tokens of the prediction as in `RequestDelta`."""
    num_read: int = 0
    """Tokens that `next_part` has returned."""

    def next_part(self) -> Delta:
        """Return what can be worked on in one turn of the event loop, at best all of it."""
        start, num_tokens = self.num_read, len(self.token_ids)
        most = MAX_TOKENS_PER_TURN
        if self.logprobs is not None:
            most = min(most, max(4, self.logprobs.tokens_per_piece // 8))
        self.num_read = stop = min(start + most, num_tokens)
        if stop - start == num_tokens:
            return self
        is_first, is_last = start == 0, stop == num_tokens
        return Delta(
            self.token_ids[start:stop],
            self.finish_reason if is_last else None,
            None if self.logprobs is None else self.logprobs.part(start, stop),
            self.prompt_logprobs if is_first else None,
            self.num_cached_tokens if is_first else 0,
            self.scheduled_slo if is_first else None,
            predicted=self.predicted if is_first else NOTHING_PREDICTED,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of memory, without the prompt's log-probabilities."""
        num_bytes = 4 * len(self.token_ids)
        return num_bytes + (0 if self.logprobs is None else self.logprobs.num_bytes)

    @property
    def is_read(self) -> bool:
        """Whether there are no further parts."""
        return self.num_read == len(self.token_ids)


class Origin(Protocol):
    """The place that live requests come from and answer to: `RouterClient`."""

    def acknowledge(self, request_id: RequestId, num_tokens: int) -> None:
        """Take in that the first `num_tokens` of a request's output have no stop string."""

    def finish(self, request_id: RequestId, num_tokens: int) -> None:
        """End a request with stop strings after `num_tokens`."""

    def abort(self, request_id: RequestId) -> None:
        """End a request in the router."""

    def tell(self, reader: Reader, *, at_once: bool = True) -> None:
        """Have a reader's news read."""


class LiveRequest:
    """A request's news; made by `RouterClient.submit`, read by one `Reader`."""

    def __init__(self, client: Origin, request: Submit, *, num_prompt_tokens: int) -> None:
        self.request_id = request.request_id
        self.reader: Reader | None = None
        self.index = 0
        """Among the reader's requests."""
        self._client = client
        self._sender = request.client
        self._has_stop_strings = request.needs_acknowledgement
        self._num_logprobs = request.sampling.num_logprobs
        self._num_prompt_logprobs = request.sampling.num_prompt_logprobs
        self._num_prompt_left = 0
        """Log-probabilities of the prompt that have not come."""
        if self._num_prompt_logprobs is not None:
            self._num_prompt_left = num_prompt_tokens - 1
        self._wants_vector = request.output is not RequestOutput.TOKENS
        self._has_tokens = False
        self.on_unread: Callable[[], None] | None = None
        """Called when the reader falls behind."""
        self._pending = Delta()
        self._reading: Delta | None = None
        """News that have been read in part."""
        self._is_finished = False
        self._failure: InvalidRequest | RequestFailed | ClientGone | None = None

    @property
    def is_over(self) -> bool:
        """Whether no more news will come."""
        return self._is_finished or self._failure is not None

    @property
    def num_unread_bytes(self) -> int:
        """Bytes of news that have not been read to their end."""
        return self._pending.num_bytes + (self._reading.num_bytes if self._reading else 0)

    @property
    def is_kept_by_router(self) -> bool:
        """Whether the router still has it: it waits for `finish` or `abort`."""
        return self._failure is None and (self._has_stop_strings or not self._is_finished)

    @property
    def is_read_in_part(self) -> bool:
        """Whether there are parts of news of which others were taken."""
        return self._reading is not None

    @property
    def has_news(self) -> bool:
        """Whether there is something to be taken."""
        if self._reading is not None or self._failure is not None or self._pending.token_ids:
            return True
        return self._pending.finish_reason is not None or self._pending.prompt_logprobs is not None

    @property
    def has_quick_news(self) -> bool:
        """Whether they are a few tokens, and it goes on."""
        if self._failure is not None or self._is_finished or self._reading is not None:
            return False
        pending = self._pending
        return 0 < len(pending.token_ids) <= QUICK_TOKENS and pending.logprobs is None

    def take(self) -> Delta:
        """Take the news, a long backlog in parts.

        Raises:
            InvalidRequest, RequestFailed: the request ended without the rest of its answer;
                tokens that came before are delivered first.
            ClientGone: it was aborted.
        """
        if self._reading is None:
            news, self._pending = self._pending, Delta()
        else:
            news = self._reading
        if len(news.token_ids) > QUICK_TOKENS or news.logprobs is not None:
            self._reading, news = news, news.next_part()
            if self._reading.is_read:
                self._reading = None
        if self._failure is None:
            return news
        if news.token_ids and not isinstance(self._failure, ClientGone):
            return news
        raise self._failure

    def acknowledge(self, num_tokens: int) -> None:
        """Say that the first `num_tokens` of the output have no stop string."""
        self._client.acknowledge(self.request_id, num_tokens)

    def finish(self, num_tokens: int) -> None:
        """End a request with stop strings after `num_tokens`, also if it is over by itself."""
        self._is_finished = True
        self._client.finish(self.request_id, num_tokens)

    def abort(self) -> None:
        """End the request here and in the router, and tell its reader no more.

        So it is not part of a cycle with its reader: all of both goes at once.
        """
        if self.is_over:
            self._client.abort(self.request_id)
        else:
            self.end(ClientGone())
        self.reader = self.on_unread = None

    def end(self, failure: InvalidRequest | RequestFailed | ClientGone) -> None:
        """End the request here and in the router with a failure; no effect once it is over."""
        if not self.is_over:
            self.fail(failure)
            self._client.abort(self.request_id)

    def fail(self, failure: InvalidRequest | RequestFailed | ClientGone) -> None:
        """End the request with a failure."""
        self._failure = failure
        if self.reader is not None:
            self.reader.note(self.index)
            self.reader.wake()

    def append_token(self, token_id: int) -> None:
        """Merge a token that comes alone; none after the end. Raises ProtocolError as `append`."""
        is_odd = self._wants_vector or token_id < 0
        if self._num_logprobs is not None or self._num_prompt_left or is_odd:
            self.append(RequestDelta(self.request_id, [token_id]))
        elif not self.is_over:
            is_first, self._has_tokens = not self._has_tokens, True
            self._pending.token_ids.append(token_id)
            self._tell(at_once=is_first)

    def append(self, delta: RequestDelta) -> None:
        """Merge news from the router; none after the end.

        Raises:
            ProtocolError: the router may not say that of this request, which has to be ended.
        """
        if self.is_over:
            return
        pending = self._pending
        self._check(delta)
        pending.token_ids.extend(delta.token_ids)
        if self._num_logprobs is not None and delta.logprobs:
            pending.logprobs = _with(pending.logprobs, delta.logprobs)
        if self._num_prompt_logprobs is not None and delta.prompt_logprobs:
            pending.prompt_logprobs = _with(pending.prompt_logprobs, delta.prompt_logprobs)
        pending.num_cached_tokens += delta.num_cached_tokens
        pending.scheduled_slo = delta.scheduled_slo or pending.scheduled_slo
        pending.vector = delta.vector or pending.vector
        if delta.predicted != NOTHING_PREDICTED:
            right, wrong = delta.predicted
            pending.predicted = pending.predicted[0] + right, pending.predicted[1] + wrong
        if delta.error is not None:
            self._failure = from_router(
                delta.error,
                retry_after_s=delta.retry_after_s,
                max_tokens=delta.max_tokens,
                client=self._sender,
            )
        else:
            pending.finish_reason = delta.finish_reason
            self._is_finished = delta.finish_reason is not None
        self._tell(at_once=True)

    def _tell(self, *, at_once: bool) -> None:
        """Tell the reader, once all of a message has been taken in, that there are news."""
        reader = self.reader
        if reader is not None and (reader.note(self.index) or (at_once and reader.can_wait)):
            self._client.tell(reader, at_once=at_once)
        if self.on_unread is not None and len(self._pending.token_ids) > MAX_TOKENS_PER_TURN:
            self.on_unread()

    def _check(self, delta: RequestDelta) -> None:
        """Check what readers rely on; raises ProtocolError."""
        _check_ids(delta.token_ids)
        if (delta.error is not None) != (delta.finish_reason is FinishReason.ERROR):
            raise ProtocolError(f"finish reason {delta.finish_reason} with error {delta.error}")
        if self._num_logprobs is not None:
            if len(delta.logprobs) != len(delta.token_ids):
                what = f"{len(delta.logprobs)} log-probabilities"
                raise ProtocolError(f"{what} for {len(delta.token_ids)} tokens")
            _check_logprobs(delta.logprobs, self._num_logprobs)
        if self._num_prompt_logprobs is not None:
            _check_logprobs(delta.prompt_logprobs, self._num_prompt_logprobs)
            self._num_prompt_left -= len(delta.prompt_logprobs)
        if bool(delta.vector) != (self._wants_vector and bool(delta.token_ids)):
            raise ProtocolError(f"{len(delta.vector)} bytes of a vector")
        self._has_tokens |= bool(delta.token_ids)
        if self._num_prompt_left < 0 or (self._has_tokens and self._num_prompt_left):
            raise ProtocolError("another number of log-probabilities than the prompt has tokens")
        if not delta.token_ids and delta.error is None and delta.finish_reason is not None:
            raise ProtocolError("an end without a token")


def _check_ids(token_ids: Sequence[int]) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= MAX_TOKEN_ID:
        raise ProtocolError(f"token ids from {min(token_ids)} to {max(token_ids)}")


def _check_logprobs(logprobs: Sequence[TokenLogprob], num_top: int) -> None:
    for logprob in logprobs:
        if not len(logprob.top_token_ids) == len(logprob.top_logprobs) == num_top:
            raise ProtocolError(f"not {num_top} most probable tokens: {logprob}")
        _check_ids(logprob.top_token_ids)


def _with(columns: LogprobColumns | None, logprobs: Sequence[TokenLogprob]) -> LogprobColumns:
    columns = columns or LogprobColumns()
    for logprob in logprobs:
        columns.append(logprob)
    return columns
