"""Images are encoded as work of steps: cut between layers, real-time ones first."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.policy_scenes import Admitting, Queue, begun, make_limits, make_request, running_of

from lightserve.messages.common import StepCoefficients, TokenSegment, pack_int32
from lightserve.messages.frontend_router import Client, Submit
from lightserve.messages.images import (
    MIN_KEPT_TOKENS,
    EncodeOrder,
    EncoderWork,
    Image,
    KeptImages,
    digest_of,
)
from lightserve.messages.router_worker import StepPlan, StepResult
from lightserve.router.admission.baselines import ConservativeAdmission
from lightserve.router.config import SchedulerConfig
from lightserve.router.encoding import IDLE_PLANS, Encoding, StepEncodes
from lightserve.router.events import FromFrontend, WorkersReady
from lightserve.router.from_submit import QueueLimits
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.policies import POLICIES
from lightserve.router.policies.pace import EVERY_BEST_EFFORT
from lightserve.router.policies.unified import UnifiedOptions, UnifiedPolicy
from lightserve.router.request import Parameters
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep
from lightserve.sim.images import SimulatedEncoder
from lightserve.sim.simulation import Simulation, TimedEvent
from lightserve.sim.worker import SimulatedWorker
from lightserve.types import SLO, FrontendId, RequestClass, RequestId, SamplingParams

NUM_TOKENS, NUM_LAYERS = 50, 24
WORK = EncoderWork(NUM_LAYERS, 0.01)
LAYER_S = 0.004
TOKEN_S = LAYER_S / (NUM_TOKENS * (1 + 0.01 * NUM_TOKENS))
COST = StepCoefficients(0.01, 16.0, 1e-4, 0.0, 0.0, 0.0, 0.0, 0.0)
PROFILED = msgspec.structs.replace(COST, per_encoder_token_s=TOKEN_S)


def image(start: int, colour: int, num_tokens: int = NUM_TOKENS) -> Image:
    pixels = bytes([colour]) * 12
    return Image(start, num_tokens, 2, 2, pixels, digest_of(2, 2, pixels))


def whole(start: int, colour: int, num_tokens: int = NUM_TOKENS) -> Image:
    return msgspec.structs.replace(image(start, colour, num_tokens), sees_itself=True)


def request(
    number: int, length: int, *images: Image, of: RequestClass = RequestClass.RT, **options: Any
) -> Submit:
    fields: dict[str, Any] = {
        "max_tokens": 4,
        "sampling": SamplingParams(seed=length + 4),
        "slo": SLO(ttft_ms=10_000.0, tpot_ms=30.0),
    }
    if of is RequestClass.BE:
        fields["slo"] = SLO()
    return Submit(
        request_id=RequestId(number),
        prompt=[TokenSegment(token_ids=pack_int32([7] * length))],
        eos_token_ids=[],
        request_class=of,
        age_s=0.0,
        images=images,
        **(fields | options),
    )


class Worker:
    """A simulated worker whose encoder takes LAYER_S for a layer of an image of NUM_TOKENS."""

    def __init__(self, encoder: EncoderWork | None, num_slots: int) -> None:
        self._worker = SimulatedWorker(num_slots=num_slots, max_num_seqs=16, max_model_len=1000)
        self._encoder = encoder and SimulatedEncoder(encoder)
        self._work = 0.0
        self.encode_s: list[float] = []
        """Of each plan."""
        self.plans: list[StepPlan] = []

    def seconds(self, plan: StepPlan) -> float:
        self._work = self._encoder.work_of(plan) if self._encoder else 0.0
        self.encode_s.append(TOKEN_S * self._work)
        return 0.01 + TOKEN_S * self._work

    def execute(self, plan: StepPlan, *, exec_s: float, idle_s: float) -> StepResult:
        self.plans.append(plan)
        result = self._worker.execute(plan, exec_s=exec_s, idle_s=idle_s)
        return msgspec.structs.replace(result, encode_s=TOKEN_S * self._work, encoded=self._work)


class Core(Scheduler):
    """Notes what it sends."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.sent: list[PlannedStep] = []

    def commit(self, planned: PlannedStep, now_s: float) -> StepPlan:
        self.sent.append(planned)
        return super().commit(planned, now_s)


