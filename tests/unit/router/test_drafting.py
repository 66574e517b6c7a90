"""Drafts are planned where they pay, by measured times and by what came of the last ones."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from support.policy_scenes import make_request, running_of

from lightserve.config import ServeConfig
from lightserve.cost.model import StepShape
from lightserve.errors import ConfigError
from lightserve.messages.common import (
    MAX_INT32,
    NO_SIZES,
    GraphSizes,
    StepCoefficients,
    Thinking,
    pack_int32,
)
from lightserve.messages.router_worker import StepOutput, StepResult
from lightserve.router.accounts import Account
from lightserve.router.drafting import (
    FIRST_CHANCE,
    QUIET_STEPS,
    RETRY_STEPS,
    Chance,
    Drafting,
    can_draft,
    scope_of,
)
from lightserve.router.request import Parameters, Request
from lightserve.router.request_table import BoolArray, Decodes
from lightserve.router.step_cost import FADING, REFIT_STEPS, StepCost
from lightserve.types import (
    MAX_DRAFTS,
    DraftSource,
    RequestClass,
    RequestOutput,
    SamplingParams,
    StepId,
)

STEP_S = 0.01
BOUND_BY_WEIGHTS = StepCoefficients(STEP_S, 64.0, 1e-3, 0.0, 0.0, 0.0, 0.0, 0.0)
"""64 tokens take as long as one."""
BOUND_BY_COMPUTE = StepCoefficients(0.0, 0.0, STEP_S, 0.0, 0.0, 0.0, 0.0, 0.0)


class Scene:
    def __init__(self, requests: list[Request], coefficients: StepCoefficients) -> None:
        self.table = running_of(requests).table
        self.decodes = Decodes(self.table, self.table.rows).kept()
        self.drafting = Drafting(MAX_DRAFTS, self.table)
        self.cost = StepCost()
        self.cost.use_profile(coefficients)
        for request in self.decodes.requests:
            self.drafting.begin(request)

    def choose(self, *, chunk: int = 0, **changes: Any) -> list[int]:
        shape = StepShape().plus_decodes(len(self.decodes), self.decodes.num_context_tokens)
        if chunk:
            shape = shape.plus(0, chunk)
        options = {"room": 1000, "limit_s": 1e9} | changes
        return self.drafting.choose(self.decodes, shape, self.cost, **options).tolist()

    def send(self) -> list[int]:
        """Choose for a step, and send it."""
        drafts = self.choose()
        chosen = np.array(drafts, dtype=np.int64)
        self.drafting.note(replace(self.decodes, drafts=chosen))
        return drafts

    def learn(self, number: int, accepted: int, times: int = 1) -> None:
        for _ in range(times):
            tried = min(MAX_DRAFTS, accepted + 1)
            self.drafting._learn(self.decodes.requests[number], tried, accepted)


def decoding(number: int, **changes: Any) -> Request:
    request = make_request(number, output=5)
    for name, value in changes.items():
        setattr(request, name, value)
    return request


def test_free_tokens_are_all_taken() -> None:
    scene = Scene([decoding(0), decoding(1)], BOUND_BY_WEIGHTS)
    assert scene.choose() == [MAX_DRAFTS] * 2


def test_none_before_it_is_known_how_long_steps_take() -> None:
    """Learnt from steps with drafts alone, a draft would seem to cost nothing."""
    scene = Scene([decoding(0), decoding(1)], BOUND_BY_WEIGHTS)
    scene.cost = StepCost()
    for number in range(REFIT_STEPS):
        assert scene.choose() == []
        scene.cost.observe(StepShape().plus_decodes(1 + number % 2, 20), STEP_S)
    assert scene.choose() == [MAX_DRAFTS] * 2


def test_of_one_stream_the_cost_of_its_row_is_no_draft_s_until_drafts_tell() -> None:
    """Prompts have less of a floor than its decodes, so that the fit puts all of it on the row."""
    scene = Scene([decoding(0)], BOUND_BY_WEIGHTS)
    scene.cost = cost = StepCost()

    def see(shape: StepShape, seconds: float) -> None:
        for number in range(REFIT_STEPS):
            cost.observe(shape, seconds)
            prompt = 20 + 10 * number
            cost.observe(StepShape().plus(0, prompt), prompt * 1e-4)

    one = StepShape().plus_decodes(1, 10)
    see(one, STEP_S)
    assert cost.seconds(one.plus_decodes(1, 10)) > 1.9 * cost.seconds(one)
    assert scene.choose() != []
    assert cost.seconds(one.plus_drafts(8, 80)) == pytest.approx(STEP_S, rel=0.1)
    see(one.plus_drafts(8, 80), 9 * STEP_S)
    assert scene.choose() == []
    assert cost.seconds(one.plus_drafts(8, 80)) == pytest.approx(9 * STEP_S, rel=0.1)


def test_none_where_a_token_costs_what_it_is_worth() -> None:
    scene = Scene([decoding(number) for number in range(4)], BOUND_BY_COMPUTE)
    assert scene.choose() == []
    scene.learn(0, MAX_DRAFTS, 50)  # even if nearly all are right
    assert scene.choose() == []


def test_none_where_reading_the_kv_bounds_the_step() -> None:
    """Every draft reads its row's context once more, which takes nearly all of the time."""
    reads = msgspec.structs.replace(
        BOUND_BY_WEIGHTS, floor_s=STEP_S / 100, per_decode_context_s=1e-3, per_chunk_pair_s=1e-3
    )
    scene = Scene([decoding(number) for number in range(4)], reads)
    assert scene.choose() == []
    scene.learn(0, MAX_DRAFTS, 50)
    assert sum(scene.choose()) <= 1


