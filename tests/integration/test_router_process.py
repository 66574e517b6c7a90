"""The router's loop over in-memory channels: who is heard, and in which order."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from support.memory_channel import MemoryHub, MemoryLink, bind_hub

from lightserve.config import ServeConfig
from lightserve.errors import ChannelFull
from lightserve.messages.common import (
    PROTOCOL_VERSION,
    GraphSizes,
    StepCoefficients,
    TokenLogprob,
    TokenSegment,
    pack_int32,
)
from lightserve.messages.frontend_router import (
    Abort,
    Acknowledge,
    ClassSlots,
    Client,
    DescribeKV,
    DescribeRequest,
    ErrorCode,
    Finish,
    FrontendHello,
    FrontendMessage,
    KVMap,
    MaySubmit,
    Progress,
    RequestDelta,
    RequestTimeline,
    RouterMessage,
    RouterStatus,
    RouterWelcome,
    SentSoFar,
    Submit,
    TokenDelta,
    Verdict,
)
from lightserve.messages.router_worker import (
    RouterToWorker,
    RowResult,
    StepPlan,
    StepResult,
    StepTimesMeasured,
    WorkerHello,
    WorkerToRouter,
    sampling_rows,
)
from lightserve.messages.supervision import (
    ChildMessage,
    ChildSpec,
    FrontendLost,
    Role,
    SupervisorMessage,
    WorkersLost,
    WorkersStalled,
)
from lightserve.router.config import make_scheduler_config
from lightserve.router.process import RouterProcess
from lightserve.router.scheduler import Scheduler
from lightserve.router.step_cost import StepShape
from lightserve.types import (
    SLO,
    FinishReason,
    FrontendId,
    RequestClass,
    RequestId,
    RowId,
    SamplingParams,
    StepId,
)

BOOT = "boot"
VOCAB_SIZE = 512


@dataclass
class Scene:
    """A router process and the other ends of its links."""

    config: ServeConfig
    process: RouterProcess
    frontends: MemoryHub[RouterMessage, FrontendMessage]
    workers: MemoryHub[RouterToWorker, WorkerToRouter]
    supervisor: MemoryHub[SupervisorMessage, ChildMessage]

    def turn(self) -> None:
        """Turns of the loop until it would sleep."""
        while self.process.turn() <= time.monotonic() or self.workers.is_readable():
            pass

    def worker(self, rank: int = 0) -> MemoryLink[WorkerToRouter, RouterToWorker]:
        return self.workers.connect_link(f"worker-{rank}")

    def hello(self, **changes: object) -> WorkerHello:
        hello = WorkerHello(
            protocol_version=PROTOCOL_VERSION,
            boot_id=BOOT,
            config_hash=self.config.ranks_digest,
            incarnation=0,
            rank=0,
            num_kv_slots=100,
            num_host_slots=0,
            max_num_batched_tokens=self.config.max_tokens_of_step("cpu"),
        )
        return WorkerHello(**{**{f: getattr(hello, f) for f in hello.__struct_fields__}, **changes})  # type: ignore[arg-type]

    def frontend(
        self, incarnation: int = 0, *, number: int = 0
    ) -> MemoryLink[FrontendMessage, RouterMessage]:
        link = self.frontends.connect_link(f"frontend-{number}")
        link.send(
            FrontendHello(
                protocol_version=PROTOCOL_VERSION,
                boot_id=BOOT,
                config_hash=self.config.digest,
                frontend_id=FrontendId(number),
                incarnation=incarnation,
                session=incarnation + 1,
            )
        )
        return link

    @property
    def is_ready(self) -> bool:
        return self.process.core.status(0.0).workers_ready


def make_scene(**options: object) -> Scene:
    config = ServeConfig(max_num_seqs=8, **options)  # type: ignore[arg-type]
    frontends = bind_hub(send_type=RouterMessage, recv_type=FrontendMessage)
    workers = bind_hub(send_type=RouterToWorker, recv_type=WorkerToRouter)
    supervisor = bind_hub(send_type=SupervisorMessage, recv_type=ChildMessage)
    spec = ChildSpec(
        role=Role.ROUTER, index=0, incarnation=0, boot_id=BOOT, config=config, control_address=""
    )
    process = RouterProcess(
        spec,
        Scheduler(make_scheduler_config(config, max_model_len=128)),
        frontends,
        workers,
        supervisor.connect_link("router-0"),
        vocab_size=VOCAB_SIZE,
    )
    return Scene(config, process, frontends, workers, supervisor)


def submit(number: int = 1, **changes: object) -> Submit:
    fields: dict[str, object] = {
        "request_id": RequestId(number),
        "prompt": [TokenSegment(token_ids=pack_int32([1, 2, 3]))],
        "max_tokens": 2,
        "eos_token_ids": [],
        "sampling": SamplingParams(),
        "request_class": RequestClass.RT,
        "age_s": 0.0,
    }
    return Submit(**{**fields, **changes})  # type: ignore[arg-type]


def received(link: MemoryLink[FrontendMessage, RouterMessage]) -> list[RouterMessage]:
    messages = []
    while (message := link.receive(0.0)) is not None:
        messages.append(message)
    return [message for message in messages if not isinstance(message, RouterStatus)]


def result(step_id: int, *tokens: int, incarnation: int = 0) -> StepResult:
    return StepResult(
        step_id=StepId(step_id),
        incarnation=incarnation,
        token_ids=pack_int32(tokens),
        exec_s=0.01,
        idle_s=0.0,
    )


def test_a_request_from_hello_to_its_last_token() -> None:
    scene = make_scene()
    frontend, worker = scene.frontend(), scene.worker()
    worker.send(scene.hello())
    scene.turn()
    assert received(frontend) == [RouterWelcome(boot_id=BOOT, num_kv_slots=100)]
    frontend.send(submit())
    scene.turn()
    first = worker.receive(0.0)
    assert isinstance(first, StepPlan) and first.rows[0].num_tokens == 3
    worker.send(result(0, 7))
    scene.turn()
    worker.send(result(1, 8))
    scene.turn()
    tokens = [
        d.token_ids for m in received(frontend) if isinstance(m, TokenDelta) for d in m.each()
    ]
    assert tokens == [[7], [8]]


def test_the_kv_pool_is_described_to_who_asks() -> None:
    scene = make_scene()
    frontend, worker = scene.frontend(), scene.worker()
    frontend.send(DescribeKV(query_id=1))
    scene.turn()
    assert received(frontend) == [KVMap(query_id=1, pool=None)]  # no workers yet
    worker.send(scene.hello())
    frontend.send(submit(request_class=RequestClass.BE, max_tokens=1))
    scene.turn()
    frontend.send(DescribeKV(query_id=2))
    scene.turn()
    answer = received(frontend)[-1]
    assert isinstance(answer, KVMap) and answer.pool is not None
    assert (answer.query_id, answer.pool.num_slots) == (2, 100)
    assert answer.pool.num_slots_of_kind == [97, 0, 3, 0, 0]
    assert answer.pool.classes[RequestClass.BE] == ClassSlots(1, 3, 0)
    assert answer.pool.block_size == scene.config.block_size
    stranger = scene.frontends.connect_link("frontend-7")
    stranger.send(DescribeKV(query_id=1))
    scene.turn()
    assert received(stranger) == []


def test_steps_are_told_to_who_looks_at_them() -> None:
    """And noted only after a question."""
    scene = make_scene()
    frontend, worker = scene.frontend(), scene.worker()
    worker.send(scene.hello())
    frontend.send(submit(request_class=RequestClass.BE, max_tokens=1))
    scene.turn()
    frontend.send(DescribeKV(query_id=1))
    scene.turn()
    first = received(frontend)[-1]
    assert isinstance(first, KVMap) and first.steps == []

    frontend.send(submit(RequestId(2), max_tokens=1))
    scene.turn()
    frontend.send(DescribeKV(query_id=2))
    scene.turn()
    answer = received(frontend)[-1]
    assert isinstance(answer, KVMap)
    (note,) = answer.steps
    assert note.num_requests == {RequestClass.RT: 1}
    assert note.num_tokens[RequestClass.RT] > 1
    assert note.exec_s is None and note.age_s >= 0.0


def test_frontends_ask_whether_a_request_may_come() -> None:
    """Each has its answer, nothing is kept of what was asked for, and no worker hears of it."""
    scene = make_scene()
    links = [scene.frontend(number=number) for number in range(2)]
    scene.worker().send(scene.hello())
    scene.turn()
    for link in links:
        received(link)

    def answers() -> list[list[RouterMessage]]:
        for number, link in enumerate(links):
            link.send(MaySubmit(query_id=5 + number, submit=submit(9)))
        scene.turn()
        return [received(link) for link in links]

    yes = [[Verdict(query_id=5)], [Verdict(query_id=6)]]
    assert answers() == yes == answers()
    assert not scene.process.core._requests
    links[0].send(submit(1, client=Client(key="a", requests_per_minute=1)))
    links[0].send(MaySubmit(query_id=1, submit=submit(2, max_tokens=2**30)))
    links[0].send(MaySubmit(query_id=2, submit=submit(3, priority=2**63)))
    wish = submit(4, client=Client(key="a", requests_per_minute=1))
    links[1].send(MaySubmit(query_id=3, submit=wish))
    scene.turn()
    first = received(links[0])
    assert first[0] == Verdict(query_id=1, error=ErrorCode.TOO_LARGE, max_tokens=101)
    assert first[1] == Verdict(query_id=2, error=ErrorCode.INVALID)
    (verdict,) = received(links[1])
    assert isinstance(verdict, Verdict) and verdict.error is ErrorCode.REQUEST_QUOTA
    assert 59.0 < verdict.retry_after_s <= 60.0


@pytest.mark.parametrize("num_kept", [0, 5])
def test_timelines_are_kept_where_they_are_wanted(num_kept: int) -> None:
    scene = make_scene(request_timelines=num_kept)
    frontend, worker = scene.frontend(), scene.worker()
    worker.send(scene.hello())
    frontend.send(submit(names=("x-1",), max_tokens=1))
    scene.turn()
    for name in ("x-1", "x-2"):
        frontend.send(DescribeRequest(query_id=1, name=name, client_key=None))
        scene.turn()
        answer = received(frontend)[-1]
        assert isinstance(answer, RequestTimeline)
        assert len(answer.lives) == (num_kept > 0 and name == "x-1")
        if answer.lives:
            assert answer.lives[0].stretches[0].what == "computes"


def test_a_loss_and_the_new_group_in_one_wake_up() -> None:
    """Whichever of the two is read first, the new group counts."""
    for word_of_loss_comes_late in (False, True):
        scene = make_scene()
        scene.worker().send(scene.hello())
        scene.turn()
        assert scene.is_ready
        if not word_of_loss_comes_late:
            scene.supervisor.send("router-0", WorkersLost(incarnation=0))
        scene.worker().send(scene.hello(incarnation=1))
        scene.turn()
        scene.supervisor.send("router-0", WorkersLost(incarnation=0))
        scene.turn()
        assert scene.is_ready


def test_word_of_a_dead_frontend_does_not_hurt_its_successor() -> None:
    scene = make_scene()
    scene.worker().send(scene.hello())
    scene.frontend(incarnation=0)
    scene.turn()
    successor = scene.frontend(incarnation=1)
    scene.turn()
    scene.supervisor.send("router-0", FrontendLost(frontend_id=FrontendId(0), incarnation=0))
    scene.turn()
    successor.send(submit(max_tokens=1000))
    scene.turn()
    [_, refused] = received(successor)
    assert isinstance(refused, TokenDelta)
    assert refused.requests[0].error is ErrorCode.TOO_LARGE


@pytest.mark.parametrize(
    "changes",
    [
        {"boot_id": "other"},
        {"config_hash": "other"},
        {"protocol_version": PROTOCOL_VERSION + 1},
        {"rank": 1},
        {"rank": 7},
        {"rank": -1},
    ],
)
def test_a_stranger_is_not_a_worker(changes: dict[str, object]) -> None:
    scene = make_scene()
    scene.worker(0).send(scene.hello(**changes))
    scene.worker(9).send(scene.hello(rank=9))
    scene.turn()
    assert not scene.is_ready
    scene.worker().send(scene.hello())
    scene.turn()
    assert scene.is_ready


def test_all_ranks_count_and_the_smallest_pool_decides() -> None:
    scene = make_scene(tp=2)
    scene.worker(0).send(scene.hello(num_kv_slots=100))
    scene.worker(0).send(scene.hello(num_kv_slots=100))
    scene.turn()
    assert not scene.is_ready
    scene.worker(1).send(scene.hello(rank=1, num_kv_slots=60))
    frontend = scene.frontend()
    scene.turn()
    assert received(frontend) == [RouterWelcome(boot_id=BOOT, num_kv_slots=60)]


def test_a_request_has_room_for_what_its_state_leaves() -> None:
    scene = make_scene()
    scene.worker().send(scene.hello(num_kv_slots=100, num_state_slots=30))
    frontend = scene.frontend()
    scene.turn()
    welcome = [m for m in received(frontend) if isinstance(m, RouterWelcome)]
    assert welcome == [RouterWelcome(boot_id=BOOT, num_kv_slots=70)]
    status = scene.process.core.status(0.0)
    assert (status.num_kv_slots, status.num_state_slots) == (100, 30)


def test_results_of_strangers_are_dropped_and_wrong_ones_end_the_group() -> None:
    scene = make_scene()
    scene.worker().send(scene.hello())
    scene.turn()
    scene.worker(9).send(result(999))
    scene.worker(0).send(result(999, incarnation=3))
    scene.turn()
    assert scene.supervisor.receive(0.0) is None or scene.is_ready
    scene.worker(0).send(result(999))
    scene.turn()
    messages = [m for _, m in iter(lambda: scene.supervisor.receive(0.0), None)]
    assert WorkersStalled(incarnation=0, stalled_s=0.0) in messages


def test_only_the_first_rank_of_the_workers_of_now_tells_what_steps_take() -> None:
    scene = make_scene()
    scene.worker().send(scene.hello())
    scene.turn()
    cost = scene.process.core._pipeline.cost

    def tell(index: int, incarnation: int) -> None:
        measured = StepTimesMeasured(
            incarnation=incarnation,
            step_cost=StepCoefficients(1.0, *[0.0] * 9),
            max_num_batched_tokens=8,
        )
        scene.worker(index).send(measured)
        scene.turn()

    tell(0, 3)
    tell(1, 0)
    assert not cost.is_known
    tell(0, 0)
    assert cost.is_known and cost.seconds(StepShape().plus(0, 4)) == 1.0


def test_the_sizes_to_which_workers_pad_steps_come_with_their_hello() -> None:
    scene = make_scene()
    per_token = StepCoefficients(0.0, 0.0, 1.0, *[0.0] * 7)
    scene.worker().send(scene.hello(step_cost=per_token, graph_sizes=GraphSizes(mixed=(16, 32))))
    scene.turn()
    cost = scene.process.core._pipeline.cost
    num_tokens = (2, 16, 17, 33)
    assert [cost.seconds(StepShape().plus(0, n)) for n in num_tokens] == [16.0, 16.0, 32.0, 33.0]


@pytest.mark.parametrize(
    "prompt", [[], [TokenSegment(token_ids=b"abc")], [TokenSegment(token_ids=b"")]]
)
def test_a_frame_that_is_no_prompt_hurts_no_other(prompt: list[TokenSegment]) -> None:
    scene = make_scene()
    scene.worker().send(scene.hello())
    frontend = scene.frontend()
    frontend.send(submit(1, prompt=prompt))
    frontend.send(submit(2, max_tokens=1000))
    scene.turn()
    news = [m for m in received(frontend) if isinstance(m, TokenDelta)]
    assert [d.request_id for m in news for d in m.each()] == [1, 2]


def test_requests_before_hello_are_dropped() -> None:
    scene = make_scene()
    scene.worker().send(scene.hello())
    silent = scene.frontends.connect_link("frontend-0")
    silent.send(submit())
    stranger = scene.frontends.connect_link("intruder")
    stranger.send(submit())
    scene.turn()
    assert received(silent) == [] and not any(
        load.num_waiting for load in scene.process.core.status(0.0).load.values()
    )


def test_a_hello_of_another_boot_is_refused() -> None:
    scene = make_scene()
    scene.worker().send(scene.hello())
    link = scene.frontends.connect_link("frontend-0")
    hello = FrontendHello(
        protocol_version=PROTOCOL_VERSION,
        boot_id="other",
        config_hash=scene.config.digest,
        frontend_id=FrontendId(0),
        incarnation=0,
        session=1,
    )
    link.send(hello)
    link.send(submit())
    scene.turn()
    assert received(link) == []


def test_a_turn_ends_though_frontends_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and heartbeats leave between the messages of a frontend that has much to say."""
    for name in ("MAX_TURN_S", "LEAST_FOR_FRONTENDS_S"):
        monkeypatch.setattr(f"lightserve.router.process.{name}", -1.0)
    scene = make_scene()
    frontend, worker = scene.frontend(), scene.worker()
    worker.send(scene.hello())
    scene.turn()
    for number in range(1, 4):
        frontend.send(submit(number))
    for expected in (1, 2, 3):
        scene.process.turn()
        load = scene.process.core.status(0.0).load[RequestClass.RT]
        assert load.num_running + load.num_waiting == expected
        assert isinstance(worker.receive(0.0), StepPlan) is (expected > 1), "of the turn before"


