"""Queues bounded per class, in requests and tokens; what requests have besides, as memory."""

from __future__ import annotations

import tracemalloc
from contextlib import nullcontext
from typing import Any

import pytest
from support.core_scenes import Arrival, make_core, pack_results, submit

from lightserve.channels import Codec
from lightserve.errors import ProtocolError
from lightserve.messages.common import Constraint, JsonSchemaConstraint
from lightserve.messages.frontend_router import (
    Abort,
    ClassLoad,
    ErrorCode,
    Finish,
    FrontendMessage,
    RequestDelta,
    RouterMessage,
)
from lightserve.messages.images import DIGEST_BYTES, Image
from lightserve.messages.router_worker import (
    RowResult,
    plan_rows,
)
from lightserve.router.events import FromFrontend, FrontendGone, WorkersGone, WorkersReady
from lightserve.router.from_submit import QueueLimits, check_submit
from lightserve.router.queue import Backlog
from lightserve.router.retry_after import MIN_RETRY_S
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep
from lightserve.types import (
    SAMPLING_FIELDS,
    FrontendId,
    RequestClass,
    RequestId,
    SamplingField,
    SamplingParams,
)

FRONTEND = FrontendId(0)


@pytest.mark.parametrize(
    ("backlog", "num_prompt_tokens", "has_room"),
    [
        (Backlog(0, 0), 10, True),
        (Backlog(0, 0), 1000, True),  # has the queue for itself
        (Backlog(3, 30), 10, True),
        (Backlog(3, 30), 71, False),
        (Backlog(3, 30), 70, True),
        (Backlog(4, 4), 1, False),
    ],
)
def test_room(backlog: Backlog, num_prompt_tokens: int, has_room: bool) -> None:
    assert QueueLimits(4, 100).has_room(backlog, num_prompt_tokens) is has_room


def test_one_class_does_not_fill_the_queue_of_the_other() -> None:
    core = make_core("chunked", max_waiting=2)

    def says(number: int, request_class: RequestClass) -> list[RequestDelta]:
        message = submit(number, Arrival(0.0, 8, 4, 4, request_class=request_class))
        news = core.on_message(FromFrontend(FRONTEND, message), 1.0)
        return [delta for outgoing in news for delta in outgoing.message.each()]

    for number in range(2):
        assert says(number, RequestClass.BE) == []
    (refusal,) = says(2, RequestClass.BE)
    assert refusal.error is ErrorCode.QUEUE_FULL and refusal.retry_after_s == MIN_RETRY_S
    assert says(3, RequestClass.RT) == []
    assert core.status(1.0).load == {
        RequestClass.BE: ClassLoad(2, 16, 0),
        RequestClass.RT: ClassLoad(1, 8, 0),
    }


@pytest.mark.parametrize(
    ("name", "spec"), [item for item in SAMPLING_FIELDS.items() if item[1].high is not None]
)
def test_sampling_beyond_its_limits_is_no_request(name: str, spec: SamplingField) -> None:
    assert spec.low is not None and spec.high is not None
    for value, is_wrong in (
        *((spec.low, False), (spec.high, False)),
        *((spec.low - 1, True), (spec.high + 1, True)),
    ):
        params: Any = {name: value}
        message = submit(0, Arrival(0.0, 8, 4, 4), sampling=SamplingParams(**params))
        with pytest.raises(ProtocolError, match=name) if is_wrong else nullcontext():
            check_submit(message, vocab_size=100_000)


RT, BE = RequestClass.RT, RequestClass.BE
ARRIVAL = Arrival(0.0, 8, 4, 4)


def _ids(number: int, count: int) -> tuple[int, ...]:
    return tuple(range(300 + number, 300 + number + count))


def _sent(core: Scheduler, number: int, **fields: Any) -> list[RequestDelta]:
    """Submit as over a link: nothing that arrives is the same object as anything else."""
    frontend_id = fields.pop("frontend_id", FRONTEND)
    arrival = Arrival(0.0, 8, 4, 4, request_class=fields.pop("request_class", RT))
    codec: Codec[Any, Any] = Codec(send_type=FrontendMessage, recv_type=RouterMessage)
    other: Codec[Any, Any] = Codec(send_type=RouterMessage, recv_type=FrontendMessage)
    message = other.decode(codec.encode(submit(number, arrival, **fields)))
    news = core.on_message(FromFrontend(frontend_id, message), 1.0)
    core.check_integrity()
    return [delta for outgoing in news for delta in outgoing.message.each()]


@pytest.mark.parametrize(
    ("sampling", "constraint"),
    [
        (SamplingParams(allowed_token_ids=_ids(0, 60_000)), None),
        (SamplingParams(logit_bias=tuple((300 + n, 0.1 * n) for n in range(1024))), None),
        (SamplingParams(), JsonSchemaConstraint(schema="a" * 100_000)),
        (SamplingParams(), JsonSchemaConstraint(schema="\U0001f600" * 50_000)),
    ],
)
def test_parameters_take_no_more_memory_than_is_counted(
    sampling: SamplingParams, constraint: Constraint | None
) -> None:
    core = make_core("chunked")
    _sent(core, 0, sampling=sampling, constraint=constraint)  # Python keeps what it encodes
    core.on_message(FrontendGone(FRONTEND), 1.0)
    tracemalloc.start()
    _sent(core, 1, sampling=sampling, constraint=constraint)
    first, _ = tracemalloc.get_traced_memory()
    for number in range(2, 17):  # its other choices
        _sent(core, number, sampling=sampling, constraint=constraint)
    all_of_them, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    counted = core.parameter_bytes[RT]
    assert first < counted + 20_000
    assert all_of_them < counted + 100_000, "the choices share them"
    assert counted < 3 * first


