"""A server that loses the lease of lines that its engine computes: how much it still computes.

Two whole servers share a store. One of them, whose lines are in flight, is

    stopped   with all its processes, until the other has its lines, and goes on then
    cut off   from the store alone, whose sessions for its batches process are stopped; its lines
              last beyond the end of its lease

What its engine computes is read from its decision log: steps whose results have come. The router's
clock, which the log has, is this process's monotonic one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from lightserve.decisions.records import Decision, MessageReceived, ResultReceived, Share
from lightserve.decisions.replaying import DecisionLogReader
from lightserve.messages.frontend_router import Abort, Submit
from support.faulted_batch import STOP, Report, Servers, decision_log
from support.live_server import LiveServer
from support.postgres import PostgresServer
from support.processes import wait_for

AFTER_S = 3.0
"""So long after the end of the lease it is looked at what was computed; the bar is 2 s."""
MOST_TRIES = 4
LOG_S = 3.0
"""A decision log is written once a second."""


@dataclass
class Loss:
    """What an engine computed for lines that were its server's own until the lease was over."""

    num_steps: int = 0
    """Steps with such lines whose results came after the end of the lease, and of the stop."""
    num_tokens: int = 0
    """Of these lines in these steps."""
    num_told: int = 0
    """Lines of which the router was told that they are given up."""
    num_steps_after: int = 0
    """Most of these steps with one line whose results came after that."""
    seconds: float = 0.0
    """From the end of the lease, and of the stop, to the last of these results; 0: none came."""
    num_left: int = 0
    """Tokens that these lines had to come at that end."""


@contextmanager
def two_servers(
    parent: Path, postgres: PostgresServer, name: str, *, num_in_flight: int, num_tokens: int
) -> Iterator[Servers]:
    """Run them on a database of this name, with lines of so many tokens and some."""
    location = postgres.database(name)
    with Servers(
        *(parent, location),
        num_servers=2,
        postgres=postgres,
        num_in_flight=num_in_flight,
        num_tokens=num_tokens,
        has_decision_logs=True,
    ) as servers:
        yield servers


def stopped(parent: Path, postgres: PostgresServer, name: str) -> tuple[Loss, Report]:
    """Have a batch answered while a server with lines is stopped until the other has them.

    Again where it had none just then: between its last lines and the next.
    """
    with two_servers(parent, postgres, name, num_in_flight=8, num_tokens=400) as servers:
        for _ in range(MOST_TRIES):
            _, report = servers.run(48, [STOP])
            if report.num_begun_again:
                break
        server, end_s = servers.went_on[-1]
        return _loss(server, end_s), report


def cut_off(parent: Path, postgres: PostgresServer, name: str) -> Loss:
    """Cut a server off from the store until its lease is over, with lines that last longer."""
    num_in_flight = 16
    with two_servers(
        parent, postgres, name, num_in_flight=num_in_flight, num_tokens=8000
    ) as servers:
        return _cut_off(servers, 2 * num_in_flight)


def _cut_off(servers: Servers, num_lines: int) -> Loss:
    batch_id = servers.make(num_lines)
    leased = "SELECT count(*) FROM lines WHERE state = 'leased'"
    wait_for(lambda: servers.value(leased) == num_lines, "all lines in flight")
    two = "SELECT min(owner), max(owner) FROM lines WHERE state = 'leased'"
    owners = servers.row(two) or ()
    with _sessions_stopped(servers, servers.servers[0]):
        over = "SELECT min(lease_until_s) FROM owners WHERE lease_until_s < ? AND name IN (?, ?)"
        until_s = wait_for(lambda: servers.value(over, time.time(), *owners), "the lease's end")
        end_s = time.monotonic() - (time.time() - until_s)
        time.sleep(AFTER_S)
    servers.cancel(batch_id)
    return _loss(servers.servers[0], end_s)


@contextmanager
def _sessions_stopped(servers: Servers, server: LiveServer) -> Iterator[None]:
    """Stop the database's sessions of a batches process, between two of its transactions."""
    ports = [c.laddr.port for c in server.tree()["batches-1"].net_connections("tcp")]
    sql = "SELECT pid FROM pg_stat_activity WHERE client_port = ?"
    pids = [pid for port in ports if (pid := servers.value(sql, port)) is not None]
    sessions = [psutil.Process(pid) for pid in pids]
    assert len(sessions) == 2, ports  # of the store, and of hints

    def are_idle() -> bool:
        for session in sessions:
            session.suspend()
        state = "SELECT state FROM pg_stat_activity WHERE pid = ?"
        if all(servers.value(state, pid) == "idle" for pid in pids):
            return True
        for session in sessions:
            session.resume()
        return False

    wait_for(are_idle, "sessions between two transactions")
    try:
        yield
    finally:
        for session in sessions:
            session.resume()


def _loss(server: LiveServer, end_s: float) -> Loss:
    """Return what a server's decision log says of lines that it had before `end_s` (monotonic)."""
    time.sleep(LOG_S)
    left: dict[tuple[int, int], int] = {}
    told: Counter[tuple[int, int]] = Counter()
    """Steps since the router was told of each."""
    shares: dict[int, list[Share]] = {}
    loss = Loss()
    for line in DecisionLogReader(decision_log(server.run_parent)).lines():
        match line.record:
            case MessageReceived(now_s=now_s, frontend_id=frontend, message=Submit() as message):
                if message.batch and now_s < end_s:
                    left[frontend, message.request_id] = message.max_tokens
            case MessageReceived(now_s=now_s, frontend_id=frontend, message=Abort() as message):
                if now_s >= end_s and (frontend, message.request_id) in left:
                    told[frontend, message.request_id] = 0
            case Decision() as step:
                shares[step.step_id] = [share for share in step.advancing if share[:2] in left]
            case ResultReceived(now_s=now_s, result=result):
                own = shares.pop(result.step_id)
                if now_s < end_s:
                    for share in own:
                        left[share[:2]] -= 1
                elif own:
                    loss.num_steps += 1
                    loss.num_tokens += sum(share.num_tokens for share in own)
                    told.update(share[:2] for share in own if share[:2] in told)
                    loss.seconds = now_s - end_s
    loss.num_told, loss.num_steps_after = len(told), max(told.values(), default=0)
    loss.num_left = sum(left.values())
    return loss
