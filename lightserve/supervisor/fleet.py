"""All children of one server, and what a death or a message means.

Rules while serving:

    frontend dies   FrontendLost to the router; a new one on the same listening socket
                    (the batches process is one that listens to no socket; in a store that
                    is new it starts when a client uses it first)
    worker dies     the rest of its group is killed, WorkersLost to the router; a new group
                    starts when the last of the old one is gone (its memory is free then)
    router dies     RouterDown to the frontends, the workers are killed; then a new router with
                    a new boot id and fresh addresses, and a new group

    node lost       as if one of its workers had died: the new group waits for the node

Each of these costs one restart from the budget. While starting, any death is the end; while
draining, nothing is restarted.

A ready router or frontend that has said nothing for `SILENCE_TIMEOUT_S` hangs, unless it is busy:
then it is late, and may be for `LATE_TIMEOUT_S`. One that hangs is killed, and its death is treated
as any other. Workers have no heartbeat: a long step is no fault, and the
router tells when they stall. The loop alone calls these methods.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from enum import Enum, IntEnum

from lightserve.errors import ProtocolError, StartupError
from lightserve.http_access import ApiKey
from lightserve.messages.supervision import (
    LATE_TIMEOUT_S,
    ChildFailed,
    ChildMessage,
    ChildReady,
    ChildSpec,
    Drain,
    FrontendLost,
    FrontendServing,
    Heartbeat,
    MetricSample,
    MetricsRequest,
    MetricsSnapshot,
    NewApiKeys,
    NodeGroup,
    Picture,
    PictureRequest,
    Role,
    RouterDown,
    RouterUp,
    StoreUsed,
    WorkersLost,
    WorkersStalled,
)
from lightserve.supervisor.metrics import ServerMetrics
from lightserve.supervisor.nodes import Nodes, url_of
from lightserve.supervisor.spawn import Child, RouterBoot, Spawner, SpecWriter, num_frontends
from lightserve.types import FrontendId

log = logging.getLogger(__name__)

# How many restarts are too many.


class RestartBudget:
    """At most `max_restarts` within any `window_s`."""

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self.max_restarts = max_restarts
        self.window_s = window_s
        self._times_s: deque[float] = deque()

    def spend(self, now_s: float) -> bool:
        """Count a restart at `now_s`; False when it is one too many."""
        while self._times_s and self._times_s[0] <= now_s - self.window_s:
            self._times_s.popleft()
        self._times_s.append(now_s)
        return len(self._times_s) <= self.max_restarts


DRAIN_GRACE_S = 2.0
"""Time for frontends beyond --shutdown-timeout-s, before they are killed."""
SILENCE_TIMEOUT_S = 10.0
"""Heartbeats come every second; above the pauses of a busy machine, below a client's patience."""
LATE_CHECK_S = 1.0
"""How often it is asked whether what is late still works."""
MAX_LATENESS_S = 1.0
"""A supervisor later than this was stopped itself (Ctrl-Z, a frozen container), and perhaps its
children with it: their silence proves nothing."""


