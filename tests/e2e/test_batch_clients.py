"""Files, batches, responses and messages by the clients' own calls, one by one, on a real server.

The first part makes the calls of llama-stack's public tests of batches and files. There a file that
is wrong makes a batch that fails; here it is refused, and nothing is made.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from openai import OpenAI
from support.live_server import LiveServer, live_server
from support.processes import wait_for

URL = "/v1/chat/completions"
ASK: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server(run_parent: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    store = tmp_path_factory.mktemp("batches") / "store"
    with live_server(run_parent, f"--batch-store={store}", "--http-workers=1") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def line(custom_id: str, model: str, **changes: Any) -> dict[str, Any]:
    body = {"model": model, "messages": ASK, "max_tokens": 5} | changes.pop("body", {})
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": body} | changes


def upload(client: OpenAI, lines: list[dict[str, Any]] | str) -> Any:
    text = lines if isinstance(lines, str) else "\n".join(json.dumps(each) for each in lines)
    file = BytesIO(text.encode())
    file.name = "batch_input.jsonl"
    return client.files.create(file=file, purpose="batch")


def make(client: OpenAI, lines: list[dict[str, Any]] | str, **options: Any) -> Any:
    options = {"endpoint": URL, "completion_window": "24h"} | options
    return client.batches.create(input_file_id=upload(client, lines).id, **options)


def ended(client: OpenAI, batch_id: str) -> Any:
    """The batch, once it is over."""

    def is_over() -> Any:
        batch = client.batches.retrieve(batch_id)
        return None if batch.status == "in_progress" else batch

    return wait_for(is_over, "the end of a batch")


# ---------------------------------------------------------------------- llama-stack's calls


def test_a_batch_is_made_and_retrieved(client: OpenAI, server: LiveServer) -> None:
    metadata = {"test_type": "comprehensive", "version": "1.0", "tags": "test,batch"}
    batch = make(client, [line("request-1", server.model)], metadata=metadata)
    assert (batch.object, batch.endpoint, batch.completion_window) == ("batch", URL, "24h")
    assert batch.metadata == metadata
    again = client.batches.retrieve(batch.id)
    for name in ("id", "object", "endpoint", "input_file_id", "completion_window", "metadata"):
        assert getattr(again, name) == getattr(batch, name)
    ended(client, batch.id)


def test_batches_are_listed(client: OpenAI, server: LiveServer) -> None:
    made = [make(client, [line(f"request-{number}", server.model)]).id for number in range(2)]
    assert {*made} <= {each.id for each in client.batches.list().data}
    assert [each.id for each in client.batches.list(limit=1)][:2] == made[::-1]
    for batch_id in made:
        ended(client, batch_id)


def test_a_batch_is_cancelled_at_once(client: OpenAI, server: LiveServer) -> None:
    lines = [line(f"r{n}", server.model, body={"max_tokens": 400}) for n in range(300)]
    batch = make(client, lines)
    cancelled = client.batches.cancel(batch.id)
    assert cancelled.status == "cancelled" and isinstance(cancelled.cancelling_at, int)
    over = client.batches.retrieve(batch.id)
    assert over.status == "cancelled" and isinstance(over.cancelled_at, int)
    assert client.batches.cancel(batch.id).id == batch.id  # allowed of one that is cancelled


def test_a_batch_to_its_end(client: OpenAI, server: LiveServer) -> None:
    lines = [
        line("success-1", server.model),
        line("error-1", server.model, body={"max_tokens": -1}),
    ]
    batch = ended(client, make(client, lines).id)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 2, 1, 1)
    (output,) = client.files.content(batch.output_file_id).text.splitlines()
    result = json.loads(output)
    assert result["id"] and result["custom_id"] == "success-1"
    assert result["response"]["status_code"] == 200 and result["response"]["body"]["choices"]
    (error,) = client.files.content(batch.error_file_id).text.splitlines()
    result = json.loads(error)
    # As OpenAI has it: what HTTP would have answered. `error` is for lines without any answer.
    assert result["id"] and result["custom_id"] == "error-1" and result["error"] is None
    assert result["response"]["status_code"] == 400
    assert "max_tokens" in result["response"]["body"]["error"]["message"]
    with pytest.raises(openai.ConflictError, match="cannot cancel"):
        client.batches.cancel(batch.id)
    for file_id in (batch.output_file_id, batch.error_file_id):
        assert client.files.delete(file_id).deleted


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"url": "/v1/embeddings"}, "line 2 .*url must be the batch's endpoint"),
        ({"body": {"stream": True}}, "line 2 .*body.stream must be false"),
        ({"body": {"model": "nonexistent-model-xyz"}}, "line 2 .*body.*nonexistent-model-xyz"),
        ("{invalid json here", "line 2 .*not valid JSON"),
        *((name, f"line 2 .*{name}") for name in ("custom_id", "method", "url", "body")),
    ],
    ids=str,
)
def test_a_line_that_is_wrong_is_refused(
    client: OpenAI, server: LiveServer, change: dict[str, Any] | str, said: str
) -> None:
    """A name is of a field that is missing."""
    wrong: Any = line("b", server.model, **(change if isinstance(change, dict) else {}))
    if isinstance(change, str):
        wrong.pop(change, None)
    text = change if isinstance(change, str) and " " in change else json.dumps(wrong)
    before = len(client.batches.list(limit=100).data)
    with pytest.raises(openai.BadRequestError, match=said) as error:
        make(client, f"{json.dumps(line('a', server.model))}\n{text}")
    assert error.value.param == "input_file_id"
    assert len(client.batches.list(limit=100).data) == before


def test_a_body_without_a_field_is_that_lines_error(client: OpenAI, server: LiveServer) -> None:
    without = line("missing-messages", server.model)
    del without["body"]["messages"]
    batch = ended(client, make(client, [without]).id)
    assert batch.request_counts.failed == 1 and batch.output_file_id is None
    assert '"messages"' in client.files.content(batch.error_file_id).text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"endpoint": "/v1/invalid/endpoint"}, "endpoint must be .*/v1/invalid/endpoint"),
        *(
            ({"completion_window": w}, "completion_window must")
            for w in ("1s", "48", "invalid", "")
        ),
        ({"metadata": {"tags": ["a", "b"]}}, "metadata.tags must be a string"),
        ({"extra_body": {"idempotency_key": "x"}}, "idempotency_key is not supported"),
    ],
    ids=str,
)
def test_a_batch_that_is_wrong_is_refused(
    client: OpenAI, server: LiveServer, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        make(client, [line("a", server.model)], **options)


@pytest.mark.parametrize("call", ["retrieve", "cancel"])
def test_a_batch_that_is_not_there(client: OpenAI, call: str) -> None:
    with pytest.raises(openai.NotFoundError, match="no batch found"):
        getattr(client.batches, call)("batch-nonexistent-xyz")
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        client.batches.create(
            input_file_id="file-nonexistent-xyz", endpoint=URL, completion_window="24h"
        )


def test_a_request_that_is_sent_again(client: OpenAI, server: LiveServer) -> None:
    file = upload(client, [line("a", server.model)])
    asked: dict[str, Any] = {
        "input_file_id": file.id,
        "endpoint": URL,
        "completion_window": "24h",
        "extra_headers": {"Idempotency-Key": "token-1"},
    }
    first = client.batches.create(**asked, metadata={"a": "1", "b": "2"})
    again = client.batches.create(**asked, metadata={"b": "2", "a": "1"})
    for name in ("id", "input_file_id", "endpoint", "completion_window", "metadata", "created_at"):
        assert getattr(again, name) == getattr(first, name)
    with pytest.raises(openai.ConflictError):
        client.batches.create(**asked, metadata={"a": "2"})
    assert client.batches.retrieve(first.id).input_file_id == file.id
    ended(client, first.id)


# ---------------------------------------------------------------------- each client's own calls


def test_files(client: OpenAI, server: LiveServer) -> None:
    text = json.dumps(line("a", server.model))
    file = upload(client, text)
    assert file.id.startswith("file-") and file.filename == "batch_input.jsonl"
    assert file.id in [each.id for each in client.files.list()]
    assert client.files.retrieve(file.id).bytes == len(text)
    assert client.files.wait_for_processing(file.id).status == "processed"
    assert client.files.content(file.id).content == text.encode()
    with pytest.deprecated_call():
        client.files.retrieve_content(file.id)
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            call(file.id)
    with pytest.raises(openai.BadRequestError, match="purpose must be batch"):
        client.files.create(file=BytesIO(b"x"), purpose="assistants")


def test_responses(client: OpenAI, server: LiveServer) -> None:
    asked: dict[str, Any] = {"model": server.model, "input": "Hello", "max_output_tokens": 16}
    first = client.responses.create(**asked)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    items = client.responses.input_items.list(first.id)
    assert [each.content[0].text for each in items] == ["Hello"]
    second = client.responses.create(**asked, previous_response_id=first.id)
    assert len(list(client.responses.input_items.list(second.id))) == 1
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created" and kinds[-1] in (
        *("response.completed", "response.incomplete"),
    )
    parsed = client.responses.parse(**asked)
    assert parsed.output_text is not None
    later = client.responses.create(**asked, background=True)
    assert later.status == "queued"
    over = wait_for(lambda: _ended_response(client, later.id), "a response in the background")
    assert over.status in ("completed", "incomplete")
    assert client.responses.cancel(later.id).status == over.status
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError, match=r"previous_response_id"):
        client.responses.create(**asked, previous_response_id=first.id)


def _ended_response(client: OpenAI, response_id: str) -> Any:
    response = client.responses.retrieve(response_id)
    return None if response.status in ("queued", "in_progress") else response


def test_calls_that_are_not_served_say_so(client: OpenAI, server: LiveServer) -> None:
    """A 4xx in the client's own shape, whatever it is asked for."""
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as other:
        asked: dict[str, Any] = {"model": server.model, "input": "Hello"}
        messages: dict[str, Any] = {"model": server.model, "messages": ASK, "max_tokens": 8}
        batches = other.messages.batches
        calls: list[Callable[[], Any]] = [
            lambda: client.responses.compact(**asked),
            lambda: client.responses.input_tokens.count(**asked),
            lambda: client.responses.retrieve("resp_1", stream=True),
            lambda: client.uploads.create(bytes=1, filename="x", mime_type="x", purpose="batch"),
            lambda: batches.create(requests=[{"custom_id": "a", "params": messages}]),  # type: ignore[typeddict-item]
            batches.list,
            lambda: batches.retrieve("x"),
            lambda: batches.cancel("x"),
            lambda: batches.delete("x"),
            lambda: batches.results("x"),
        ]
        for number, call in enumerate(calls):
            with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as error:
                call()
            assert error.value.status_code in (400, 404, 405), number
            assert error.value.response.json()["error"]["message"], number