SAMPLING = SamplingParams()


def _sampling(**changes: Any) -> dict[str, object]:
    return {"sampling": msgspec.structs.replace(SAMPLING, **changes)}


def _prompt(*token_ids: int) -> dict[str, object]:
    return {"prompt": [TokenSegment(token_ids=pack_int32(token_ids))]}


ILLEGAL: list[dict[str, object]] = [
    _prompt(5, VOCAB_SIZE),
    _prompt(-1),
    _prompt(),
    {"prompt": []},
    {"prompt": [TokenSegment(token_ids=b"12345")]},
    {"max_tokens": 0},
    {"max_tokens": 2**40},
    {"eos_token_ids": [VOCAB_SIZE]},
    {"age_s": math.nan},
    {"age_s": -math.inf},
    {"slo": SLO(ttft_ms=math.nan)},
    {"priority": 2**63},
    *(
        _sampling(**changes)
        for changes in [
            {"allowed_token_ids": (VOCAB_SIZE,)},
            {"allowed_token_ids": (-1,)},
            {"logit_bias": ((VOCAB_SIZE, 1.0),)},
            {"bad_words": ((1, VOCAB_SIZE),)},
            {"bad_words": ((1,), ())},
            {"bad_words": ((1,) * 33,)},
            {"bad_words": ((1,),) * 193},
            {"logit_bias": ((1, math.nan),)},
            {"logit_bias": ((1, 1e300), (2, 0.0))},
            {"temperature": math.nan},
            {"top_p": -1.0},
            {"top_k": VOCAB_SIZE + 1},
            {"seed": 2**63},
            {"choice": -1},
            {"repetition_penalty": 0.0},
            {"repetition_penalty": 1e-300},
            {"frequency_penalty": math.inf},
            {"min_tokens": 3},
            {"num_logprobs": 10**9},
            {"num_prompt_logprobs": -1},
        ]
    ),
]