def test_none_where_logits_cost_what_a_draft_is_worth() -> None:
    """Of a model with many words: the tokens of a step are free, the logits of each are not."""
    logits_s = STEP_S / 4
    costs = msgspec.structs.replace(BOUND_BY_WEIGHTS, floor_s=0.0, per_decode_s=logits_s)
    scene = Scene([decoding(number) for number in range(4)], costs)
    assert scene.choose() == []
    costs = msgspec.structs.replace(costs, floor_s=STEP_S, per_decode_s=logits_s / 20)
    scene = Scene([decoding(number) for number in range(4)], costs)
    assert 0 < sum(scene.choose()) < 4 * MAX_DRAFTS


def test_rows_without_a_record_try_drafts_where_likely_ones_pay() -> None:
    """No record would ever begin otherwise; a few wrong drafts end it."""
    costs = StepCoefficients(0.03, 8.0, 4e-4, 1e-3, 1e-3, 0.0, 0.0, 0.0)
    scene = Scene([decoding(number) for number in range(16)], costs)
    assert sum(scene.choose()) == 16
    for number in range(16):
        scene.learn(number, 0)
    assert scene.choose() == []


def test_best_effort_drafts_where_weights_bound_the_step_alone() -> None:
    """A token beyond the knee costs next to nothing, which only real-time rows may buy."""
    costs = msgspec.structs.replace(BOUND_BY_WEIGHTS, knee=8.0, per_new_s=STEP_S / 1e6)
    of_be = {"request_class": RequestClass.BE}
    assert Scene([decoding(0)], costs).choose() == [MAX_DRAFTS]
    assert Scene([decoding(0, **of_be)], costs).choose() == [7]
    both = Scene([decoding(0), decoding(1, **of_be)], costs)
    assert both.choose() == [MAX_DRAFTS, 3]  # the likeliest first, six up to the knee
    assert both.choose(chunk=100) == [MAX_DRAFTS, 0]
    assert Scene([decoding(0, **of_be)], costs).choose(chunk=100) == []


def test_as_many_as_pay_and_to_the_row_that_is_right() -> None:
    """A token costs a fifth of the step of one row."""
    costs = msgspec.structs.replace(BOUND_BY_WEIGHTS, knee=2.0, per_new_s=STEP_S / 5)
    scene = Scene([decoding(0), decoding(1)], costs)
    scene.learn(0, MAX_DRAFTS, 30)
    scene.learn(1, 0, 30)
    right, wrong = scene.choose()
    assert right > 2 and wrong == 0


def look_and_send(scene: Scene) -> list[int]:
    """Send a step that looks for drafts, and those that rest behind it."""
    drafts = scene.send()
    while scene.drafting.rests:
        scene.drafting.note(scene.decodes)
    return drafts