class Run:
    """What a schedule became."""

    def __init__(self, policy: str, *arrivals: tuple[float, Submit], **options: Any) -> None:
        config = SchedulerConfig(
            max_model_len=1000,
            max_num_seqs=16,
            max_num_batched_tokens=options.get("budget", 256),
            queue_limits=dict.fromkeys(RequestClass, QueueLimits(100, 1 << 30)),
            policy=options.get("rules") or POLICIES[policy](),
            admission=ConservativeAdmission(overcommit=options.get("overcommit", 1.0)),
            lengths=OutputLengths(max_output_tokens=1000),
        )
        encoder, num_slots = options.get("encoder", WORK), options.get("num_slots", 4000)
        self.core, self.worker = Core(config), Worker(encoder, num_slots)
        simulation = Simulation(
            self.core,
            self.worker,  # type: ignore[arg-type]
            self.worker.seconds,
            WorkersReady(num_slots, step_cost=options.get("step_cost", COST), encoder=encoder),
        )
        events = [TimedEvent(at_s, FromFrontend(FrontendId(0), own)) for at_s, own in arrivals]
        simulation.run(events)
        self.core.check_integrity()
        self.outcomes = {key.request_id: each for key, each in simulation.outcomes.items()}
        self.plans = self.worker.plans

    def orders(self) -> list[int]:
        """Layers of each step that has any."""
        counts = [sum(order.num_layers for order in plan.encodes) for plan in self.plans]
        return [count for count in counts if count]


LONG = request(
    0,
    20,
    max_tokens=200,
    sampling=SamplingParams(seed=220),
    slo=SLO(ttft_ms=40.0, tpot_ms=14.0),
)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_images_that_are_seen_whole_are_never_cut(policy: str) -> None:
    """Also beside decodes whose targets leave time for a part of one, in a small budget, and where
    the positions that prompts' probabilities are asked of end within one."""
    wholes = [
        request(
            number,
            length,
            *(whole(start, 3 * number + place) for place, start in enumerate(starts)),
            of=of,
            max_tokens=4,
            sampling=SamplingParams(seed=length + 4, num_prompt_logprobs=num_logprobs),
        )
        for number, length, starts, of, num_logprobs in (
            (1, 200, (10, 61, 140), RequestClass.RT, None),
            (2, 150, (0, 100), RequestClass.BE, None),
            (3, 120, (70,), RequestClass.BE, None),
            (4, 700, (480,), RequestClass.BE, 0),
            (5, 600, (0, 50), RequestClass.BE, 0),
        )
    ]
    arrivals = [(0.1 + 0.01 * number, own) for number, own in enumerate(wholes)]
    run = Run(policy, (0.0, LONG), *arrivals, budget=40)
    assert {len(outcome.token_ids) for outcome in run.outcomes.values()} == {4, 200}
    of_row: dict[int, tuple[Image, ...]] = {}
    num_chunks = num_beside = 0
    for plan in run.plans:
        of_row |= {sequence.row: sequence.images for sequence in plan.sequences}
        for row in plan.rows:
            end = row.start_position + row.num_tokens
            for own in of_row[row.row]:
                assert not own.start < end < own.end
                is_begun = row.start_position <= own.start < end
                num_chunks += is_begun
                num_beside += is_begun and len(plan.decodes.rows) > 0
    assert num_chunks == 9 and (num_beside > 1 or policy == "fcfs")


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("of", RequestClass)
def test_images_that_are_seen_whole_take_memory_for_all_of_them(
    policy: str, of: RequestClass
) -> None:
    """The pool has room for one of two: whose turn it is takes from the other, or that waits."""
    cases = itertools.product(RequestClass, (100, 200), (False, True))
    for other, budget, shares_prefixes in cases:
        own = [
            request(
                number,
                260,
                whole(150, number, 90),
                of=of if number == 1 else other,
                slo=SLO(),
                client=Client(key=key),
                prefix_salt="" if shares_prefixes else key,
            )
            for number, key in ((1, "a"), (2, "b"))
        ]
        run = Run(
            policy, *((0.0, each) for each in own), budget=budget, num_slots=310, overcommit=2
        )
        assert [len(run.outcomes[each.request_id].token_ids) for each in own] == [4, 4]