@pytest.mark.parametrize("changes", ILLEGAL, ids=str)
def test_an_illegal_request_fails_alone_and_never_reaches_a_worker(
    changes: dict[str, object],
) -> None:
    scene = make_scene()
    frontend, worker = scene.frontend(), scene.worker()
    worker.send(scene.hello())
    scene.turn()
    received(frontend)
    frontend.send(submit(1, **changes))
    scene.turn()
    (news,) = received(frontend)
    failure = RequestDelta(RequestId(1), [], FinishReason.ERROR, ErrorCode.INVALID)
    assert news == TokenDelta(requests=[failure])
    assert worker.receive(0.0) is None
    frontend.send(submit(2))
    scene.turn()
    assert worker.receive(0.0) is not None


def test_what_is_said_of_requests_that_are_not_there_changes_nothing() -> None:
    scene = make_scene()
    frontend, worker = scene.frontend(), scene.worker()
    worker.send(scene.hello())
    frontend.send(submit(1, needs_acknowledgement=True))
    scene.turn()
    for message in (
        Abort(request_id=RequestId(9)),
        Finish(request_id=RequestId(9), num_tokens=1),
        Acknowledge(progress=[Progress(RequestId(9), 5), Progress(RequestId(1), -(2**63))]),
        submit(1),  # its double
    ):
        frontend.send(message)
    scene.turn()
    scene.process.core.check_integrity()
    worker.send(result(0, 7))
    scene.turn()
    (tokens,) = [m for m in received(frontend) if isinstance(m, TokenDelta)]
    assert tokens.each()[0].token_ids == [7]
    for _ in range(2):  # an end with a length that cannot be, twice
        frontend.send(Finish(request_id=RequestId(1), num_tokens=2**62))
    scene.turn()
    assert scene.process.core.num_unfinished == 0
    assert scene.process.core._config.lengths.average < 1000


