"""`lightserve chat` against a scripted server: the protocol, the conversation, the terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from lightserve import chat_client
from lightserve.chat import Session, printable, talk
from lightserve.chat_client import ChatClient, Piece
from lightserve.cli import chat as cli_chat
from lightserve.errors import ChatError


def _event(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


_DONE = b"data: [DONE]\n\n"


class FakeServer:
    """Answers with scripted bytes and remembers what it was asked."""

    def __init__(self, *chunks: bytes, status: int = 200) -> None:
        self.chunks = chunks
        self.status = status
        self.requests: list[httpx.Request] = []
        self.was_closed = False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        return httpx.Response(self.status, stream=_Body(self))

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(r.content) for r in self.requests if r.method == "POST"]

    def client(self, **options: Any) -> ChatClient:
        return ChatClient("http://server", transport=httpx.MockTransport(self), **options)

    def session(self, **options: Any) -> Session:
        return Session(self.client(), "m", **options)


class _Body(httpx.SyncByteStream):
    def __init__(self, server: FakeServer) -> None:
        self._server = server

    def __iter__(self) -> Iterator[bytes]:
        yield from self._server.chunks

    def close(self) -> None:
        self._server.was_closed = True


def _drop(piece: Piece) -> None:
    pass


def test_pieces_arrive_as_they_were_sent_over_any_cuts_and_comments() -> None:
    reasoning = b'data: {"choices": [{"delta": {"reasoning_content": "hm"}}]}\n\n'
    usage = b'data: {"choices": [], "usage": {}}\n\n'
    whole = b": queued\n\n" + reasoning + _event("Grü") + _event("ße\n") + usage + _DONE
    cuts = [whole[i : i + 3] for i in range(0, len(whole), 3)]
    server = FakeServer(*cuts)
    assert list(server.client().stream("m", [], {})) == [
        Piece(reasoning="hm"),
        Piece("Grü"),
        Piece("ße\n"),
    ]


@pytest.mark.parametrize(
    ("chunks", "status", "expected"),
    [
        ((b'{"error": {"message": "too long"}}',), 400, "HTTP 400: too long"),
        ((b"<h1>Bad\nGateway</h1>",), 502, "HTTP 502: <h1>Bad Gateway</h1>"),
        ((b"",), 401, "HTTP 401: (--api-key-file or --api-key-env"),
        ((b'{"error": {"message": "no key"}}',), 401, "no key (--api-key-file or --api-key-env"),
        ((_event("a"), b'data: {"error": {"message": "died"}}\n\n'), 200, "broke off: died"),
        ((_event("a"),), 200, "ended without [DONE]"),
        ((b"data: [1]\n\n",), 200, "no chat completion"),
        ((b"data: {\n\n",), 200, "no chat completion"),
    ],
)
def test_what_is_no_answer_is_an_error_and_leaves_no_trace(
    chunks: tuple[bytes, ...], status: int, expected: str
) -> None:
    session = FakeServer(*chunks, status=status).session()
    with pytest.raises(ChatError) as raised:
        session.enter("hello", _drop)
    assert expected in str(raised.value)
    assert session.history == []


def test_a_server_that_is_not_there() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    client = ChatClient("http://server/v1/", transport=httpx.MockTransport(refuse))
    for ask in (client.models, lambda: list(client.stream("m", [], {}))):
        with pytest.raises(ChatError, match="http://server/v1/: refused"):
            ask()


def test_a_conversation_is_sent_whole_with_options_and_key() -> None:
    server = FakeServer(_event("yes"), _DONE)
    session = Session(
        server.client(api_key="k1"), "m", system="be brief", options={"temperature": 0.5}
    )
    session.enter("one", _drop)
    session.enter(" two ", _drop)
    assert server.requests[0].headers["authorization"] == "Bearer k1"
    assert str(server.requests[0].url) == "http://server/v1/chat/completions"
    assert server.bodies[1] == {
        "model": "m",
        "stream": True,
        "temperature": 0.5,
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "two"},
        ],
    }


def test_a_stopped_answer_ends_the_request_and_is_kept() -> None:
    server = FakeServer(_event("a"), _event("b"), _event("c"), _DONE)
    session = server.session()
    seen: list[str] = []

    def stop(piece: Piece) -> None:
        seen.append(piece.text)
        if piece.text == "b":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.enter("go", stop)
    assert seen == ["a", "b"]
    assert server.was_closed
    assert session.history[-1] == {"role": "assistant", "content": "ab"}


def test_commands(tmp_path: Path) -> None:
    server = FakeServer(_event("yes"), _DONE)
    session = server.session()
    session.enter("one", _drop)
    session.enter("two", _drop)
    assert session.enter("/undo", _drop) == "forgotten"
    assert [m["content"] for m in session.messages] == ["one", "yes"]
    target = tmp_path / "talk.json"
    assert session.enter(f"/save {target}", _drop) == f"saved to {target}"
    assert json.loads(target.read_text()) == json.loads(session.enter("/show", _drop))
    assert "exists" in session.enter(f"/save {target}", _drop)
    assert session.enter("/save", _drop) == "/save needs a file"
    assert session.enter("/reset", _drop) == "begun anew"
    assert session.enter("/undo", _drop) == "there is nothing to forget"
    assert session.enter("/system be kind", _drop) == "system prompt set"
    assert session.messages == [{"role": "system", "content": "be kind"}]
    assert session.enter("/system", _drop) == "no system prompt"
    assert session.enter("/set temperature 0.2", _drop) == "temperature = 0.2"
    assert session.enter("/set max_tokens 5", _drop) == "max_tokens = 5"
    assert "must be a number" in session.enter("/set max_tokens many", _drop)
    assert session.options == {"temperature": 0.2, "max_tokens": 5}
    assert session.enter("/set temperature", _drop) == "temperature is the server's own"
    assert session.enter("/set colour red", _drop).startswith("/set knows temperature")
    assert session.options == {"max_tokens": 5}
    assert session.enter("/nope", _drop) == "no such command: /nope (see /help)"
    for command in ("system", "reset", "undo", "set", "show", "save", "help", "exit"):
        assert f"/{command}" in session.enter("/help", _drop)
    assert session.enter("  ", _drop) == ""
    assert len(server.bodies) == 2
    session.enter("/exit", _drop)
    assert session.is_over


def test_the_terminal_edits_lines_shows_answers_and_leaves_with_ctrl_d() -> None:
    server = FakeServer(_event("hi \x1b[31m"), _event("there"), _DONE)
    written: list[str] = []
    with create_pipe_input() as keyboard:
        # Two lines by Alt-Enter; a line dropped by Ctrl-C; Ctrl-D.
        keyboard.send_text("one\x1b\rtwo\r")
        keyboard.send_text("\x04")
        code = talk(
            server.session(),
            keyboard=keyboard,
            screen=DummyOutput(),
            write=written.append,
            flush=lambda: None,
        )
    assert code == 0
    assert [body["messages"][-1]["content"] for body in server.bodies] == ["one\ntwo"]
    assert "hi [31mthere\n" in "".join(written)


def test_the_terminal_goes_on_after_errors_and_dropped_lines() -> None:
    server = FakeServer(b'{"error": {"message": "full"}}', status=429)
    written: list[str] = []
    with create_pipe_input() as keyboard:
        keyboard.send_text("dropped\x03again\r/exit\r")
        talk(
            server.session(),
            keyboard=keyboard,
            screen=DummyOutput(),
            write=written.append,
            flush=lambda: None,
        )
    assert [body["messages"][-1]["content"] for body in server.bodies] == ["again"]
    assert "error: HTTP 429: full\n" in "".join(written)


def test_printable_keeps_text_and_drops_control_characters() -> None:
    assert printable("a\tb\nc\x1b]0;x\x07\x9b é 🙂\r") == "a\tb\nc]0;x é 🙂"


@pytest.fixture
def fake_http(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    server = FakeServer(_event("yes"), _DONE)
    real = httpx.Client
    monkeypatch.setattr(
        chat_client.httpx,
        "Client",
        lambda **options: real(**{**options, "transport": httpx.MockTransport(server)}),
    )
    return server


def test_a_pipe_is_one_question_and_never_a_command(
    fake_http: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-env")
    key_file = tmp_path / "key"
    key_file.write_text("from-file\n")
    runner = CliRunner()
    words = ["--system", "s", "--temperature", "0", "--top-p", "0.5", "--max-tokens", "7"]
    result = runner.invoke(cli_chat.command, [*words, "--seed", "3"], input="/reset\nline 2\n")
    assert (result.exit_code, result.output) == (0, "yes\n")
    runner.invoke(cli_chat.command, ["--api-key-file", str(key_file)], input="x")
    keys = [r.headers["authorization"] for r in fake_http.requests if r.method == "POST"]
    assert keys == ["Bearer from-env", "Bearer from-file"]
    assert fake_http.bodies[0] == {
        "model": "m",
        "stream": True,
        "temperature": 0.0,
        "top_p": 0.5,
        "max_tokens": 7,
        "seed": 3,
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "/reset\nline 2\n"},
        ],
    }


@pytest.mark.parametrize("content", [None, "", "two words", "é"])
def test_a_wrong_key_file_is_refused_without_its_words(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
    result = CliRunner().invoke(cli_chat.command, ["--api-key-file", str(path)], input="x")
    assert type(result.exception).__name__ == "ConfigError"
    assert str(path) in str(result.exception)
    assert not content or content not in str(result.exception)


def test_only_a_terminal_needs_the_package_for_terminals() -> None:
    """A question in a pipe is answered without it."""
    code = "import sys; sys.modules['prompt_toolkit'] = None; "
    subprocess.run([sys.executable, "-c", f"{code}import lightserve.chat"], check=True)
    code += "sys.argv = ['lightserve', 'chat', '--model=m']; "
    code += "from lightserve.cli.main import main; sys.exit(main())"
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdin=theirs, capture_output=True, text=True, check=False
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 2
    assert "prompt_toolkit is missing" in done.stderr and "-m pip install" in done.stderr