def test_an_image_that_has_no_memory_does_not_hold_up_another() -> None:
    """Beside other tokens one image goes beyond the limits, which is the one that is computed."""
    decode = make_request(0, output=2)
    prompts = []
    for number, num_tokens in ((1, 200), (2, 80)):
        prompts.append(make_request(number, prompt=num_tokens, computed=0))
        prompts[-1].parameters = Parameters(images=(whole(0, number, num_tokens),))
    running = running_of([decode, *prompts])
    limits = make_limits(60)
    step = begun(UnifiedPolicy(), running, Queue([]), limits, Admitting(), num_slots=150)
    step.run(step.of())
    chosen = {request.key.request_id: num_tokens for request, num_tokens in step.budget.parts}
    assert chosen == {0: 1, 2: 80}


def test_layers_go_beside_decodes_within_their_targets() -> None:
    """A token is due every 14 ms, its step takes 10: what is left has room for a few layers."""
    run = Run("unified", (0.0, LONG), (0.1, request(1, 80, image(10, 1))))
    orders = run.orders()
    assert sum(orders) == NUM_LAYERS and len(orders) > 6
    times_s = run.outcomes[RequestId(0)].token_times_s
    late = [n for n, time_s in enumerate(times_s) if time_s > 0.040 + 0.014 * n]
    assert len(times_s) == 200 and late == [], "what is encoded beside them makes no token late"
    first = next(plan for plan in run.plans if plan.encodes).encodes[0]
    assert first.image.pixels and not any(
        order.image.pixels for plan in run.plans for order in plan.encodes if order is not first
    )
    number = {id(plan): place for place, plan in enumerate(run.plans)}
    last = max(number[id(plan)] for plan in run.plans if plan.encodes)
    rows = {sequence.row for plan in run.plans for sequence in plan.sequences if sequence.images}
    for plan in run.plans[: last + 1]:
        for row in plan.rows:
            assert row.row not in rows or row.start_position + row.num_tokens <= 10
    assert len(run.outcomes[RequestId(1)].token_ids) == 4


def test_a_request_alone_has_its_image_encoded_with_its_tokens() -> None:
    one = request(1, 80, image(10, 1))
    run = Run("unified", (0.0, one), step_cost=PROFILED, budget=2048)
    assert run.orders() == [] and len(run.outcomes[RequestId(1)].token_ids) == 4


def test_what_a_step_encodes_with_its_tokens_is_predicted() -> None:
    one = request(1, 80, image(10, 1))
    run = Run("unified", (0.0, one), step_cost=PROFILED, budget=2048)
    assert run.worker.encode_s[0] == pytest.approx(NUM_LAYERS * LAYER_S)
    first = run.core.sent[0]
    assert first.predicted_s == pytest.approx(0.01 + 64e-4 + NUM_LAYERS * LAYER_S)
    assert run.core.sent[1].predicted_s < 0.02


def test_two_at_once_of_one_picture_are_one_step() -> None:
    """What the first encodes with its tokens the second need not wait for."""
    before = request(0, 20, max_tokens=1, sampling=SamplingParams(seed=21))
    requests = [(0.001 * n, request(n, 80, image(10, 1))) for n in range(1, 3)]
    run = Run("unified", (0.0, before), *requests, step_cost=PROFILED)
    assert sum(run.worker.encode_s) == pytest.approx(NUM_LAYERS * LAYER_S)
    assert run.orders() == [] and len(run.plans[1].rows) == 2


