"""Pictures by the clients' own calls on a real server with two ranks: what comes back is what
transformers says of the same picture."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from anthropic import Anthropic
from click.testing import CliRunner
from openai import OpenAI
from PIL import Image
from support.live_server import LiveServer, live_server
from support.processes import wait_for
from support.tiny_vision import (
    NUM_TOKENS,
    Reference,
    data_url,
    file_of,
    picture,
    write_llava,
    write_vision_model,
)

from lightserve.cli.decision_logs import replay as replay_command
from lightserve.decisions.records import MessageReceived
from lightserve.decisions.replaying import DecisionLogReader
from lightserve.messages.frontend_router import Submit

ROOT = Path(__file__).parents[2]
URL = "/v1/chat/completions"
FIRST, SECOND = picture(1, 64, 48), picture(2, 33, 70)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    """Serve the first picture; yields the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = file_of(FIRST)
            self.send_response(200 if self.path == "/first.png" else 404)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/first.png"
        running.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def server(
    run_parent: Path, model: Path, web: str, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    store = tmp_path_factory.mktemp("batches") / "store"
    flags = ("--model", str(model), "--served-model-name=llava", "--dtype=float32", "--tp=2")
    own = (f"--batch-store={store}", f"--allow-image-hosts={web.split('/')[2]}")
    with live_server(run_parent, *flags, *own) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


def image_part(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(file_of(image)), "detail": "auto"}}


