"""The rules of children's lives, with children that are no processes; see `supervisor/fleet.py`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightserve.child import control_name, last_words_name
from lightserve.config import ServeConfig
from lightserve.errors import StartupError
from lightserve.messages.supervision import (
    ChildFailed,
    ChildReady,
    ChildSpec,
    FrontendLost,
    FrontendServing,
    NodeGroup,
    Picture,
    Role,
    StoreUsed,
    SupervisorMessage,
    WorkersLost,
    WorkersStalled,
)
from lightserve.supervisor import spawn
from lightserve.supervisor.fleet import Fleet, Phase
from lightserve.supervisor.metrics import ServerMetrics
from lightserve.supervisor.nodes import Nodes
from lightserve.supervisor.spawn import Child, RunDir, Spawner, SpecWriter
from lightserve.types import FrontendId


class _Child(Child):
    """What the fleet sees of a child; it is ended by the test."""

    def __init__(self, spec: ChildSpec, due_s: float) -> None:
        self.spec = spec
        self.name = f"{spec.role}-{spec.index}"
        self.control_name = control_name(spec)
        self.pid = os.getpid()  # what metrics look at
        self.due_s, self.late_due_s = due_s, float("inf")
        self.is_ready = self.is_serving = self.is_doomed = self.was_killed = False
        self.is_at_work = False
        self.failure = ""
        self.sent: list[SupervisorMessage] = []

    def is_busy(self) -> bool:
        return self.is_at_work

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

    def __init__(self, run_dir: RunDir, config: ServeConfig, nodes: Nodes | None = None) -> None:
        self.spawner = _Spawner()
        specs = SpecWriter(config, run_dir, run_dir.address("control"), listen_fd=-1)
        self.fleet = Fleet(specs, self.spawner, ServerMetrics(config), nodes=nodes)
        self.fleet.start()

    def child(self, role: Role, index: int = 0) -> _Child:
        """Return the youngest of a kind."""
        return next(
            child
            for child in reversed(self.spawner.children)
            if (child.spec.role, child.spec.index) == (role, index)
        )

    def all_ready(self, *, but: Sequence[_Child] = (), are_welcome: bool = True) -> None:
        """Have every child that lives say that it is ready, and frontends that they serve."""
        for child in self.fleet.children:
            if not child.is_ready and child not in but:
                self.fleet.on_message(child.control_name, ChildReady())
        for child in self.fleet.children:
            if child.spec.role is Role.FRONTEND and child not in but and are_welcome:
                self.fleet.on_message(child.control_name, FrontendServing())

    def kinds(self, child: _Child) -> list[str]:
        """Return the names of the messages that a child has been sent."""
        return [type(message).__name__ for message in child.sent]

    def stalled(self, incarnation: int) -> None:
        """Have the router say that this group of workers makes no step."""
        router = self.child(Role.ROUTER)
        message = WorkersStalled(incarnation=incarnation, stalled_s=60.0)
        self.fleet.on_message(router.control_name, message)


@pytest.fixture
def starting(tmp_path: Path) -> _Server:
    config = ServeConfig(tp=2, http_workers=2, max_restarts=2, start_timeout_s=300.0)
    return _Server(RunDir(str(tmp_path)), config)


@pytest.fixture
def server(starting: _Server) -> _Server:
    starting.all_ready()
    assert starting.fleet.phase is Phase.SERVING
    return starting


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


def test_frontends_learn_of_a_routers_death_and_of_its_successor(server: _Server) -> None:
    frontend, worker = server.child(Role.FRONTEND), server.child(Role.WORKER)
    server.fleet.on_exit(server.child(Role.ROUTER))
    assert worker.was_killed and server.kinds(frontend) == ["RouterUp", "RouterDown"]
    for rank in (0, 1):
        server.fleet.on_exit(server.child(Role.WORKER, rank))
    server.all_ready()
    assert server.kinds(frontend) == ["RouterUp", "RouterDown", "RouterUp"]
    assert not frontend.was_killed


def test_a_router_that_dies_while_the_workers_are_replaced(server: _Server) -> None:
    for rank in (0, 1):
        server.fleet.on_exit(server.child(Role.WORKER, rank))
    unready = server.child(Role.WORKER)
    assert unready.spec.incarnation == 1
    server.fleet.on_exit(server.child(Role.ROUTER))
    assert unready.was_killed
    for rank in (0, 1):
        server.fleet.on_exit(server.child(Role.WORKER, rank))
    worker, router = server.child(Role.WORKER), server.child(Role.ROUTER)
    assert worker is not unready and worker.spec.boot_id == router.spec.boot_id


def test_a_dead_frontend_is_told_to_the_router_and_replaced(server: _Server) -> None:
    server.fleet.on_exit(server.child(Role.FRONTEND, 1))
    lost = FrontendLost(frontend_id=FrontendId(1), incarnation=0)
    assert server.child(Role.ROUTER).sent == [lost]
    new = server.child(Role.FRONTEND, 1)
    assert (new.spec.incarnation, server.kinds(new)) == (1, ["RouterUp"])
    assert not server.child(Role.FRONTEND, 0).was_killed
    assert not server.child(Role.WORKER).was_killed


def _check_when_due(server: _Server, child: _Child) -> None:
    """Look at the deadlines when this child's has come, and all others were heard of just now."""
    assert child.due_s < float("inf")
    for other in server.spawner.children:
        if other is not child:
            other.due_s = float("inf")
    server.fleet.check_deadlines(child.due_s)