def test_a_profile_says_what_layers_take() -> None:
    """The first order has as many layers as fit, where unmeasured ones begin with one."""
    for cost, most in ((COST, 1), (PROFILED, NUM_LAYERS)):
        slow = msgspec.structs.replace(cost, per_encoder_token_s=cost.per_encoder_token_s / 2)
        run = Run("unified", (0.0, LONG), (0.1, request(1, 80, image(10, 1))), step_cost=slow)
        first = next(plan for plan in run.plans if plan.encodes).encodes[0].num_layers
        assert first == 1 if most == 1 else 1 < first <= most


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_nothing_is_encoded_for_a_request_that_has_no_memory(policy: str) -> None:
    """It is admitted, but all slots are another's, which ends first; then it is alone."""
    holder = request(0, 160, max_tokens=60, sampling=SamplingParams(seed=220))
    late = request(1, 80, image(0, 1))
    run = Run(policy, (0.0, holder), (0.1, late), num_slots=230, overcommit=2.0)
    assert len(run.outcomes[RequestId(0)].token_ids) == 60
    assert not any(plan.encodes for plan in run.plans if len(plan.decodes.rows))
    assert len(run.outcomes[RequestId(1)].token_ids) == 4
    assert sum(run.worker.encode_s) == pytest.approx(NUM_LAYERS * LAYER_S), "once"


def test_targets_are_those_of_a_server_that_has_to_encode() -> None:
    core = Run("unified", step_cost=PROFILED).core
    one = request(1, 80, image(10, 1), image(60, 2, 20), slo=SLO(ttft_ms=20.0))
    core.on_message(FromFrontend(FrontendId(0), one), 0.0)
    (waiting,) = core._requests.values()
    assert waiting.scheduled_slo is not None
    smaller = LAYER_S * 20 * 1.2 / (50 * 1.5)
    expected_s = 1.2 * (0.01 + 64e-4 + NUM_LAYERS * (LAYER_S + smaller))
    assert waiting.scheduled_slo.ttft_ms == pytest.approx(1e3 * expected_s)


@pytest.mark.parametrize(("tpot_ms", "gap_s"), [(None, 0.4), (100.0, math.inf)])
def test_the_largest_gap_limits_steps_where_there_is_no_mean(
    tpot_ms: float | None, gap_s: float
) -> None:
    core = Run("unified").core
    one = request(1, 80, image(10, 1), slo=SLO(ttft_ms=1500.0, tpot_ms=tpot_ms, mtpot_ms=400.0))
    core.on_message(FromFrontend(FrontendId(0), one), 0.0)
    assert core._demand.outlook(core._pipeline.cost.work, 1.0).gap_s == gap_s


def test_encoding_counts_as_time_that_best_effort_requests_get() -> None:
    rules = UnifiedPolicy(UnifiedOptions(be_min_share=0.2))
    document = request(1, 80, image(10, 1), of=RequestClass.BE)
    run = Run("unified", (0.0, LONG), (0.1, document), rules=rules, step_cost=PROFILED)
    steps = [step for step in run.core.sent if step.encodes]
    layers_s = [LAYER_S * step.encodes[0].num_layers for step in steps]
    assert len(steps) > 3 and run.core.sent[-1].best_effort_s is None, "it wants no more"
    assert [step.best_effort_s for step in steps] == pytest.approx(layers_s)


def test_an_image_of_a_real_time_request_says_nothing_of_best_effort_ones() -> None:
    rules = UnifiedPolicy(UnifiedOptions(be_min_share=0.2))
    run = Run("unified", (0.0, LONG), (0.1, request(1, 80, image(10, 1))), rules=rules)
    assert len(run.orders()) > 3, "it is cut"
    assert {step.best_effort_s for step in run.core.sent} == {None}


