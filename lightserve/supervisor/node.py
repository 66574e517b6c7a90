"""The supervisor of a node other than 0: it runs workers as node 0 says, and nothing else.

Its workers live and die as one. Where one dies, or the order changes, the rest is killed, and when
the last is gone (its memory is free then) it goes on with what node 0 wants. While node 0 is silent
for longer than `--node-timeout-s`, that is nothing: the other ranks are being replaced as well.
"""

from __future__ import annotations

import logging
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Protocol

from lightserve.channels import Codec, Waitable, ZmqLink, bind_hub, wait_readable
from lightserve.config import ServeConfig
from lightserve.errors import ChannelFull, StartupError
from lightserve.logs import LineWriter
from lightserve.messages.common import PROTOCOL_VERSION
from lightserve.messages.supervision import (
    BEAT_S,
    NODE_LINK_VERSION,
    STOPPED,
    ChildFailed,
    ChildMessage,
    ChildReady,
    NodeGroup,
    NodeOrder,
    NodeReport,
    SupervisorMessage,
)
from lightserve.supervisor.nodes import master_address, terms_of
from lightserve.supervisor.spawn import Child, ControlHub, RouterBoot, RunDir, Spawner, SpecWriter

log = logging.getLogger(__name__)

NODE_READY_PREFIX = "lightserve: ready as node "
"""Printed when the workers of a node are ready for the first time."""
_MAX_QUEUED = 4
"""Reports: each says all, so that old ones are worth nothing."""
_LAST_WORDS_S = 5.0
_LINGER_S = 1.0


class Signals(Protocol):
    """Where stop signals arrive; see `supervisor.loop.StopSignals`."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when one has."""

    def take(self) -> list[int]:
        """Return those that have arrived since the last call."""


def run_node(
    config: ServeConfig, run_dir: RunDir, node_key: bytes, command: Sequence[str], signals: Signals
) -> int:
    """Run workers until a signal, or the end of node 0; returns the exit code.

    Raises:
        StartupError: node 0 is not there for --start-timeout-s, refuses this node, or has failed.
    """
    host = master_address(config)
    session = secrets.randbelow(10**9)
    codec = Codec[NodeReport, NodeOrder](
        send_type=NodeReport, recv_type=NodeOrder, version=NODE_LINK_VERSION
    )
    control_address = run_dir.address("control")
    with (
        closing(
            ZmqLink(
                f"tcp://{host}:{config.master_port}",
                f"node-{config.node_rank}-{session}",
                codec,
                max_queued=_MAX_QUEUED,
                linger_s=_LINGER_S,
                node_key=node_key,
                silence_s=config.node_timeout_s,
            )
        ) as link,
        closing(
            bind_hub(control_address, send_type=SupervisorMessage, recv_type=ChildMessage)
        ) as hub,
    ):
        specs = SpecWriter(config, run_dir, control_address, -1, node_key=node_key)
        report = NodeReport(
            protocol_version=PROTOCOL_VERSION,
            node_rank=config.node_rank,
            session=session,
            terms=terms_of(config),
        )
        node = Node(specs, Spawner(hub, command), report)
        try:
            return _NodeLoop(config, node, link, hub, signals).run()
        finally:
            node.kill_all()


class Node:
    """The workers of this node, and the rules of their lives."""

    def __init__(self, specs: SpecWriter, spawner: Spawner, report: NodeReport) -> None:
        """`report` is what is always said."""
        self.workers: list[Child] = []
        self.wanted: NodeGroup | None = None
        """By node 0."""
        self._group: NodeGroup | None = None
        """Which the workers are part of, as long as there are any, or it failed and is wanted."""
        self._failure = ""
        self._specs = specs
        self._spawner = spawner
        self._report = report

    @property
    def is_ready(self) -> bool:
        """Whether all workers of the wanted group are."""
        ready = [worker.is_ready for worker in self.workers]
        return len(ready) == len(self._specs.config.local_ranks) and all(ready)

    def report(self, *, is_leaving: bool = False) -> NodeReport:
        """Return how things stand."""
        always = self._report
        return NodeReport(
            protocol_version=always.protocol_version,
            node_rank=always.node_rank,
            session=always.session,
            terms=always.terms,
            group="" if self._group is None else self._group.name,
            is_ready=self.is_ready and not self._failure,
            failure=self._failure,
            is_leaving=is_leaving,
        )

    def follow(self) -> None:
        """Do what brings the workers nearer to what is wanted."""
        if self._group == self.wanted:
            return
        for worker in self.workers:
            worker.kill()
        if self.workers:
            return
        self._group, self._failure = self.wanted, ""
        if self.wanted is None:
            return
        log.info("workers start for node 0, group %s", self.wanted.name)
        boot = RouterBoot(
            number=self.wanted.boot_number,
            boot_id=self.wanted.boot_id,
            frontends_address="",
            workers_address=self.wanted.workers_address,
        )
        due_s = time.monotonic() + self._specs.config.start_timeout_s
        for rank in self._specs.config.local_ranks:
            spec = self._specs.worker(
                boot, rank, self.wanted.incarnation, store=self.wanted.store_address
            )
            self.workers.append(self._spawner.spawn(spec, due_s=due_s))

    def on_message(self, control_name: str, message: ChildMessage) -> None:
        """Take in what a worker says; those that are gone are ignored."""
        worker = next((w for w in self.workers if control_name in w.control_names), None)
        if worker is None:
            return
        if isinstance(message, ChildReady):
            worker.mark_ready()
            worker.due_s = float("inf")
        elif isinstance(message, ChildFailed):
            worker.failure = message.reason

    def on_exit(self, worker: Child) -> None:
        """Reap a worker whose pidfd is readable; the others end with it."""
        self.workers.remove(worker)
        self._fail(worker, worker.reap())

    def check_deadlines(self, now_s: float) -> None:
        """Give up on workers that are not ready in time."""
        for worker in self.workers:
            if now_s >= worker.due_s:
                timeout_s = self._specs.config.start_timeout_s
                self._fail(worker, f"was not ready after {timeout_s:g} s (--start-timeout-s)")

    def kill_all(self) -> None:
        """Kill and reap every worker."""
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.reap()
        self.workers = []

    def _fail(self, worker: Child, how: str) -> None:
        if not worker.is_doomed:
            reason = worker.failure or how
            self._failure = f"{worker.name}: {reason}" if worker.failure else f"{worker.name} {how}"
            log.error("%s", self._failure)
        for other in self.workers:
            other.kill()