@pytest.mark.parametrize("is_reading", [False, True])
def test_one_that_is_wrong_again_and_again_is_left(is_reading: bool) -> None:
    """And tries again after a while; where contexts are long to read, or tokens to compute."""
    costs = {"per_chunk_pair_s": 2e-3 / 12} if is_reading else {"knee": 1.0, "per_new_s": 2e-3}
    scene = Scene([decoding(0)], msgspec.structs.replace(BOUND_BY_WEIGHTS, **costs))
    assert scene.choose()
    scene.learn(0, 0, 60)
    scene.drafting._priors[:] = FIRST_CHANCE  # of others of its key it knows nothing
    assert scene.choose() == []
    num_steps = next(number for number in range(10_000) if look_and_send(scene))
    assert 10 < num_steps < RETRY_STEPS / (1 + QUIET_STEPS) < 10 / (1 - FADING)


FREE = msgspec.structs.replace(BOUND_BY_WEIGHTS, floor_s=0.1, knee=1e3)
"""Long steps in which tokens cost nothing: the least chance is worth planning."""
WITH_LOGITS = StepCoefficients(0.03, 8.0, 4e-4, 1e-3, 1e-3, 0.0, 0.0, 0.0)


def drafted_share(scene: Scene, num_steps: int, accepted: int) -> float:
    """Return the share of steps that have drafts, while so many of each row's are right."""
    num_drafted = 0
    for _ in range(num_steps):
        drafts = [] if scene.drafting.rests else scene.choose()
        scene.drafting.note(replace(scene.decodes, drafts=np.array(drafts, dtype=np.int64)))
        num_drafted += bool(drafts)
        for number, count in enumerate(drafts):
            if count:
                right = min(accepted, count)
                scene.drafting._learn(scene.decodes.requests[number], min(count, right + 1), right)
    return num_drafted / num_steps


@pytest.mark.parametrize("num_keys", [1, 16])
@pytest.mark.parametrize("num_rows", [1, 16])
@pytest.mark.parametrize("costs", [FREE, WITH_LOGITS, BOUND_BY_WEIGHTS])
def test_text_that_becomes_repetitive_gets_drafts_again(
    costs: StepCoefficients, num_rows: int, num_keys: int
) -> None:
    """Though none was right for long; until then next to no step tries, of new requests neither."""
    key = "key {}".format
    requests = [decoding(n, prediction_key=key(n % num_keys)) for n in range(num_rows)]
    scene = Scene(requests, costs)
    drafted_share(scene, 3000, accepted=0)
    for request in requests:  # as new ones of the same keys would
        scene.drafting.begin(request)
    assert 0.0 < drafted_share(scene, 5000, accepted=0) < 0.005
    drafted_share(scene, RETRY_STEPS + QUIET_STEPS + 1, accepted=MAX_DRAFTS)
    assert drafted_share(scene, 100, accepted=MAX_DRAFTS) == 1.0


def test_where_drafts_cost_too_much_none_tries_again() -> None:
    scene = Scene([decoding(number) for number in range(4)], BOUND_BY_COMPUTE)
    assert drafted_share(scene, 2 * RETRY_STEPS, accepted=MAX_DRAFTS) == 0.0


def test_a_key_for_which_nothing_is_proposed_is_as_good_as_a_new_one() -> None:
    """A proposer that finds nothing costs no time, and says nothing of those that will be found."""
    known = Chance()
    known.learn(0, 50, FADING)
    assert known.value < 0.05
    for _ in range(1000):
        known.learn(0, 0, FADING)
    assert known.value == pytest.approx(FIRST_CHANCE)


def test_a_new_request_begins_with_what_its_key_had() -> None:
    first, other = decoding(0, prediction_key="a"), decoding(1, prediction_key="b")
    scene = Scene([first, other], BOUND_BY_WEIGHTS)
    scene.learn(0, 0, 100)
    scene.table.release(first)
    newcomer = decoding(2, prediction_key="a")
    scene.table.acquire(newcomer)
    scene.drafting.begin(newcomer)
    scene.decodes = Decodes(scene.table, scene.table.rows).kept()
    chances = dict(
        zip(scene.decodes.requests, scene.drafting._chances(scene.decodes.rows), strict=True)
    )
    assert chances[newcomer] < 0.1 < chances[other] == pytest.approx(FIRST_CHANCE)


