"""`lightserve batch`: what it asks, prints and refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lightserve.cli import main as cli_main
from lightserve.cli.batch import describe

BATCH: dict[str, Any] = {
    "id": "batch_1",
    "status": "in_progress",
    "expires_at": 7384,
    "output_file_id": None,
    "error_file_id": None,
    "request_counts": {"total": 3, "completed": 1, "failed": 0},
}


class Script(BaseHTTPRequestHandler):
    """Answers from a script, and notes what it was asked."""

    asked: list[tuple[str, str, bytes]] = []  # noqa: RUF012 - of a test at a time
    batches: list[dict[str, Any]] = []  # noqa: RUF012

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.asked.append((self.command, self.path, body))
        answer: Any = {"id": "file-1"}
        status = 200
        if self.path.startswith("/v1/batches"):
            answer = self.batches.pop(0)
            status = answer.pop("http", 200)
        if self.path.startswith("/v1/batches?"):
            answer = {"data": [answer]}
        data = b"line\n" if self.path.endswith("/content") else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = _answer  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Script.asked, Script.batches = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Script)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        cli_main.main(["batch", *arguments])
    out, err = capfd.readouterr()
    return int(end.value.code or 0), out, err


def test_a_file_becomes_a_batch(
    url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("{}\n")
    Script.batches = [dict(BATCH)]
    asked = ("submit", str(path), "--url", url, "--window", "7d", "--endpoint", "/v1/completions")
    assert run(capfd, *asked) == (0, "batch_1\n", "")
    (_, upload_path, form), (_, batch_path, body) = Script.asked
    assert (upload_path, batch_path) == ("/v1/files", "/v1/batches")
    assert b'filename="in.jsonl"' in form and b"{}\n" in form
    assert json.loads(body) == {
        "input_file_id": "file-1",
        "endpoint": "/v1/completions",
        "completion_window": "7d",
    }


def test_a_file_of_which_no_batch_is_made_is_deleted_again(
    url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("{}\n")
    Script.batches = [{"http": 400, "error": {"message": "line 1 of the input file: bad"}}]
    code, out, err = run(capfd, "submit", str(path), "--url", url)
    assert (code, out) == (1, "")
    assert err == "lightserve: error: HTTP 400: line 1 of the input file: bad\n"
    assert Script.asked[-1][:2] == ("DELETE", "/v1/files/file-1")


def test_what_has_become_of_batches_is_printed(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    Script.batches = [BATCH | {"status": "cancelled"} for _ in range(3)]
    for command in (["status", "batch_1"], ["list"], ["cancel", "batch_1"]):
        assert run(capfd, *command, "--url", url) == (0, "batch_1 cancelled 1/3\n", "")
    assert [asked[1] for asked in Script.asked] == [
        "/v1/batches/batch_1",
        "/v1/batches?limit=20",
        "/v1/batches/batch_1/cancel",
    ]


def test_results_are_written_once_there_are_some(
    url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    over = BATCH | {"status": "completed", "output_file_id": "file-2"}
    Script.batches = [dict(BATCH), over, dict(over), dict(over)]
    code, out, err = run(capfd, "results", "batch_1", "--url", url)
    assert (code, out) == (1, "") and "its results come when it is over" in err
    assert run(capfd, "results", "batch_1", "--url", url) == (0, "line\n", "")
    path = tmp_path / "out"
    assert run(capfd, "results", "batch_1", "--url", url, "-o", str(path)) == (0, "", "")
    assert path.read_text() == "line\n"
    assert run(capfd, "results", "batch_1", "--errors", "--url", url) == (0, "", "")


@pytest.mark.parametrize(("failed", "code"), [(0, 0), (1, 1)])
def test_a_batch_is_watched_to_its_end(
    url: str, capfd: pytest.CaptureFixture[str], failed: int, code: int
) -> None:
    counts = {"total": 3, "completed": 3 - failed, "failed": failed}
    over = BATCH | {"status": "completed", "request_counts": counts}
    Script.batches = [dict(BATCH), dict(BATCH), over]
    given, out, _ = run(capfd, "watch", "batch_1", "--every-s", "0.1", "--url", url)
    assert given == code and "3/3" in out
    assert len(Script.asked) == 3


def test_a_server_that_is_not_there_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capfd, "list", "--url", "http://127.0.0.1:9")
    assert code == 1 and err.count("\n") == 1 and "127.0.0.1:9" in err


def test_a_batch_in_a_line_says_what_is_left_of_its_window() -> None:
    assert describe(BATCH, 61.0) == "batch_1 in_progress 1/3, its window ends in 2:02:03"
