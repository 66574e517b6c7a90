"""Tests of the batch store run over SQLite and over PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.batch_store import Places
from support.postgres import PostgresServer, missing


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server for all tests of this process; each has databases of its own."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    server = PostgresServer()
    yield server
    server.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def both_stores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have `support.batch_store` make stores of this kind."""
    if request.param == "postgresql":
        monkeypatch.setattr(Places, "postgres", request.getfixturevalue("postgres"))
    return str(request.param)
