"""Outputs forced token by token through a real frontend, whose router is as far away as wanted.

Time is virtual: a second passes as soon as all tasks wait for it, so a lag costs nothing. The
router obeys the protocol: one token a step, at most MAX_UNACKNOWLEDGED_TOKENS past what has been
acknowledged, no more than `max_tokens`, and news as well as acknowledgements travel `lag_s`.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import selectors
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hypothesis import strategies as st

from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.frontend.router_client import RouterClient
from lightserve.messages.frontend_router import (
    MAX_UNACKNOWLEDGED_TOKENS,
    Abort,
    Acknowledge,
    Finish,
    FrontendMessage,
    RequestDelta,
    Submit,
    TokenDelta,
)
from lightserve.tokenization.tokenizer import Tokenizer
from lightserve.types import FinishReason, RequestId
from support.fake_router import Setup, frontend, made_logprobs, sse_data, token_delta

STEP_S = 0.001
LAGS_S = (0.0, 0.005, 0.05)


class _Waiting(selectors.DefaultSelector):
    """Never waits for time: hands it to the loop's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now_s += timeout or 0.0
        return super().select(None if timeout is None else 0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop in which timers are due as soon as nothing else is to be done."""

    def __init__(self) -> None:
        self._waiting = _Waiting()
        super().__init__(self._waiting)

    def time(self) -> float:
        """Return virtual seconds."""
        return self._waiting.now_s


@dataclass(frozen=True)
class ForcedCase:
    """One output, and how it is asked for."""

    token_ids: tuple[int, ...]
    """What the model says, EOS included if it ends by itself."""
    stops: tuple[str, ...]
    includes_stop: bool
    num_logprobs: int | None
    merges: tuple[int, ...]
    """How many steps' news arrive in one frame, in turn."""


@dataclass
class _Running:
    """A request at the router."""

    num_acknowledged: int = 0
    end: Finish | Abort | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)


