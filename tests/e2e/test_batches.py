"""Batches whose servers are killed, process by process and all at once, on both stores.

With SQLite, files are objects; with PostgreSQL, rows. And how much is computed for lines that are
others' by now.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support import lost_leases
from support.faulted_batch import DATABASE, PROCESSES, Servers
from support.grids import choose, more_when_long
from support.object_store import BUCKET, fake_s3
from support.postgres import PostgresServer, missing
from support.processes import wait_for

FAMILIES = (
    *("batches", "batch_lines", "batch_results_late_total", "batch_oldest_seconds"),
    *("batch_forecast_ratio", "batch_leases_lost_total", "batch_store_seconds_count"),
)
KILLS = choose(
    PROCESSES,
    ("batches-1", "router-0", "tree", "batches-1", "frontend-0", "worker-0", "supervisor"),
)
"""Of the store that one server has."""
SHARED_KILLS = choose((DATABASE, "batches-1", "tree"), (DATABASE, *KILLS, DATABASE, "batches-1"))


def check(servers: Servers, faults: tuple[str, ...]) -> None:
    """Lines are answered once and as without faults."""
    num_lines = 12 * len(faults)
    faulted, report = servers.run(num_lines, faults)
    assert (report.num_lost, report.num_doubled, report.num_errors) == (0, 0, 0)
    assert report.num_begun_again > 0
    whole, report = servers.run(num_lines)
    assert report.num_begun_again == 0
    assert faulted == whole and len(faulted) == num_lines


@more_when_long
def test_each_line_is_answered_once_whatever_is_killed(run_parent: Path, tmp_path: Path) -> None:
    assert set(KILLS) == set(PROCESSES)
    with (
        fake_s3() as s3,
        Servers(
            *(run_parent, str(tmp_path / "store")),
            file_store=f"s3://{BUCKET}/files",
            environment=s3.environment,
        ) as servers,
    ):
        check(servers, KILLS)
        assert len(s3.objects) >= 2  # the inputs of both batches, and results that were moved
        names = [f"\nlightserve_{name}{{" for name in FAMILIES]
        server = servers.servers[0]
        wait_for(lambda: all(name in server.metrics() for name in names), "metrics of batches")


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """A server for all tests here."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with closing(PostgresServer()) as server:
        yield server


@more_when_long
def test_two_servers_share_postgresql_whatever_is_killed(
    run_parent: Path, postgres: PostgresServer
) -> None:
    location = postgres.database("store")
    with Servers(run_parent, location, num_servers=2, postgres=postgres) as servers:
        check(servers, SHARED_KILLS)


@pytest.mark.long
def test_one_that_was_stopped_computes_no_more_for_lines_that_others_have(
    run_parent: Path, postgres: PostgresServer
) -> None:
    loss, report = lost_leases.stopped(run_parent, postgres, "stopped")
    assert (report.num_lost, report.num_doubled, report.num_errors) == (0, 0, 0)
    assert report.num_begun_again > 0
    check_loss(loss)


@pytest.mark.long
def test_one_that_is_cut_off_computes_until_its_lease_is_over(
    run_parent: Path, postgres: PostgresServer
) -> None:
    check_loss(lost_leases.cut_off(run_parent, postgres, "cut-off"))


def check_loss(loss: lost_leases.Loss) -> None:
    """Lines were given up: two steps were on their way by then, and it was not long after."""
    assert loss.num_told > 0 and loss.num_tokens < loss.num_left / 10
    assert loss.num_steps_after <= 2
    assert loss.seconds <= 2.0