def test_two_of_one_picture_are_encoded_once() -> None:
    arrivals = [(0.1, request(n, 80, image(10, 1))) for n in (1, 2)]
    run = Run("unified", (0.0, LONG), *arrivals, (2.0, request(3, 90, image(20, 1))))
    assert sum(run.orders()) == NUM_LAYERS


def test_every_image_of_a_prompt() -> None:
    images = image(10, 1), image(60, 2), image(200, 3)
    run = Run("unified", (0.0, LONG), (0.1, request(1, 300, *images)))
    assert sum(run.worker.encode_s) == pytest.approx(3 * NUM_LAYERS * LAYER_S)
    assert len(run.outcomes[RequestId(1)].token_ids) == 4


def test_real_time_images_go_first() -> None:
    first = request(1, 80, image(10, 1), of=RequestClass.BE)
    second = request(2, 80, image(10, 2))
    run = Run("unified", (0.0, LONG), (0.1, first), (0.1, second))
    digests = [order.image.digest for plan in run.plans for order in plan.encodes]
    assert digests[0] == image(0, 2).digest
    assert {*digests} == {image(0, 1).digest, image(0, 2).digest}
    assert sum(run.worker.encode_s) == pytest.approx(2 * NUM_LAYERS * LAYER_S)


@pytest.mark.parametrize("num_slots", [4000, 250])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_comes_to_an_end(policy: str, num_slots: int) -> None:
    arrivals = [
        (0.02 * n, request(n, 100, image(5 * n, n), of=[*RequestClass][n % 2]))
        for n in range(1, 12)
    ]
    run = Run(policy, (0.0, LONG), *arrivals, num_slots=num_slots, overcommit=1.5)
    assert all(len(run.outcomes[RequestId(n)].token_ids) == 4 for n in range(1, 12))


def test_workers_without_an_encoder_are_ordered_nothing() -> None:
    run = Run("unified", (0.0, LONG), (0.1, request(1, 80, image(10, 1))), encoder=None)
    assert run.orders() == []


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3000)), max_size=40))
def test_kept_images_stay_within_their_limit(puts: list[tuple[int, int]]) -> None:
    kept: KeptImages[int] = KeptImages()
    last: dict[bytes, int] = {}
    for number, (colour, num_tokens) in enumerate(puts):
        one = image(0, colour, 100 + 317 * colour if num_tokens else 1)
        kept.put(one, number)
        last.pop(one.digest, None)
        last[one.digest] = number
        assert kept.get(one) == number
        held = [image(0, c, 100 + 317 * c) for c in range(10)]
        found = [other for other in held if kept.get(other) is not None]
        assert sum(other.num_tokens for other in found) <= MIN_KEPT_TOKENS or len(found) == 1
        newest = [*last][::-1][: len(found)]
        assert {other.digest for other in found} == {*newest}


def test_an_image_that_begins_does_not_push_out_another_that_is_on_its_way() -> None:
    encoding, half = Encoding(WORK), MIN_KEPT_TOKENS // 2 + 1
    first, second = image(0, 1, half), image(0, 2, half)
    step = StepEncodes(encoding)
    step.order(first, 0.0, RequestClass.RT)
    step.order(second, 1.0, RequestClass.RT)
    assert [order.image.digest for order in step.orders] == [first.digest]
    encoding.note_orders(step.orders)
    again = StepEncodes(encoding)
    again.order(first, 0.0, RequestClass.RT)
    again.order(second, 1.0, RequestClass.RT)
    assert [order.num_layers for order in again.orders] == [1]
    encoding.note_orders(again.orders)
    assert encoding.num_left(first) == NUM_LAYERS - 2 and encoding.num_left(second) == NUM_LAYERS