@pytest.mark.parametrize("step_id", [1, 7], ids=["lost", "far"])
def test_a_result_that_is_not_the_next_one_replaces_the_workers(step_id: int) -> None:
    scene = make_scene()
    frontend, worker = scene.frontend(), scene.worker()
    worker.send(scene.hello())
    frontend.send(submit())
    scene.turn()
    while scene.supervisor.receive(0.0) is not None:
        pass
    worker.send(result(step_id, 7))
    scene.turn()
    said = []
    while (item := scene.supervisor.receive(0.0)) is not None:
        said.append(item[1])
    assert any(isinstance(message, WorkersStalled) for message in said)


def test_a_supervisor_that_does_not_read_takes_no_router_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = make_scene()
    frontend, worker = scene.frontend(), scene.worker()
    worker.send(scene.hello())
    frontend.send(submit())
    scene.turn()
    control = scene.process._control

    def full(message: ChildMessage) -> None:
        raise ChannelFull("queue to the hub is full")

    with monkeypatch.context() as patch:
        patch.setattr(control, "send", full)
        scene.process._send_status(0.0)
        worker.send(result(7, 7))
        scene.turn()
    worker.send(result(7, 7))
    scene.turn()
    said = []
    while (received := scene.supervisor.receive(0.0)) is not None:
        said.append(received[1])
    assert any(isinstance(message, WorkersStalled) for message in said)


