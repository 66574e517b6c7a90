"""The router process: moves messages between the links and Scheduler. All the I/O is here.

One single-threaded, event-driven loop: take in what has arrived (results first, so that the
worker's next plan leaves before anything else is done), let the core plan, sleep until the next
message, the next planned moment or the next status beat.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from lightserve.channels import Hub, Link, Waitable, ZmqHub, bind_hub, wait_readable
from lightserve.config.fields import parse_memory
from lightserve.decisions.lives import Lives, WatchedCore
from lightserve.decisions.records import CoreCalls, DecisionLogFile, RecordedCore, header_of
from lightserve.errors import ChannelFull, ConfigError, ProtocolError
from lightserve.logs import num_dropped_lines
from lightserve.messages.common import MAX_INT32, PROTOCOL_VERSION
from lightserve.messages.frontend_router import (
    Abort,
    BatchDue,
    DescribeKV,
    DescribeRequest,
    ErrorCode,
    Finish,
    FrontendHello,
    FrontendMessage,
    KVMap,
    MaySubmit,
    RequestDelta,
    RequestTimeline,
    RouterMessage,
    RouterWelcome,
    SentSoFar,
    Submit,
    TokenDelta,
    Verdict,
)
from lightserve.messages.router_worker import (
    RouterToWorker,
    StepResult,
    StepTimesMeasured,
    WorkerHello,
    WorkerToRouter,
)
from lightserve.messages.supervision import (
    ChildMessage,
    ChildReady,
    ChildSpec,
    FrontendLost,
    Heartbeat,
    MetricsSnapshot,
    SupervisorMessage,
    WorkersLost,
    WorkersStalled,
)
from lightserve.metrics.catalogue import LOG_LINES_DROPPED
from lightserve.metrics.recording import Recorder
from lightserve.metrics.turns import TurnClock
from lightserve.models.config import load_model_config, num_ids, resolve_context_len
from lightserve.models.vision_config import VisionConfig
from lightserve.router.accounts import Refusal
from lightserve.router.config import make_scheduler_config
from lightserve.router.events import (
    FromFrontend,
    FrontendGone,
    Outgoing,
    SchedulerEvent,
    StepTimesKnown,
    WorkersGone,
    WorkersReady,
)
from lightserve.router.from_submit import check_batch_due, check_submit
from lightserve.router.kept_lengths import LengthFile
from lightserve.router.kv.block_events import AllBlocksCleared
from lightserve.router.kv_publisher import KVPublisher
from lightserve.router.metrics import RecentSteps, RouterMetrics
from lightserve.router.output_lengths import RememberedLengths
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep
from lightserve.types import FinishReason, FrontendId

log = logging.getLogger(__name__)

# When Python looks for garbage in the router: often and briefly, never at length.
#
# What the router keeps, tens of thousands of waiting requests and the nodes of their prompts, is
# freed by reference counts: nothing of it stays part of a cycle. A full collection would look
# through all of it, tens of milliseconds in which no plan leaves. So whatever has lived for a
# second is set aside (`gc.freeze`), where no collection looks; should cycles ever have died there,
# they are found once the router has had nothing to do for a while.

YOUNG_OBJECTS = 10_000
"""Allocations between two looks at the young: a step makes thousands, most gone by its end."""
IDLE_TICKS = 30
"""Without work, before everything is looked through."""


class Collector:
    """One per process, as what it sets is the process's; call `tick` about once a second."""

    def __init__(self) -> None:
        gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
        self._num_idle_ticks = 0
        gc.collect()
        gc.freeze()

    def tick(self, *, is_busy: bool) -> None:
        """Set aside what has become old, or, idle for long enough, look through everything."""
        self._num_idle_ticks = 0 if is_busy else self._num_idle_ticks + 1
        if is_busy:
            gc.collect(1)
            gc.freeze()
        elif self._num_idle_ticks == IDLE_TICKS:
            gc.unfreeze()
            gc.collect()
            gc.freeze()


