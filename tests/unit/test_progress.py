"""Progress of a start: a bar where a person looks, lines where a log is kept, else nothing."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightserve import logs, progress


class Output(io.TextIOWrapper):
    """Standard error as a file, which may say that it is a terminal."""

    def __init__(self, path: Path, *, is_terminal: bool = False) -> None:
        super().__init__(path.open("w+b"), line_buffering=True)
        self.path = path
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers = handlers
    root.setLevel(level)


def shown(
    monkeypatch: pytest.MonkeyPatch,
    stream: Output,
    *,
    level: str = "info",
    log_format: str = "text",
    interval_s: float = 10.0,
    is_shown: bool = True,
    in_bytes: bool = False,
) -> str:
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(progress, "LOG_INTERVAL_S", interval_s)
    logs.setup_logging("worker-0", level, log_format)
    unit = 2**30 if in_bytes else 1
    with progress.progress("weights", 4 * unit, is_shown=is_shown, in_bytes=in_bytes) as advance:
        advance(unit)
        advance(3 * unit)
    for handler in logging.getLogger().handlers:
        handler.flush()
    stream.close()
    return stream.path.read_bytes().decode()


def test_a_terminal_gets_a_bar_that_ends_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = shown(monkeypatch, Output(tmp_path / "terminal", is_terminal=True), in_bytes=True)
    assert "\r" in output
    assert " 25%" in output and "1.00 GiB of 4.00 GiB" in output
    last = output.replace("\x1b[?25h", "").rstrip().splitlines()[-1]
    assert "100%" in last and "4.00 GiB of 4.00 GiB" in last


@pytest.mark.parametrize("interval_s", [0.0, 10.0])
def test_a_file_gets_lines(
    monkeypatch: pytest.MonkeyPatch, interval_s: float, tmp_path: Path
) -> None:
    lines = shown(monkeypatch, Output(tmp_path / "file"), interval_s=interval_s).splitlines()
    told = [line.split("progress: ")[1] for line in lines]
    between = ["weights: 1 of 4"] if interval_s == 0.0 else []
    assert told[:-1] == ["weights: 4", *between]
    assert told[-1].startswith("weights: done in ")


def test_a_json_log_stays_json_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = shown(
        monkeypatch, Output(tmp_path / "terminal", is_terminal=True), log_format="json"
    ).splitlines()
    assert [json.loads(line)["level"] for line in lines] == ["info", "info"]


@pytest.mark.parametrize(("level", "is_shown"), [("warning", True), ("info", False)])
def test_who_asked_for_silence_gets_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, level: str, is_shown: bool
) -> None:
    for stream in (Output(tmp_path / "terminal", is_terminal=True), Output(tmp_path / "file")):
        assert shown(monkeypatch, stream, level=level, is_shown=is_shown) == ""