def test_a_result_that_comes_twice_replaces_the_workers() -> None:
    scene = make_scene()
    frontend, worker = scene.frontend(), scene.worker()
    worker.send(scene.hello())
    frontend.send(submit(max_tokens=9))
    scene.turn()
    for _ in range(2):
        worker.send(result(0, 7))
    scene.turn()
    said = []
    while (item := scene.supervisor.receive(0.0)) is not None:
        said.append(item[1])
    assert any(isinstance(message, WorkersStalled) for message in said)
    tokens = [d for m in received(frontend) if isinstance(m, TokenDelta) for d in m.each()]
    assert [d.token_ids for d in tokens] == [[7]], "no token twice"


def test_statuses_say_for_which_session_they_are_and_what_was_sent_before() -> None:
    scene = make_scene()
    frontend, worker = scene.frontend(incarnation=4), scene.worker()
    worker.send(scene.hello())
    frontend.send(submit())
    scene.turn()
    worker.send(result(0, 7))
    scene.turn()
    scene.process._send_status(0.0)
    statuses = []
    while (message := frontend.receive(0.0)) is not None:
        if isinstance(message, RouterStatus):
            statuses.append((message.session, message.num_deltas))
    assert statuses[-1] == (5, 1)


def test_messages_that_did_not_arrive_are_said_in_the_next_status() -> None:
    scene = make_scene()
    frontend, worker = scene.frontend(), scene.worker()
    worker.send(scene.hello())
    frontend.send(submit())
    scene.turn()

    def num_lost(num_sent: int) -> int:
        frontend.send(SentSoFar(num_messages=num_sent))
        scene.turn()
        scene.process._send_status(0.0)
        statuses = []
        while (message := frontend.receive(0.0)) is not None:
            if isinstance(message, RouterStatus):
                statuses.append(message)
        return statuses[-1].num_lost

    assert num_lost(1) == 0
    assert num_lost(2) == 1
    frontend.send(Abort(request_id=RequestId(1)))
    frontend.send(Abort(request_id=RequestId(1)))
    assert num_lost(2) == -1, "one came twice"


