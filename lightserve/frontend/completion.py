"""From a validated request to text: submit, detokenise, find stop strings, count.

Several completions of one HTTP request are read as one sequence of news.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from lightserve.errors import InvalidRequest
from lightserve.frontend.columns import LogprobColumns, Piece
from lightserve.frontend.errors import ClientGone, RequestFailed
from lightserve.frontend.json_body import StrictModel
from lightserve.frontend.news import Delta, LiveRequest
from lightserve.frontend.request_options import Prepared
from lightserve.messages.frontend_router import NOTHING_PREDICTED
from lightserve.metrics.requests import RequestMetrics
from lightserve.tokenization.detokenizer import StopMatcher, Stopped
from lightserve.tokenization.thought import Thought
from lightserve.tokenization.tokenizer import Tokenizer
from lightserve.types import SLO, FinishReason, RequestClass

# ----------------------------------------------------------------------
# From a validated request to text: submit, detokenise, find stop strings, count.


class TextDelta(NamedTuple):
    """News of one completion. At least one of the fields is not empty."""

    text: str
    """Valid UTF-8 by itself."""
    pieces: tuple[Piece, ...]
    """The tokens behind it; given only if asked for."""
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Usage:
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose KV was there already."""
    reasoning_tokens: int = 0
    """Tokens of the reasoning, without the tags around it."""
    accepted_prediction_tokens: int = 0
    """Tokens of a prediction that were guessed and right; each needed no step of its own, …"""
    rejected_prediction_tokens: int = 0
    """… and that were wrong."""


