"""/v1/embeddings on real servers: an encoder, and the bundled model, which generates as well."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI
from support.live_server import LiveServer, live_server
from support.processes import wait_for
from support.tiny_encoders import (
    CLS,
    SEP,
    TINY_ENCODERS,
    WORDS,
    reference_vectors,
    write_tiny_encoder,
)

TEXTS = ["the old lamp", "a tower", "Mira keeps the brass light", "sea " * 36]
MODEL = "tiny-bert"
LONGEST = 40


def ids_of(text: str) -> list[int]:
    return [CLS, *(4 + WORDS.index(word) for word in text.split()), SEP]


@pytest.fixture(scope="module")
def encoder_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder")
    write_tiny_encoder(TINY_ENCODERS[0], path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "matryoshka_dimensions": [8, 16]}))
    return path


@pytest.fixture(scope="module")
def encoder(encoder_dir: Path, run_parent: Path) -> Iterator[LiveServer]:
    store = run_parent / "embeddings-store"
    flags = (f"--model={encoder_dir}", f"--served-model-name={MODEL}", f"--batch-store={store}")
    with live_server(run_parent, *flags, "--dtype=float32", "--tp=2") as running:
        yield running


@pytest.fixture(scope="module")
def client(encoder: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{encoder.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def expected(encoder_dir: Path) -> list[Any]:
    prompts = [ids_of(text) for text in TEXTS]
    found = reference_vectors(encoder_dir, prompts, "mean_tokens", family="Bert")
    return [vector.numpy() for vector in found]


def is_close(ours: Any, theirs: Any) -> bool:
    return bool(np.allclose(np.array(ours), theirs, atol=2e-6))


def test_each_form_of_input_and_encoding(client: OpenAI, expected: list[Any]) -> None:
    """The client asks for base64 unless it is told otherwise."""
    answer = client.embeddings.create(model=MODEL, input=TEXTS)
    assert [item.index for item in answer.data] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == sum(len(ids_of(text)) for text in TEXTS)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens
    for item, theirs in zip(answer.data, expected, strict=True):
        assert is_close(item.embedding, theirs)
    plain = client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="float")
    assert is_close(plain.data[0].embedding, expected[0])
    by_ids = client.embeddings.create(model=MODEL, input=ids_of(TEXTS[1]))
    assert is_close(by_ids.data[0].embedding, expected[1])
    several: list[Any] = [ids_of(text) for text in TEXTS]
    for item, theirs in zip(
        client.embeddings.create(model=MODEL, input=several).data, expected, strict=True
    ):
        assert is_close(item.embedding, theirs)


def test_sizes_that_the_model_was_trained_for(client: OpenAI, expected: list[Any]) -> None:
    answer = client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=8)
    cut = expected[0][:8] / np.linalg.norm(expected[0][:8])
    assert is_close(answer.data[0].embedding, cut)
    with pytest.raises(openai.BadRequestError, match=r"dimensions must be .*\(8, 16, 32\), got 9"):
        client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=9)


def test_long_inputs(client: OpenAI, encoder_dir: Path) -> None:
    """All positions count; one more is refused, or cut behind the beginning where that is asked."""
    text = "lamp " * 50
    with pytest.raises(openai.BadRequestError, match=r"40 tokens: input\[1\] has 52"):
        client.embeddings.create(model=MODEL, input=["a", text])
    for keep, length in ((-1, LONGEST), (10, 10)):
        answer = client.embeddings.create(
            model=MODEL, input=text, extra_body={"truncate_prompt_tokens": keep}
        )
        kept = [*ids_of(text)[: length - 1], SEP]
        (theirs,) = reference_vectors(encoder_dir, [kept], "mean_tokens", family="Bert")
        assert is_close(answer.data[0].embedding, theirs.numpy())
        assert answer.usage.prompt_tokens == length


def test_many_at_once_are_those_alone(client: OpenAI, expected: list[Any]) -> None:
    """More than there are rows; in both classes; none is mistaken for another."""

    def ask(number: int) -> Any:
        tier = "default" if number % 2 else "flex"
        return client.embeddings.create(
            model=MODEL, input=[TEXTS[number % 4]] * 30, extra_body={"service_tier": tier}
        )

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, range(24)))
    for number, answer in enumerate(answers):
        assert answer.model_extra["service_tier"] == ("default" if number % 2 else "flex")
        for item in answer.data:
            assert is_close(item.embedding, expected[number % 4])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": MODEL, "prompt": "a"}),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"model": MODEL, "input": "a"}),
        (
            "/v1/messages",
            {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]},
        ),
        ("/generate", {"inputs": "a"}),
    ],
)
def test_an_encoder_generates_nothing(encoder: LiveServer, path: str, body: Any) -> None:
    answer = httpx.post(f"{encoder.url}{path}", json=body)
    assert answer.status_code == 400, answer.text
    assert "/v1/embeddings" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "must not be empty"),
        ({"input": ["a", ""]}, "input[1] must not be empty"),
        ({"input": [[]]}, "input"),
        ({"input": [64]}, "from 0 to 63, got 64"),
        ({"input": [-1]}, "from 0 to 63, got -1"),
        ({"input": [1.5]}, "input"),
        ({"input": ["a"] * 2049}, "at most 2048 inputs, got 2049"),
        ({"input": None}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"stream": True}, "stream"),
        ({"temperature": 1}, "temperature"),
        ({"model": "other"}, "does not exist"),
    ],
)
def test_bad_input_is_named(encoder: LiveServer, fields: Any, complaint: str) -> None:
    body = {"model": MODEL, "input": "a", **fields}
    answer = httpx.post(f"{encoder.url}/v1/embeddings", json=body)
    assert answer.status_code == (404 if "model" in fields else 400), answer.text
    assert complaint in answer.json()["error"]["message"]


def test_lines_of_a_batch(client: OpenAI, expected: list[Any]) -> None:
    def line(number: int, text: str) -> str:
        body = {"model": MODEL, "input": text, "encoding_format": "float"}
        head = {"custom_id": str(number), "method": "POST", "url": "/v1/embeddings"}
        return json.dumps({**head, "body": body})

    lines = "\n".join(line(number, text) for number, text in enumerate(TEXTS))
    file = client.files.create(file=("in.jsonl", lines.encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    done = wait_for(
        lambda: (b := client.batches.retrieve(batch.id)).status == "completed" and b, "the batch"
    )
    assert done.output_file_id is not None, done
    results = client.files.content(done.output_file_id).text.splitlines()
    assert len(results) == len(TEXTS)
    for result in map(json.loads, results):
        (item,) = result["response"]["body"]["data"]
        assert is_close(item["embedding"], expected[int(result["custom_id"])])


def test_a_model_that_generates_embeds_where_it_is_told_how(run_parent: Path) -> None:
    with (
        live_server(run_parent, "--pooling=last", "--dtype=float32") as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        text = "Where is Mira's brass lantern? " * 12

        def vector(given: str) -> Any:
            return np.array(
                client.embeddings.create(model=server.model, input=given).data[0].embedding
            )

        first, again, other = vector(text), vector(text), vector(text + "Or the lamp?")
        assert abs(np.linalg.norm(first) - 1.0) < 1e-5
        assert is_close(first, again)  # the second from the prefix cache
        assert float(first @ other) < 1.0 - 1e-6
        answer = client.completions.create(model=server.model, prompt="Mira", max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4


def test_a_model_that_does_not_embed_says_so(server: LiveServer) -> None:
    body = {"model": server.model, "input": "a"}
    answer = httpx.post(f"{server.url}/v1/embeddings", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "model_does_not_embed"
    assert "--pooling last" in answer.json()["error"]["message"]