def test_a_frontend_that_does_not_read_loses_its_requests_alone() -> None:
    scene = make_scene()
    full, worker = scene.frontend(), scene.worker()
    other = scene.frontends.connect_link("frontend-1")
    other.send(
        FrontendHello(
            protocol_version=PROTOCOL_VERSION,
            boot_id=BOOT,
            config_hash=scene.config.digest,
            frontend_id=FrontendId(1),
            incarnation=0,
            session=9,
        )
    )
    worker.send(scene.hello())
    full.send(submit(1, max_tokens=50))
    other.send(submit(1))
    scene.turn()
    for _ in range(5000):  # its queue holds 4096
        scene.process._send(FrontendId(0), RouterWelcome(boot_id=BOOT, num_kv_slots=1))
    scene.turn()
    assert FrontendId(0) not in scene.process._connected
    keys = set(scene.process.core._requests)
    assert keys == {(1, 1)}
    scene.process.core.check_integrity()


STALE: list[dict[str, object]] = [
    {"boot_id": "before"},
    {"protocol_version": PROTOCOL_VERSION - 1},
    {"config_hash": "other"},
    {"rank": 1},
    {"rank": -1},
]


@pytest.mark.parametrize("changes", STALE, ids=str)
def test_a_worker_of_another_boot_is_refused_and_counted(changes: dict[str, object]) -> None:
    scene = make_scene()
    worker = scene.worker()
    worker.send(scene.hello(**changes))
    worker.send(result(0, 7, incarnation=3))
    scene.turn()
    assert not scene.is_ready
    scene.process._send_status(0.0)
    samples = scene.process._metrics.recorder.snapshot()
    (rejected,) = [s.values for s in samples if s.family.endswith("ipc_rejected_total")]
    assert rejected == [2.0]
    worker.send(scene.hello())
    scene.turn()
    assert scene.is_ready