class Completion:
    """One completion as it comes; made by `Service.start`, read by one task."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prepared: Prepared,
        live: LiveRequest,
        metrics: RequestMetrics,
        *,
        by_token: bool,
    ) -> None:
        self.live = live
        self.request, self.options = request, options = prepared
        self._detokenizer = tokenizer.detokenizer(options.prompt_token_ids)
        self._eos_token_ids = frozenset(request.eos_token_ids)
        self._stops = (
            StopMatcher(options.stop_strings, include=options.includes_stop)
            if options.stop_strings
            else None
        )
        self._by_token = by_token
        self._metrics = metrics
        self._thought: Thought | None = None
        if options.thinking is not None:
            self._thought = Thought(options.thinking, tokenizer.bytes_of)
        self._num_cached_tokens = 0
        self._predicted = NOTHING_PREDICTED
        self.num_tokens = 0
        self.num_bytes = 0
        """About as many as an answer that is kept has in memory, so far."""
        self.prompt_logprobs = LogprobColumns()
        """Log-probabilities of the prompt's tokens 1 …, if asked for; there with the first text."""
        self.vector = b""
        """float32, of a request for it; there with the end."""
        self.first_token_s: float | None = None
        """Monotonic."""
        self.finish_reason: FinishReason | None = None
        self.scheduled_slo: SLO | None = None
        """Targets that schedule it, where it asked for others; known with the first token."""
        self.stop_string: str | None = None
        """The stop string that ended it, if one did."""
        self._last_token_id: int | None = None

    @property
    def usage(self) -> Usage:
        """Tokens so far, the one that ended it included."""
        num_prompt_tokens = len(self.options.prompt_token_ids)
        num_reasoning = 0 if self._thought is None else self._thought.num_tokens
        return Usage(
            num_prompt_tokens,
            self.num_tokens,
            self._num_cached_tokens,
            num_reasoning,
            *self._predicted,
        )

    @property
    def matched_stop(self) -> str | int | None:
        """The stop string or the token that ended it; None: a limit did."""
        is_stopped = self.finish_reason is FinishReason.STOP
        return self.stop_string or (self._last_token_id if is_stopped else None)

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or token that the request named and that ended it; None: another end."""
        matched = self.matched_stop
        is_asked_for = isinstance(matched, str) or matched in self.options.stop_token_ids
        return matched if is_asked_for else None

    @property
    def missed(self) -> list[str] | None:
        """Targets that it has missed, once it is over."""
        return self._metrics.missed

    @property
    def num_unread_bytes(self) -> int:
        """Bytes of news that have not been read."""
        return self.live.num_unread_bytes

    def watch(self, on_unread: Callable[[], None]) -> None:
        """Have this called when its reader falls behind."""
        self.live.on_unread = on_unread

    def abort(self) -> None:
        """End it; no effect once it is over."""
        self._metrics.on_abort()
        self.live.abort()

    def end(self, failure: RequestFailed) -> None:
        """End it with a failure, which `next_delta` raises; no effect once it is over."""
        if not self.live.is_over:
            self._metrics.on_failure(failure.code)
            self.live.end(failure)

    def take(self, now_s: float) -> TextDelta | None:
        """Take the news that are there; None: they have nothing to show.

        The last ones have the finish reason, after which there are no more.

        Raises:
            InvalidRequest, RequestFailed: it ended without the rest of its answer.
            ClientGone: it was aborted.
        """
        try:
            news = self.live.take()
        except (InvalidRequest, RequestFailed) as failure:
            self._metrics.on_failure(failure.code)
            raise
        if news.prompt_logprobs is not None:
            self.prompt_logprobs.extend(news.prompt_logprobs)
            self.num_bytes += news.prompt_logprobs.num_bytes
        if news.vector:
            self.vector = news.vector
            self.num_bytes += len(news.vector)
            self._metrics.on_tokens(0, now_s)
        self._num_cached_tokens += news.num_cached_tokens
        right, wrong = news.predicted
        self._predicted = self._predicted[0] + right, self._predicted[1] + wrong
        self.scheduled_slo = news.scheduled_slo or self.scheduled_slo
        if news.token_ids and self.first_token_s is None:
            self.first_token_s = now_s
        num_before = self.num_tokens
        delta = self._take(news)
        self.num_bytes += len(delta.text)
        if self._by_token:
            self.num_bytes += len(delta.text) + 8 * len(news.token_ids)
            self.num_bytes += 0 if news.logprobs is None else news.logprobs.num_bytes
        if self.num_tokens > num_before:
            self._metrics.on_tokens(self.num_tokens - num_before, now_s)
        if self.finish_reason is not None:
            self._metrics.on_finish(self.finish_reason)
        is_empty = not (delta.text or delta.pieces) and delta.finish_reason is None
        return None if is_empty else delta

    def _take(self, news: Delta) -> TextDelta:
        """Take in tokens up to a stop string or the end."""
        if self.options.discards_output:
            self.finish_reason = news.finish_reason and FinishReason.LENGTH
            return TextDelta("", (), self.finish_reason)
        if self._stops is None and not self._by_token:
            self.num_tokens += len(news.token_ids)
            self.finish_reason = news.finish_reason
            self._last_token_id = news.token_ids[-1] if news.token_ids else self._last_token_id
            text = self._text_of(news.token_ids)
            return TextDelta(text + self._tail(), (), self.finish_reason)
        return self._take_by_token(news)

    def _text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of more tokens; half a character at which a budget is used up has
        none."""
        visible, thought, text = self._visible(token_ids), self._thought, ""
        if thought is not None and not thought.is_over:
            for place, token_id in enumerate(token_ids):
                if not thought.is_over and thought.consume(token_id):
                    text = self._detokenizer.push(visible[:place])
                    visible = visible[place:]
                    self._detokenizer.finish()
        return text + self._detokenizer.push(visible)

    def _visible(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens without the one that only ends the text."""
        ends = self.finish_reason is FinishReason.STOP and token_ids
        return token_ids[:-1] if ends and token_ids[-1] in self._eos_token_ids else token_ids

    def _take_by_token(self, news: Delta) -> TextDelta:
        """Take in token by token, so that a stop string is found wherever deltas are cut."""
        texts: list[str] = []
        pieces: list[Piece] = []
        logprobs = itertools.repeat(None) if news.logprobs is None else iter(news.logprobs)
        for index, (token_id, logprob) in enumerate(zip(news.token_ids, logprobs, strict=False)):
            self.num_tokens += 1
            self._last_token_id = token_id
            is_last = index == len(news.token_ids) - 1
            self.finish_reason = news.finish_reason if is_last else None
            text = self._text_of([token_id]) + self._tail()
            if self._by_token:
                pieces.append(Piece(token_id, text, logprob))
            texts.append(self._look_for_stops(text))
            if self.stop_string is not None:
                break
        if self._stops is not None:
            if self.finish_reason is None:
                self.live.acknowledge(self.num_tokens)
            else:
                self.live.finish(self.num_tokens)
        return TextDelta("".join(texts), tuple(pieces), self.finish_reason)

    def _look_for_stops(self, text: str) -> str:
        """Return what of a token's text can be shown now."""
        if self._stops is None:
            return text
        found = self._stops.push(text)
        if isinstance(found, Stopped):
            self.stop_string = found.stop
            self.finish_reason = FinishReason.STOP
            return found.text
        return found if self.finish_reason is None else found + self._stops.finish()

    def _tail(self) -> str:
        return "" if self.finish_reason is None else self._detokenizer.finish()


# ----------------------------------------------------------------------
# Several completions of one HTTP request, read as one sequence of news.


LONG_PROMPT_TOKENS = 4096
STARTS_PER_TURN = 8
"""Completions of a request that are submitted in one turn of the event loop: with all biases and
allowed ids that one may have each takes half a millisecond."""

News = tuple[int, TextDelta]
"""The index of a completion, and what is new of it."""


class Sink(Protocol):
    """Where news can go at once."""

    @property
    def is_open(self) -> bool:
        """Whether nothing that went there before is still waiting."""

    def take(self, news: Sequence[News], now_s: float) -> None:
        """Take in news of completions that go on."""


class Choices:
    """All completions of a request, in the order of their indices; made by `start`.

    One task reads them, and while it waits, what needs no more than to be written goes straight to
    its `Sink` (see `read`): a turn of a task for each token would cost more than the token.
    """

    def __init__(self, completions: Sequence[Completion], *, per_prompt: int) -> None:
        self.completions = tuple(completions)
        request = self.first.request
        self.is_urgent = request.request_class is RequestClass.RT
        self.can_wait = not (self.is_urgent or request.needs_acknowledgement)
        self._per_prompt = per_prompt
        self._num_open = len(completions)
        self._is_aborted = False
        self._ready: dict[int, None] = {}
        """Indices of those with news, those that are to be read first in front."""
        self._left: deque[News] = deque()
        """News that were taken, but not by the sink."""
        self._bug: Exception | None = None
        self._sink: Sink | None = None
        """While the task waits, if it has one."""
        self._awake = asyncio.Event()
        for index, completion in enumerate(self.completions):
            completion.live.reader, completion.live.index = self, index
            if completion.live.has_news:
                self._ready[index] = None

    @classmethod
    async def start(
        cls,
        start: Callable[[Prepared, bool], Completion],
        requests: Sequence[Prepared],
        *,
        per_prompt: int,
    ) -> Choices:
        """Submit all requests or none; `per_prompt` of them share a prompt.

        `start` submits one; it is told whether that is the first.

        Raises:
            InvalidRequest, RequestFailed: as `start` does.
        """
        started: list[Completion] = []
        try:
            for request in requests:
                started.append(start(request, not started))
                is_long = len(request[1].prompt_token_ids) > LONG_PROMPT_TOKENS  # each is copied
                if is_long or len(started) % STARTS_PER_TURN == 0:
                    await asyncio.sleep(0)  # others have their turn
        except BaseException:
            for completion in started:
                completion.abort()
            raise
        return cls(started, per_prompt=per_prompt)

    @property
    def is_over(self) -> bool:
        """Whether every completion has its finish reason, and it has been read."""
        return self._num_open == 0

    @property
    def first(self) -> Completion:
        """The completion with index 0."""
        return self.completions[0]

    @property
    def usage(self) -> Usage:
        """Tokens of all completions; a prompt counts once, however many completions it has."""
        usages = [completion.usage for completion in self.completions]
        prompts = usages[:: self._per_prompt]
        return Usage(
            sum(usage.prompt_tokens for usage in prompts),
            sum(usage.completion_tokens for usage in usages),
            sum(usage.cached_tokens for usage in prompts),
            sum(usage.reasoning_tokens for usage in usages),
            sum(usage.accepted_prediction_tokens for usage in usages),
            sum(usage.rejected_prediction_tokens for usage in usages),
        )

    @property
    def num_bytes(self) -> int:
        """About as many as the answer, if it is kept, has in memory."""
        return sum(completion.num_bytes for completion in self.completions)

    @property
    def num_unread_bytes(self) -> int:
        """Bytes of news that have not been read."""
        return sum(completion.num_unread_bytes for completion in self.completions)

    async def next_news(self, sink: Sink | None = None) -> News:
        """Wait for news of any completion that `sink` has not taken.

        Raises:
            InvalidRequest, RequestFailed: one of them failed.
            ClientGone: they were aborted.
        """
        while True:
            self.check_wanted()
            if self._bug is not None:
                raise self._bug
            if not self._left and not self._ready:
                self._awake.clear()
                self._sink = sink
                try:
                    await self._awake.wait()
                finally:
                    self._sink = None
                continue
            if not self._left:
                first = self.completions[next(iter(self._ready))]
                if first.live.is_read_in_part:
                    await asyncio.sleep(0)  # between the parts, others have their turn
                    self.check_wanted()
                self._take_one(time.monotonic())
            if self._left:
                index, delta = self._left.popleft()
                self._num_open -= delta.finish_reason is not None
                return index, delta

    def _take_one(self, now_s: float) -> None:
        """Take the news that come first."""
        index = next(iter(self._ready))
        del self._ready[index]
        live = self.completions[index].live
        delta = self.completions[index].take(now_s)
        if live.has_news:
            self._ready[index] = None
        if delta is not None:
            self._left.append((index, delta))

    def note(self, index: int) -> bool:
        """Note news of a completion; return whether there were none of any."""
        is_first = not self._ready
        self._ready[index] = None
        return is_first

    def read(self, now_s: float) -> None:
        """Hand news to the sink, if nothing else is to be done with them, or wake the task."""
        sink = self._sink
        if sink is None or self._awake.is_set() or not sink.is_open:
            self._awake.set()
            return
        for index in self._ready:
            if not self.completions[index].live.has_quick_news:
                self._awake.set()
                return
        ready, self._ready = self._ready, {}
        try:
            for index in ready:
                delta = self.completions[index].take(now_s)
                if delta is not None:
                    self._left.append((index, delta))
                    if delta.finish_reason is not None:  # a stop string
                        self._awake.set()
            if self._left and not self._awake.is_set():
                sink.take(self._left, now_s)
                self._left.clear()
        except Exception as bug:  # it is this request's alone
            self._bug = bug
            self._awake.set()

    def wake(self) -> None:
        """Wake the task that waits for news."""
        self._awake.set()

    def check_wanted(self) -> None:
        """Raise ClientGone if they were aborted."""
        if self._is_aborted:
            raise ClientGone

    def abort(self) -> None:
        """End all of them, and what waits for news; no effect on those that are over."""
        self._is_aborted = True
        for completion in self.completions:
            completion.abort()
        self._awake.set()

    def end(self, failure: RequestFailed) -> None:
        """End with a failure those that are not over; `next_news` raises it."""
        for completion in self.completions:
            completion.end(failure)


# ----------------------------------------------------------------------
# What an answer says of targets that no server could have met: `slo`, on every route.
#
# It is there only if the router schedules by others than were asked for. A whole
# answer has it once; in a stream the first event of each choice has it.


_DIGITS = 3


class TargetsObject(StrictModel):
    """Targets in the units of a request's `slo`; those that there are."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    mtpot_ms: float | None = None
    completion_s: float | None = None


class RaisedSLOObject(StrictModel):
    """`slo` of an answer."""

    asked: TargetsObject
    """By the request, or else by the server for it; attainment is judged by these."""
    scheduled: TargetsObject
    """Targets that it is scheduled by."""


def raised_slo(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the field `slo` of an answer with these completions, if one has other targets.

    Of several, the loosest targets count.
    """
    if all(completion.scheduled_slo is None for completion in completions):
        return {}
    asked = completions[0].request.slo  # one request, one set of targets
    scheduled = [_targets(g.scheduled_slo or asked) for g in completions]
    loosest = {name: max(slo[name] for slo in scheduled) for name in scheduled[0]}
    return {"slo": {"asked": _targets(asked), "scheduled": loosest}}


def _targets(slo: SLO) -> dict[str, float]:
    values = {name: getattr(slo, name) for name in SLO.__struct_fields__}
    return {name: round(value, _DIGITS) for name, value in values.items() if value is not None}