# ---------------------------------------------------------------------- without a flag


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


@contextmanager
def plain_server(
    run_parent: Path, state: Path, port: int, *flags: str
) -> Iterator[tuple[LiveServer, OpenAI]]:
    """One that is told nothing of a store; nothing above INFO is logged from start to stop."""
    own = ("--batch-store=auto", f"--port={port}", "--http-workers=1", "--log-format=json", *flags)
    with live_server(run_parent, *own, environment={"XDG_STATE_HOME": str(state)}) as server:
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            yield server, client
        assert server.stop() == 0
        records = [json.loads(each) for each in server.stderr.splitlines()]
        assert {each["level"] for each in records} == {"info"}, server.stderr


def test_a_server_without_flags_works_batches_off_from_the_first_use_on(
    run_parent: Path, tmp_path: Path
) -> None:
    state, port, other_port = tmp_path / "state", free_port(), free_port()
    directory = state / "lightserve" / f"batches-{port}"
    with plain_server(run_parent, state, port) as (server, client):
        assert directory.stat().st_mode & 0o777 == 0o700
        response = client.responses.create(model=server.model, input="Hello")
        assert response.store is False and "batches-1" not in server.tree()
        batch = make(client, [line("a", server.model), line("b", server.model)])
        done = ended(client, batch.id)
        assert done.status == "completed" and done.request_counts.completed == 2
        assert "batches-1" in server.tree()
        with plain_server(run_parent, state, other_port) as (other, other_client):
            assert "batches-1" not in other.tree()
            assert not other_client.files.list().data
        # Another address of the same port: a server of its own, with a store that is taken.
        elsewhere = ("--host=127.0.0.2",)
        with plain_server(run_parent, state, port, *elsewhere) as (other, other_client):
            check_without_store(other, other_client, "another server uses it")
    assert {each.name for each in directory.parent.iterdir()} == {
        *(f"batches-{port}", f"batches-{other_port}")
    }
    with plain_server(run_parent, state, port) as (server, client):
        assert "batches-1" in server.tree()
        assert client.batches.retrieve(batch.id).status == "completed"


def test_a_server_whose_own_store_cannot_be_written_serves_all_else(
    run_parent: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with plain_server(run_parent, tmp_path / "file", free_port()) as (server, client):
        check_without_store(server, client, "Not a directory")


def check_without_store(server: LiveServer, client: OpenAI, why: str) -> None:
    with pytest.raises(openai.InternalServerError, match=why) as error:
        upload(client, "{}")
    assert error.value.status_code == 503
    answer = client.chat.completions.create(model=server.model, messages=ASK, max_tokens=5)
    assert answer.choices[0].message.content
    assert server.stderr.count("files and batches cannot be kept") == 1
    assert "batches-1" not in server.tree()