STATUS_INTERVAL_S = 1.0
MAX_TURN_S = 0.02
"""CPU time after which what else frontends say waits for the next turn of the loop."""
LEAST_FOR_FRONTENDS_S = 0.005
"""CPU time that they have though a result and its plan have taken that long."""


def run(spec: ChildSpec, control: Link[ChildMessage, SupervisorMessage]) -> int:
    """Serve until killed: the supervisor ends the router last."""
    model = load_model_config(Path(spec.config.model))
    max_model_len = resolve_context_len(spec.config.max_model_len, model)
    frontends: Hub[RouterMessage, FrontendMessage] = bind_hub(
        spec.frontends_address, send_type=RouterMessage, recv_type=FrontendMessage
    )
    workers: ZmqHub[RouterToWorker, WorkerToRouter] = bind_hub(
        spec.workers_address, send_type=RouterToWorker, recv_type=WorkerToRouter
    )
    if spec.node_key:
        workers.listen(socket.socket(fileno=spec.listen_fd), spec.node_key)
    keeps_lengths = spec.config.profile != "off"
    length_file = LengthFile(Path(spec.config.model)) if keeps_lengths else None
    remembered = None if length_file is None else length_file.read()
    core_config = make_scheduler_config(
        spec.config, max_model_len=max_model_len, remembered=remembered
    )
    core = Scheduler(core_config)
    if length_file is not None:
        length_file.keep(core_config.lengths)
    decision_log = _open_log(spec, max_model_len, remembered)
    publisher = _open_publisher(spec)
    collector = Collector()
    control.send(ChildReady())
    RouterProcess(
        *(spec, core, frontends, workers, control),
        collector=collector,
        decision_log=decision_log,
        publisher=publisher,
        length_file=length_file,
        vocab_size=num_ids(model),
        vision=model.vision,
    ).serve()
    return 0


def _open_publisher(spec: ChildSpec) -> KVPublisher | None:
    """Return what tells gateways of the prefix cache, if that is wanted.

    Raises:
        ConfigError: it cannot be told there. Only when the server starts, as with the log.
    """
    address = spec.config.kv_events
    if not address:
        return None
    try:
        publisher = KVPublisher(address, spec.config.kv_events_keys)
    except ConfigError as error:
        if spec.incarnation == 0:
            raise
        log.error("no events of the prefix cache: %s", error)
        return None
    log.info("events of the prefix cache at %s", publisher.address)
    if spec.config.kv_events_insecure:
        log.warning("token ids of prompts can be read at %s by all that reach it", address)
    # A router that was before this one has told of blocks that are gone with it.
    publisher.publish([AllBlocksCleared()], now_s=time.time())
    return publisher


def _open_log(
    spec: ChildSpec, max_model_len: int, remembered: RememberedLengths | None
) -> DecisionLogFile | None:
    """Return the decision log, if one is wanted.

    Raises:
        ConfigError: it cannot be written. Only when the server starts: later it is not worth
            staying down for.
    """
    if not spec.config.decision_log:
        return None
    header = header_of(
        spec.config,
        max_model_len=max_model_len,
        seed=0,
        boot_id=spec.boot_id,
        remembered=remembered,
    )
    max_bytes = parse_memory(spec.config.decision_log_size, "--decision-log-size")
    try:
        return DecisionLogFile(Path(spec.config.decision_log), header, max_bytes=max_bytes)
    except ConfigError as error:
        if spec.incarnation == 0:
            raise
        log.error("no decision log: %s", error)
        return None


@dataclass
class _WorkerGroup:
    """The ranks of the current incarnation that have said hello."""

    incarnation: int = 0
    hellos: dict[int, WorkerHello] = field(default_factory=dict)


@dataclass
class _Session:
    """A frontend's link after its hello."""

    incarnation: int
    number: int
    num_deltas: int = 0
    num_received: int = 0
    num_lost: int = 0


