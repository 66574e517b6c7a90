"""Log lines: one per record, with the request's id, without prompts and keys."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.fake_router import Setup, frontend, says
from support.processes import wait_for

from lightserve import logs
from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.frontend.observation import Observation
from lightserve.messages.frontend_router import TokenDelta
from lightserve.metrics.catalogue import LOG_LINES_DROPPED

SECRET = "xyzzy-plugh"
KEY = "sk-hollow-voice"
EOS = 2


@contextmanager
def logged(monkeypatch: pytest.MonkeyPatch, log_format: str, file: Path) -> Iterator[list[str]]:
    """Have this process log as a server does at debug level; yields the lines at the end."""
    lines = list[str]()
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    with file.open("w+") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        logs.setup_logging("frontend-0", "debug", log_format)
        (handler,) = root.handlers
        try:
            yield lines
        finally:
            root.handlers = handlers
            root.setLevel(level)
            handler.flush()
            lines.extend(file.read_text().splitlines())


async def _talk(setup: Setup, number: int, *, stream: bool, path: str) -> None:
    body: dict[str, Any] = {"model": BUNDLED_MODEL_NAME, "max_tokens": 5, "stream": stream}
    if path.endswith("chat/completions"):
        body["messages"] = [{"role": "user", "content": f"{SECRET} {number}"}]
    else:
        body["prompt"] = f"{SECRET} {number}"
    body["user"] = f"user-{SECRET}"
    headers = {"x-request-id": f"id-{number}", "authorization": f"Bearer {KEY}"}
    answer = await setup.http.post(path, json=body, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == f"id-{number}"


async def _scenario() -> None:
    async with frontend(says([50, 51, EOS])) as setup:
        await asyncio.gather(
            *(
                _talk(setup, number, stream=number % 2 == 0, path=path)
                for number, path in enumerate(
                    ["/v1/completions", "/v1/chat/completions", "/v1/chat/completions"]
                )
            )
        )
        bad = {"model": BUNDLED_MODEL_NAME, "prompt": SECRET, SECRET: 1, "max_tokens": -1}
        headers = {"x-request-id": "id-3"}
        assert (
            await setup.http.post("/v1/completions", json=bad, headers=headers)
        ).status_code == 400
        await setup.http.get(f"/{SECRET}?key={KEY}", headers={"x-request-id": "id-4"})


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_each_line_of_a_request_has_its_id_and_none_has_its_words(
    monkeypatch: pytest.MonkeyPatch, log_format: str, tmp_path: Path
) -> None:
    with logged(monkeypatch, log_format, tmp_path / "log") as lines:
        asyncio.run(_scenario())
    ours = [line for line in lines if "lightserve.frontend" in line]
    for number, count in ((0, 3), (1, 3), (2, 3), (3, 1), (4, 1)):
        mine = f'"request_id":"id-{number}"' if log_format == "json" else f"[id-{number}]"
        assert sum(mine in line for line in ours) == count, ours
    assert len(ours) == 11
    refused = next(line for line in ours if "id-3" in line)
    ended = next(line for line in ours if "id-0" in line and "outcome" in line)
    if log_format == "json":
        assert json.loads(refused)["code"] == "unknown_parameter"
        assert json.loads(ended)["class"] == "rt"
        assert json.loads(ended)["completion_tokens"] == 3
    else:
        assert "POST /v1/completions 400 unknown_parameter in " in refused
        assert " class=rt outcome=stop " in ended
    servers = [line for line in lines if "httpx" not in line]  # the client logs its URLs
    assert len(servers) >= len(ours)
    for word in (SECRET, KEY):
        assert not any(word in line for line in servers)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("temperature", "hot", "400 invalid_type temperature in"),
        ("metadata", {SECRET: 1}, "400 invalid_type metadata in"),
        ("model", SECRET, "404 model_not_found model in"),
    ],
)
def test_a_refusal_says_in_the_log_what_it_is_about(
    field: str, value: object, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            body = {"model": BUNDLED_MODEL_NAME, "prompt": "hi", field: value}
            await setup.http.post("/v1/completions", json=body)

    with caplog.at_level("INFO", logger="lightserve"):
        asyncio.run(scenario())
    assert f"POST /v1/completions {reason} " in caplog.text
    assert SECRET not in caplog.text


def test_a_failure_of_the_server_has_the_id_and_the_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.StringIO()
    formatter = logs.JsonFormatter("router-0")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    log = logging.Logger("some.module")
    log.addHandler(handler)
    token = logs.request_id.set("id-9")
    try:
        raise ZeroDivisionError("oops")
    except ZeroDivisionError:
        log.exception("two\nlines %d", 7, extra={"fields": {"status": 500}})
    finally:
        logs.request_id.reset(token)
    log.warning("plain")
    failed, plain = map(json.loads, stream.getvalue().splitlines())
    assert failed["exception"].endswith("ZeroDivisionError: oops")
    del failed["exception"], failed["time"]
    assert failed == {
        "level": "error",
        "process": "router-0",
        "logger": "some.module",
        "message": "two\nlines 7",
        "request_id": "id-9",
        "status": 500,
    }
    assert "request_id" not in plain


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ("abc-1.2:3_4", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("", False),
        ("with space", False),
        ("<script>", False),
        ("-leading", False),
    ],
)
def test_a_request_id_is_taken_over_if_it_is_harmless(given: str, *, is_kept: bool) -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            answer = await setup.http.get("/livez", headers={"x-request-id": given})
            got = answer.headers["x-request-id"]
            assert (got == given) == is_kept
            assert is_kept or len(got) == 32

    asyncio.run(scenario())


def test_two_requests_of_one_task_have_their_own_ids() -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            ids = {(await setup.http.get("/livez")).headers["x-request-id"] for _ in range(5)}
            assert len(ids) == 5
            assert logs.request_id.get() == ""
            setup.service.router.on_message(TokenDelta(requests=[]))

    asyncio.run(scenario())


@contextmanager
def _log_to(fd: int) -> Iterator[logging.Logger]:
    """Yield a logger of its own whose lines go to a descriptor as a server's do."""
    handler = logs.QueuedHandler(fd)
    handler.setFormatter(logs.TextFormatter("router-0"))
    log = logging.Logger("some.module")
    log.addHandler(handler)
    yield log