@pytest.mark.parametrize("role", [Role.ROUTER, Role.FRONTEND])
def test_one_that_is_silent_is_killed_unless_it_works(server: _Server, role: Role) -> None:
    child, worker = server.child(role), server.child(Role.WORKER)
    assert worker.due_s == float("inf"), "a long step is no fault"
    child.is_at_work = True
    _check_when_due(server, child)
    assert not child.was_killed and child.due_s < child.late_due_s
    child.due_s = child.late_due_s
    _check_when_due(server, child)
    assert child.was_killed, "however busy"


def test_one_that_is_silent_and_idle_is_killed(server: _Server) -> None:
    child = server.child(Role.FRONTEND, 1)
    _check_when_due(server, child)
    assert child.was_killed and not child.is_doomed, "its end is recovered from"


def test_silence_while_the_supervisor_was_stopped_proves_nothing(server: _Server) -> None:
    router = server.child(Role.ROUTER)
    server.fleet.check_deadlines(router.due_s + 1000.0)
    assert not any(child.was_killed for child in server.spawner.children)


def test_a_replacement_that_is_never_ready_is_replaced(server: _Server) -> None:
    for rank in (0, 1):
        server.fleet.on_exit(server.child(Role.WORKER, rank))
    unready = server.child(Role.WORKER)
    server.all_ready(but=[unready])
    _check_when_due(server, unready)
    assert unready.was_killed and not unready.is_doomed
    server.fleet.on_exit(unready)
    server.fleet.on_exit(server.child(Role.WORKER, 1))
    assert server.child(Role.WORKER).spec.incarnation == 2


