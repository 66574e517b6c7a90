"""/tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_router import frontend
from support.grids import choose, more_when_long
from support.tokenizers_made import BOS, EOS, write_byte_level, write_config

from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.frontend import admin
from lightserve.frontend.admin import SpansResponse
from lightserve.frontend.connections import Turns
from lightserve.frontend.errors import RequestFailed
from lightserve.frontend.json_body import Backlog
from lightserve.tokenization.tokenizer import Tokenizer

TOKENIZER = Tokenizer(BUNDLED_MODEL_DIR)
MAX_LEN = 64


def _post(path: str, body: Any) -> tuple[int, Any]:
    async def scenario() -> tuple[int, Any]:
        # No router: the tokeniser does not need one.
        async with frontend(welcome=False, max_model_len=MAX_LEN) as setup:
            response = await setup.post(path, body)
            return response.status_code, response.json()

    return asyncio.run(scenario())


@pytest.mark.parametrize("text", ["", "Tell me a story.", "Tell mé a 😀", "x" * 100])
@pytest.mark.parametrize("special", [None, True, False])
def test_tokenize_gives_ids_and_places(text: str, special: bool | None) -> None:
    status, spans = _post("/tokenize", {"inputs": text, "add_special_tokens": special})
    assert status == 200
    ids = TOKENIZER.encode(text, add_special_tokens=special is not False)
    assert [span["id"] for span in spans] == ids
    end = 0
    for span in spans:
        if TOKENIZER.is_special(span["id"]):
            assert (span["start"], span["stop"], span["text"]) == (0, 0, "<|bos|>")
        else:
            assert span["text"] == text[span["start"] : span["stop"]] != ""
        assert end - 1 <= span["start"] <= end  # parts of one character share it
        end = span["stop"]
    assert end == len(text)


@more_when_long
@given(st.text(max_size=60))
@settings(deadline=None, max_examples=choose(30, 100))
def test_spans_are_the_tokens_of_encode(text: str) -> None:
    for special in (True, False):
        spans = TOKENIZER.spans(text, add_special_tokens=special)
        assert list(spans.token_ids) == TOKENIZER.encode(text, add_special_tokens=special)


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("text", ["hello", f"{BOS}hello", f"{BOS}{BOS}hello"])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_bos_that_comes_or_goes_moves_no_place(
    tmp_path: Path, adds_bos: bool, text: str, flag: bool
) -> None:
    write_byte_level(tmp_path, adds_bos=adds_bos)
    names = {"bos_token": BOS, "eos_token": EOS, "add_bos_token": flag}
    write_config(tmp_path, "tokenizer_config.json", names)
    tokenizer = Tokenizer(tmp_path)
    spans = tokenizer.spans(text, add_special_tokens=True)
    assert list(spans.token_ids) == tokenizer.encode(text, add_special_tokens=True)
    bos = tokenizer.special_tokens.bos_token_id
    assert "".join(text[a:b] for i, a, b in zip(*spans, strict=True) if i != bos) == "hello"


@pytest.mark.parametrize("text", ["", "Tell me a story.", "Tell mé a 😀"])
def test_detokenize_is_the_way_back(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=True)
    assert _post("/detokenize", {"tokens": ids}) == (200, {"text": text})
    assert _post("/detokenize", {"tokens": [*map(float, ids)]}) == (200, {"text": text})


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"inputs": 5}, "inputs"),
        ("/tokenize", {}, "inputs"),
        ("/tokenize", {"inputs": "a", "model": "x"}, "model"),
        ("/tokenize", {"inputs": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"inputs": "a" * 100_000}, "inputs"),
        ("/tokenize", {"inputs": "\ud800"}, "inputs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**63]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [5, 2.5]}, "tokens[1]"),
        ("/detokenize", {"tokens": [5] * (MAX_LEN + 1)}, "tokens"),
        ("/detokenize", {"tokens": [], "skip": True}, "skip"),
    ],
)
def test_complaints_name_the_field(path: str, body: Any, param: str) -> None:
    status, answer = _post(path, body)
    assert status == 400
    assert answer["error"]["param"] == param, answer


def test_what_slow_readers_have_not_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer holds its text and 12 bytes for each token for as long as its client likes."""
    service: Any = SimpleNamespace(model=SimpleNamespace(tokenizer=TOKENIZER), turns=Turns())
    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    answers = Backlog(max_size=2000)

    async def answer(send: Callable[[Any], Awaitable[None]]) -> None:
        text = "Tell me a story."
        spans = TOKENIZER.spans(text * 20, add_special_tokens=True)
        response = SpansResponse(service, text * 20, spans, answers)
        await response(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]

    async def scenario() -> None:
        async def read(_message: Any) -> None:
            pass

        stuck = asyncio.Event()
        slow = asyncio.create_task(answer(lambda _message: stuck.wait()))  # type: ignore[arg-type,return-value]
        await asyncio.sleep(0)
        with pytest.raises(RequestFailed, match="too many"):
            await answer(read)
        stuck.set()
        await slow
        await answer(read)

    asyncio.run(scenario())
    monkeypatch.setattr(admin, "Backlog", lambda: Backlog(max_items=0))
    status, body = _post("/tokenize", {"inputs": "hi"})
    assert (status, body["error"]["code"]) == (429, "overloaded")