def _handler(log: logging.Logger) -> logs.QueuedHandler:
    (handler,) = log.handlers
    assert isinstance(handler, logs.QueuedHandler)
    return handler


def test_a_pipe_that_is_not_read_holds_up_nothing_and_what_is_lost_is_told() -> None:
    read_fd, write_fd = os.pipe()
    count = 2 * logs.MAX_QUEUED_BYTES // 1000
    with _log_to(write_fd) as log:
        for number in range(count):
            log.info("line %d %s", number, "x" * 1000)  # would block from the 60th on
        num_dropped = _handler(log).num_dropped
        assert 0.3 * count < num_dropped < 0.7 * count

        got = b""
        while b"could not be written" not in got:
            got += os.read(read_fd, 1 << 20)
        *kept, told = got.decode().splitlines()
        numbers = [int(line.split()[6]) for line in kept]  # the thread may make room in between
        assert len(numbers) == count - num_dropped
        assert numbers == sorted(set(numbers))
        assert numbers[: count // 4] == list(range(count // 4))
        assert f"WARNING router-0 lightserve.logs: {num_dropped} log lines" in told

        log.info("after")
        _handler(log).flush()
        assert os.read(read_fd, 1 << 20).endswith(b"after\n")
        assert _handler(log).num_dropped == num_dropped
    os.close(read_fd)
    os.close(write_fd)


def test_a_pipe_that_does_not_block_loses_nothing() -> None:
    """Another process that shares standard error may have made it so."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    with _log_to(write_fd) as log:
        for number in range(200):
            log.info("line %d %s", number, "x" * 1000)
        got = b""
        while b"line 199" not in got:
            got += os.read(read_fd, 1 << 20)
        assert _handler(log).num_dropped == 0
    assert [line.split()[6] for line in got.decode().splitlines()] == [str(n) for n in range(200)]
    os.close(read_fd)
    os.close(write_fd)


def test_a_full_disk_holds_up_nothing_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full, _log_to(full.fileno()) as log:
        for number in range(100):
            log.info("line %d", number)
        wait_for(lambda: _handler(log).num_dropped == 100, "the count")
        monkeypatch.setattr(logging.getLogger(), "handlers", log.handlers)
        snapshot = Observation().snapshot(num_in_flight=0, num_rejected_frames=0)
        (dropped,) = [s for s in snapshot.samples if s.family == LOG_LINES_DROPPED.name]
        assert (dropped.labels, dropped.values) == (["frontend"], [100])


@pytest.mark.parametrize("form", [logs.TextFormatter, logs.JsonFormatter])
def test_a_record_that_cannot_be_written_is_told_of_where_lines_go(
    form: type[logs.TextFormatter | logs.JsonFormatter],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Not on standard error by itself, which may be a pipe that is not read."""
    with (tmp_path / "log").open("w") as file, _log_to(file.fileno()) as log:
        _handler(log).setFormatter(form("router-0"))
        log.info("%d", SECRET)
        log.info("half a pair: %s", "\ud800")
        log.info("after")
        _handler(log).flush()
    lines = (tmp_path / "log").read_text().splitlines()
    *_, told, after = (line for line in lines if "half" not in line)
    assert "a record of some.module, line " in told and "cannot be written" in told
    assert "after" in after and SECRET not in told
    assert capsys.readouterr().err == ""


_CLOSED = """
import logging, os, sys
os.close(2)
sys.stderr = None  # as Python has it from the start then
from lightserve import logs
logs.setup_logging("router-0", "info", "text")
read_fd, write_fd = os.pipe()
logging.info("lost")
logging.shutdown()
os.set_blocking(read_fd, False)
try:
    got = os.read(read_fd, 1000)
except BlockingIOError:
    got = b""
sys.exit(len(got))
"""


def test_where_standard_error_is_closed_nothing_else_gets_the_lines() -> None:
    command = [sys.executable, "-c", _CLOSED]
    assert subprocess.run(command, check=False, timeout=300).returncode == 0


_LAST_LINES = """
import logging, os, sys
from lightserve import logs
logs.setup_logging("router-0", "info", "text")
logs.FLUSH_S = 0.2
for number in range(500):
    logging.info("line %d %s", number, "x" * 1000)
if sys.argv[1] == "child":
    logging.shutdown()
    os._exit(1)
logs.say_last("lightserve: error: the last one")
sys.exit(1)
"""


@pytest.mark.parametrize("how", ["child", "command"])
def test_the_last_lines_of_a_process_come_out(how: str) -> None:
    command = [sys.executable, "-c", _LAST_LINES, how]
    process = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=300)
    assert process.returncode == 1
    lines = process.stderr.splitlines()
    assert "line 499" in lines[-1 if how == "child" else -2]
    assert how == "child" or lines[-1] == "lightserve: error: the last one"
    assert len(lines) == 500 + (how == "command")


@pytest.mark.parametrize("how", ["child", "command"])
def test_a_process_ends_though_its_lines_are_not_read(how: str) -> None:
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-c", _LAST_LINES, how]
    process = subprocess.run(command, stderr=write_fd, check=False, timeout=300)
    assert process.returncode == 1
    os.close(read_fd)
    os.close(write_fd)