def test_bounds() -> None:
    """The last token, memory, a deadline that is kept without; none of those that may not."""
    short = decoding(0, max_tokens=5 + 1 + 3)  # of which one is in the step
    grammar = decoding(1, constraint=object())
    scene = Scene([short, grammar, decoding(2)], BOUND_BY_WEIGHTS)
    assert scene.choose() == [3, 0, MAX_DRAFTS]
    assert sum(scene.choose(room=5)) == 5
    assert scene.choose(room=0) == []
    costs = msgspec.structs.replace(BOUND_BY_WEIGHTS, knee=3.0, per_new_s=STEP_S / 100)
    scene = Scene([decoding(number) for number in range(3)], costs)
    num_all = sum(scene.choose())
    assert 0 < sum(scene.choose(limit_s=1.02 * STEP_S)) <= 2 < num_all
    assert sum(scene.choose(limit_s=0.9 * STEP_S)) == num_all  # late in any case


def test_a_step_without_drafts_is_followed_by_some_that_do_not_look() -> None:
    scene = Scene([decoding(0), decoding(1)], BOUND_BY_COMPUTE)
    assert not scene.send()
    for _ in range(QUIET_STEPS):
        assert scene.drafting.rests
        scene.drafting.note(scene.decodes)
    assert not scene.drafting.rests
    assert not scene.send() and scene.drafting.rests


@pytest.mark.parametrize("costs", [BOUND_BY_WEIGHTS, BOUND_BY_COMPUTE])
def test_planning_changes_nothing(costs: StepCoefficients) -> None:
    """A step may be planned again and again until it is sent."""
    scene = Scene([decoding(0), decoding(1)], costs)
    scene.learn(0, 2, 5)

    def known() -> list[object]:
        drafting = scene.drafting
        columns = (drafting._accepted, drafting._tried, drafting._priors, drafting._limits)
        counts = [drafting._num_quiet, drafting._num_until_retry]
        return [*counts, *[column.tolist() for column in columns]]

    before = known()
    assert scene.choose() == scene.choose()
    assert known() == before
    scene.send()
    is_quiet, num_until_retry, *columns = known()
    assert (is_quiet, num_until_retry) == (
        QUIET_STEPS * (costs is BOUND_BY_COMPUTE),
        RETRY_STEPS - 1,
    )
    assert (columns == before[2:]) == (costs is BOUND_BY_WEIGHTS)


def test_a_late_row_gets_them_for_what_they_cost() -> None:
    chance = FIRST_CHANCE
    costs = StepCoefficients(STEP_S, 1.0, STEP_S * chance / 1.1, 0.0, 0.0, 0.0, 0.0, 0.0)
    scene = Scene([decoding(0)], costs)
    assert scene.choose() == []
    assert scene.choose(is_late=lambda: np.array([True])) == [1]


def test_where_nothing_can_be_won_deadlines_are_not_looked_up() -> None:
    """Most plans of rows whose drafts are wrong end there: planning takes time as well."""
    scene = Scene([decoding(number) for number in range(4)], BOUND_BY_WEIGHTS)
    asked: list[int] = []

    def is_late() -> BoolArray:
        asked.append(1)
        return np.zeros(4, dtype=np.bool_)

    assert scene.choose(is_late=is_late) and asked
    asked.clear()
    for number in range(4):
        scene.learn(number, 0, 200)
    assert scene.choose(is_late=is_late) == [] and not asked


@pytest.mark.parametrize(
    ("changes", "can"),
    [
        ({}, True),
        ({"sampling": SamplingParams(temperature=0.7, logit_bias=((5, 1.0),), min_tokens=3)}, True),
        ({"sampling": SamplingParams(frequency_penalty=0.1, repetition_penalty=1.1)}, True),
        ({"output": RequestOutput.VECTOR}, False),
        ({"constraint": object()}, False),
        ({"parameters": Parameters(thinking=Thinking((), ("e",), (), (3,), (3,), 100))}, False),
        (
            {"parameters": Parameters(thinking=Thinking((), ("e",), (), (3,), (3,), MAX_INT32))},
            True,
        ),
    ],
)
def test_who_may_have_drafts(changes: dict[str, Any], can: bool) -> None:
    assert can_draft(decoding(0, **changes)) is can


def test_a_prediction_has_a_record_of_its_own() -> None:
    plain, predicted = decoding(0), decoding(1, parameters=Parameters(prediction=b"1234"))
    scene = Scene([plain, predicted], BOUND_BY_WEIGHTS)
    scene.learn(0, 0, 60)
    chances = dict(
        zip(scene.decodes.requests, scene.drafting._chances(scene.decodes.rows), strict=True)
    )
    assert chances[plain] < 0.1 < chances[predicted] == pytest.approx(FIRST_CHANCE)


