"""What copies cost: a fixed time and one per token, whatever sizes were seen."""

from __future__ import annotations

import itertools

import pytest

from lightserve.router.step_cost import CopyCost

PER_COPY_S, PER_TOKEN_S = 1e-4, 21e-6


def learnt(*copies: tuple[int, int]) -> CopyCost:
    """Return what was learnt from copies of so many tokens, behind so many."""
    cost = CopyCost()
    for num_tokens, num_ahead in copies:
        cost.observe(num_tokens, PER_COPY_S + PER_TOKEN_S * (num_tokens + num_ahead), num_ahead)
    return cost


def test_nothing_is_known_at_first_and_steps_without_copies_teach_nothing() -> None:
    cost = CopyCost()
    cost.observe(0, 0.0, 100)
    assert cost.predict(700) == 0.0


@pytest.mark.parametrize("num_tokens", [1, 10, 1000])
def test_the_rate_is_learnt_from_copies_of_several_sizes(num_tokens: int) -> None:
    sizes = [1, 700, 16, 300, 2, 8, 40, 512]
    cost = learnt(*((size, 0) for size in itertools.islice(itertools.cycle(sizes), 60)))
    true_s = PER_COPY_S + PER_TOKEN_S * num_tokens
    assert cost.predict(num_tokens) == pytest.approx(true_s, rel=0.05, abs=1e-4)


def test_what_is_copied_ahead_is_not_put_down_to_the_tokens_behind_it() -> None:
    cost = learnt(*((1 + number % 16, 16 * (number % 17)) for number in range(100)))
    assert cost.predict(700) == pytest.approx(PER_COPY_S + 700 * PER_TOKEN_S, rel=0.1)


def test_small_copies_alone_never_make_large_ones_look_dear() -> None:
    """Loads would stay untried for ever: 700 tokens cost 15 ms, not the 440 ms of 700 copies."""
    cost = CopyCost()
    for number in range(200):
        num_tokens = 1 + number % 3
        cost.observe(num_tokens, 600e-6 + PER_TOKEN_S * num_tokens)
    assert cost.predict(700) < 700 * PER_TOKEN_S
    assert cost.predict(2) == pytest.approx(600e-6 + 2 * PER_TOKEN_S, rel=0.1)


def test_a_rate_that_changes_is_followed() -> None:
    cost = learnt(*((700, 0), (10, 0)) * 30)
    for number in range(200):
        num_tokens = (700, 10)[number % 2]
        cost.observe(num_tokens, 5 * PER_TOKEN_S * num_tokens)
    assert cost.predict(700) == pytest.approx(5 * 700 * PER_TOKEN_S, rel=0.1)
