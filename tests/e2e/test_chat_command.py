"""`lightserve chat` as people run it in a pipe, against the real server."""

from __future__ import annotations

import subprocess
import sys

from support.live_server import LiveServer

_QUESTION = "Tell me a story about Mira and the brass lantern."


def _chat(server: LiveServer, *flags: str, question: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lightserve.cli.main", "chat", "--url", server.url, *flags],
        input=question,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_a_piped_question_is_answered(server: LiveServer) -> None:
    flags = ("--temperature", "0", "--max-tokens", "20")
    first, second = (_chat(server, *flags, question=_QUESTION) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert len(first.stdout.split()) > 5
    assert first.stdout == second.stdout


def test_a_refusal_is_one_line(server: LiveServer) -> None:
    result = _chat(server, "--max-tokens", "-1", question=_QUESTION)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("lightserve: error: HTTP 400: ")
    assert result.stderr.count("\n") == 1
