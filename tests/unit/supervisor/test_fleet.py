"""The rules of children's lives, with children that are no processes; see `supervisor/fleet.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightserve.child import control_name
from lightserve.config import ServeConfig
from lightserve.errors import StartupError
from lightserve.messages.supervision import (
    ChildReady,
    ChildSpec,
    FrontendServing,
    Role,
    SupervisorMessage,
    WorkersLost,
    WorkersStalled,
)
from lightserve.supervisor.fleet import Fleet, Phase
from lightserve.supervisor.metrics import ServerMetrics
from lightserve.supervisor.spawn import Child, RunDir, Spawner, SpecWriter


class _Child(Child):
    """What the fleet sees of a child; it is ended by the test."""

    def __init__(self, spec: ChildSpec, due_s: float) -> None:
        self.spec = spec
        self.name = f"{spec.role}-{spec.index}"
        self.control_name = control_name(spec)
        self.pid = os.getpid()  # what metrics look at
        self.due_s, self.late_due_s = due_s, float("inf")
        self.is_ready = self.is_serving = self.is_doomed = self.was_killed = False
        self.failure = ""
        self.sent: list[SupervisorMessage] = []

    def is_busy(self) -> bool:
        return False

    def send(self, message: SupervisorMessage) -> None:
        self.sent.append(message)

    def mark_ready(self) -> None:
        self.is_ready = True

    def kill(self, *, is_doomed: bool = True) -> None:
        self.was_killed = True
        self.is_doomed = self.is_doomed or is_doomed

    def reap(self) -> str:
        return "was killed by SIGKILL" if self.was_killed else "exited with code 7"


class _Spawner(Spawner):
    """Starts no process."""

    def __init__(self) -> None:
        self.children: list[_Child] = []

    def spawn(self, spec: ChildSpec, *, due_s: float) -> Child:
        self.children.append(_Child(spec, due_s))
        return self.children[-1]


class _Server:
    """A fleet that serves, and all children that it ever had."""

    def __init__(self, run_dir: RunDir, config: ServeConfig) -> None:
        self.spawner = _Spawner()
        specs = SpecWriter(config, run_dir, run_dir.address("control"), listen_fd=-1)
        self.fleet = Fleet(specs, self.spawner, ServerMetrics(config))
        self.fleet.start()
        self.all_ready()
        assert self.fleet.phase is Phase.SERVING

    def child(self, role: Role, index: int = 0) -> _Child:
        """Return the youngest of a kind."""
        return next(
            child
            for child in reversed(self.spawner.children)
            if (child.spec.role, child.spec.index) == (role, index)
        )

    def all_ready(self) -> None:
        """Have every child that lives say that it is ready, and frontends that they serve."""
        for child in self.fleet.children:
            if not child.is_ready:
                self.fleet.on_message(child.control_name, ChildReady())
        for child in self.fleet.children:
            if child.spec.role is Role.FRONTEND:
                self.fleet.on_message(child.control_name, FrontendServing())

    def stalled(self, incarnation: int) -> None:
        """Have the router say that this group of workers makes no step."""
        router = self.child(Role.ROUTER)
        message = WorkersStalled(incarnation=incarnation, stalled_s=60.0)
        self.fleet.on_message(router.control_name, message)


@pytest.fixture
def server(tmp_path: Path) -> _Server:
    config = ServeConfig(tp=2, http_workers=1, max_restarts=2)
    return _Server(RunDir(str(tmp_path)), config)


def test_workers_are_replaced_when_they_stall_and_not_for_what_was_said_of_others(
    server: _Server,
) -> None:
    """The router may have said it of a group that is gone by the time that it is read."""
    first = server.child(Role.WORKER, 0)
    server.stalled(1)
    assert not first.was_killed, "a group that is still to come"
    server.fleet.on_exit(first)
    assert server.child(Role.WORKER, 1).was_killed
    assert server.child(Role.ROUTER).sent[-1] == WorkersLost(incarnation=0)
    server.fleet.on_exit(server.child(Role.WORKER, 1))
    server.all_ready()
    second = [server.child(Role.WORKER, rank) for rank in (0, 1)]
    assert [worker.spec.incarnation for worker in second] == [1, 1]

    server.stalled(0)
    assert not any(worker.was_killed for worker in second)
    server.stalled(1)
    assert all(worker.was_killed and worker.is_doomed for worker in second)
    assert server.child(Role.ROUTER).sent[-1] == WorkersLost(incarnation=1)


def test_a_new_router_counts_its_groups_from_the_first(server: _Server) -> None:
    """So what an older router said is told from it by name, and by nothing else."""
    old = server.child(Role.ROUTER)
    server.fleet.on_exit(old)
    for rank in (0, 1):
        server.fleet.on_exit(server.child(Role.WORKER, rank))
    server.all_ready()
    worker, router = server.child(Role.WORKER), server.child(Role.ROUTER)
    assert (router.spec.incarnation, worker.spec.incarnation) == (1, 0)
    assert worker.spec.boot_id == router.spec.boot_id != old.spec.boot_id

    message = WorkersStalled(incarnation=0, stalled_s=60.0)
    server.fleet.on_message(old.control_name, message)
    assert not worker.was_killed
    server.fleet.on_message(router.control_name, message)
    assert worker.was_killed


def test_each_failure_costs_one_restart_and_one_too_many_is_the_end(server: _Server) -> None:
    for _ in range(2):
        server.fleet.on_exit(server.child(Role.FRONTEND))
        server.all_ready()
    assert server.child(Role.FRONTEND).spec.incarnation == 2
    with pytest.raises(StartupError, match=r"gave up after 2 restarts within .*: worker-0 exited"):
        server.fleet.on_exit(server.child(Role.WORKER))