def test_messages_in_any_order_any_number_of_times_leave_the_books_whole() -> None:
    """Whatever a link may do to what a frontend says: nothing hangs, nothing leaks."""
    for seed in range(20):
        rng = random.Random(seed)
        scene = make_scene()
        frontend, worker = scene.frontend(), scene.worker()
        worker.send(scene.hello())
        scene.turn()
        messages: list[FrontendMessage] = []
        for number in range(8):
            messages.append(submit(number, max_tokens=4, needs_acknowledgement=rng.random() < 0.5))
            messages.append(Acknowledge(progress=[Progress(RequestId(number), rng.randint(-1, 9))]))
            end = Abort(request_id=RequestId(number))
            messages.append(end)
            messages.append(Finish(request_id=RequestId(number), num_tokens=rng.randint(-1, 9)))
        rng.shuffle(messages)
        said = [message for message in messages for _ in range(rng.choice([0, 1, 1, 2]))]
        step_id = 0
        for message in said:
            frontend.send(message)
            scene.turn()
            while isinstance(plan := worker.receive(0.0), StepPlan):
                worker.send(result(step_id, *[7] * len(sampling_rows(plan))))
                step_id += 1
            scene.process.core.check_integrity()
        for number in range(8):
            frontend.send(Abort(request_id=RequestId(number)))
        while True:
            scene.turn()
            if not isinstance(plan := worker.receive(0.0), StepPlan):
                break
            worker.send(result(step_id, *[7] * len(sampling_rows(plan))))
            step_id += 1
        scene.process.core.check_integrity()
        core = scene.process.core
        assert not core._requests and not core.num_unfinished
        assert core.num_used_slots == 0 and set(core.parameter_bytes.values()) == {0}