def test_images_of_a_step_do_not_push_out_each_other() -> None:
    encoding, most = Encoding(WORK), MIN_KEPT_TOKENS // 2 + 1
    first, second = image(0, 1, most), image(0, 2, most)
    encoding.note_orders([EncodeOrder(first, 5)])
    step = StepEncodes(encoding)
    step.order(second, math.inf, RequestClass.RT)  # of a request with an earlier deadline
    step.order(first, math.inf, RequestClass.RT)
    assert [order.image.digest for order in step.orders] == [second.digest]


def test_best_effort_images_leave_room_to_real_time_ones() -> None:
    """They hold half of what is kept at most, and push out nothing that is waited for."""
    encoding, quarter = Encoding(WORK), MIN_KEPT_TOKENS // 4
    images = [image(0, number, quarter) for number in range(6)]
    for each in images[:3]:
        step = StepEncodes(encoding)
        step.order(each, 0.0, RequestClass.BE)
        encoding.note_orders(step.orders)
    assert [encoding.num_left(each) for each in images[:3]] == [23, 23, 24]
    encoding.observe(LAYER_S, WORK.of_layer(images[0]))
    step = StepEncodes(encoding)
    for each in images[3:]:
        step.order(each, 1.0, RequestClass.RT)
    assert [order.image.digest for order in step.orders] == [images[3].digest, images[4].digest]


def test_an_image_that_is_not_gone_on_with_keeps_no_place() -> None:
    encoding, half = Encoding(WORK), MIN_KEPT_TOKENS // 2
    encoding.note_orders([EncodeOrder(image(0, 1, half), 1)])
    for _ in range(IDLE_PLANS):
        assert not encoding.can_begin(image(0, 2), RequestClass.BE)
        encoding.note_orders([])
    assert encoding.can_begin(image(0, 2), RequestClass.BE)


def test_images_that_are_computed_make_room_for_those_that_are_waited_for() -> None:
    kept: KeptImages[int] = KeptImages()
    quarter = MIN_KEPT_TOKENS // 4
    kept.put(image(0, 0, quarter), 0)
    for number in range(1, 6):
        kept.put(image(0, number, quarter), number, is_computed=True)
    found = [kept.get(image(0, number, quarter)) for number in range(6)]
    assert found == [0, None, None, 3, 4, 5]


def test_a_document_s_image_takes_no_time_that_a_stream_needs() -> None:
    """There is time for no layer: in one step of many it gets one all the same."""
    stream = request(
        0,
        20,
        max_tokens=400,
        sampling=SamplingParams(seed=420),
        slo=SLO(ttft_ms=40.0, tpot_ms=12.0, mtpot_ms=12.0),
    )
    document = request(1, 80, image(0, 1), of=RequestClass.BE)
    run = Run("unified", (0.0, stream), (0.1, document), step_cost=PROFILED)
    beside = [step.step_id for step in run.core.sent if step.encodes and len(step.decodes)]
    assert 1 < len(beside) < 5 and all(step_id % EVERY_BEST_EFFORT == 0 for step_id in beside)


@pytest.mark.parametrize(
    ("policy", "of", "limit_s"),
    [
        ("unified", RequestClass.BE, 0.1),  # as long as best-effort tokens
        ("unified", RequestClass.RT, 0.01 + 240e-4),  # as a step of 256 tokens
        ("chunked", RequestClass.RT, 0.01 + 240e-4),
    ],
)
def test_a_chat_waits_for_an_image_no_longer_than_for_tokens(
    policy: str, of: RequestClass, limit_s: float
) -> None:
    """A layer takes 10.7 ms, the image 256: with nothing else to do it is encoded in parts."""
    own = request(1, 120, image(10, 1, 100), of=of, slo=SLO())
    chat = request(2, 20, slo=SLO())
    run = Run(policy, (0.0, own), (0.02, chat), step_cost=PROFILED)
    alone = [plan for plan in run.plans if plan.encodes and not plan.rows]
    assert len(alone) > 1, "steps without a token"
    assert max(run.worker.encode_s) <= limit_s
    assert sum(run.worker.encode_s) == pytest.approx(NUM_LAYERS * LAYER_S * 200 / 75)
    waited_s = run.outcomes[RequestId(2)].token_times_s[0] - 0.02
    assert waited_s < limit_s + 0.03 + LAYER_S * 200 / 75
    assert all(len(run.outcomes[RequestId(n)].token_ids) == 4 for n in (1, 2))
    assert run.core._pipeline.cost.guard < 2.0, "such a step tells nothing of tokens"


