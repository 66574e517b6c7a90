"""Who of a class loses memory first."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lightserve.messages.common import StepCoefficients
from lightserve.messages.images import DIGEST_BYTES, EncoderWork, Image
from lightserve.router.encoding import Encoding
from lightserve.router.events import FromFrontend
from lightserve.router.kv.cache import KVOptions, KVStore, Preemption
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.request import Request
from lightserve.router.request_table import DueTimes, RequestTable
from lightserve.router.scheduler import Scheduler
from lightserve.router.slo import TokenDeadlines
from lightserve.router.step_cost import StepCost, StepShape
from lightserve.router.victims import VICTIMS, VictimView, cheapest, emptiest, latest
from lightserve.sim.simulation import TimedEvent
from lightserve.types import SLO, FrontendId, RequestId, RequestKey
from tests.support.core_scenes import (
    Arrival,
    RecklessAdmission,
    check_outcome,
    events_of,
    make_core,
    make_simulation,
    submit,
)
from tests.support.policy_scenes import BE, RT, make_request


def view(kv: KVStore | None = None) -> VictimView:
    cost = StepCost()
    zeros = dict.fromkeys(StepCoefficients.__struct_fields__, 0.0)
    cost.use_profile(
        StepCoefficients(**{**zeros, "per_new_s": 1e-3, "per_chunk_pair_s": 1e-5, "floor_s": 1e-3})
    )
    lengths = OutputLengths(max_output_tokens=100)
    return VictimView(
        kv or KVStore(64, KVOptions()), DueTimes(RequestTable(1), 10.0), cost, lengths
    )


def test_the_emptiest_best_effort_block_goes_first() -> None:
    """Blocks of 8 slots: of 10 tokens the last has 6 free, of 15 one."""
    kv = KVStore(64, KVOptions(block_size=8))
    requests = [make_request(number, BE, prompt=p) for number, p in enumerate((15, 10))]
    for request in requests:
        request.num_paused_tokens = request.num_prompt_tokens
        kv.start(request, kv.look_up(request))
        slots = kv.acquire([(request, request.num_prompt_tokens)])
        assert request.slots is not None
        request.slots[: len(slots)] = slots
        request.num_paused_tokens = len(slots)
    assert [emptiest(request, view(kv)) for request in requests] == [1.0, 6.0]


def test_real_time_ones_go_by_the_time_that_is_left() -> None:
    requests = [make_request(number, RT) for number in range(2)]
    for request, ttft_ms in zip(requests, (500.0, 900.0), strict=True):
        request.deadlines = TokenDeadlines(SLO(ttft_ms=ttft_ms), 10.0)
    for order in (emptiest, latest):
        left_s = [order(request, view()) for request in requests]
        assert left_s == [pytest.approx(0.5), pytest.approx(0.9)]


def test_what_is_soon_done_or_dear_to_compute_again_stays() -> None:
    def held(prompt: int, output: int) -> Request:
        request = make_request(0, BE, prompt=prompt, output=output)
        request.max_tokens = 20
        request.num_paused_tokens = prompt + output - 1
        return request

    begun, nearly_done = held(40, 2), held(40, 19)
    assert cheapest(begun, view()) > cheapest(nearly_done, view())
    short, long = held(10, 2), held(4000, 2)
    short.next_position, long.next_position = 11, 4001
    assert cheapest(short, view()) > 0


def test_images_are_dear_to_compute_again() -> None:
    """Half a second for 40 tokens and as much for their image: it goes half as soon."""
    plain, seeing = (make_request(0, BE, prompt=40, output=2) for _ in range(2))
    for request in (plain, seeing):
        request.slots, request.num_paused_tokens = np.zeros(64, dtype=np.int32), 41
    image = Image(3, 10, 2, 2, b"", bytes(DIGEST_BYTES))
    seeing.parameters = dataclasses.replace(seeing.parameters, images=(image,))
    encoding = Encoding(EncoderWork(2, 0.0))
    again_s = view().cost.work(StepShape().plus(0, 41))
    encoding.observe(again_s, 20.0)
    own = view()._replace(encoding=encoding)
    assert cheapest(plain, own) == cheapest(plain, view())
    assert cheapest(seeing, own) == pytest.approx(cheapest(plain, own) / 2)


@pytest.mark.parametrize("preemption", [Preemption.CHECKPOINT, Preemption.RECOMPUTE])
@pytest.mark.parametrize("victims", VICTIMS)
def test_all_come_to_their_end(victims: str, preemption: Preemption) -> None:
    """Ten requests in a pool for three: the oldest of each class is never taken from."""
    kv = KVOptions(block_size=4, preemption=preemption)
    config = make_core("bros", 64, admission=RecklessAdmission(), kv=kv)._config
    core = Scheduler(dataclasses.replace(config, victims=VICTIMS[victims]))
    simulation = make_simulation(core)
    arrivals = [
        Arrival(0.0, 10, 30, 30, request_class=BE if number % 2 else RT) for number in range(10)
    ]
    simulation.run(events_of(arrivals))
    for number, arrival in enumerate(arrivals):
        check_outcome(arrival, simulation.outcomes[RequestKey(FrontendId(0), RequestId(number))])
    assert core.num_preemptions > 0
    core.check_integrity()


def test_the_oldest_of_a_class_is_the_last() -> None:
    config = make_core("priority", 64, admission=RecklessAdmission())._config
    core = Scheduler(
        dataclasses.replace(config, victims=lambda request, _view: -request.arrival_number)
    )
    simulation = make_simulation(core)
    arrival = Arrival(0.0, 4, 9, 9, request_class=BE)
    messages = [FromFrontend(FrontendId(0), submit(number, arrival)) for number in range(4)]
    simulation.run([TimedEvent(0.0, message) for message in messages], until_s=0.01)
    assert core._kv is not None
    in_order = core._planner._by_loss(core._kv, 0.01)
    assert [request.key.request_id for request in in_order] == [0, 3, 2, 1]
