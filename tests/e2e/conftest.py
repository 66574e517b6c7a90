"""One running server for all tests that leave it as they found it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.live_server import LiveServer, live_server


@pytest.fixture(scope="session")
def run_parent() -> Iterator[Path]:
    """A directory that other users may enter, so that only the run directory keeps them out."""
    path = Path(tempfile.mkdtemp(prefix="ls-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def server(run_parent: Path) -> Iterator[LiveServer]:
    """The bundled model with default flags."""
    with live_server(run_parent) as running:
        yield running