class RouterProcess:
    """The loop. `core` decides; this object only knows who is connected."""

    def __init__(
        self,
        spec: ChildSpec,
        core: Scheduler,
        frontends: Hub[RouterMessage, FrontendMessage],
        workers: Hub[RouterToWorker, WorkerToRouter],
        control: Link[ChildMessage, SupervisorMessage],
        *,
        collector: Collector | None = None,
        decision_log: DecisionLogFile | None = None,
        publisher: KVPublisher | None = None,
        length_file: LengthFile | None = None,
        vocab_size: int = MAX_INT32,
        vision: VisionConfig | None = None,
    ) -> None:
        """Without a `collector` garbage is collected as Python does by itself."""
        self._vocab_size, self._vision = vocab_size, vision
        self._spec = spec
        self._collector = collector
        self.core = core
        self._decision_log = decision_log
        self._publisher = publisher
        self._calls: CoreCalls = core
        if decision_log is not None:
            self._calls = RecordedCore(core, decision_log)
        self._lives: Lives | None = None
        if spec.config.num_kept_lives:
            self._lives = Lives(spec.config.num_kept_lives)
            self._calls = WatchedCore(self._calls, self._lives)
        self._length_file = length_file
        self._frontends = frontends
        self._workers = workers
        self._control = control
        self._sources: list[Waitable] = [workers, frontends, control]
        self._connected: dict[FrontendId, _Session] = {}
        """Frontends that have said hello."""
        self._group = _WorkerGroup()
        self._welcome: RouterWelcome | None = None
        self._next_status_s = 0.0
        self._num_rejected = 0
        self._num_refused = 0
        """Messages that were read, but must not be followed."""
        self._metrics = RouterMetrics(Recorder())
        self._recent = RecentSteps()
        self._turns = TurnClock(self._metrics.recorder, f"{spec.role}-{spec.index}")

    def serve(self) -> None:
        """Run for ever."""
        wake_s = 0.0
        while True:
            now_s = time.monotonic()
            if now_s >= self._next_status_s:
                self._send_status(now_s)
            timeout_s = max(0.0, min(wake_s, self._next_status_s) - time.monotonic())
            self._turns.end()
            wait_readable(self._sources, timeout_s)
            self._turns.begin()
            wake_s = self.turn()

    def turn(self) -> float:
        """Take in some of what has arrived, and send a plan if one is due; return when to go on.

        Deaths come first: what a successor says must not be taken for its predecessor's. Then a
        result, followed by the plan it makes possible, before anything else. What frontends say
        has the rest of `MAX_TURN_S`, and after a long plan a little more than that. Whatever is
        left, another plan that is due by then included, waits for the next turn: no turn makes two.
        """
        end_s = time.thread_time() + MAX_TURN_S
        while (order := self._control.receive()) is not None:
            self._on_supervisor(order)
        if (received := self._workers.receive()) is not None:
            self._on_worker(*received)
        wake_s = self._plan()
        end_s = max(end_s, time.thread_time() + LEAST_FOR_FRONTENDS_S)
        while (from_frontend := self._frontends.receive()) is not None:
            self._on_frontend(*from_frontend)
            wake_s = time.monotonic()
            if time.thread_time() > end_s:
                break
        return wake_s

    def _plan(self) -> float:
        """Send a plan if one is due; return when to ask again."""
        step = self._calls.plan(time.monotonic())
        if not isinstance(step, PlannedStep):
            return float("inf") if step.at_s is None else step.at_s
        now_s = time.monotonic()
        self._metrics.on_commit(step, now_s)
        self._recent.on_commit(step, now_s)
        plan = self._calls.commit(step, now_s)
        self._workers.send_to_all(map(_worker_name, range(self._spec.config.tp)), plan)
        return now_s

    # ---------------------------------------------------------------- workers

    def _on_worker(self, peer: str, message: WorkerToRouter) -> None:
        if isinstance(message, WorkerHello):
            self._on_worker_hello(peer, message)
        elif peer != _worker_name(0) or message.incarnation != self._group.incarnation:
            self._num_refused += 1
            log.warning("dropped a message of %s, incarnation %d", peer, message.incarnation)
        elif isinstance(message, StepTimesMeasured):
            self._dispatch(StepTimesKnown(message.step_cost, message.max_num_batched_tokens))
            log.info("at most %d tokens in a step", message.max_num_batched_tokens)
        else:
            self._on_result(message)

    def _on_result(self, result: StepResult) -> None:
        num_used_slots, predicted_s = self.core.num_used_slots, self.core.predicted_step_s
        try:
            news = self._calls.on_result(result, time.monotonic())
        except ProtocolError as error:
            self._num_refused += 1
            log.error("the workers are out of step: %s", error)
            self._ask_for_new_workers(0.0)
            return
        self._metrics.on_result(result, num_used_slots, predicted_s)
        self._recent.on_result(result.step_id, result.exec_s, predicted_s)
        self._deliver(news)
        if self._publisher is not None:
            self._publisher.publish(self.core.take_kv_events(), now_s=time.time())

    def _on_worker_hello(self, peer: str, hello: WorkerHello) -> None:
        ours = (PROTOCOL_VERSION, self._spec.boot_id, self._spec.config.ranks_digest)
        theirs = (hello.protocol_version, hello.boot_id, hello.config_hash)
        is_rank = peer == _worker_name(hello.rank) and 0 <= hello.rank < self._spec.config.tp
        if theirs != ours or not is_rank or hello.incarnation < self._group.incarnation:
            self._num_refused += 1
            log.error("refused %s: not a rank of this boot's workers", peer)
            return
        if hello.incarnation > self._group.incarnation:
            # The old group is gone, though the supervisor's word of it is still on its way.
            self._lose_workers(next_incarnation=hello.incarnation)
        self._group.hellos[hello.rank] = hello
        if self._welcome is not None or len(self._group.hellos) < self._spec.config.tp:
            return
        num_kv_slots = min(rank.num_kv_slots for rank in self._group.hellos.values())
        num_host_slots = min(rank.num_host_slots for rank in self._group.hellos.values())
        num_prefix_slots = min(rank.num_prefix_slots for rank in self._group.hellos.values())
        first = self._group.hellos[0]
        log.info(
            "workers ready, %d KV slots, %d on the host and %d more for prefixes, at most %d tokens"
            " in a step",
            num_kv_slots,
            num_host_slots,
            num_prefix_slots,
            first.max_num_batched_tokens,
        )
        if (config := self._spec.config).keeps_pace:
            log.info(
                "real-time requests without targets keep %g ms a token beside prompts, or twice"
                " their own step; beside best-effort work %g times their own step%s",
                config.pace_ms,
                config.be_stretch,
                "" if first.step_cost else "; from the first steps on, as there is no profile",
            )
        self._dispatch(
            WorkersReady(
                num_kv_slots,
                num_host_slots,
                first.step_cost,
                first.overlaps_copies,
                first.max_num_batched_tokens,
                first.graph_sizes,
                first.num_state_slots,
                first.encoder,
                num_prefix_slots,
            )
        )
        device = self._group.hellos[0].device
        if device is not None:
            self._metrics.on_device(device)
        self._welcome = RouterWelcome(
            boot_id=self._spec.boot_id,
            num_kv_slots=num_kv_slots - first.num_state_slots,
            device=device,
        )
        for frontend_id in list(self._connected):
            self._send(frontend_id, self._welcome)
        self._next_status_s = 0.0

    def _lose_workers(self, *, next_incarnation: int) -> None:
        self._group = _WorkerGroup(incarnation=next_incarnation)
        self._welcome = None
        self._dispatch(WorkersGone())
        if self._publisher is not None:
            self._publisher.publish([AllBlocksCleared()], now_s=time.time())
        self._metrics.on_workers_gone()
        self._next_status_s = 0.0

    def _ask_for_new_workers(self, stalled_s: float) -> None:
        # A supervisor that is stopped hears of it later: they stay stalled until it acts.
        with contextlib.suppress(ChannelFull):
            message = WorkersStalled(incarnation=self._group.incarnation, stalled_s=stalled_s)
            self._control.send(message)

    # ---------------------------------------------------------------- frontends

    def _on_frontend(self, peer: str, message: FrontendMessage) -> None:
        if isinstance(message, FrontendHello):
            self._on_frontend_hello(peer, message)
            return
        frontend_id = _frontend_id(peer)
        if frontend_id not in self._connected:
            self._num_refused += 1
            log.warning("dropped a message of %s, which has not said hello", peer)
            return
        session = self._connected[frontend_id]
        if isinstance(message, SentSoFar):
            session.num_lost = message.num_messages - session.num_received
            return
        session.num_received += 1
        if isinstance(message, DescribeKV):
            steps = self._recent.tell(time.monotonic())
            answer = KVMap(query_id=message.query_id, pool=self.core.kv_map(), steps=steps)
            self._send(frontend_id, answer)
            return
        if isinstance(message, DescribeRequest):
            lives = []
            if self._lives is not None:
                lives = self._lives.tell(message.name, message.client_key, time.monotonic())
            self._send(frontend_id, RequestTimeline(query_id=message.query_id, lives=lives))
            return
        if isinstance(message, MaySubmit):
            refusal: Refusal | None = Refusal(ErrorCode.INVALID)
            if self._is_legal(peer, message.submit, has_pixels=False):
                refusal = self.core.refusal(frontend_id, message.submit, time.monotonic())
            told = refusal._asdict() if refusal else {}
            self._send(frontend_id, Verdict(query_id=message.query_id, **told))
            return
        if isinstance(message, Submit) and not self._is_legal(peer, message):
            failure = RequestDelta(message.request_id, [], FinishReason.ERROR, ErrorCode.INVALID)
            self._deliver([Outgoing(frontend_id, TokenDelta(requests=[failure]))])
            return
        try:
            if isinstance(message, BatchDue):
                check_batch_due(message)
            _log_wish(frontend_id, message)
            self._dispatch(FromFrontend(frontend_id, message))
        except ProtocolError as error:
            self._num_refused += 1
            log.error("dropped a message of %s: %s", peer, error)

    def _is_legal(self, peer: str, submit: Submit, *, has_pixels: bool = True) -> bool:
        """Whether a request says nothing that no frontend may say."""
        try:
            check_submit(submit, self._vocab_size, self._vision, has_pixels=has_pixels)
        except ProtocolError as error:
            self._num_refused += 1
            log.error("refused a request of %s: %s", peer, error)
            return False
        return True

    def _on_frontend_hello(self, peer: str, hello: FrontendHello) -> None:
        ours = (PROTOCOL_VERSION, self._spec.boot_id, self._spec.config.digest, peer)
        theirs = (hello.protocol_version, hello.boot_id, hello.config_hash)
        if (*theirs, _frontend_name(hello.frontend_id)) != ours:
            self._num_refused += 1
            log.error("refused %s: another version, boot or configuration", peer)
            return
        if hello.frontend_id in self._connected:
            self._forget(hello.frontend_id)
        self._connected[hello.frontend_id] = _Session(hello.incarnation, hello.session)
        if self._welcome is not None:
            self._send(hello.frontend_id, self._welcome)
        self._next_status_s = 0.0

    def _deliver(self, news: list[Outgoing]) -> None:
        is_verbose = log.isEnabledFor(logging.DEBUG)
        for outgoing in news:
            if is_verbose:
                _log_ends(outgoing)
            if (session := self._connected.get(outgoing.frontend_id)) is not None:
                session.num_deltas += 1
            self._send(outgoing.frontend_id, outgoing.message)

    def _send(self, frontend_id: FrontendId, message: RouterMessage) -> None:
        try:
            self._frontends.send(_frontend_name(frontend_id), message)
        except ChannelFull:
            log.error("frontend %d does not read; its requests are dropped", frontend_id)
            self._forget(frontend_id)

    def _forget(self, frontend_id: FrontendId) -> None:
        self._connected.pop(frontend_id, None)
        self._dispatch(FrontendGone(frontend_id))

    # ---------------------------------------------------------------- supervisor, status

    def _on_supervisor(self, message: SupervisorMessage) -> None:
        if isinstance(message, FrontendLost):
            # A successor may have said hello already.
            session = self._connected.get(message.frontend_id)
            if session is not None and session.incarnation == message.incarnation:
                self._forget(message.frontend_id)
        elif isinstance(message, WorkersLost) and message.incarnation == self._group.incarnation:
            self._lose_workers(next_incarnation=message.incarnation + 1)

    def _dispatch(self, event: SchedulerEvent) -> None:
        self._deliver(self._calls.on_message(event, time.monotonic()))

    def _send_status(self, now_s: float) -> None:
        self._next_status_s = now_s + STATUS_INTERVAL_S
        if self._decision_log is not None:
            self._decision_log.flush()
        if self._length_file is not None:
            self._length_file.save(now_s)
        status = self.core.status(now_s)
        for frontend_id, session in list(self._connected.items()):
            own = msgspec.structs.replace(
                status,
                session=session.number,
                num_deltas=session.num_deltas,
                num_lost=session.num_lost,
            )
            self._send(frontend_id, own)
        if status.stalled_s > self._spec.config.step_timeout_s:
            self._ask_for_new_workers(status.stalled_s)
        num_rejected = sum(
            channel.num_rejected for channel in (self._workers, self._frontends, self._control)
        )
        if num_rejected != self._num_rejected:
            log.warning("%d frames or connections refused", num_rejected - self._num_rejected)
            self._num_rejected = num_rejected
        self._metrics.collect(self.core, status, num_rejected + self._num_refused)
        dropped = self._metrics.recorder.counter(LOG_LINES_DROPPED, "router")
        dropped.value = num_dropped_lines()
        with contextlib.suppress(ChannelFull):  # a supervisor that is stopped counts again later
            self._control.send(Heartbeat())
            self._control.send(MetricsSnapshot(samples=self._metrics.recorder.snapshot()))
        if self._collector is not None:
            busy = any(load.num_running + load.num_waiting for load in status.load.values())
            self._collector.tick(is_busy=busy)


def _log_wish(frontend_id: FrontendId, message: FrontendMessage) -> None:
    """Say what a frontend wants of a request; `FRONTEND/REQUEST` is its key."""
    if isinstance(message, Submit):
        log.debug(
            "request %d/%d: submitted, class %s, at most %d tokens",
            frontend_id,
            message.request_id,
            message.request_class.value,
            message.max_tokens,
        )
    elif isinstance(message, Abort):
        log.debug("request %d/%d: aborted", frontend_id, message.request_id)
    elif isinstance(message, Finish):
        log.debug("request %d/%d: stop string complete", frontend_id, message.request_id)


def _log_ends(news: Outgoing) -> None:
    for delta in news.message.requests:
        if (end := delta.error or delta.finish_reason) is not None:
            log.debug("request %d/%d: ends, %s", news.frontend_id, delta.request_id, end.value)


def _worker_name(rank: int) -> str:
    return f"worker-{rank}"


def _frontend_name(frontend_id: FrontendId) -> str:
    return f"frontend-{frontend_id}"


def _frontend_id(peer: str) -> FrontendId:
    """Return the id in a peer's name, an impossible one if it is no frontend's."""
    number = peer.removeprefix("frontend-")
    return FrontendId(int(number) if number.isdigit() else -1)
