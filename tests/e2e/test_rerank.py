"""/v1/rerank and /v1/score on real servers, beside transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.live_server import LiveServer, live_server
from support.tiny_encoders import (
    CROSS_ENCODERS,
    WORDS,
    TinyEncoder,
    logits_apart,
    reference_scores,
    write_tiny_encoder,
    write_tiny_judge,
)

MODEL = "tiny"
QUERY = "Mira keeps the brass lamp"
DOCUMENTS = [
    "Mira keeps the old lamp",
    "the sea",
    "a light tower a light tower",
    "the sea",
    "old old old brass",
    "Mira",
]
NEAR = 1e-4
"""What log-probabilities may be apart in float32 (README, Numbers)."""


def ask(server: LiveServer, path: str, **fields: Any) -> Any:
    answer = httpx.post(f"{server.url}{path}", json={"model": MODEL, **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def flags(path: Path, *others: str) -> tuple[str, ...]:
    return (f"--model={path}", f"--served-model-name={MODEL}", "--dtype=float32", *others)


@pytest.fixture(scope="module", params=CROSS_ENCODERS, ids=lambda tiny: tiny.name)
def tiny(request: pytest.FixtureRequest) -> TinyEncoder:
    found: TinyEncoder = request.param
    return found


@pytest.fixture(scope="module")
def encoder_dir(tiny: TinyEncoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cross")
    write_tiny_encoder(tiny, path)
    return path


@pytest.fixture(scope="module")
def encoder(tiny: TinyEncoder, encoder_dir: Path, run_parent: Path) -> Iterator[LiveServer]:
    ranks = "--tp=2" if tiny is CROSS_ENCODERS[0] else "--tp=1"
    with live_server(run_parent, *flags(encoder_dir, ranks)) as running:
        yield running


def test_cross_encoders_score_as_transformers_does(encoder: LiveServer, encoder_dir: Path) -> None:
    expected = reference_scores(encoder_dir, [(QUERY, document) for document in DOCUMENTS])
    assert max(expected) - min(expected) > 100 * NEAR  # else any order would do
    answer = ask(encoder, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)
    assert [item["index"] for item in answer["data"]] == list(range(6))
    scores = [item["score"] for item in answer["data"]]
    assert scores == pytest.approx(expected, abs=NEAR)
    answer = ask(encoder, "/v1/rerank", query=QUERY, documents=DOCUMENTS)
    order = [item["index"] for item in answer["results"]]
    assert sorted(order) == list(range(6))
    # Scores that are as near as transformers' may change places.
    assert [expected[i] for i in order] == pytest.approx(sorted(expected, reverse=True), abs=NEAR)
    ranked = [item["relevance_score"] for item in answer["results"]]
    assert ranked == sorted(ranked, reverse=True)
    assert ranked == pytest.approx([scores[i] for i in order], abs=NEAR / 100)
    assert answer["service_tier"] == "flex"
    for names in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        again = ask(encoder, "/score", **dict(zip(names, (QUERY, DOCUMENTS), strict=True)))
        assert [item["score"] for item in again["data"]] == pytest.approx(scores, abs=NEAR / 100)
    # The two texts are told apart: as one of them, or the other way round, they score otherwise.
    turned = ask(encoder, "/score", text_1=DOCUMENTS, text_2=[QUERY] * 6)
    expected = reference_scores(encoder_dir, [(document, QUERY) for document in DOCUMENTS])
    assert [item["score"] for item in turned["data"]] == pytest.approx(expected, abs=NEAR)
    assert max(abs(a - b) for a, b in zip(scores, expected, strict=True)) > 10 * NEAR


def test_what_is_answered(encoder: LiveServer) -> None:
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        fields = {"top_n": 2, "return_documents": True, "user": "u"}
        answer = ask(encoder, path, query=QUERY, documents=DOCUMENTS, **fields)
        assert len(answer["results"]) == 2
        for item in answer["results"]:
            assert item["document"] == {"text": DOCUMENTS[item["index"]]}
    one = ask(encoder, "/v1/rerank", query="a", documents=["the sea"])
    assert one["usage"] == {"prompt_tokens": 6, "total_tokens": 6}  # [CLS] a [SEP] the sea [SEP]
    assert "document" not in one["results"][0]


def test_documents_are_cut_where_it_is_asked(encoder: LiveServer) -> None:
    cut = ask(encoder, "/v1/rerank", query=QUERY, documents=["sea " * 500], max_tokens_per_doc=2)
    whole = ask(encoder, "/v1/rerank", query=QUERY, documents=["sea sea"])
    assert cut["usage"] == whole["usage"]
    (ours,), (theirs,) = cut["results"], whole["results"]
    assert ours["relevance_score"] == pytest.approx(theirs["relevance_score"], abs=NEAR / 100)


PAIR = {"query": None, "documents": None, "text_1": "a", "text_2": "a"}
BODY = {"model": MODEL, "query": "a", "documents": ["a"]}


@pytest.mark.parametrize(
    ("path", "fields", "complaint"),
    [
        ("/v1/rerank", {"documents": []}, "documents"),
        ("/v1/rerank", {"documents": ["a", ""]}, "documents"),
        ("/v1/rerank", {"documents": ["a", {"text": "a"}]}, "documents"),
        ("/v1/rerank", {"documents": ["a"] * 2049}, "at most 2048 texts, got 2049"),
        ("/v1/rerank", {"documents": ["a", "sea " * 50]}, "documents[1] has 5"),
        ("/v1/rerank", {"query": ""}, "query"),
        ("/v1/rerank", {"query": "a" * 3000, "documents": ["a"] * 2000}, "at most 4194304 char"),
        ("/v1/rerank", {"top_n": 0}, "top_n"),
        ("/v1/rerank", {"max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ("/v1/rerank", {"instruction": "a"}, "instruction"),
        ("/v1/rerank", {"rank_fields": ["a"]}, "rank_fields"),
        ("/v1/rerank", {"model": "other"}, "does not exist"),
        ("/v1/score", {**PAIR, "text_2": None}, "text_2"),
        ("/v1/score", {**PAIR, "queries": "b"}, "queries"),
        ("/v1/score", {**PAIR, "text_1": None, "queries": 3}, "queries"),
        ("/v1/score", {**PAIR, "text_1": ["a"] * 3}, "one text or as many as text_2, 1, got 3"),
        ("/v1/embeddings", {"query": None, "documents": None, "input": "a"}, "makes no vectors"),
    ],
)
def test_bad_input_is_named(encoder: LiveServer, path: str, fields: Any, complaint: str) -> None:
    body = {key: value for key, value in {**BODY, **fields}.items() if value is not None}
    answer = httpx.post(f"{encoder.url}{path}", json=body, timeout=60)
    assert answer.status_code == (404 if "model" in fields else 400), answer.text
    assert complaint in answer.json()["error"]["message"]


def test_a_cross_encoder_generates_nothing(encoder: LiveServer) -> None:
    answer = httpx.post(f"{encoder.url}/v1/completions", json={"model": MODEL, "prompt": "a"})
    assert answer.status_code == 400, answer.text
    assert "/v1/rerank" in answer.json()["error"]["message"]


def test_a_model_that_does_not_score_says_so(server: LiveServer) -> None:
    body = {"model": server.model, "query": "a", "documents": ["a"]}
    answer = httpx.post(f"{server.url}/v1/rerank", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "model_does_not_score"
    assert "--pooling yes-no" in answer.json()["error"]["message"]


PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that answer"
    " the query\n<Query>: {}\n<Document>: {}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def test_a_decoder_scores_by_the_logits_of_yes_and_no(run_parent: Path, tmp_path: Path) -> None:
    """As Qwen3-Reranker: the query is found in the prefix cache, and the model generates, too."""
    write_tiny_judge(tmp_path)
    with live_server(run_parent, *flags(tmp_path, "--pooling=yes-no", "--tp=2")) as running:
        prompts = [PROMPT.format(QUERY, document) for document in DOCUMENTS]
        logits = logits_apart(tmp_path, prompts, "yes", "no")
        expected = [1 / (1 + math.exp(-logit)) for logit in logits]
        assert max(expected) - min(expected) > 100 * NEAR
        answer = ask(running, "/v1/rerank", query=QUERY, documents=DOCUMENTS)
        scores = {item["index"]: item["relevance_score"] for item in answer["results"]}
        assert [scores[n] for n in range(6)] == pytest.approx(expected, abs=NEAR)
        order = sorted(range(6), key=lambda index: -expected[index])
        assert [item["index"] for item in answer["results"]] == order
        written = ask(running, "/v1/completions", prompt="the sea", max_tokens=3, temperature=0)
        assert written["usage"]["completion_tokens"] <= 3


def test_a_decoder_whose_files_say_how_it_scores(run_parent: Path, tmp_path: Path) -> None:
    """As Sentence Transformers saves one: two tokens, an activation, and a template of pairs."""
    write_tiny_judge(tmp_path)
    modules = [
        {"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {"path": "1_L", "type": "sentence_transformers.cross_encoder.modules.LogitScore"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_L").mkdir()
    (tmp_path / "1_L" / "config.json").write_text('{"true_token_id": 5, "false_token_id": 7}')
    (tmp_path / "config_sentence_transformers.json").write_text(
        '{"activation_fn": "torch.nn.modules.linear.Identity"}'
    )
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'query' %}light {{ m.content }}"
        '{% elif m.role == "document" %} lamp {{ m.content }}{% endif %}{% endfor %} tower'
    )
    with live_server(run_parent, *flags(tmp_path)) as running:
        answer = ask(running, "/v1/score", text_1="the sea", text_2=["old", "brass"])
        scores = [item["score"] for item in answer["data"]]
        prompts = [f"light the sea lamp {word} tower" for word in ("old", "brass")]
        expected = logits_apart(tmp_path, prompts, WORDS[1], WORDS[3])
        assert scores == pytest.approx(expected, abs=NEAR)
        answer = httpx.post(f"{running.url}/v1/completions", json={"model": MODEL, "prompt": "a"})
        assert answer.json()["error"]["code"] == "model_embeds_only"
