"""What nothing was tuned on: the second half of a trace."""

from __future__ import annotations

import pytest

from bench.memory import past_future
from bench.memory.past_future import HELD_BACK, LOADS, UNOPENED, Load, second_half


def test_runs_begin_in_the_middle_of_a_trace(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path_factory.mktemp("traces") / "trace.csv"
    rows = "".join(f"{length},1\n" for length in range(1, 101))
    path.write_text("prompt_tokens,output_tokens\n" + rows)
    monkeypatch.setattr(past_future, "NUM_WARM_UP", 10)
    monkeypatch.setattr(past_future, "NUM_REQUESTS", 20)
    half = second_half(Load("load", str(path), 1000, 1.5))
    assert half.prompt_tokens.tolist() == list(range(51, 81))
    small = second_half(Load("load", str(path), 60, 1.5))
    assert small.prompt_tokens.tolist() == list(range(51, 61))
    assert len(small.clients) == len(small.arrival_s) == len(small.max_tokens) == 10


def test_the_trace_that_was_never_opened_is_none_of_the_others() -> None:
    assert UNOPENED.spec not in {load.spec for load in LOADS.values()}
    assert {UNOPENED.name: UNOPENED} == HELD_BACK
