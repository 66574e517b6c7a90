"""The model of a step's time against hardware that it does not know."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grids import choose, more_when_long

from lightserve.messages.common import StepCoefficients
from lightserve.router.step_cost import CopyCost, StepCost, StepShape
from lightserve.sim.virtual_gpus import A100_LLAMA2_7B, VirtualHardware

KNEE = (A100_LLAMA2_7B.floor_s - A100_LLAMA2_7B.constant_s) / A100_LLAMA2_7B.per_new_token_s


def seconds(shape: StepShape, hardware: VirtualHardware = A100_LLAMA2_7B) -> float:
    return hardware.seconds(
        shape.num_new, decode_context=shape.decode_context, chunk_context=shape.chunk_pairs
    )


def random_shape(rng: np.random.Generator) -> StepShape:
    """Decodes, and in half of the steps a chunk."""
    shape = StepShape()
    for _ in range(int(rng.integers(1, 150))):
        shape = shape.plus(int(rng.integers(50, 1500)), 1)
    if rng.random() < 0.5:
        shape = shape.plus(int(rng.integers(0, 2000)), int(rng.integers(2, 512)))
    return shape


def learnt(num_steps: int = 600, *, noise: float = 0.05, seed: int = 0) -> StepCost:
    cost, rng = StepCost(), np.random.default_rng(seed)
    for _ in range(num_steps):
        shape = random_shape(rng)
        cost.observe(shape, seconds(shape) * float(np.exp(rng.normal(0.0, noise))))
    return cost


def errors(cost: StepCost, *, factor: float = 1.0) -> list[float]:
    rng = np.random.default_rng(99)
    shapes = [random_shape(rng) for _ in range(300)]
    return [abs(cost.seconds(shape) / (factor * seconds(shape)) - 1.0) for shape in shapes]


def test_predicts_shapes_it_has_not_seen() -> None:
    """The benchmark's bars, though of virtual hardware with 5 % noise."""
    found = errors(learnt())
    assert np.median(found) <= 0.03 and np.quantile(found, 0.95) <= 0.08


def test_finds_the_knee() -> None:
    """AccelGen's pivot, within the grid of sizes that were seen."""
    assert learnt(2000, noise=0.01).pivot == pytest.approx(KNEE, rel=0.3)


def test_a_line_alone_would_be_far_off() -> None:
    """Teeth: with the knee at 0 a step of few decodes is predicted far too short."""
    cost = learnt()
    small = StepShape().plus(100, 1)
    assert abs(cost.seconds(small) / seconds(small) - 1.0) < 0.1
    linear_s = A100_LLAMA2_7B.constant_s + A100_LLAMA2_7B.per_new_token_s
    assert linear_s < 0.4 * seconds(small)


def test_prompts_are_remembered_through_many_decodes() -> None:
    cost = learnt()
    for _ in range(2000):
        shape = StepShape().plus(500, 1)
        cost.observe(shape, seconds(shape))
    assert np.median(errors(cost)) <= 0.05


def test_slower_hardware_is_noticed() -> None:
    cost, rng = learnt(), np.random.default_rng(5)
    for _ in range(60):
        shape = random_shape(rng)
        cost.observe(shape, 1.3 * seconds(shape) * float(np.exp(rng.normal(0.0, 0.05))))
    assert np.median(errors(cost, factor=1.3)) <= 0.08
    assert 1.0 < cost.guard < 1.5


def test_a_stall_says_nothing_about_other_steps() -> None:
    """The process was not running for as long as twenty steps take; one in fifty is such a one."""
    cost, rng = learnt(), np.random.default_rng(5)
    for number in range(300):
        shape = random_shape(rng)
        stalled_s = 20 * seconds(shape) if number % 50 == 49 else 0.0
        cost.observe(shape, seconds(shape) * float(np.exp(rng.normal(0.0, 0.05))) + stalled_s)
        assert cost.guard < 1.6
        if number in range(9, 19) or number % 20 == 0 or stalled_s:
            assert np.median(errors(cost)) <= 0.08 or number == 0


def test_a_first_step_that_was_stalled_is_soon_forgotten() -> None:
    """It took a second in place of 10 ms."""
    none = dict.fromkeys(StepCoefficients.__struct_fields__, 0.0)
    cost = StepCost()
    cost.use_profile(StepCoefficients(**none | {"floor_s": 0.01}))
    shape = StepShape(num_new=1)
    for seconds_taken in (1.0, *[0.01] * 12):
        cost.observe(shape, seconds_taken)
        assert cost.seconds(shape) < 0.045
    assert cost.seconds(shape) < 0.013


