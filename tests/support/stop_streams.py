"""Forced tokens that split characters and stop strings, through a generation and a script of a
router that keeps the protocol of acknowledgements; what must come out is worked out plainly."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.config import ServeConfig
from lightserve.frontend.generation import Generation, TextDelta
from lightserve.frontend.router_client import NewRequest, RouterClient
from lightserve.frontend.service import load_service
from lightserve.messages.frontend_router import (
    MAX_UNACKNOWLEDGED_TOKENS,
    Acknowledge,
    Finish,
    FrontendMessage,
    RequestDelta,
    RouterMessage,
    RouterWelcome,
    Submit,
    TokenDelta,
)
from lightserve.tokenization.byte_pieces import byte_level_alphabet
from lightserve.tokenization.tokenizer import Tokenizer
from lightserve.types import FinishReason, RequestClass, SamplingParams

TOKENIZER = Tokenizer(BUNDLED_MODEL_DIR)
EOS = TOKENIZER.eos_token_ids[0]
_NAMES = {TOKENIZER.name_of(i): i for i in range(TOKENIZER.largest_ids["model.vocab"] + 1)}
BYTES = {byte: _NAMES[name] for name, byte in byte_level_alphabet().items() if name in _NAMES}
_LETTERS = "abé😀\n"
_WORDS = [603, 441, 294, 602]


@dataclass(frozen=True)
class Case:
    """One output and how it comes."""

    token_ids: list[int]
    stops: list[str]
    include: bool
    ends_by_eos: bool
    cuts: list[int]
    """Sizes of the deltas, over and over."""
    lags: list[int]
    """Turns of the event loop that the frontend sleeps before it reads, over and over."""
    by_token: bool


def _tokens_of(text: str) -> list[int]:
    return [BYTES[byte] for byte in text.encode()]


_TOKENS = st.lists(
    st.one_of(
        st.sampled_from([*_LETTERS]).map(_tokens_of),
        st.sampled_from([[word] for word in _WORDS]),
        st.sampled_from([[BYTES[byte]] for byte in b"\xf0\x9f\xc3\x80a"]),  # parts of characters
    ),
    min_size=1,
    max_size=40,
).map(lambda parts: [token for part in parts for token in part])

CASES = st.builds(
    Case,
    token_ids=_TOKENS,
    stops=st.lists(st.text(_LETTERS + "� ", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
    ends_by_eos=st.booleans(),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    lags=st.lists(st.sampled_from([0, 0, 1, 7, 60]), min_size=1, max_size=5),
    by_token=st.booleans(),
)


@dataclass(frozen=True)
class Expected:
    """What a client must see, however the tokens come."""

    text: str
    num_tokens: int
    finish_reason: FinishReason
    stop: str | None


def expected_of(case: Case) -> Expected:
    """Decode ever longer outputs as a whole, and look for stop strings in each."""
    shown = len(case.token_ids)
    total = shown + case.ends_by_eos
    for count in range(1, total + 1):
        detokenizer = TOKENIZER.detokenizer([BYTES[ord("a")]])
        text = detokenizer.push(case.token_ids[: min(count, shown)])
        if count == total:
            text += detokenizer.finish()
        found = [(text.find(stop), -len(stop), stop) for stop in case.stops if stop in text]
        if found:
            start, _, stop = min(found)
            end = start + len(stop) if case.include else start
            return Expected(text[:end], count, FinishReason.STOP, stop)
    reason = FinishReason.STOP if case.ends_by_eos else FinishReason.LENGTH
    return Expected(text, total, reason, None)


@dataclass
class ScriptedRouter:
    """The router's end of the link: never further ahead than it may be."""

    client: RouterClient
    case: Case
    acknowledged: int = 0
    finished: list[int] = field(default_factory=list)
    needs_acknowledgement: bool = False

    def send(self, message: FrontendMessage) -> None:
        """Note what the frontend says."""
        if isinstance(message, Submit):
            self.needs_acknowledgement = message.needs_acknowledgement
        elif isinstance(message, Acknowledge):
            ((_, num_tokens),) = message.progress
            assert num_tokens > self.acknowledged
            self.acknowledged = num_tokens
        elif isinstance(message, Finish):
            self.finished.append(message.num_tokens)

    async def receive(self) -> RouterMessage:
        """Not used: messages are handed to the client directly."""
        raise NotImplementedError

    def close(self) -> None:
        """Do nothing."""

    async def play(self) -> None:
        """Deliver the tokens; when it may not go on, wait for an acknowledgement."""
        case = self.case
        tokens = [*case.token_ids, *[EOS] * case.ends_by_eos]
        reason = FinishReason.STOP if case.ends_by_eos else FinishReason.LENGTH
        num_sent = number = 0
        while num_sent < len(tokens) and not self.finished:
            size = case.cuts[number % len(case.cuts)]
            if self.needs_acknowledgement:
                size = min(size, self.acknowledged + MAX_UNACKNOWLEDGED_TOKENS - num_sent)
            if size > 0:
                chunk = tokens[num_sent : num_sent + size]
                num_sent += len(chunk)
                number += 1
                end = reason if num_sent == len(tokens) else None
                delta = RequestDelta(0, chunk, end)  # type: ignore[arg-type]
                self.client.on_message(TokenDelta(requests=[delta]))
            await asyncio.sleep(0)


class StopStreams:
    """Runs cases on one service."""

    def __init__(self) -> None:
        self._service = load_service(ServeConfig(), RouterClient())
        self._service.encoder.close()

    def check(self, case: Case) -> None:
        """Play one case and compare."""
        expected = expected_of(case)
        deltas, generation, router = asyncio.run(asyncio.wait_for(self._play(case), 60))
        assert "".join(delta.text for delta in deltas) == expected.text
        assert generation.num_tokens == expected.num_tokens
        assert generation.finish_reason == expected.finish_reason
        assert generation.stop_string == expected.stop
        assert router.finished == ([expected.num_tokens] if case.stops else [])
        if case.by_token:
            pieces = [piece.token_id for delta in deltas for piece in delta.pieces]
            assert pieces == [*case.token_ids, EOS][: expected.num_tokens]
        for delta in deltas:
            delta.text.encode()

    async def _play(self, case: Case) -> tuple[list[TextDelta], Generation, ScriptedRouter]:
        client = RouterClient()
        router = ScriptedRouter(client, case)
        client.attach(router, "boot")
        client.on_message(RouterWelcome(boot_id="boot", num_kv_slots=10**6))
        service = replace(self._service, router=client)
        request = NewRequest(
            prompt_token_ids=[BYTES[ord("a")]],
            max_tokens=len(case.token_ids) + 1,
            eos_token_ids=(EOS,),
            sampling=SamplingParams(),
            request_class=RequestClass.RT,
            arrival_s=0.0,
            stop_strings=tuple(case.stops),
            includes_stop=case.include,
        )
        generation = Generation.start(service, request, by_token=case.by_token)
        playing = asyncio.create_task(router.play())
        deltas: list[TextDelta] = []
        while generation.finish_reason is None:
            for _ in range(case.lags[len(deltas) % len(case.lags)]):
                await asyncio.sleep(0)
            deltas.append(await generation.next_delta())
        playing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await playing
        return deltas, generation, router