def asking(*images: Image.Image, text: str = "What is it?") -> list[Any]:
    parts = [*map(image_part, images), {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def whole(client: OpenAI, messages: list[Any], **options: Any) -> Any:
    fields: dict[str, Any] = {"max_tokens": 10, "temperature": 0.0, "logprobs": True}
    extra = {"return_token_ids": True, "ignore_eos": True}
    return client.chat.completions.create(
        model="llava", messages=messages, extra_body=extra, **(fields | options)
    )


def check(reference: Reference, answer: Any, images: list[Image.Image]) -> None:
    """Compare an answer's tokens with transformers'."""
    (choice,) = answer.choices
    prompt = answer.prompt_token_ids
    expected = reference.logprobs([*prompt, *choice.token_ids[:-1]], images)[len(prompt) - 1 :]
    assert choice.token_ids == expected.argmax(-1).tolist()
    for row, token_id, told in zip(
        expected, choice.token_ids, choice.logprobs.content, strict=True
    ):
        assert abs(float(row[token_id]) - told.logprob) < 1e-4


def test_batches_give_way_to_what_stands_before_a_token(server: LiveServer) -> None:
    nice = {name: process.nice() for name, process in server.tree().items()}
    (batches,) = (value for name, value in nice.items() if name.startswith("batches"))
    assert batches == min(19, nice["router-0"] + 5)
    assert nice["worker-0"] == nice["frontend-0"] == nice["router-0"] == nice["supervisor"]


def test_answers(client: OpenAI, reference: Reference) -> None:
    one = whole(client, asking(FIRST))
    check(reference, one, [FIRST])
    assert one.usage.prompt_tokens == len(one.prompt_token_ids) > NUM_TOKENS
    again = whole(client, asking(FIRST))
    assert again.choices[0].token_ids == one.choices[0].token_ids
    assert again.usage.prompt_tokens_details.cached_tokens == one.usage.prompt_tokens - 1
    metrics = client.base_url.copy_with(raw_path=b"/metrics")
    wait_for(lambda: 'source="kept"' in httpx.get(f"{metrics}").text, "the frontend's counts")
    other = whole(client, asking(SECOND))
    check(reference, other, [SECOND])
    assert other.choices[0].token_ids != one.choices[0].token_ids
    check(reference, whole(client, asking(SECOND, FIRST)), [SECOND, FIRST])
    text = whole(client, [{"role": "user", "content": "What is it?"}])
    check(reference, text, [])
    turns = [*asking(FIRST), {"role": "assistant", "content": "A"}, *asking(SECOND)]
    check(reference, whole(client, turns), [FIRST, SECOND])


@pytest.mark.parametrize(
    "family", ["qwen_vl", "qwen2_5_vl", "qwen3_vl", "mistral3", "gemma3", "gemma4"]
)
def test_families_with_two_ranks(run_parent: Path, tmp_path: Path, family: str) -> None:
    model = write_vision_model(tmp_path, family)
    flags = ("--model", str(model), "--served-model-name=llava", "--dtype=float32", "--tp=2")
    reference = Reference(model)
    small = picture(3, 5, 9)
    if family == "mistral3":  # transformers cannot split an image of one token
        small = picture(3, 20, 9)
    with (
        live_server(run_parent, *flags) as running,
        OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for images in ([FIRST], [SECOND, FIRST], [small], [FIRST, picture(4)]):
            check(reference, whole(client, asking(*images)), images)
        if written := {"qwen_vl": "<imgpad>", "gemma3": "<start_of_image>"}.get(family):
            with pytest.raises(openai.BadRequestError, match="no text that stands for an image"):
                whole(client, asking(FIRST, text=written))
            return
        thin = asking(picture(5, 201, 1))
        with pytest.raises(openai.BadRequestError, match="at most 200 times as long"):
            whole(client, thin)


def test_a_photo_is_told_of_as_it_is_read(client: OpenAI) -> None:
    photo = data_url(file_of(picture(7, 640, 480), "JPEG"), "image/jpeg")
    content = [{"type": "image_url", "image_url": {"url": photo}}, {"type": "text", "text": "See"}]
    messages: Any = [{"role": "user", "content": content}]
    options: dict[str, Any] = {
        "max_tokens": 8,
        "temperature": 0.0,
        "extra_body": {"ignore_eos": True},
    }
    stream = client.chat.completions.create(
        model="llava", messages=messages, stream=True, **options
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    answer = client.chat.completions.create(model="llava", messages=messages, n=2, **options)
    assert text and [choice.message.content for choice in answer.choices] == [text, text]


def test_the_documented_photo(server: LiveServer, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    program = text.partition("### Images")[2].partition("```python\n")[2].partition("```")[0]
    (tmp_path / "photo.jpg").write_bytes(file_of(picture(9, 4032, 3024), "JPEG"))
    done = subprocess.run(
        [sys.executable, "-c", program.replace("http://127.0.0.1:8000", server.url)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout, done.stderr


def test_other_routes(server: LiveServer, client: OpenAI) -> None:
    options: Any = {"temperature": 0.0}
    data = data_url(file_of(FIRST))
    plain = client.chat.completions.create(
        model="llava", messages=asking(FIRST), max_tokens=8, **options
    )
    content: Any = [
        {"type": "input_image", "image_url": data, "detail": "auto"},
        {"type": "input_text", "text": "What is it?"},
    ]
    response = client.responses.create(
        model="llava", input=[{"role": "user", "content": content}], max_output_tokens=8, **options
    )
    assert response.output_text == plain.choices[0].message.content
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as other:
        source = {"type": "base64", "media_type": "image/png", "data": data.partition(",")[2]}
        blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
        turns: Any = [{"role": "user", "content": blocks}]
        message = other.messages.create(
            model="llava", messages=turns, max_tokens=8, extra_body=options
        )
        assert message.content[0].text == plain.choices[0].message.content  # type: ignore[union-attr]
        count = other.messages.count_tokens(model="llava", messages=turns)
    assert count.input_tokens == plain.usage.prompt_tokens  # type: ignore[union-attr]
    body = {"model": "llava", "messages": asking(FIRST)}
    shown = httpx.post(f"{server.url}/v1/chat/completions/render", json=body).json()
    assert len(shown["token_ids"]) == count.input_tokens


def test_pictures_that_are_fetched(server: LiveServer, client: OpenAI, web: str) -> None:
    options: Any = {"temperature": 0.0}
    plain = client.chat.completions.create(
        model="llava", messages=asking(FIRST), max_tokens=8, **options
    )
    text = {"type": "text", "text": "What is it?"}
    parts: Any = [{"type": "image_url", "image_url": {"url": web}}, text]
    messages: Any = [{"role": "user", "content": parts}]
    answer = client.chat.completions.create(
        model="llava", messages=messages, max_tokens=8, **options
    )
    assert answer.choices[0].message.content == plain.choices[0].message.content
    content: Any = [{"type": "input_image", "image_url": web}, {**text, "type": "input_text"}]
    response = client.responses.create(
        model="llava", input=[{"role": "user", "content": content}], max_output_tokens=8, **options
    )
    assert response.output_text == plain.choices[0].message.content
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as other:
        blocks: Any = [{"type": "image", "source": {"type": "url", "url": web}}, text]
        turns: Any = [{"role": "user", "content": blocks}]
        message = other.messages.create(
            model="llava", messages=turns, max_tokens=8, extra_body=options
        )
        assert message.content[0].text == plain.choices[0].message.content  # type: ignore[union-attr]
    parts[0] = {"type": "image_url", "image_url": {"url": web + "x"}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="llava", messages=messages)
    assert "messages[0].content[0].image_url could not be fetched: its host answers 404" in (
        caught.value.message
    )


def test_a_body_is_larger_for_its_images_alone(server: LiveServer, client: OpenAI) -> None:
    rng = np.random.default_rng(1)
    noise = Image.fromarray(rng.integers(0, 256, (1200, 1400, 3), dtype=np.uint8))
    assert len(data_url(file_of(noise))) > 6_000_000
    assert whole(client, asking(noise)).usage.prompt_tokens > NUM_TOKENS

    def refused(path: str, body: dict[str, Any]) -> str:
        answer = httpx.post(f"{server.url}{path}", json={"model": "llava", **body})
        assert answer.status_code == 413
        return str(answer.json()["error"]["message"])

    message = refused(URL, {"messages": asking(FIRST, text="A" * 5_000_000)})
    assert message.startswith("the request body must be at most 4194304 bytes beside its images")
    message = refused(URL, {"messages": asking(noise, noise, noise)})
    assert "images of at most 16777216 bytes in base64 together" in message
    message = refused(URL, {"messages": asking(noise, noise, noise, noise)})
    assert message == "the request body must be at most 20971520 bytes"
    message = refused("/v1/completions", {"prompt": data_url(file_of(noise))})
    assert message == "the request body must be at most 4194304 bytes"


def test_lines_of_a_batch(client: OpenAI) -> None:
    body = {"model": "llava", "messages": asking(SECOND), "max_tokens": 6, "temperature": 0.0}
    lines = [
        {"custom_id": f"line-{n}", "method": "POST", "url": URL, "body": body} for n in range(3)
    ]
    file = BytesIO("\n".join(map(json.dumps, lines)).encode())
    file.name = "lines.jsonl"
    uploaded = client.files.create(file=file, purpose="batch")
    batch = client.batches.create(input_file_id=uploaded.id, endpoint=URL, completion_window="24h")
    wait_for(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch")
    done = client.batches.retrieve(batch.id)
    assert done.output_file_id is not None
    results = [
        json.loads(line)
        for line in client.files.content(done.output_file_id).text.split("\n")
        if line
    ]
    texts = [line["response"]["body"]["choices"][0]["message"]["content"] for line in results]
    direct = client.chat.completions.create(**body)
    assert texts == [direct.choices[0].message.content] * 3


BROKEN = data_url(file_of(FIRST)[:-100])


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        ({"url": BROKEN}, "messages[0].content[1].image_url is broken or cut off"),
        (
            {"url": "https://example.org/a.png"},
            "messages[0].content[1].image_url must have a host that --allow-image-hosts names",
        ),
        ({"url": "ftp://example.org/a.png"}, "image_url must be a data URL"),
        ({"url": data_url(b"GIF89a")}, "messages[0].content[1].image_url"),
        (
            {"url": data_url(b"%PDF-1.7", "application/pdf")},
            "must be a data URL in base64 of one of",
        ),
        (
            {"url": BROKEN, "detail": "high"},
            "image_url must have neither min_pixels nor max_pixels",
        ),
        ({"url": BROKEN, "max_pixels": 5000}, "the model reads images in one size"),
        ({"url": BROKEN, "detail": "ultra"}, "must have image_url.detail auto, low, high, got"),
        ({"url": BROKEN, "min_pixels": 0}, "image_url.min_pixels as an integer from 1 to 16777216"),
        ({"url": 7}, "must have image_url.url as a string, got 7"),
        ({"url": BROKEN, "sha256": "x"}, "must have image_url only as"),
    ],
)
def test_bad_pictures(client: OpenAI, part: Any, complaint: str) -> None:
    content = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": part}]
    messages: Any = [{"role": "user", "content": content}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="llava", messages=messages)
    assert complaint in caught.value.message
    assert caught.value.param is not None and caught.value.param.startswith("messages")


def test_bad_conversations(client: OpenAI) -> None:
    def refused(messages: Any, **options: Any) -> str:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="llava", messages=messages, **options)
        return caught.value.message

    many = [{"role": "user", "content": [image_part(FIRST)] * 65}]
    assert "at most 64 images (--max-images), got 65" in refused(many)
    long = [{"role": "user", "content": [image_part(FIRST)] * 20}]
    assert "maximum context length is 256 tokens" in refused(long)
    said = [{"role": "assistant", "content": [image_part(FIRST)]}, *asking(FIRST)]
    assert "may have images only if its role is user" in refused(said)
    assert "must have no text that stands for an image" in refused(asking(FIRST, text="<image>"))
    cut = refused(asking(FIRST), extra_body={"truncate_prompt_tokens": 20})
    assert "truncate_prompt_tokens cannot be combined with images" in cut
    audio = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]
    assert "must have only parts of the form" in refused(audio)


def test_a_model_that_reads_text_alone(run_parent: Path) -> None:
    with live_server(run_parent) as running:
        body: dict[str, Any] = {"model": running.model, "messages": asking(FIRST)}
        answer = httpx.post(f"{running.url}{URL}", json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "messages[0].content[0].image_url"
        assert error["message"].endswith("reads text alone")
        body = {"model": running.model, "input": "x", "images": []}
        answer = httpx.post(f"{running.url}/v1/embeddings", json=body)
        assert answer.status_code == 400 and "images" in answer.json()["error"]["message"]


def test_a_decision_log_has_no_pixels(run_parent: Path, model: Path, tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    flags = ("--model", str(model), "--served-model-name=llava", "--decision-log", str(log))
    with live_server(run_parent, *flags) as running:
        for text in ("See", "Look"):
            body = {"model": "llava", "messages": asking(FIRST, SECOND, text=text), "max_tokens": 4}
            assert httpx.post(f"{running.url}{URL}", json=body).status_code == 200
        wait_for(lambda: log.read_text().count('"prompt"') > 1, "what is written every second")
        assert running.stop() == 0
    records = [line.record for line in DecisionLogReader(log).lines()]
    messages = [record.message for record in records if isinstance(record, MessageReceived)]
    images = [image for each in messages if isinstance(each, Submit) for image in each.images]
    assert len(images) == 4 and not any(image.pixels for image in images)
    result = CliRunner().invoke(
        replay_command, [str(log), "--json"], standalone_mode=False, catch_exceptions=False
    )
    assert result.return_value == 0, result.stdout