class Phase(Enum):
    """Where the server is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class Rebuild(IntEnum):
    """Parts to be started again once the remains are gone; a larger one includes a smaller."""

    NOTHING = 0
    WORKERS = 1
    ROUTER = 2


class Fleet:
    """The children and the rules of their lives."""

    def __init__(
        self,
        specs: SpecWriter,
        spawner: Spawner,
        metrics: ServerMetrics,
        *,
        nodes: Nodes | None = None,
        api_keys: Sequence[ApiKey] = (),
        silence_timeout_s: float = SILENCE_TIMEOUT_S,
        late_timeout_s: float = LATE_TIMEOUT_S,
    ) -> None:
        config = specs.config
        self.phase = Phase.STARTING
        self._specs = specs
        self._spawner = spawner
        self._metrics = metrics
        self._api_keys = api_keys
        self._budget = RestartBudget(config.max_restarts, config.restart_window_s)
        self._start_timeout_s = config.start_timeout_s
        self._silence_timeout_s = silence_timeout_s
        self._late_timeout_s = late_timeout_s
        self._nodes = nodes
        self._nodes_due_s = float("inf")
        """When (monotonic) they have to be there; infinite while they are."""
        self._boot = self._new_boot(0)
        self._incarnation = 0
        self._router: Child | None = None
        self._workers: list[Child] = []
        self._frontends: dict[int, Child] = {}
        self._rebuild = Rebuild.NOTHING
        self._is_whole = False
        """Whether every child is ready and every frontend takes requests."""
        self._broken_since_s = time.monotonic()
        self._whole_due_s = float("inf")
        """When (monotonic) the server has to be whole; infinite while it is, or rebuilds."""
        self._drain_deadline_s = float("inf")

    @property
    def children(self) -> list[Child]:
        """Every child that has not been reaped."""
        router = [] if self._router is None else [self._router]
        return [*self._frontends.values(), *router, *self._workers]

    @property
    def next_deadline_s(self) -> float:
        """When (monotonic) `check_deadlines` has to be called next; infinite for never."""
        due_s = [child.due_s for child in self.children]
        if self._nodes is not None:
            due_s += [self._nodes.next_due_s, self._nodes_due_s]
        return min([self._drain_deadline_s, self._whole_due_s, *due_s])

    @property
    def is_drained(self) -> bool:
        """Whether the last frontend has gone after `drain`."""
        return self.phase is Phase.DRAINING and not self._frontends

    def start(self) -> None:
        """Start all processes at once: links connect whenever their other end appears.

        Workers that have ranks on other nodes wait for these.
        """
        self._start_router()
        if self._nodes is None:
            self._start_workers()
        else:
            self._rebuild, self._incarnation = Rebuild.WORKERS, -1
            self._await_nodes()
        for index in range(num_frontends(self._specs.config) + self._specs.has_batches):
            self._start_frontend(index, 0)

    def drain(self) -> None:
        """Let the frontends finish what is in flight; `is_drained` tells when they have."""
        timeout_s = self._specs.config.shutdown_timeout_s
        self.phase = Phase.DRAINING
        self._whole_due_s = float("inf")
        self._drain_deadline_s = time.monotonic() + timeout_s + DRAIN_GRACE_S
        if self._rebuild is not Rebuild.NOTHING:
            self._tell_frontends_router_down()
        for frontend in self._frontends.values():
            if frontend.is_ready:
                frontend.send(Drain(timeout_s=timeout_s))
            else:
                frontend.kill()

    def set_api_keys(self, api_keys: Sequence[ApiKey]) -> None:
        """Have all frontends, those to come included, take these keys and no others."""
        self._api_keys = api_keys
        for frontend in self._frontends.values():
            frontend.send(NewApiKeys(keys=list(api_keys)))

    def ask_for_picture(self) -> None:
        """Have a frontend tell what the dashboard draws; no effect if none takes requests."""
        for frontend in self._frontends.values():
            if frontend.is_serving and frontend.spec.role is Role.FRONTEND:
                frontend.send(PictureRequest())
                return

    def kill_all(self) -> None:
        """Kill and reap every child."""
        for child in self.children:
            child.kill()
        for child in self.children:
            child.reap()
        self._router, self._workers, self._frontends = None, [], {}

    def on_message(self, control_name: str, message: ChildMessage) -> None:
        """Take in a message; those of children that are gone are ignored."""
        child = next((c for c in self.children if control_name in c.control_names), None)
        if child is None:
            return
        if child.is_ready:
            self._on_sign_of_life(child)
        match message:
            case ChildReady():
                self._on_ready(child)
            case ChildFailed(reason=reason):
                child.failure = reason
            case FrontendServing():
                child.is_serving = True
                self._on_progress()
            case StoreUsed():
                self._start_batches()
            case Heartbeat():
                pass
            case MetricsSnapshot(samples=samples):
                self._on_snapshot(child, samples)
            case MetricsRequest():
                child.send(self._metrics.answer(message))
            case Picture(text=text):
                self._metrics.on_picture(text)
            case WorkersStalled(incarnation=incarnation, stalled_s=stalled_s):
                if incarnation == self._incarnation:
                    self._on_stall(stalled_s)

    def on_exit(self, child: Child) -> None:
        """Reap a child whose pidfd is readable, and recover.

        Raises:
            StartupError: it died while the server was starting, or the budget is spent.
        """
        self._remove(child)
        self._metrics.on_exit(child)
        how = child.reap()
        if self.phase is Phase.STARTING:
            raise StartupError(
                f"{child.name}: {child.failure}" if child.failure else f"{child.name} {how}"
            )
        if self.phase is Phase.DRAINING:
            if child.spec.role in (Role.ROUTER, Role.WORKER):
                self._tell_frontends_router_down()
            return
        reason = f"{child.name} {how}"
        if child.spec.role in (Role.FRONTEND, Role.BATCHES):
            self._replace_frontend(child, reason)
        elif not child.is_doomed:
            is_router = child.spec.role is Role.ROUTER
            self._recover(Rebuild.ROUTER if is_router else Rebuild.WORKERS, reason)
        self._rebuild_when_clear()

    def look_at_nodes(self, now_s: float) -> None:
        """Take in what other nodes say, and what their silence means.

        Raises:
            StartupError: one was lost while the server was starting, or is away for too long.
        """
        if self._nodes is None:
            return
        lost = self._nodes.turn(now_s)
        if self.phase is Phase.DRAINING:
            if lost:
                self._tell_frontends_router_down()
            return
        if lost and self.phase is Phase.STARTING:
            raise StartupError(lost)
        if lost and self._rebuild is Rebuild.NOTHING:
            self._recover(Rebuild.WORKERS, lost)
        self._rebuild_when_clear()
        self._on_progress()
        if now_s >= self._nodes_due_s:
            raise StartupError(
                f"waited {self._start_timeout_s:g} s for node {self._nodes.missing()}"
                " (--start-timeout-s)"
            )

    def check_deadlines(self, now_s: float) -> None:
        """Deal with children that are not ready, not heard of, or not gone in time.

        Raises:
            StartupError: while the server is starting.
        """
        if now_s >= self._drain_deadline_s:
            log.warning("frontends did not end in time: killed")
            self._drain_deadline_s = float("inf")
            for frontend in self._frontends.values():
                frontend.kill()
        late = [child for child in self.children if now_s >= child.due_s]
        was_stopped = any(now_s > child.due_s + MAX_LATENESS_S for child in late)
        for child in late:
            if not child.is_ready:
                self._give_up(
                    child,
                    f"{child.name} was not ready after {self._start_timeout_s:g} s",
                    "--start-timeout-s",
                )
            elif was_stopped:
                self._on_sign_of_life(child)
            elif now_s >= child.late_due_s:
                self._give_up(child, f"{child.name} was busy for {self._late_timeout_s:g} s")
            elif child.is_busy():
                log.warning("%s is late: silent, but busy", child.name)
                child.due_s = min(now_s + LATE_CHECK_S, child.late_due_s)
            else:
                self._give_up(child, f"{child.name} was silent for {self._silence_timeout_s:g} s")
        if now_s >= self._whole_due_s:
            self._give_up_waiting()

    def _give_up(self, child: Child, reason: str, flag: str = "") -> None:
        """Kill a child that does not do its part; `on_exit` recovers."""
        if self.phase is Phase.STARTING:
            raise StartupError(f"{reason} ({flag})" if flag else reason)
        log.error("%s: killed", reason)
        child.due_s = float("inf")
        child.kill(is_doomed=False)

    def _give_up_waiting(self) -> None:
        """All may be ready, but frontends are not welcomed: some of them, or the router."""
        self._whole_due_s = float("inf")
        idle = [child for child in self._frontends.values() if not child.is_serving]
        if self._router is None or self._rebuild is not Rebuild.NOTHING:
            return  # what is spawned then sets the time anew
        if self._nodes is not None and not self._nodes.are_ready:
            return  # they have deadlines of their own
        if not all(child.is_ready for child in self.children):
            return  # the others have deadlines of their own
        timeout_s = f"after {self._start_timeout_s:g} s"
        if len(idle) == len(self._frontends) and self.phase is Phase.SERVING:
            self._give_up(self._router, f"{self._router.name} welcomed no frontend {timeout_s}")
            return
        for child in idle:
            self._give_up(
                child,
                f"{child.name} was not welcomed by the router {timeout_s}",
                "--start-timeout-s",
            )

    def _on_ready(self, child: Child) -> None:
        child.mark_ready()
        self._on_sign_of_life(child)
        log.debug("%s is ready", child.name)
        if child is self._router:
            for frontend in self._frontends.values():
                self._introduce_router(frontend)
        self._on_progress()

    def _on_progress(self) -> None:
        """Note when the server becomes whole."""
        if self._is_whole or self._rebuild is not Rebuild.NOTHING or self.phase is Phase.DRAINING:
            return
        if not all(frontend.is_serving for frontend in self._frontends.values()):
            return
        if not all(child.is_ready for child in self.children):
            return
        if self._nodes is not None and not self._nodes.are_ready:
            return
        self._is_whole = True
        self._whole_due_s = float("inf")
        self.phase = Phase.SERVING
        elapsed_s = time.monotonic() - self._broken_since_s
        log.info("all processes ready after %.2f s", elapsed_s)

    def _on_snapshot(self, child: Child, samples: Sequence[MetricSample]) -> None:
        try:
            self._metrics.on_snapshot(child.control_name, samples)
        except ProtocolError as error:
            log.error("dropped the metrics of %s: %s", child.name, error)

    def _on_stall(self, stalled_s: float) -> None:
        if self.phase is Phase.DRAINING:
            self._tell_frontends_router_down()
        elif self.phase is Phase.SERVING and self._rebuild is Rebuild.NOTHING:
            self._recover(Rebuild.WORKERS, f"workers made no step for {stalled_s:.1f} s")

    def _introduce_router(self, frontend: Child) -> None:
        boot = self._boot
        frontend.is_serving = False
        frontend.send(RouterUp(address=boot.frontends_address, boot_id=boot.boot_id))

    def _tell_frontends_router_down(self) -> None:
        for frontend in self._frontends.values():
            frontend.send(RouterDown())

    def _replace_frontend(self, child: Child, reason: str) -> None:
        self._spend_restart(reason)
        if self._router is not None:
            self._router.send(
                FrontendLost(
                    frontend_id=FrontendId(child.spec.index), incarnation=child.spec.incarnation
                )
            )
        self._start_frontend(child.spec.index, child.spec.incarnation + 1)

    def _start_batches(self) -> None:
        """Start the batches process, if it is not there."""
        index = num_frontends(self._specs.config)
        if index in self._frontends or self.phase is Phase.DRAINING:
            return
        if self._is_whole:
            self._is_whole = False
            self._broken_since_s = time.monotonic()
        self._start_frontend(index, 0)

    def _recover(self, what: Rebuild, reason: str) -> None:
        """Kill the rest of what failed; `_rebuild_when_clear` goes on when it is gone."""
        self._spend_restart(reason)
        if what is Rebuild.ROUTER:
            self._tell_frontends_router_down()
        elif self._router is not None:
            self._router.send(WorkersLost(incarnation=self._incarnation))
        self._rebuild = max(self._rebuild, what)
        self._whole_due_s = float("inf")
        for frontend in self._frontends.values():
            frontend.is_serving = False
        for worker in self._workers:
            worker.kill()
        self._await_nodes()

    def _await_nodes(self) -> None:
        """Have what other nodes run of a group end; none is started before all of them are there.

        Without a group there is nothing to wait for but them.
        """
        if self._nodes is not None:
            self._nodes.order(None)
            self._nodes_due_s = time.monotonic() + self._start_timeout_s

    def _rebuild_when_clear(self) -> None:
        if self._rebuild is Rebuild.NOTHING or self._workers:
            return
        if self._nodes is not None and self._nodes.missing():
            return
        what, self._rebuild = self._rebuild, Rebuild.NOTHING
        self._incarnation += 1
        if what is Rebuild.ROUTER:
            self._boot = self._new_boot(self._boot.number + 1)
            self._incarnation = 0
            self._start_router()
        self._start_workers()

    def _spend_restart(self, reason: str) -> None:
        now_s = time.monotonic()
        log.error("%s", reason)
        if not self._budget.spend(now_s):
            raise StartupError(
                f"gave up after {self._budget.max_restarts} restarts within"
                f" {self._budget.window_s:g} s: {reason}"
            )
        if self._is_whole:
            self._is_whole = False
            self._broken_since_s = now_s

    def _new_boot(self, number: int) -> RouterBoot:
        if self._nodes is None:
            return self._specs.boot(number)
        far_workers = self._nodes.new_listener()
        return self._specs.boot(number, far_workers, url_of(far_workers))

    def _start_router(self) -> None:
        self._router = self._spawn(self._specs.router(self._boot))
        if self._boot.far_workers is not None:
            self._boot.far_workers.close()  # the router's alone, so that it ends with it

    def _start_workers(self) -> None:
        boot, incarnation, ranks = self._boot, self._incarnation, self._specs.config.local_ranks
        if self._nodes is None:
            specs = [self._specs.worker(boot, rank, incarnation) for rank in ranks]
            self._workers = [self._spawn(spec) for spec in specs]
            return
        self._nodes_due_s = float("inf")
        with self._nodes.new_listener() as listener:
            store = url_of(listener)
            self._workers = [
                self._spawn(
                    self._specs.worker(
                        boot, rank, incarnation, store=store, store_listener=listener
                    )
                )
                for rank in ranks
            ]
        self._nodes.order(
            NodeGroup(
                boot_id=boot.boot_id,
                boot_number=boot.number,
                incarnation=incarnation,
                workers_address=boot.far_address,
                store_address=store,
            )
        )

    def _start_frontend(self, index: int, incarnation: int) -> None:
        frontend = self._spawn(self._specs.frontend(index, incarnation, self._api_keys))
        self._frontends[index] = frontend
        if self._router is not None and self._router.is_ready:
            self._introduce_router(frontend)

    def _spawn(self, spec: ChildSpec) -> Child:
        """Start a child; it, and then the server, have the start timeout to be ready."""
        due_s = time.monotonic() + self._start_timeout_s
        self._whole_due_s = due_s
        is_used_first = spec.role is Role.BATCHES and spec.incarnation == 0
        if self.phase is not Phase.STARTING and not is_used_first:
            self._metrics.on_restart(spec.role)
        return self._spawner.spawn(spec, due_s=due_s)

    def _on_sign_of_life(self, child: Child) -> None:
        """Set when a ready child that speaks now has to be heard of again."""
        if child.spec.role is Role.WORKER:
            child.due_s = float("inf")
            return
        now_s = time.monotonic()
        child.due_s = now_s + self._silence_timeout_s
        child.late_due_s = now_s + self._late_timeout_s
        child.is_busy()  # what it does from now on counts

    def _remove(self, child: Child) -> None:
        if child is self._router:
            self._router = None
        elif child.spec.role is Role.WORKER:
            self._workers.remove(child)
        else:
            del self._frontends[child.spec.index]