def test_scopes() -> None:
    """Answers are guesses for the same account, key and salt alone."""
    root = Account("", None)
    alice, bob = Account("alice", root), Account("bob", root)
    kinds = [
        {},
        {"prediction_key": "a"},
        {"account": alice},
        {"account": bob},
        {"account": Account("alice", alice)},
        {"account": alice, "prefix_salt": "s"},
        {"account": alice, "prediction_key": "a"},
    ]
    scopes = [scope_of(decoding(number, **kind)) for number, kind in enumerate(kinds)]
    assert len({*scopes}) == len(kinds)
    assert scopes == [scope_of(decoding(9, **kind)) for kind in kinds]
    assert all(0 < scope < 2**63 for scope in scopes)


@pytest.mark.parametrize("source", DraftSource)
def test_results_are_counted_by_class_and_source(source: DraftSource) -> None:
    """Of two rows one had three of four drafts right, one none of two; predictions by request."""
    requests = [decoding(0), decoding(1, request_class=RequestClass.BE)]
    table = running_of(requests).table
    decodes = Decodes(table, table.rows, table.of(table.rows), np.array([4, 2]))
    drafting = Drafting(MAX_DRAFTS, table)
    for request in requests:
        drafting.begin(request)
    names = [request.request_class for request in decodes.requests]
    result = StepResult(
        StepId(0),
        0,
        b"",
        0.0,
        0.0,
        drafted=pack_int32([4, 2, source, source]),
        num_verified=6,
    )
    token_ids = np.array([[5, 6, 7, 8, -1], [5, -1, -1, -1, -1]], dtype=np.int32)
    output = StepOutput(decodes.rows.astype(np.int32), token_ids, {})
    taken: list[int] = []
    planned = SimpleNamespace(decodes=decodes)
    done = drafting.take_back_refused(
        planned, result, output, lambda parts: taken.extend(n for _, n in parts)
    )  # type: ignore[arg-type]
    assert [count for _, count in done] == [3, 0] and taken == [1, 2]
    assert drafting.num_drafted == {(names[0], source): 4, (names[1], source): 2}
    assert drafting.num_accepted == {(names[0], source): 3, (names[1], source): 0}
    is_predicted = source is DraftSource.PREDICTION
    for request, found in zip(decodes.requests, [(3, 1), (0, 2)], strict=True):
        assert drafting.predicted(request) == (found if is_predicted else (0, 0))
        assert drafting.predicted(request) == (0, 0), "told once"


@pytest.mark.parametrize(("eos", "num_right"), [(8, 3), (7, 2), (5, 0)])
def test_tokens_behind_the_end_count_nowhere(eos: int, num_right: int) -> None:
    """Guesses behind the end of the output may be what the model would have drawn."""
    request = decoding(0, eos_token_ids=frozenset({eos}))
    table = running_of([request]).table
    decodes = Decodes(table, table.rows, [request], np.array([4]))
    drafting = Drafting(MAX_DRAFTS, table)
    drafting.begin(request)
    drafted = pack_int32([4, DraftSource.PREDICTION])
    result = StepResult(StepId(0), 0, b"", 0.0, 0.0, drafted=drafted, num_verified=4)
    token_ids = np.array([[5, 6, 7, 8, -1]], dtype=np.int32)
    output = StepOutput(decodes.rows.astype(np.int32), token_ids, {})
    taken: list[int] = []
    planned = SimpleNamespace(decodes=decodes)
    done = drafting.take_back_refused(
        planned, result, output, lambda parts: taken.extend(n for _, n in parts)
    )  # type: ignore[arg-type]
    assert done == [(request, num_right)] and taken == [1]
    assert drafting.predicted(request) == (num_right, 4 - num_right)
    of = request.request_class, DraftSource.PREDICTION
    assert (drafting.num_drafted[of], drafting.num_accepted[of]) == (4, num_right)


def test_blocks_of_one_request_leave_no_slots_to_guesses() -> None:
    own = {"block_owner": "exclusive", "preemption": "recompute", "cache_policy": "off"}
    assert ServeConfig(**own).drafts_per_row == 0
    with pytest.raises(ConfigError, match="--speculation needs --block-owner two-ended"):
        ServeConfig(speculation="ngram", **own)


