"""The file of a decision log: its bounds, its rights, and what goes wrong with it."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from lightserve.config import ServeConfig
from lightserve.decisions import records
from lightserve.decisions.records import DecisionLogFile, Header, WorkersWereLost, header_of
from lightserve.decisions.replaying import DecisionLogReader
from lightserve.errors import ConfigError


def header() -> Header:
    return header_of(ServeConfig(), max_model_len=10, seed=0)


def fill(log: DecisionLogFile, count: int) -> None:
    for number in range(count):
        log.append(WorkersWereLost(now_s=float(number)))


def test_lines_arrive_in_order(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = DecisionLogFile(path, header(), max_bytes=10_000_000)
    fill(log, 5000)
    log.close()
    reader = DecisionLogReader(path)
    assert [line.record.now_s for line in reader.lines()] == [float(n) for n in range(5000)]
    assert not reader.is_cut_off and reader.header == header()
    assert path.stat().st_mode & 0o777 == 0o600


def test_it_ends_at_its_limit_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log"
    log = DecisionLogFile(path, header(), max_bytes=5000)
    fill(log, 1000)
    log.close()
    assert 4900 < path.stat().st_size <= 5000
    assert list(DecisionLogReader(path).lines())
    assert [record.getMessage() for record in caplog.records] == [
        f"decision log {path} ends here, serving goes on: it has reached its limit of 5000 bytes"
    ]


def test_a_disk_that_is_full_does_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = DecisionLogFile(tmp_path / "log", header(), max_bytes=10_000_000)
    failed = threading.Event()

    def fail(descriptor: int, data: bytes) -> int:
        failed.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records.os, "write", fail)
    log.flush()
    assert failed.wait(10)
    for _ in range(1000):  # until the thread's word of it has come
        fill(log, 10)
        log.flush()
    log.close()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "No space left" in caplog.text


def test_a_disk_that_is_slow_ends_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    write = os.write

    def wait(descriptor: int, data: bytes) -> int:
        go_on.wait(10)
        return write(descriptor, data)

    monkeypatch.setattr(records.os, "write", wait)
    monkeypatch.setattr(records, "MAX_PENDING_BYTES", 100_000)
    path = tmp_path / "log"
    log = DecisionLogFile(path, header(), max_bytes=10_000_000)
    fill(log, 10_000)
    go_on.set()
    log.close()
    assert "the disk is too slow" in caplog.text and len(caplog.records) == 1
    assert list(DecisionLogReader(path).lines()) and path.stat().st_size <= 100_000


def test_what_was_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for _ in range(2):
        DecisionLogFile(path, header(), max_bytes=10_000).close()
    assert DecisionLogReader(tmp_path / "log.1").header == header()


def test_where_no_file_can_be(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.touch()
    link = tmp_path / "link"
    link.symlink_to(target)
    for path in (tmp_path, link, Path("/dev/null"), tmp_path / "none" / "log"):
        with pytest.raises(ConfigError, match="--decision-log"):
            DecisionLogFile(path, header(), max_bytes=10_000)
    assert target.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decision_log": "x", "decision_log_size": "9KiB"}, "at least 1MiB"),
        ({"decision_log": "x", "decision_log_size": "big"}, "must be a"),
        ({"decision_log_size": "2MiB"}, "needs --decision-log"),
    ],
)
def test_options_are_checked(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeConfig(**options)  # type: ignore[arg-type]