class _NodeLoop:
    """Waits for orders, messages, deaths, signals and beats."""

    def __init__(
        self,
        config: ServeConfig,
        node: Node,
        link: ZmqLink[NodeReport, NodeOrder],
        hub: ControlHub,
        signals: Signals,
    ) -> None:
        self._config = config
        self._node = node
        self._link = link
        self._hub = hub
        self._signals = signals
        self._where = f"{config.master_addr} port {config.master_port}"
        self._heard_s = time.monotonic()
        """When node 0 was heard of last."""
        self._is_lost = True
        """Whether that was too long ago for its orders to hold."""
        self._said = NodeReport(protocol_version=0, node_rank=0, session=0, terms={})
        self._next_beat_s = 0.0

    def run(self) -> int:
        """Loop until the end; returns the exit code."""
        log.info("waiting for node 0 at %s", self._where)
        has_greeted = False
        while True:
            ready = self._wait()
            if (code := self._follow_orders()) is not None:
                return code
            self._hear_workers(ready)
            self._look_at_the_clock(time.monotonic())
            self._node.follow()
            self._say(time.monotonic())
            if self._node.is_ready and not has_greeted:
                has_greeted = True
                self._greet()
            for signum in self._signals.take():
                log.info("%s: the workers end now", signal.Signals(signum).name)
                self._node.kill_all()
                with suppress(ChannelFull):
                    self._link.send(self._node.report(is_leaving=True))
                return 0

    def _wait(self) -> set[int]:
        pidfds = [worker.pidfd for worker in self._node.workers]
        sources: list[Waitable | int] = [self._link, self._hub, self._signals.fileno(), *pidfds]
        timeout_s = max(0.0, self._next_beat_s - time.monotonic())
        return {s for s in wait_readable(sources, timeout_s) if isinstance(s, int)}

    def _follow_orders(self) -> int | None:
        """Take in what node 0 says; an exit code if this is the end."""
        while (order := self._link.receive(0.0)) is not None:
            self._heard_s = time.monotonic()
            if self._is_lost:
                self._is_lost = False
                log.info("node 0 is there")
            if order.refusal:
                raise StartupError(f"node 0 refuses this node: {order.refusal}")
            if order.end == STOPPED:
                log.info("node 0 has stopped")
                return 0
            if order.end:
                raise StartupError(f"node 0 has ended: {order.end}")
            self._node.wanted = order.group
        return None

    def _hear_workers(self, ready: set[int]) -> None:
        while (item := self._hub.receive(0.0)) is not None:
            self._node.on_message(*item)
        for worker in list(self._node.workers):
            if worker.pidfd not in ready:
                continue
            deadline_s = time.monotonic() + _LAST_WORDS_S
            while worker.has_reported_failure and not worker.failure:
                item = self._hub.receive(max(0.0, deadline_s - time.monotonic()))
                if item is None:
                    break
                self._node.on_message(*item)
            self._node.on_exit(worker)

    def _look_at_the_clock(self, now_s: float) -> None:
        self._node.check_deadlines(now_s)
        silent_s = now_s - self._heard_s
        if silent_s >= self._config.node_timeout_s and not self._is_lost:
            self._is_lost = True
            log.error("node 0 was silent for %.1f s: the workers end", silent_s)
            self._node.wanted = None
        if silent_s >= self._config.start_timeout_s:
            raise StartupError(
                f"node 0 at {self._where} has not answered for"
                f" {self._config.start_timeout_s:g} s (--start-timeout-s): is it running, with"
                " the same --node-key-file?"
            )

    def _say(self, now_s: float) -> None:
        report = self._node.report()
        if report == self._said and now_s < self._next_beat_s:
            return
        self._said, self._next_beat_s = report, now_s + BEAT_S
        with suppress(ChannelFull):  # what is queued says that this node is there
            self._link.send(report)

    def _greet(self) -> None:
        config = self._config
        ranks = ", ".join(map(str, config.local_ranks))
        LineWriter(sys.stdout.fileno()).write(
            f"{NODE_READY_PREFIX}{config.node_rank} of {config.nnodes}: runs rank {ranks} for"
            f" {self._where}\n"
        )
