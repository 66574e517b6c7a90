"""Forced tokens that cut characters and stop strings: the same answer whatever the frontend's lag.

`python -m bench.engine.exact streams` runs as many cases as wanted; here is a bounded share.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from support.forced_streams import ForcedCase, ForcedFrontend, expected_text, forced_cases

from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.messages.frontend_router import MAX_UNACKNOWLEDGED_TOKENS
from lightserve.models.config import load_model_config
from lightserve.tokenization.tokenizer import Tokenizer

TOKENIZER = Tokenizer(BUNDLED_MODEL_DIR)
VOCAB_SIZE = load_model_config(BUNDLED_MODEL_DIR).vocab_size
NUM_CASES = 300


@pytest.fixture(scope="module")
def forced() -> Iterator[ForcedFrontend]:
    with ForcedFrontend() as running:
        yield running


def _by_bytes(text: str, stops: tuple[str, ...], *, includes_stop: bool = False) -> ForcedCase:
    """One token for each byte, and no end by itself."""
    ids = {TOKENIZER.bytes_of(i): i for i in range(VOCAB_SIZE)}
    token_ids = tuple(ids[bytes([byte])] for byte in text.encode(errors="surrogateescape"))
    return ForcedCase(token_ids, stops, includes_stop, None, (1,))


@given(case=forced_cases(TOKENIZER, vocab_size=VOCAB_SIZE))
@example(case=_by_bytes("aa😀b", ("😀b",)))
@example(case=_by_bytes("a" * 60 + "é" + "b" * 60, ("éb",)))
@example(case=_by_bytes("a\udcf0\udc9f", ()))  # ends inside a character
@example(case=_by_bytes("a\udcf0\udc9f", ("\ufffd",)))
@settings(
    max_examples=NUM_CASES, deadline=None, suppress_health_check=[*HealthCheck], database=None
)
def test_answers_are_exact_with_any_lag(forced: ForcedFrontend, case: ForcedCase) -> None:
    forced.check(case)


@pytest.mark.parametrize(
    ("case", "expected", "num_tokens"),
    [
        (_by_bytes("one END two", ("END",)), "one ", 7),
        (_by_bytes("one END two", ("END",), includes_stop=True), "one END", 7),
        (_by_bytes("abc", ("abc", "b")), "a", 2),  # complete first, though it begins later
        (_by_bytes("EEND", ("END",)), "E", 4),
        (_by_bytes("EN EN", ("END",)), "EN EN", 5),  # held back, and never complete
        (_by_bytes("日本", ("本",)), "日", 6),
        (_by_bytes("日本", ("日本",)), "", 6),
    ],
)
def test_where_outputs_end(
    forced: ForcedFrontend, case: ForcedCase, expected: str, num_tokens: int
) -> None:
    answer, *_ = forced.answers(case, (0.0,))
    assert (answer.text, answer.usage["completion_tokens"]) == (expected, num_tokens)
    assert expected_text(TOKENIZER, case)[::2] == (expected, num_tokens)
    assert answer.num_finished == num_tokens  # also where the router ended it itself


def test_a_slow_frontend_stops_the_router_at_the_limit(forced: ForcedFrontend) -> None:
    """And at no lag it goes on: otherwise the limit would not be what stopped it."""
    for lag_s, furthest in ((0.0, 2), (0.05, MAX_UNACKNOWLEDGED_TOKENS)):
        forced.router.num_ahead = 0
        (answer, _) = forced.answers(_by_bytes("a" * 100, ("never",)), (lag_s,))
        assert answer.text == "a" * 100
        assert forced.router.num_ahead <= furthest
    assert forced.router.num_ahead == MAX_UNACKNOWLEDGED_TOKENS