def test_much_slower_hardware_is_no_stall() -> None:
    """It is followed as soon as the deviation has grown."""
    cost, rng = StepCost(), np.random.default_rng(5)
    none = dict.fromkeys(StepCoefficients.__struct_fields__, 0.0)
    cost.use_profile(StepCoefficients(**none | {"floor_s": 0.01}))
    shape, ratios = StepShape(num_new=1), []
    for number in range(130):
        factor = 4 if number >= 100 else 1
        cost.observe(shape, factor * 0.01 * float(np.exp(rng.normal(0.0, 0.05))))
        ratios.append(cost.seconds(shape) / 0.01)
    assert ratios[99] == pytest.approx(1, rel=0.05)
    assert ratios[102] < 1.5 and ratios[110] > 2 and ratios[129] > 3.6


def test_nothing_is_known_at_first() -> None:
    cost = StepCost()
    assert not cost.is_known and cost.seconds(StepShape(num_new=5)) == 0.0
    cost.observe(StepShape(num_new=5), 0.02)
    assert cost.is_known and cost.seconds(StepShape(num_new=5)) == pytest.approx(0.02)


COST = learnt(noise=0.02)


@more_when_long
@settings(max_examples=choose(60, 200), deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 300)), max_size=8),
    start=st.integers(0, 4000),
    num_tokens=st.integers(1, 600),
)
def test_more_work_never_takes_less_time(
    rows: list[tuple[int, int]], start: int, num_tokens: int
) -> None:
    shape = StepShape()
    for row in rows:
        shape = shape.plus(*row)
    assert COST.seconds(shape.plus(start, num_tokens)) >= COST.seconds(shape)
    assert (
        COST.seconds(shape.plus(start, num_tokens + 1))
        >= COST.seconds(shape.plus(start, num_tokens))
        or num_tokens == 1
    )  # a decode reads its context otherwise than a chunk


@more_when_long
@settings(max_examples=choose(60, 200), deadline=None)
@given(
    num_decodes=st.integers(0, 100),
    limit_s=st.floats(0.0, 0.2),
    start=st.integers(0, 3000),
    most=st.integers(1, 2000),
)
def test_the_budget_is_the_inverse_of_the_time(
    num_decodes: int, limit_s: float, start: int, most: int
) -> None:
    shape = StepShape()
    for _ in range(num_decodes):
        shape = shape.plus(300, 1)
    count = COST.tokens_within(shape, limit_s, start, most)
    assert 0 <= count <= most
    if count > 1:
        assert COST.seconds(shape.plus(start, count)) <= limit_s
    if 1 <= count < most:
        assert COST.seconds(shape.plus(start, count + 1)) > limit_s


@pytest.mark.parametrize("most", [2, 100, 2000])
def test_a_prompt_that_is_a_little_too_long_is_cut(most: int) -> None:
    """All of it is asked about first, and that has the same limit as a part."""
    shape = StepShape().plus(300, 1)
    whole_s = COST.seconds(shape.plus(50, most))
    assert COST.tokens_within(shape, whole_s, 50, most) == most
    assert COST.tokens_within(shape, 0.99 * whole_s, 50, most) < most


# What copies cost: a fixed time and one per token, whatever sizes were seen.

PER_COPY_S, PER_TOKEN_S = 1e-4, 21e-6


def learnt_copies(*copies: int) -> CopyCost:
    """Return what was learnt from copies of so many tokens."""
    cost = CopyCost()
    for num_tokens in copies:
        cost.observe(num_tokens, PER_COPY_S + PER_TOKEN_S * num_tokens)
    return cost


def test_nothing_is_known_at_first_and_steps_without_copies_teach_nothing() -> None:
    cost = CopyCost()
    cost.observe(0, 0.0)
    assert cost.predict(700) == 0.0


@pytest.mark.parametrize("num_tokens", [1, 10, 1000])
def test_the_rate_is_learnt_from_copies_of_several_sizes(num_tokens: int) -> None:
    sizes = [1, 700, 16, 300, 2, 8, 40, 512]
    cost = learnt_copies(*itertools.islice(itertools.cycle(sizes), 60))
    true_s = PER_COPY_S + PER_TOKEN_S * num_tokens
    assert cost.predict(num_tokens) == pytest.approx(true_s, rel=0.05, abs=1e-4)


def test_small_copies_alone_never_make_large_ones_look_dear() -> None:
    """Loads would stay untried for ever: 700 tokens cost 15 ms, not the 440 ms of 700 copies."""
    cost = CopyCost()
    for number in range(200):
        num_tokens = 1 + number % 3
        cost.observe(num_tokens, 600e-6 + PER_TOKEN_S * num_tokens)
    assert cost.predict(700) < 700 * PER_TOKEN_S
    assert cost.predict(2) == pytest.approx(600e-6 + 2 * PER_TOKEN_S, rel=0.1)


def test_a_rate_that_changes_is_followed() -> None:
    cost = learnt_copies(*(700, 10) * 30)
    for number in range(200):
        num_tokens = (700, 10)[number % 2]
        cost.observe(num_tokens, 5 * PER_TOKEN_S * num_tokens)
    assert cost.predict(700) == pytest.approx(5 * 700 * PER_TOKEN_S, rel=0.1)