def test_nothing_is_taken_of_a_result_that_does_not_fit_its_plan() -> None:
    """Two requests run; what is wrong with the second row may not cost the first its token."""
    odd = TokenLogprob(-1.0, [], [])
    one_alone = {"token_ids": pack_int32([7, -1])}
    wrong: list[dict[str, object]] = [
        {"token_ids": pack_int32([7])},
        {"token_ids": pack_int32([7, 8, 9])},
        {"token_ids": pack_int32([7, 8])[:-1]},
        {"token_ids": pack_int32([7, -2])},
        {"token_ids": b"", "tokens_per_row": 0},
        {"token_ids": b"", "tokens_per_row": -1},
        {"tokens_per_row": 2},
        {"token_ids": pack_int32([7, -1, 8, 9]), "tokens_per_row": 2},
        {"token_ids": pack_int32([7, -1, -1, 8]), "tokens_per_row": 2},
        one_alone,
        {"rows": [RowResult(RowId(1), [8])]},
        {"rows": [RowResult(RowId(2), [9])]},
        one_alone | {"rows": [RowResult(RowId(1), [8])] * 2},
        one_alone | {"rows": [RowResult(RowId(0), [8])]},
        one_alone | {"rows": [RowResult(RowId(1), [8, 9])]},
        one_alone | {"rows": [RowResult(RowId(1), [2**31])]},
        one_alone | {"rows": [RowResult(RowId(1), [-1])]},
        one_alone | {"rows": [RowResult(RowId(1), [8], logprobs=[odd])]},
        one_alone | {"rows": [RowResult(RowId(1), [8], prompt_logprobs=[odd])]},
        {"exec_s": math.nan},
        {"idle_s": -1.0},
        {"launch_s": math.inf},
    ]
    for changes in wrong:
        scene = make_scene()
        frontend, worker = scene.frontend(), scene.worker()
        worker.send(scene.hello())
        frontend.send(submit(1))
        frontend.send(submit(2))
        scene.turn()
        plan, ahead = worker.receive(0.0), worker.receive(0.0)
        assert isinstance(plan, StepPlan) and len(plan.rows) == 2 and isinstance(ahead, StepPlan)
        received(frontend)
        good = {"token_ids": pack_int32([7, 8]), "exec_s": 0.01, "idle_s": 0.0}
        fields: dict[str, object] = good | changes
        worker.send(StepResult(step_id=plan.step_id, incarnation=0, **fields))  # type: ignore[arg-type]
        scene.turn()
        assert received(frontend) == [], changes
        asked = []
        while (said := scene.supervisor.receive(0.0)) is not None:
            asked.append(said[1])
        assert WorkersStalled(incarnation=0, stalled_s=0.0) in asked, changes
        scene.supervisor.send("router-0", WorkersLost(incarnation=0))
        worker.send(scene.hello(incarnation=1))
        scene.turn()
        again = worker.receive(0.0)
        assert isinstance(again, StepPlan) and again.rows[0].num_tokens == 3, "no output is lost"