@pytest.mark.parametrize("sizes", [NO_SIZES, GraphSizes((1, 2, 4, 8), (16, 32, 64, 100))])
@pytest.mark.parametrize("chunk", [0, 7])
def test_the_time_of_all_numbers_of_drafts_is_that_of_each(sizes: GraphSizes, chunk: int) -> None:
    cost = StepCost()
    nothing = cost.seconds_with_drafts(StepShape(), np.ones(2, dtype=np.int64))
    assert [some.tolist() for some in nothing] == [[0.0, 0.0], [0.0, 0.0]]
    values = (3e-3, 20.0, 1e-4, 2e-5, 3e-4, 1e-7, 2e-7, 3e-8)
    cost.use_workers(StepCoefficients(*values), sizes)
    shape = StepShape().plus_decodes(6, 900)
    shape = shape.plus(40, chunk) if chunk else shape
    for number, seconds in enumerate((4e-3, 6e-3, 2e-2)):  # of several kinds, so that they differ
        cost.observe([shape.decodes, shape.plus_drafts(3, 20), shape.plus(0, 9)][number], seconds)
    pairs = np.cumsum(np.arange(100, 220))
    found, added = map(np.ndarray.tolist, cost.seconds_with_drafts(shape, pairs))
    each = enumerate(pairs.tolist(), 1)
    expected = [cost.seconds(shape.plus_drafts(count, own)) for count, own in each]
    assert found == pytest.approx(expected, rel=1e-12)
    base_s = cost.seconds(shape)
    assert all(more >= time_s - base_s - 1e-15 for more, time_s in zip(added, found, strict=True))
    assert all(np.diff(added) >= 0.0) and added[-1] > 0.0


def test_a_guess_costs_what_the_model_says_though_its_kind_of_step_was_faster_by_chance() -> None:
    cost, shape = StepCost(), StepShape().plus_decodes(4, 400)
    cost.use_profile(StepCoefficients(30e-3, 6.0, 1.7e-3, 6e-4, 0.0, 0.0, 0.0, 0.0))
    for _ in range(20):
        cost.observe(shape, 1.1 * 32.4e-3)
        cost.observe(shape.plus_drafts(1, 100), 33e-3)
    whole_s, added_s = cost.seconds_with_drafts(shape, np.array([100, 200]))
    assert whole_s[0] == pytest.approx(33e-3, rel=0.02) and whole_s[0] < cost.seconds(shape)
    assert added_s == pytest.approx([6e-4, 1.2e-3], rel=0.02)


def test_a_machine_that_gets_faster_without_guesses_is_known_to_be_so_with_them() -> None:
    cost, shape = StepCost(), StepShape().plus_decodes(1, 100)
    cost.use_profile(StepCoefficients(10e-3, 6.0, 1e-3, 0.0, 0.0, 0.0, 0.0, 0.0))
    for _ in range(30):
        cost.observe(shape, 30e-3)
        cost.observe(shape.plus_drafts(1, 100), 36e-3)
    for _ in range(60):
        cost.observe(shape, 10e-3)
    ((whole_s,), (added_s,)) = cost.seconds_with_drafts(shape, np.array([100]))
    assert 10e-3 < whole_s < 12.5e-3 and added_s < 2.5e-3


def test_guesses_that_were_slow_once_are_tried_again() -> None:
    cost, shape = StepCost(), StepShape().plus_decodes(1, 100)
    cost.use_profile(StepCoefficients(10e-3, 6.0, 1e-3, 0.0, 0.0, 0.0, 0.0, 0.0))
    cost.observe(shape, 10e-3)
    cost.observe(shape.plus_drafts(1, 100), 20e-3)
    added_s = [cost.seconds_with_drafts(shape, np.array([100]))[1][0]]
    for _ in range(1000):
        cost.observe(shape, 10e-3)
    added_s += [cost.seconds_with_drafts(shape, np.array([100]))[1][0]]
    assert added_s[0] > 2e-3 and added_s[1] < 1e-3


def test_guesses_that_are_slow_each_time_stay_so_beside_steps_without() -> None:
    cost, shape = StepCost(), StepShape().plus_decodes(4, 400)
    cost.use_profile(StepCoefficients(4e-3, 9.0, 1e-4, 5e-5, 0.0, 0.0, 0.0, 0.0))
    for step in range(500):
        cost.observe(shape if step % 5 else shape.plus_drafts(4, 400), 4.2e-3 if step % 5 else 5e-3)
    ((*_, whole_s), _) = cost.seconds_with_drafts(shape, np.arange(100, 500, 100))
    assert whole_s == pytest.approx(5e-3, rel=0.03)