def test_choices_share_images_whose_pixels_are_not_compared() -> None:
    """Those of a large request are 48 MiB, which the router would look at byte by byte."""

    class Pixels(bytes):
        def __eq__(self, _: object) -> bool:
            raise AssertionError("pixels were compared")

        __hash__ = bytes.__hash__

    core = make_core("chunked")
    for number in range(2):
        image = Image(0, 1, 2, 2, Pixels(12), bytes(DIGEST_BYTES))
        arrival = Arrival(0.0, 8, 4, 4, request_class=RT)
        core.on_message(FromFrontend(FRONTEND, submit(number, arrival, images=(image,))), 1.0)
    first, second = core._requests.values()
    assert first.parameters is second.parameters


def test_parameters_of_a_class_are_bounded_as_memory() -> None:
    core = make_core("chunked", max_parameter_bytes=100_000)
    for number, size in enumerate([1000, 1000]):
        assert (
            _sent(core, number, sampling=SamplingParams(allowed_token_ids=_ids(number, size))) == []
        )
    more = SamplingParams(allowed_token_ids=_ids(7, 1000))
    (refusal,) = _sent(core, 2, sampling=more)
    assert refusal.error is ErrorCode.QUEUE_FULL
    assert _sent(core, 3) == [], "what has none waits as before"
    same = SamplingParams(allowed_token_ids=_ids(1, 1000), choice=1)
    assert _sent(core, 4, sampling=same) != [], "others came between"
    assert _sent(core, 5, sampling=more, request_class=BE) == [], "the other class has its own"
    core.on_message(FromFrontend(FRONTEND, Abort(request_id=RequestId(0))), 1.0)
    assert _sent(core, 6, sampling=more) == []


def test_a_key_leaves_half_of_the_memory_for_parameters_to_others() -> None:
    core = make_core("chunked", max_parameter_bytes=100_000)

    def is_taken(number: int, key: str, size: int, **fields: Any) -> bool:
        sampling = SamplingParams(allowed_token_ids=_ids(number, size))
        return _sent(core, number, sampling=sampling, prefix_salt=key, **fields) == []

    assert is_taken(0, "a", 1000) and not is_taken(1, "a", 1000), "40 bytes each: over 50,000"
    assert is_taken(2, "a", 200) and is_taken(3, "b", 600)
    assert is_taken(4, "a", 1000, request_class=BE), "classes are counted apart"
    assert not is_taken(5, "b", 200), "half of what the first one leaves"
    assert is_taken(6, "", 600) and not is_taken(7, "", 200), "without keys all of it"
    for number in range(8):
        core.on_message(FromFrontend(FRONTEND, Abort(request_id=RequestId(number))), 1.0)
    assert not core._parameters._of_keys
    assert is_taken(8, "a", 5000), "alone"


def test_equal_parameters_of_another_key_are_its_own() -> None:
    core = make_core("chunked")
    for number, key in enumerate(["a", "b", "b"]):
        sampling = SamplingParams(allowed_token_ids=_ids(0, 1000))
        assert _sent(core, number, sampling=sampling, prefix_salt=key) == []
    assert [*core._parameters._of_keys.values()] == [40_104, 40_104]


def test_one_request_may_have_more_for_itself_and_its_choices() -> None:
    core = make_core("chunked", max_parameter_bytes=1000)
    for choice in range(4):
        large = SamplingParams(allowed_token_ids=_ids(0, 1000), choice=choice)
        assert _sent(core, choice, sampling=large) == []
    (refusal,) = _sent(core, 9, sampling=SamplingParams(allowed_token_ids=_ids(1, 10)))
    assert refusal.error is ErrorCode.QUEUE_FULL


def test_parameters_are_counted_until_the_last_choice_has_ended() -> None:
    core = make_core("chunked")
    core.on_message(WorkersReady(120), 0.0)
    counts = []
    large = SamplingParams(allowed_token_ids=_ids(0, 1000))
    for number, is_looked_at in enumerate([False, True, False]):
        _sent(core, number, sampling=large, needs_acknowledgement=is_looked_at)
    while isinstance(step := core.plan(5.0), PlannedStep):
        plan = core.commit(step, 5.0)
        rows = [RowResult(row.row, [1]) for row in plan_rows(plan) if row.output]  # EOS
        result = pack_results(plan, rows, exec_s=0.01)
        core.on_result(result, 5.0)
        core.check_integrity()
        counts.append(core.parameter_bytes[RT])
    assert counts[-1] == 1000 * 40 + 104, "its frontend may yet shorten one of them"
    core.on_message(FromFrontend(FRONTEND, Finish(request_id=RequestId(1), num_tokens=1)), 6.0)
    assert core.parameter_bytes[RT] == 0
    _sent(core, 5, sampling=large)
    core.on_message(WorkersGone(), 7.0)
    core.check_integrity()
    core.on_message(FrontendGone(FRONTEND), 7.0)
    core.check_integrity()
    assert core.parameter_bytes[RT] == 0