def test_ready_is_said_once_and_not_before_every_frontend_serves(
    server: _Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    late = server.child(Role.FRONTEND, 1)
    for rank in (0, 1):
        server.fleet.on_exit(server.child(Role.WORKER, rank))
    server.all_ready(but=[late])
    assert "ready after" not in caplog.text
    server.all_ready()
    server.all_ready()
    assert caplog.text.count("all processes ready after") == 1


@pytest.mark.parametrize("is_first", [True, False])
def test_a_welcome_that_never_comes_is_not_waited_for(server: _Server, is_first: bool) -> None:
    """Of one frontend it is the frontend that is killed, of all of them the router."""
    if is_first:
        server.fleet.on_exit(server.child(Role.FRONTEND, 1))
        expected = server.child(Role.FRONTEND, 1)
        server.all_ready(but=[expected])
        server.fleet.on_message(expected.control_name, ChildReady())
    else:
        for rank in (0, 1):
            server.fleet.on_exit(server.child(Role.WORKER, rank))
        expected = server.child(Role.ROUTER)
        server.all_ready(are_welcome=False)
    # All are heard of at that moment, so that nothing else is late.
    due_s = server.fleet._whole_due_s
    for child in server.spawner.children:
        child.due_s = float("inf")
    server.fleet.check_deadlines(due_s)
    killed = [child for child in server.spawner.children if child.was_killed]
    assert [child for child in killed if not child.is_doomed] == [expected]


@pytest.mark.parametrize(
    ("role", "reason"),
    [
        (Role.WORKER, "worker-0 was not ready after 300 s (--start-timeout-s)"),
        (Role.FRONTEND, "frontend-0 was not ready after 300 s (--start-timeout-s)"),
    ],
)
def test_a_start_that_takes_too_long_is_the_end(starting: _Server, role: Role, reason: str) -> None:
    child = starting.child(role)
    starting.all_ready(but=[child])
    with pytest.raises(StartupError) as ended:
        _check_when_due(starting, child)
    assert str(ended.value) == reason


def test_a_child_that_dies_while_starting_is_the_end(starting: _Server) -> None:
    name = last_words_name(starting.child(Role.WORKER).control_name)
    starting.fleet.on_message(name, ChildFailed(reason="key 'x' is wrong"))
    with pytest.raises(StartupError, match=r"^worker-0: key 'x' is wrong$"):
        starting.fleet.on_exit(starting.child(Role.WORKER))
    with pytest.raises(StartupError, match=r"^router-0 exited with code 7$"):
        starting.fleet.on_exit(starting.child(Role.ROUTER))


def test_while_draining_nothing_is_replaced(server: _Server) -> None:
    server.fleet.drain()
    num_children = len(server.spawner.children)
    server.fleet.on_exit(server.child(Role.ROUTER))
    frontend = server.child(Role.FRONTEND)
    assert server.kinds(frontend) == ["RouterUp", "Drain", "RouterDown"]
    server.fleet.on_exit(frontend)
    assert not server.fleet.is_drained
    server.fleet.on_exit(server.child(Role.FRONTEND, 1))
    assert server.fleet.is_drained and len(server.spawner.children) == num_children


def test_frontends_that_do_not_drain_are_killed(server: _Server) -> None:
    server.fleet.drain()
    for child in server.fleet.children:
        child.due_s = float("inf")
    server.fleet.check_deadlines(server.fleet.next_deadline_s)
    assert all(server.child(Role.FRONTEND, index).was_killed for index in (0, 1))


def test_each_failure_costs_one_restart_and_one_too_many_is_the_end(server: _Server) -> None:
    for _ in range(2):
        server.fleet.on_exit(server.child(Role.FRONTEND))
        server.all_ready()
    assert server.child(Role.FRONTEND).spec.incarnation == 2
    with pytest.raises(StartupError, match=r"gave up after 2 restarts within .*: worker-0 exited"):
        server.fleet.on_exit(server.child(Role.WORKER))


def test_a_frontend_that_serves_is_asked_for_the_dashboards_picture(
    starting: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting.fleet.ask_for_picture()
    assert "PictureRequest" not in starting.kinds(starting.child(Role.FRONTEND))
    starting.all_ready()
    starting.fleet.ask_for_picture()
    assert "PictureRequest" in starting.kinds(starting.child(Role.FRONTEND))
    assert "PictureRequest" not in starting.kinds(starting.child(Role.FRONTEND, 1))
    pictures: list[bytes] = []
    monkeypatch.setattr(ServerMetrics, "on_picture", lambda _, text: pictures.append(text))
    name = starting.child(Role.FRONTEND).control_name
    starting.fleet.on_message(name, Picture(text=b"{}"))
    assert pictures == [b"{}"]


# With other nodes, which here say what the test has them say.


class _Nodes(Nodes):
    """Opens no port."""

    def __init__(self) -> None:
        self.host, self.node_key = "127.0.0.1", b"key"
        self.lost, self.away, self.is_all_ready = "", "1", False
        self.orders: list[NodeGroup | None] = []
        self._next_beat_s = float("inf")

    def order(self, group: NodeGroup | None) -> None:
        self.orders.append(group)
        self.is_all_ready = False

    def turn(self, now_s: float) -> str:
        lost, self.lost = self.lost, ""
        return lost

    def missing(self) -> str:
        return self.away

    @property
    def are_ready(self) -> bool:
        return self.is_all_ready


def _spread(tmp_path: Path) -> tuple[_Server, _Nodes]:
    config = ServeConfig(
        **{"tp": 2, "nnodes": 2, "master_addr": "127.0.0.1", "node_key_file": "key"},  # type: ignore[arg-type]
        start_timeout_s=300.0,
    )
    nodes = _Nodes()
    return _Server(RunDir(str(tmp_path)), config, nodes), nodes


def test_a_group_over_several_nodes_waits_for_them_and_is_lost_with_one(tmp_path: Path) -> None:
    server, nodes = _spread(tmp_path)
    fleet = server.fleet
    now_s = time.monotonic()

    def workers() -> list[_Child]:
        return [child for child in server.spawner.children if child.spec.role is Role.WORKER]

    fleet.look_at_nodes(now_s)
    assert not workers() and nodes.orders == [None]
    nodes.away = ""
    fleet.look_at_nodes(now_s)
    (rank_0,) = workers()
    group = nodes.orders[-1]
    assert group is not None and (group.incarnation, rank_0.spec.index) == (0, 0)
    assert rank_0.spec.collective_store == group.store_address != ""
    assert server.child(Role.ROUTER).spec.listen_fd >= 0, "for workers of the others"
    server.all_ready()
    assert fleet.phase is Phase.STARTING, "rank 1 is not ready"
    nodes.is_all_ready = True
    fleet.look_at_nodes(now_s)
    assert fleet.phase is Phase.SERVING

    nodes.lost, nodes.away = "node 1 was silent", "1"
    fleet.look_at_nodes(now_s)
    assert rank_0.was_killed and nodes.orders[-1] is None
    assert server.child(Role.ROUTER).sent[-1] == WorkersLost(incarnation=0)
    fleet.on_exit(rank_0)
    fleet.look_at_nodes(now_s)
    assert workers() == [rank_0], "node 1 is away"
    nodes.away = ""
    fleet.look_at_nodes(now_s)
    assert workers()[-1].spec.incarnation == 1
    assert nodes.orders[-1] is not None and nodes.orders[-1].incarnation == 1

    fleet.on_exit(workers()[-1])
    assert nodes.orders[-2] is None, "a death here ends the ranks there"
    assert nodes.orders[-1] is not None and nodes.orders[-1].incarnation == 2
    fleet.on_exit(server.child(Role.ROUTER))
    fleet.on_exit(workers()[-1])
    assert nodes.orders[-1] is not None and nodes.orders[-1].boot_number == 1


def test_a_node_that_never_comes_or_fails_is_the_end_of_a_start(tmp_path: Path) -> None:
    server, nodes = _spread(tmp_path)
    due_s = server.fleet.next_deadline_s
    for child in server.fleet.children:
        child.due_s = float("inf")
    with pytest.raises(StartupError, match=r"^waited 300 s for node 1 \(--start-timeout-s\)$"):
        server.fleet.look_at_nodes(max(due_s, server.fleet.next_deadline_s) + 1.0)
    nodes.away = ""
    server.fleet.look_at_nodes(0.0)
    nodes.lost = "node 1: worker-1: no memory"
    with pytest.raises(StartupError, match=r"^node 1: worker-1: no memory$"):
        server.fleet.look_at_nodes(0.0)


def test_passwords_of_the_store_reach_only_those_that_open_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PGPASSWORD", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    seen = {role for role in Role if "secret" in spawn._environment(role).values()}
    assert seen == {Role.FRONTEND, Role.BATCHES}
    assert spawn._environment(Role.WORKER)["PATH"]


def test_the_batches_process_starts_when_the_store_is_used_first(
    server: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarts: list[Role] = []
    monkeypatch.setattr(ServerMetrics, "on_restart", lambda self, role: restarts.append(role))
    fleet, router = server.fleet, server.child(Role.ROUTER)
    assert all(child.spec.role is not Role.BATCHES for child in fleet.children)
    for index in (0, 1, 0):
        fleet.on_message(server.child(Role.FRONTEND, index).control_name, StoreUsed())
    (batches,) = (each for each in fleet.children if each.spec.role is Role.BATCHES)
    assert (batches.spec.index, batches.spec.incarnation) == (2, 0) and batches.spec.batch_owner
    assert server.kinds(batches) == ["RouterUp"]
    fleet.on_message(batches.control_name, ChildReady())
    fleet.on_message(batches.control_name, FrontendServing())
    assert not restarts

    fleet.on_exit(batches)
    assert router.sent[-1] == FrontendLost(frontend_id=FrontendId(2), incarnation=0)
    again = server.child(Role.BATCHES, 2)
    assert restarts == [Role.BATCHES]
    assert again.spec.incarnation == 1 and server.kinds(again) == ["RouterUp"]
    fleet.drain()
    fleet.on_exit(again)
    fleet.on_message(server.child(Role.FRONTEND).control_name, StoreUsed())
    assert server.child(Role.BATCHES, 2) is again