def test_an_image_leaves_time_to_first_tokens() -> None:
    """Of a target of 200 ms a step takes a third, unless the image itself would be late so."""
    for ttft_ms, is_cut in ((10_000.0, True), (320.0, False)):
        early = request(0, 20, max_tokens=1, slo=SLO(ttft_ms=200.0))
        own = request(1, 120, image(0, 1, 100), slo=SLO(ttft_ms=ttft_ms))
        run = Run("unified", (0.0, early), (0.1, own), step_cost=PROFILED, budget=4096)
        assert (max(run.worker.encode_s) < 0.07) == is_cut == bool(run.orders())


def test_with_nothing_else_to_do_an_image_pushes_out_one_that_is_forgotten() -> None:
    encoding, half = Encoding(WORK), MIN_KEPT_TOKENS // 2
    encoding.note_orders([EncodeOrder(image(0, 1, half), 1)])
    for is_empty in (False, True):
        step = StepEncodes(encoding)
        step.order(image(0, 2), 0.0, RequestClass.BE, is_empty=is_empty)
        assert bool(step.orders) == is_empty


def test_an_image_is_encoded_with_its_tokens_where_there_is_time_for_both() -> None:
    stream = request(
        0,
        20,
        max_tokens=200,
        sampling=SamplingParams(seed=220),
        slo=SLO(ttft_ms=400.0, tpot_ms=400.0),
    )
    run = Run("unified", (0.0, stream), (0.1, request(1, 80, image(10, 1))), step_cost=PROFILED)
    assert run.orders() == []
    (number,) = [number for number, seconds in enumerate(run.worker.encode_s) if seconds]
    plan = run.plans[number]
    assert len(plan.decodes.rows) == 4 and [row.num_tokens for row in plan.rows] == [80]


def test_tokens_before_an_image_go_beside_its_layers() -> None:
    run = Run("unified", (0.0, LONG), (0.1, request(1, 80, image(10, 1))), step_cost=PROFILED)
    first = next(plan for plan in run.plans if plan.encodes)
    assert [(row.start_position, row.num_tokens) for row in first.rows] == [(0, 10)]


def test_best_effort_tokens_go_on_beside_images_of_newcomers() -> None:
    others = request(9, 20, of=RequestClass.BE, max_tokens=200, sampling=SamplingParams(seed=220))
    arrivals = [(0.1, request(n, 80, image(0, n))) for n in range(1, 4)]
    run = Run("unified", (0.0, LONG), (0.0, others), *arrivals)
    encoding = [plan for plan in run.plans if plan.encodes]
    assert any(len(plan.decodes.rows) == 8 for plan in encoding), "both of them"
    assert all(len(run.outcomes[RequestId(n)].token_ids) == 4 for n in range(1, 4))


def test_rates_are_learnt() -> None:
    encoding = Encoding(WORK)
    one = image(0, 1)
    assert encoding.layer_s(one) == 0.0
    for _ in range(100):
        encoding.observe(LAYER_S, WORK.of_layer(one))
    encoding.observe(1.0, 0.0)  # nothing was encoded
    assert encoding.layer_s(one) == pytest.approx(LAYER_S)
    larger = image(0, 1, 2 * NUM_TOKENS)
    assert encoding.layer_s(larger) == pytest.approx(LAYER_S * 2 * (1 + 1) / (1 + 0.5))
