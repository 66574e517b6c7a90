"""What a refused client is told, from hand-made backlogs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from support.policy_scenes import BE, RT, make_request, planned_step

from lightserve.messages.common import StepCoefficients
from lightserve.messages.images import DIGEST_BYTES, EncoderWork, Image, ImageSums
from lightserve.router.admission.baselines import ConservativeAdmission
from lightserve.router.config import SchedulerConfig
from lightserve.router.encoding import Encoding
from lightserve.router.from_submit import QueueLimits
from lightserve.router.kv.cache import KVOptions, KVStore
from lightserve.router.output_lengths import PRIOR_MOST, OutputLengths, expected_output
from lightserve.router.pipeline import Pipeline
from lightserve.router.policies import POLICIES
from lightserve.router.queue import WaitingQueue
from lightserve.router.request import Parameters, Request
from lightserve.router.request_table import RequestTable
from lightserve.router.retry_after import MAX_RETRY_S, MIN_RETRY_S, QueueDelay, Work, work_of
from lightserve.router.step import Scheduled, shape_of
from lightserve.router.step_cost import StepShape
from lightserve.types import RequestClass

TEN_MS = StepCoefficients(
    floor_s=0.01,
    knee=1e9,
    per_new_s=0.0,
    per_decode_s=0.0,
    per_chunk_s=0.0,
    per_decode_context_s=0.0,
    per_chunk_context_s=0.0,
    per_chunk_pair_s=0.0,
)
"""Every step takes as long."""


class Scene:
    """Queues and rows, without a core."""

    def __init__(self, *, cost: StepCoefficients | None = TEN_MS, policy: str = "unified") -> None:
        self.waiting, self.rows = WaitingQueue(), RequestTable(8)
        self.pipeline = Pipeline(max_num_batched_tokens=100)
        if cost is not None:
            self.pipeline.cost.use_profile(cost)
        config = SchedulerConfig(
            max_model_len=4096,
            max_num_seqs=8,
            max_num_batched_tokens=100,
            queue_limits=dict.fromkeys(RequestClass, QueueLimits(9, 999)),
            policy=POLICIES[policy](),
            admission=ConservativeAdmission(),
            lengths=OutputLengths(max_output_tokens=4096),
        )
        self.waits = QueueDelay(config, self.waiting, self.rows, self.pipeline)
        self.kv = KVStore(100_000, KVOptions())
        self._number = 0

    def make(self, request_class: RequestClass, prompt: int, *, output: int = 0) -> Request:
        self._number += 1
        return make_request(self._number, request_class, prompt=prompt, output=output or None)

    def wait(self, count: int, request_class: RequestClass, prompt: int) -> None:
        for _ in range(count):
            self.waiting.append(self.make(request_class, prompt))

    def run(self, count: int, request_class: RequestClass, output: int) -> list[Request]:
        running = [self.make(request_class, 8, output=output) for _ in range(count)]
        for request in running:
            self.rows.acquire(request)
        return running

    def learn(self, request_class: RequestClass, *lengths: int) -> None:
        for length in lengths:
            self.waits.note_length(self.make(request_class, 8), length)

    def step(
        self,
        allotments: list[Scheduled],
        seconds: float,
        accepted: Sequence[tuple[Request, int]] = (),
    ) -> None:
        self.pipeline.busy_s += seconds
        self.waits.note_step(planned_step(allotments), shape_of(allotments), accepted)

    def seconds(self, request_class: RequestClass) -> float:
        return self.waits.seconds(request_class, self.kv)


def test_drafts_are_no_work_on_prompts() -> None:
    shape = StepShape().plus_decodes(2, 9).plus(0, 30)
    done = work_of(planned_step([]), shape)
    assert done == {RT: Work(30, 2), BE: Work()}
    assert work_of(planned_step([]), shape.plus_drafts(8, 36)) == done


def test_accepted_drafts_are_in_the_pace() -> None:
    """Eight outputs get three tokens a step, so that 16 more have places in a third of the time."""
    found_s = []
    for num_accepted in (0, 2):
        scene = Scene()
        scene.learn(RT, *[1000] * 4000)
        running = scene.run(8, RT, output=500)
        scene.wait(16, RT, 2)
        accepted = [(request, num_accepted) for request in running]
        for _ in range(3000):
            scene.step([Scheduled(request, 1) for request in running], 0.01, accepted)
        found_s.append(scene.seconds(RT))
        assert scene.waits.computed[RT].num_decodes == 3000 * 8 * (1 + num_accepted)
    assert found_s[0] == pytest.approx(20.0, rel=0.01)
    assert found_s[1] == pytest.approx(20.0 / 3, rel=0.05)


def test_accepted_drafts_are_work_of_their_class() -> None:
    rt, be = make_request(0, RT, prompt=8, output=5), make_request(1, BE, prompt=8, output=5)
    scene = Scene()
    scene.step([Scheduled(rt, 1), Scheduled(be, 1)], 0.01, [(rt, 3), (be, 1)])
    assert scene.waits.computed == {RT: Work(0, 4), BE: Work(0, 2)}


def test_who_waits_for_prompts_alone() -> None:
    """Four prompts of 300 tokens are 12 steps of 100; there are rows for all."""
    scene = Scene()
    scene.wait(4, RT, 300)
    assert scene.seconds(RT) == pytest.approx(0.12)
    assert scene.seconds(BE) == 0.0
    assert scene.waits.retry_after_s(RT, scene.kv) == MIN_RETRY_S


def test_who_waits_for_places() -> None:
    """Of eight rows none is free: 16 outputs of 1000 tokens, eight a step. Those that run are half
    done, as they are on average where all are as long."""
    scene = Scene()
    scene.learn(RT, *[1000] * 4000)
    scene.run(8, RT, output=500)
    scene.wait(16, RT, 2)
    assert scene.seconds(RT) == pytest.approx(20.0, rel=0.01)


def test_a_young_batch_takes_longer_to_make_room() -> None:
    scene = Scene()
    scene.learn(RT, *[1000] * 4000)
    scene.run(8, RT, output=1)
    scene.wait(16, RT, 2)
    assert scene.seconds(RT) == pytest.approx(25.0, rel=0.01)
    scattered = Scene()
    scattered.learn(RT, *[1, 1, 1, 3997] * 1000)  # now it is unknown, however long it has run
    scattered.run(8, RT, output=1)
    scattered.wait(16, RT, 2)
    assert scattered.seconds(RT) == pytest.approx(20.0, rel=0.01)


def test_real_time_gets_the_places_of_best_effort() -> None:
    for policy, expected_s in (("unified", 0.16), ("chunked", 20.16)):
        scene = Scene(policy=policy)
        scene.learn(RT, *[1000] * 4000)
        scene.run(8, BE, output=500)
        scene.wait(8, RT, 200)
        scene.learn(BE, 1000)
        found_s = scene.seconds(RT)
        if policy == "unified":
            assert found_s == pytest.approx(expected_s)
        else:
            assert found_s > 10.0


def test_what_was_seen_counts() -> None:
    """Half of the steps go to the other class: everything takes twice as long."""
    scene = Scene()
    scene.wait(4, BE, 20_000)
    before_s = scene.seconds(BE)
    assert before_s == pytest.approx(8.0)
    (request,) = scene.run(1, BE, output=1)
    (other,) = scene.run(1, RT, output=1)
    for number in range(4000):
        allotment = Scheduled(other if number % 2 else request, 100)
        scene.step([allotment], 0.01)
    assert scene.seconds(BE) == pytest.approx(2 * before_s, rel=0.07)
    assert scene.waits.computed == {BE: Work(200_000, 0), RT: Work(200_000, 0)}


def with_image(request: Request, num_tokens: int) -> Request:
    image = Image(0, num_tokens, 1, 1, b"abc", bytes([request.arrival_number]) * DIGEST_BYTES)
    images = (image, msgspec.structs.replace(image, start=num_tokens, digest=bytes(DIGEST_BYTES)))
    request.parameters = Parameters(
        images=images, image_sums=ImageSums(2 * num_tokens, 2 * num_tokens**2)
    )
    return request


ENCODER = EncoderWork(num_layers=10, pair_share=0.1)
"""With 1 ms a token: an image of 40 tokens takes 2 s."""


def test_images_that_wait_are_waited_for() -> None:
    """Two of each prompt, the part of them that is not found in the cache."""
    scene = Scene()
    scene.pipeline.encoding = Encoding(ENCODER)
    waiting = [with_image(scene.make(RT, 100), 40) for _ in range(3)]
    for request in waiting:
        scene.waiting.append(request)
    assert scene.seconds(RT) == pytest.approx(0.03)  # it is not known yet how long encoding takes
    scene.pipeline.encoding.use_profile(msgspec.structs.replace(TEN_MS, per_encoder_token_s=1e-3))
    assert scene.seconds(RT) == pytest.approx(0.03 + 3 * 4.0)
    (running,) = scene.run(1, BE, output=2)
    with_image(running, 40).num_computed_tokens = 0
    assert scene.seconds(RT) == pytest.approx(0.03 + 3 * 4.0 + 4.0, rel=0.01)
    scene.rows.end(running)
    scene.rows.release(running)
    for _ in range(4000):
        scene.waits.note_started(waiting[0], 75)
    assert scene.seconds(RT) == pytest.approx((0.03 + 3 * 4.0) / 4, rel=0.01)
    scene.waiting.remove(waiting[0])
    assert scene.waiting.backlog(RT).images == ImageSums(160, 6400)
    assert scene.seconds(RT) == pytest.approx((0.02 + 2 * 4.0) / 4, rel=0.01)
    scene.waiting.remove(waiting[1])
    scene.waiting.remove(waiting[2])
    assert scene.waiting.backlog(RT).images == ImageSums()


def test_what_was_encoded_is_in_the_pace() -> None:
    """Steps that do nothing but encode images of a class, every other one of another class."""
    found_s = []
    for share in (1.0, 0.5):
        scene = Scene()
        scene.pipeline.encoding = Encoding(ENCODER)
        costs = msgspec.structs.replace(TEN_MS, per_encoder_token_s=1e-3)
        scene.pipeline.encoding.use_profile(costs)
        for _ in range(8):
            scene.waiting.append(with_image(scene.make(BE, 100), 40))
        for _ in range(1000):
            scene.pipeline.busy_s += 0.1
            planned = dataclasses.replace(planned_step([]), encode_s={BE: 0.1 * share})
            scene.waits.note_step(planned, StepShape())
        assert scene.waits.computed[BE].encode_s == pytest.approx(100 * share)
        found_s.append(scene.seconds(BE))
    assert found_s[0] == pytest.approx(32.08, rel=0.001)  # rows are free, and memory: time is not
    assert found_s[1] == pytest.approx(2 * 32.08, rel=0.1)


def test_time_without_a_queue_does_not_count() -> None:
    scene = Scene()
    (request,) = scene.run(1, BE, output=1)
    for _ in range(100):
        scene.step([Scheduled(request, 1)], 1.0)
    scene.wait(4, BE, 3000)
    assert scene.seconds(BE) == pytest.approx(1.2)


def test_what_is_cached_is_not_waited_for() -> None:
    scene = Scene()
    for _ in range(3):
        request = scene.make(BE, 100)
        scene.waits.note_started(request, 75)
    scene.wait(4, BE, 3000)
    assert scene.seconds(BE) == pytest.approx(0.3)


def test_without_step_times_it_follows_the_tokens_that_were_seen() -> None:
    scene = Scene(cost=None)
    scene.wait(4, BE, 3000)
    assert scene.waits.retry_after_s(BE, scene.kv) == MIN_RETRY_S
    (request,) = scene.run(1, BE, output=1)
    for _ in range(100):
        scene.step([Scheduled(request, 100)], 0.1)
    assert scene.seconds(BE) == pytest.approx(12_000 / 1000, rel=0.05)


def test_it_has_bounds() -> None:
    scene = Scene()
    assert scene.waits.retry_after_s(RT, None) == MIN_RETRY_S
    scene.wait(400, RT, 30_000)
    assert scene.waits.retry_after_s(RT, scene.kv) == MAX_RETRY_S
    assert scene.waits.retry_after_s(RT, None) == MAX_RETRY_S


@pytest.mark.parametrize("limit", [1, 128, 1024, 4096])
def test_an_unknown_output_is_log_uniform(limit: int) -> None:
    lengths = np.geomspace(1, max(limit, PRIOR_MOST), 100_001)
    expected = np.minimum(lengths, limit).mean()
    assert expected_output(limit) == pytest.approx(expected, rel=1e-3)


def test_the_first_to_end_are_not_taken_for_all() -> None:
    """One output of a token does not say that the others are as short, many do."""
    found = {}
    for num_short in (0, 1, 1000):
        scene = Scene()
        scene.learn(RT, *[1] * num_short)
        scene.run(8, RT, output=500)
        scene.wait(100, RT, 2)
        found[num_short] = scene.seconds(RT)
    assert found[0] > found[1] > 0.7 * found[0]
    assert found[1000] < 0.1 * found[0]
