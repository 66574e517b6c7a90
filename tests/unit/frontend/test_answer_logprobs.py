"""What answers say besides the text: log-probabilities, ids, prompts, how each choice ended."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any

import pytest
from support.fake_router import Answer, frontend, says, sse_data

from lightserve.bundled import BUNDLED_MODEL_DIR, BUNDLED_MODEL_NAME
from lightserve.frontend.columns import LogprobColumns
from lightserve.frontend.openai.writing import token_text
from lightserve.messages.common import TokenLogprob, unpack_int32
from lightserve.messages.frontend_router import RequestDelta, Submit
from lightserve.models.config import load_model_config
from lightserve.tokenization.tokenizer import Tokenizer
from lightserve.types import FinishReason

TOKENIZER = Tokenizer(BUNDLED_MODEL_DIR)
VOCAB_SIZE = load_model_config(BUNDLED_MODEL_DIR).vocab_size
IDS = {TOKENIZER.bytes_of(token): token for token in range(VOCAB_SIZE)}
EOS = TOKENIZER.eos_token_ids[0]
TEXT = "aé😀b"
BYTES = [bytes([byte]) for byte in TEXT.encode()]
TOKENS = [IDS[data] for data in BYTES]
NAMES = [*["a", *[rf"bytes:\x{d[0]:02x}" for d in BYTES[1:-1]], "b"], "<|eos|>"]
"""Of the tokens, EOS included; none of its parts is a character alone."""
LOGPROBS = [-number / 8 for number in range(len(NAMES))]
PROMPT = [IDS[bytes([byte])] for byte in "ü!".encode()]
COMPLETION: dict[str, Any] = {"model": BUNDLED_MODEL_NAME, "prompt": PROMPT, "max_tokens": 50}
CHAT: dict[str, Any] = {
    "model": BUNDLED_MODEL_NAME,
    "messages": [{"role": "user", "content": "hi"}],
}


@pytest.mark.parametrize("num_top", [0, 2])
def test_a_part_of_the_columns_is_what_a_list_would_have(num_top: int) -> None:
    """News of a stream has those of its own tokens, with their own others."""
    whole = [
        TokenLogprob(
            -1.0 - i, [10 * i + j for j in range(num_top)], [-2.0 * i - j for j in range(num_top)]
        )
        for i in range(7)
    ]
    columns = LogprobColumns()
    for logprob in whole:
        columns.append(logprob)
    for start, stop in itertools.combinations(range(8), 2):
        assert list(columns.part(start, stop)) == whole[start:stop]
    again = columns.part(0, 3)
    again.extend(columns.part(3, 7))
    assert list(again) == whole


async def _ask(path: str, body: dict[str, Any], answer: Answer) -> tuple[Any, Submit]:
    async with frontend(answer) as setup:
        response = await setup.post(path, body)
        assert response.status_code == 200, response.text
        is_stream = response.headers["content-type"] == "text/event-stream"
        answered = sse_data(response.text) if is_stream else response.json()
        return answered, setup.router.submits[-1]


def _post(path: str, body: dict[str, Any], answer: Answer | None = None) -> tuple[Any, Submit]:
    return asyncio.run(_ask(path, body, answer or says([*TOKENS, EOS])))


def _joined(chunks: list[Any]) -> dict[str, list[Any]]:
    joined: dict[str, list[Any]] = {}
    for chunk in chunks[:-1]:
        for key, values in (chunk["choices"][0]["logprobs"] or {}).items():
            joined.setdefault(key, []).extend(values or [])
    return joined


@pytest.mark.parametrize("num_top", [None, 0, 2])
def test_chat(num_top: int | None) -> None:
    asked = {**CHAT, "logprobs": True, "top_logprobs": num_top}
    whole, submit = _post("/v1/chat/completions", asked)
    assert submit.sampling.num_logprobs == (num_top or 0)
    logprobs = whole["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    content = logprobs["content"]
    assert [token["token"] for token in content] == NAMES
    assert [token["logprob"] for token in content] == LOGPROBS
    assert b"".join(bytes(token["bytes"]) for token in content[:-1]).decode() == TEXT
    for token in content:
        assert [top["logprob"] for top in token["top_logprobs"]] == [0.0, -0.25][: num_top or 0]
        assert all(top.keys() == {"token", "logprob", "bytes"} for top in token["top_logprobs"])
    chunks, _ = _post("/v1/chat/completions", asked | {"stream": True})
    assert _joined(chunks)["content"] == content


def test_chat_without() -> None:
    whole, submit = _post("/v1/chat/completions", {**CHAT, "logprobs": False})
    assert whole["choices"][0]["logprobs"] is None
    assert submit.sampling.num_logprobs is None


@pytest.mark.parametrize("num_top", [0, 2])
def test_completions(num_top: int) -> None:
    whole, submit = _post("/v1/completions", {**COMPLETION, "logprobs": num_top})
    assert submit.sampling.num_logprobs == num_top
    assert submit.sampling.num_prompt_logprobs is None
    logprobs = whole["choices"][0]["logprobs"]
    assert logprobs["tokens"] == NAMES
    assert logprobs["token_logprobs"] == LOGPROBS
    # In characters: a part of one stands where the text ends that is certain before it.
    assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3, 4]
    for name, logprob, top in zip(NAMES, LOGPROBS, logprobs["top_logprobs"], strict=True):
        assert top[name] == logprob
        assert len(top) in (num_top, num_top + 1)
    chunks, _ = _post("/v1/completions", {**COMPLETION, "logprobs": num_top, "stream": True})
    assert _joined(chunks) == logprobs


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_before_each_choice(stream: bool) -> None:
    asked = {**COMPLETION, "echo": True, "logprobs": 1, "n": 2, "stream": stream}
    answer, submit = _post("/v1/completions", asked)
    assert submit.sampling.num_prompt_logprobs == 1
    for index in range(2):
        if stream:
            own = [c for c in answer[:-1] if c["choices"][0]["index"] == index]
            text = "".join(chunk["choices"][0]["text"] for chunk in own)
            logprobs = _joined([*own, None])
        else:
            choice = answer["choices"][index]
            text, logprobs = choice["text"], choice["logprobs"]
        assert text == "ü!" + TEXT
        assert logprobs["tokens"] == [r"bytes:\xc3", r"bytes:\xbc", "!", *NAMES]
        assert logprobs["token_logprobs"] == [None, -1 / 8, -2 / 8, *LOGPROBS]
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["text_offset"][:5] == [0, 0, 1, 2, 3]


def test_echo_without_log_probabilities_asks_for_none() -> None:
    for prompt, text in ((PROMPT, "ü!"), ("hello", "hello")):
        answer, submit = _post("/v1/completions", {**COMPLETION, "prompt": prompt, "echo": True})
        assert submit.sampling.num_prompt_logprobs is None
        choice = answer["choices"][0]
        assert (choice["text"], choice["logprobs"]) == (text + TEXT, None)


def test_max_tokens_0_only_echoes() -> None:
    asked = {**COMPLETION, "max_tokens": 0, "echo": True, "logprobs": 0}
    answer, submit = _post("/v1/completions", asked)
    assert submit.max_tokens == 1
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ü!", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1 / 8, -2 / 8]
    assert answer["usage"]["completion_tokens"] == 0


def test_minus_infinity_is_a_number_in_json() -> None:
    def answer(submit: Submit) -> list[RequestDelta]:
        never = TokenLogprob(-math.inf, [5], [-math.inf])
        return [RequestDelta(submit.request_id, [5], FinishReason.LENGTH, logprobs=[never])]

    whole, _ = _post("/v1/completions", {**COMPLETION, "logprobs": 1}, answer)
    assert whole["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]
    whole, _ = _post("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1}, answer)
    (content,) = whole["choices"][0]["logprobs"]["content"]
    assert (content["logprob"], content["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)
    events, _ = _post(
        "/generate_stream", {"inputs": "x", "parameters": {"top_n_tokens": 1}}, answer
    )
    assert events[0]["token"]["logprob"] == events[0]["top_tokens"][0]["logprob"] == -9999.0


def test_generate_has_prompt_tokens_top_tokens_and_the_whole_text() -> None:
    parameters = {
        **{"details": True, "decoder_input_details": True, "return_full_text": True},
        **{"top_n_tokens": 2, "stop": ["😀"]},
    }
    answer, submit = _post("/generate", {"inputs": "hi there", "parameters": parameters})
    assert (submit.sampling.num_logprobs, submit.sampling.num_prompt_logprobs) == (2, 0)
    assert answer["generated_text"] == "hi there" + "aé😀"  # as TGI, with the stop string
    details = answer["details"]
    assert (details["finish_reason"], details["generated_tokens"]) == ("stop_sequence", 7)
    prompt = TOKENIZER.encode("hi there", add_special_tokens=True)
    assert [token["id"] for token in details["prefill"]] == prompt
    expected = [None, *[-n / 8 for n in range(1, len(prompt))]]
    assert [token["logprob"] for token in details["prefill"]] == expected
    assert [token["id"] for token in details["tokens"]] == TOKENS[:7]
    assert [[top["id"] for top in tops] for tops in details["top_tokens"]] == [[0, 1]] * 7


# ---------------------------------------------------------------------- ids of tokens

BOTH = pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
)


@pytest.mark.parametrize("fields", [{}, {"logprobs": 0, "echo": True}])
@pytest.mark.parametrize("n", [1, 2])
def test_ids_of_completions(n: int, fields: dict[str, Any]) -> None:
    asked = {**COMPLETION, "prompt": [PROMPT, [7, 8]], "n": n, "return_token_ids": True, **fields}
    whole, _ = _post("/v1/completions", asked)
    chunks, _ = _post("/v1/completions", asked | {"stream": True})
    for index, choice in enumerate(whole["choices"]):
        prompt = [PROMPT, [7, 8]][index // n]
        assert choice["prompt_token_ids"] == prompt
        assert choice["token_ids"] == [*TOKENS, EOS]
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert own[0]["prompt_token_ids"] == prompt
        assert not any("prompt_token_ids" in later for later in own[1:])
        assert [*itertools.chain(*(later["token_ids"] for later in own))] == [*TOKENS, EOS]


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}])
def test_ids_of_chats(fields: dict[str, Any]) -> None:
    asked = {**CHAT, "n": 2, "return_token_ids": True, **fields}
    whole, submit = _post("/v1/chat/completions", asked)
    prompt = unpack_int32(submit.prompt[0].token_ids).tolist()
    assert whole["prompt_token_ids"] == prompt
    assert [choice["token_ids"] for choice in whole["choices"]] == [[*TOKENS, EOS]] * 2
    chunks, _ = _post("/v1/chat/completions", asked | {"stream": True})
    assert chunks[0]["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:-1])
    for index in range(2):
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert [*itertools.chain(*(choice.get("token_ids", []) for choice in own))] == [
            *TOKENS,
            EOS,
        ]
        assert "".join(choice["delta"].get("content", "") for choice in own) == TEXT


@BOTH
def test_ids_are_told_up_to_a_stop_string_and_only_if_asked_for(
    path: str, body: dict[str, Any]
) -> None:
    whole, _ = _post(path, body | {"stop": "😀", "return_token_ids": True})
    assert whole["choices"][0]["token_ids"] == TOKENS[:7]
    for asked in (None, False):
        whole, _ = _post(path, body | {"return_token_ids": asked})
        of_prompt = whole["choices"][0] if path == "/v1/completions" else whole
        assert of_prompt["prompt_token_ids"] is of_prompt["prompt_logprobs"] is None
        assert whole["choices"][0]["token_ids"] is None
        chunks, _ = _post(path, body | {"return_token_ids": asked, "stream": True})
        assert not any("token_ids" in chunk["choices"][0] for chunk in chunks[:-1])
        assert not any("prompt_token_ids" in str(chunk) for chunk in chunks)


# ---------------------------------------------------------------------- prompt_logprobs


@pytest.mark.parametrize("num_top", [0, 2])
def test_prompt_logprobs_of_completions(num_top: int) -> None:
    asked = {**COMPLETION, "prompt": [PROMPT, [7, 8]], "n": 2, "prompt_logprobs": num_top}
    answer, submit = _post("/v1/completions", asked)
    assert submit.sampling.num_prompt_logprobs is None, "the first of the two has asked"
    for index, choice in enumerate(answer["choices"]):
        first, *others = choice["prompt_logprobs"]
        assert first is None
        token_ids = [PROMPT, [7, 8]][index // 2][1:]
        for number, (token_id, entry) in enumerate(zip(token_ids, others, strict=True), 1):
            assert entry[str(token_id)]["logprob"] == -number / 8
            assert entry[str(token_id)]["rank"] is None
            assert entry[str(token_id)]["decoded_token"] == token_text(TOKENIZER, token_id)
            top = {key: value for key, value in entry.items() if key != str(token_id)}
            assert [(key, value["rank"]) for key, value in top.items()] == (
                [("0", 1), ("1", 2)] if num_top else []
            )


def test_prompt_logprobs_of_chats() -> None:
    answer, submit = _post("/v1/chat/completions", {**CHAT, "prompt_logprobs": 1})
    assert submit.sampling.num_prompt_logprobs == 1
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert len(others) == answer["usage"]["prompt_tokens"] - 1
    assert "prompt_logprobs" not in answer["choices"][0]


def test_a_prompt_token_among_the_most_probable_has_its_rank() -> None:
    def answer(submit: Submit) -> list[RequestDelta]:
        known = [TokenLogprob(-1.0, [9, PROMPT[1]], [-0.5, -1.0])]
        known += [TokenLogprob(-math.inf, [9, 3], [-0.1, -2.0])]
        return [RequestDelta(submit.request_id, [EOS], FinishReason.STOP, prompt_logprobs=known)]

    told, _ = _post("/v1/completions", {**COMPLETION, "prompt_logprobs": 2}, answer)
    _, second, third = told["choices"][0]["prompt_logprobs"]
    assert {key: value["rank"] for key, value in second.items()} == {str(PROMPT[1]): 2, "9": 1}
    assert third[str(PROMPT[2])]["logprob"] == -9999.0


def test_prompt_logprobs_beside_an_echo_are_the_same() -> None:
    asked = {**COMPLETION, "echo": True, "logprobs": 1, "prompt_logprobs": 1, "n": 2}
    answer, submit = _post("/v1/completions", asked)
    assert submit.sampling.num_prompt_logprobs == 1
    for choice in answer["choices"]:
        echoed = choice["logprobs"]["token_logprobs"][: len(PROMPT)]
        known = zip(PROMPT, choice["prompt_logprobs"], strict=True)
        assert echoed == [entry and entry[str(token)]["logprob"] for token, entry in known]


@BOTH
@pytest.mark.parametrize(
    "fields",
    [
        *[{"prompt_logprobs": value} for value in (-1, 21, True, 1.5, "1", [1])],
        {"prompt_logprobs": 0, "stream": True},
        {"prompt_logprobs": 1, "logprobs": 2, "echo": True},
    ],
)
def test_prompt_logprobs_that_cannot_be(
    path: str, body: dict[str, Any], fields: dict[str, Any]
) -> None:
    if "echo" in fields and path != "/v1/completions":
        return

    async def scenario() -> None:
        async with frontend(says([5, EOS])) as setup:
            response = await setup.post(path, body | fields)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "prompt_logprobs"

    asyncio.run(scenario())


# ---------------------------------------------------------------------- how it ended


@BOTH
@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, ["stop", None, EOS]),
        ({"stop": ["zzz", "😀"]}, ["stop", "😀", "😀"]),
        ({"stop": ["zzz"]}, ["stop", None, EOS]),
        ({"stop_token_ids": [EOS]}, ["stop", None, EOS]),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, ["stop", EOS, EOS]),
        ({"stop_token_ids": [TOKENS[-1]]}, ["stop", TOKENS[-1], TOKENS[-1]]),
        ({"max_tokens": 3}, ["length", None, None]),
    ],
)
def test_what_ended_a_choice(
    path: str, body: dict[str, Any], fields: dict[str, Any], end: list[int | str | None]
) -> None:
    ended_by_b = fields.get("stop_token_ids") == [TOKENS[-1]]
    answer = says(TOKENS if ended_by_b else [*TOKENS, EOS])
    expected = dict(zip(("finish_reason", "stop_reason", "matched_stop"), end, strict=True))
    whole, _ = _post(path, body | fields, answer)
    assert whole["choices"][0].items() >= expected.items()
    chunks, _ = _post(path, body | fields | {"stream": True}, answer)
    *before, last = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert last.items() >= expected.items()
    assert not any("stop_reason" in choice for choice in before)


def test_what_ended_an_echo_alone() -> None:
    answer, _ = _post("/v1/completions", {**COMPLETION, "max_tokens": 0, "echo": True})
    assert answer["choices"][0]["matched_stop"] is None