class DistantRouter:
    """The router's end of an `AsyncLink`."""

    num_rejected = 0

    def __init__(self, client: RouterClient) -> None:
        self._client = client
        self.case: ForcedCase | None = None
        self.lag_s = 0.0
        self.ends: dict[RequestId, Finish | Abort] = {}
        self.num_ahead = 0
        """The furthest any request ran past its last acknowledgement."""
        self._running: dict[RequestId, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Timers due at the same time come in any order, messages do not.
        self._to_router: deque[FrontendMessage] = deque()
        self._to_frontend: deque[TokenDelta] = deque()

    def send(self, message: FrontendMessage) -> None:
        """Take in a message, a lag later."""
        self._to_router.append(message)
        loop = asyncio.get_running_loop()
        loop.call_later(self.lag_s, lambda: self._on_message(self._to_router.popleft()))

    async def receive(self) -> Any:
        raise NotImplementedError("messages are handed to the client directly")

    def close(self) -> None:
        pass

    async def settled(self) -> None:
        """Wait until every request has ended here too."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.sleep(2 * self.lag_s + STEP_S)

    def _on_message(self, message: FrontendMessage) -> None:
        if isinstance(message, Submit):
            running = self._running[message.request_id] = _Running()
            task = asyncio.get_running_loop().create_task(self._play(message, running))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(message, Acknowledge):
            for request_id, num_tokens in message.progress:
                if (known := self._running.get(request_id)) is not None:
                    assert num_tokens > known.num_acknowledged, "acknowledged twice"
                    known.num_acknowledged = num_tokens
                    known.news.set()
        elif isinstance(message, Finish | Abort):
            assert message.request_id not in self.ends, "ended twice"
            self.ends[message.request_id] = message
            if (known := self._running.get(message.request_id)) is not None:
                known.end = message
                known.news.set()

    async def _play(self, submit: Submit, running: _Running) -> None:
        assert self.case is not None
        tokens = self.case.token_ids[: submit.max_tokens]
        is_whole = len(tokens) == len(self.case.token_ids)
        frame: list[RequestDelta] = []
        num_frames = 0
        for number, token_id in enumerate(tokens):
            while submit.needs_acknowledgement and running.end is None:
                ahead = number - running.num_acknowledged
                if ahead < MAX_UNACKNOWLEDGED_TOKENS:
                    self.num_ahead = max(self.num_ahead, ahead + 1)
                    break
                self._deliver(frame)
                running.news.clear()
                await running.news.wait()
            if running.end is not None:
                break
            await asyncio.sleep(STEP_S)
            is_last = number == len(tokens) - 1
            eos = is_whole and token_id in submit.eos_token_ids
            end = FinishReason.STOP if eos else FinishReason.LENGTH
            frame.append(
                RequestDelta(
                    submit.request_id,
                    [token_id],
                    end if is_last else None,
                    logprobs=made_logprobs(submit.sampling.num_logprobs, number),
                )
            )
            if len(frame) >= self.case.merges[num_frames % len(self.case.merges)]:
                num_frames += 1
                self._deliver(frame)
        self._deliver(frame)

    def _deliver(self, frame: list[RequestDelta]) -> None:
        if frame:
            self._to_frontend.append(token_delta(frame))
            frame.clear()
            loop = asyncio.get_running_loop()
            loop.call_at(self._arrival_s(loop.time()), self._arrive)

    def _arrive(self) -> None:
        self._client.on_message(self._to_frontend.popleft())

    def _arrival_s(self, now_s: float) -> float:
        """Return when the frontend looks at its link again: a slow one takes all that is there."""
        return now_s if self.lag_s == 0.0 else (now_s // self.lag_s + 1.0) * self.lag_s


class Answer(NamedTuple):
    """A response without what differs from request to request."""

    text: str
    finish_reason: str
    usage: dict[str, Any]
    logprobs: dict[str, Any] | None
    num_finished: int | None
    """What `Finish` told the router, if there were stop strings."""


def expected_text(tokenizer: Tokenizer, case: ForcedCase) -> tuple[str, str, int]:
    """Return text, finish reason and number of tokens, by searching everything anew each time."""
    data = b""
    before = ""
    is_eos = case.token_ids[-1] in tokenizer.eos_token_ids
    for number, token_id in enumerate(case.token_ids):
        is_last = number == len(case.token_ids) - 1
        data += b"" if is_last and is_eos else tokenizer.bytes_of(token_id)
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(data, is_last)
        assert text.startswith(before)
        places = [(text.find(stop), -len(stop)) for stop in case.stops if stop in text]
        if places:
            start, negative_len = min(places)
            end = start - negative_len if case.includes_stop else start
            return text[:end], "stop", number + 1
        before = text
    return before, "stop" if is_eos else "length", len(case.token_ids)


class ForcedFrontend:
    """A frontend in virtual time, used for many cases; a context manager."""

    def __enter__(self) -> ForcedFrontend:
        self._loop = VirtualTimeLoop()
        self._broken: list[dict[str, Any]] = []
        """What callbacks raised: the router's assertions."""
        self._loop.set_exception_handler(lambda _, context: self._broken.append(context))
        self._context = frontend()
        self._setup: Setup = self._loop.run_until_complete(self._context.__aenter__())
        client = self._setup.service.router
        self.router = DistantRouter(client)
        connection = client._connection
        assert connection is not None
        connection.link = self.router
        self.tokenizer = self._setup.service.model.tokenizer
        self.eos_token_ids = self.tokenizer.eos_token_ids
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run_until_complete(self._context.__aexit__(None, None, None))
        self._loop.close()

    def answers(self, case: ForcedCase, lags_s: Sequence[float] = LAGS_S) -> list[Answer]:
        """Return the case's answers, streamed and whole, with each lag."""
        return [self._answer(case, lag_s, stream) for lag_s in lags_s for stream in (False, True)]

    def check(self, case: ForcedCase) -> bool:
        """Assert that all answers are what a naive search says; return whether a string stopped."""
        text, reason, num_tokens = expected_text(self.tokenizer, case)
        answers = self.answers(case)
        assert answers[0].text == text
        assert answers[0].finish_reason == reason
        assert answers[0].usage["completion_tokens"] == num_tokens
        assert answers[0].num_finished == (num_tokens if case.stops else None)
        if case.num_logprobs is not None:
            assert answers[0].logprobs is not None
            assert len(answers[0].logprobs["tokens"]) == num_tokens
        assert all(answer == answers[0] for answer in answers), answers
        assert not self._broken, self._broken
        assert self.router.num_ahead <= MAX_UNACKNOWLEDGED_TOKENS

        return reason == "stop" and case.token_ids[num_tokens - 1] not in self.eos_token_ids

    def _answer(self, case: ForcedCase, lag_s: float, stream: bool) -> Answer:
        return self._loop.run_until_complete(self._ask(case, lag_s, stream))

    async def _ask(self, case: ForcedCase, lag_s: float, stream: bool) -> Answer:
        router, service = self.router, self._setup.service
        router.case, router.lag_s = case, lag_s
        router.ends.clear()
        body = {
            "model": BUNDLED_MODEL_NAME,
            "prompt": [5, 6, 7],
            "max_tokens": len(case.token_ids),
            "stop": list(case.stops),
            "include_stop_str_in_output": case.includes_stop and bool(case.stops),
            "logprobs": case.num_logprobs,
            "stream": stream,
            "stream_options": {"include_usage": True} if stream else None,
        }
        response = await self._setup.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        await router.settled()
        assert service.router.num_live == 0
        assert service.in_flight.count == 0
        (end,) = router.ends.values() or (None,)
        assert not isinstance(end, Abort)
        num_finished = None if end is None else end.num_tokens
        if stream:
            return _joined(sse_data(response.text), num_finished)
        whole = json.loads(response.text)
        (choice,) = whole["choices"]
        return Answer(
            choice["text"],
            choice["finish_reason"],
            whole["usage"],
            choice["logprobs"],
            num_finished,
        )


def _joined(events: list[Any], num_finished: int | None) -> Answer:
    *chunks, usage, done = events
    assert done == "[DONE]"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons[:-1] == [None] * (len(choices) - 1)
    logprobs: dict[str, list[Any]] = {}
    for choice in choices:
        for key, values in (choice["logprobs"] or {}).items():
            logprobs.setdefault(key, []).extend(values)
    text = "".join(choice["text"] for choice in choices)
    return Answer(text, reasons[-1], usage["usage"], logprobs or None, num_finished)


ALPHABET = "ab é日😀"


def forced_cases(tokenizer: Tokenizer, *, vocab_size: int) -> st.SearchStrategy[ForcedCase]:
    """Outputs whose characters and stop strings are cut anywhere, with some bytes that are none."""
    ids = {data: i for i in range(vocab_size) if (data := tokenizer.bytes_of(i))}
    longest = max(map(len, ids))

    @st.composite
    def case(draw: st.DrawFn) -> ForcedCase:
        text = draw(st.text(ALPHABET, min_size=1, max_size=30))
        data = text.encode()
        if draw(st.booleans()):
            at = draw(st.integers(0, len(data)))
            data = data[:at] + draw(st.binary(max_size=3)) + data[at:]
        token_ids = []
        while data:
            fitting = [n for n in range(1, min(longest, len(data)) + 1) if data[:n] in ids]
            num_bytes = draw(st.sampled_from(fitting))
            token_ids.append(ids[data[:num_bytes]])
            data = data[num_bytes:]
        if draw(st.booleans()):
            token_ids.append(tokenizer.eos_token_ids[0])
        part = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 8)).map(
            lambda cut: text[cut[0] : cut[0] + cut[1]]
        )
        stop = part | part.map(lambda found: found + "b") | st.text(ALPHABET, min_size=1)
        return ForcedCase(
            token_ids=tuple(token_ids),
            stops=tuple(draw(st.lists(stop, max_size=4))),
            includes_stop=draw(st.booleans()),
            num_logprobs=draw(st.sampled_from((None, 0, 2))),
            merges=tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))),
        )

    return case()
