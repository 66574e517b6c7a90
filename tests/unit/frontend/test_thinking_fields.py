"""Fields of reasoning: what they become, what is refused, and what answers say of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from support.fake_router import Setup, copy_bundled_model, frontend, says, sse_data

from lightserve.bundled import BUNDLED_MODEL_DIR, BUNDLED_MODEL_NAME
from lightserve.messages.common import MAX_INT32, Thinking
from lightserve.tokenization.thought import Thought
from lightserve.tokenization.tokenizer import Tokenizer

TOKENIZER = Tokenizer(BUNDLED_MODEL_DIR)
OPENED = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
SWITCHED = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>\n{% endif %}"
)
LEVELS = SWITCHED + "{{ reasoning_effort }}"
BODY: dict[str, Any] = {
    "model": BUNDLED_MODEL_NAME,
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 100,
}
CHAT = "/v1/chat/completions"
SCHEMA = {"structured_outputs": {"regex": "[ab]+"}}
CLOSING = tuple(TOKENIZER.encode_within("</think>"))


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


@pytest.fixture
def template(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Returns the flags of a server with this chat template."""

    def flags(text: str) -> dict[str, str]:
        path = tmp_path / "template.jinja"
        path.write_text(text)
        return {"chat_template": str(path)}

    return flags


async def asked(setup: Setup, **fields: Any) -> Thinking | None:
    """What the router is told of a chat's reasoning."""
    response = await setup.post(CHAT, {**BODY, **fields})
    assert response.status_code == 200, response.text
    return setup.router.submits[-1].thinking


async def refused(setup: Setup, **fields: Any) -> dict[str, Any]:
    response = await setup.post(CHAT, {**BODY, **fields})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_what_a_prompt_has_of_reasoning(template: Callable[[str], dict[str, str]]) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2]), **template(OPENED)) as setup:
            known = await asked(setup)
            assert known == Thinking((), ("</think>",), (), CLOSING, CLOSING, MAX_INT32)
        async with frontend(says([5, 2]), **template(SWITCHED)) as setup:
            known = await asked(setup)
            assert known is not None
            assert known.openings == ("<think>",)
            assert known.opening == tuple(TOKENIZER.encode_within("<think>"))
            off = {"chat_template_kwargs": {"enable_thinking": False}}
            assert await asked(setup, **off) is None
            goes_on = {**BODY, "continue_final_message": True}
            for content, is_inside in (("<think>So", True), ("<think>a</think>b", False)):
                said = [*BODY["messages"], {"role": "assistant", "content": content}]
                found = await asked(setup, **{**goes_on, "messages": said})
                assert (found is not None and not found.openings) is is_inside

    run(scenario)


@pytest.mark.parametrize("budget", [0, 16, 100 - len(CLOSING) - 1])
def test_a_budget(budget: int, template: Callable[[str], dict[str, str]]) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2]), **template(OPENED)) as setup:
            for fields in ({}, SCHEMA):
                known = await asked(setup, thinking_token_budget=budget, **fields)
                assert known is not None
                assert known.budget == budget

    run(scenario)


def test_a_budget_leaves_an_answer(template: Callable[[str], dict[str, str]]) -> None:
    most = 100 - len(CLOSING) - 1

    async def scenario() -> None:
        async with frontend(says([5, 2]), **template(OPENED)) as setup:
            for budget in (most + 1, 99, 100, 10**6):
                error = await refused(setup, thinking_token_budget=budget)
                assert error["param"] == "thinking_token_budget"
                assert f"must be at most {most}: max_tokens (100) less" in error["message"]
                assert f"got {budget}" in error["message"]
            other = {"max_tokens": None, "max_completion_tokens": 50}
            error = await refused(setup, thinking_token_budget=50, **other)
            assert "max_completion_tokens (50)" in error["message"]
            known = await asked(setup, thinking_token_budget=-1, reasoning_effort="none")
            assert known is not None
            assert known.budget == MAX_INT32
            for odd in (-2, 1.5, "9"):
                error = await refused(setup, thinking_token_budget=odd)
                assert error["param"] == "thinking_token_budget"

    run(scenario)


def test_levels_are_budgets_where_a_template_has_none(
    template: Callable[[str], dict[str, str]],
) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2]), **template(SWITCHED), max_answer_items=10**6) as setup:
            budgets = [MAX_INT32, 16_384, 4096, 1024, 256]
            for level, budget in zip(
                ("xhigh", "high", "medium", "low", "minimal"), budgets, strict=True
            ):
                known = await asked(setup, reasoning_effort=level)
                assert known is not None
                assert known.budget == (75 if budget < MAX_INT32 else budget), "of 100 tokens"
            assert await asked(setup, reasoning_effort="none") is None, "the switch is off"
            known = await asked(setup, reasoning_effort="low", thinking_token_budget=9)
            assert known is not None
            assert known.budget == 9
        async with frontend(says([5, 2]), **template(OPENED)) as setup:
            known = await asked(setup, reasoning_effort="none")
            assert known is not None
            assert known.budget == 0
        async with frontend(says([5, 2]), **template(LEVELS)) as setup:
            known = await asked(setup, reasoning_effort="low")
            assert known is not None
            assert known.budget == MAX_INT32, "the template's own"
        async with frontend(says([5, 2])) as setup:
            assert (await refused(setup, reasoning_effort="low"))["param"] == "reasoning_effort"

    run(scenario)


def test_what_needs_to_know_the_end_of_reasoning_is_refused_without_it(
    template: Callable[[str], dict[str, str]],
) -> None:
    async def scenario() -> None:
        flags = {**template(SWITCHED), "reasoning_parser": "none"}
        async with frontend(says([5, 2]), **flags) as setup:
            error = await refused(setup, thinking_token_budget=4)
            assert (error["param"], error["code"]) == ("thinking_token_budget", "unknown_reasoning")
            assert "--reasoning-parser" in error["message"]
            on = {"chat_template_kwargs": {"enable_thinking": True}}
            error = await refused(setup, **on, **SCHEMA)
            assert error["param"] == "chat_template_kwargs"
            assert "enable_thinking needs a model whose end" in error["message"]
            assert await asked(setup, **SCHEMA) is None
            assert await asked(setup, **on) is None

    run(scenario)


def test_a_model_is_closed_by_the_sentence_of_its_repository(
    tmp_path: Path, template: Callable[[str], dict[str, str]]
) -> None:
    config = json.loads((BUNDLED_MODEL_DIR / "config.json").read_text())
    config["architectures"] = ["Qwen3ForCausalLM"]
    model = copy_bundled_model(tmp_path, **config)

    async def scenario() -> None:
        async with frontend(says([5, 2]), model=model, **template(OPENED)) as setup:
            known = await asked(setup, model=setup.service.model.names[0])
            assert known is not None
            text = TOKENIZER.decode(known.closing)
            assert text.endswith(
                "I have to give the solution based on the thinking directly now.\n</think>"
            )
            assert known.closing[-len(CLOSING) :] == known.ending == CLOSING

    run(scenario)


def test_anthropics_budget(template: Callable[[str], dict[str, str]]) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2]), **template(SWITCHED)) as setup:
            thinking = {"type": "enabled", "budget_tokens": 20}
            response = await setup.post("/v1/messages", {**BODY, "thinking": thinking})
            assert response.status_code == 200, response.text
            known = setup.router.submits[-1].thinking
            assert known is not None
            assert known.budget == 20
            thinking["budget_tokens"] = 100
            response = await setup.post("/v1/messages", {**BODY, "thinking": thinking})
            error = response.json()["error"]
            assert error["details"]["param"] == "thinking.budget_tokens"
            assert "max_tokens (100) less" in error["message"]

    run(scenario)


THOUGHT = TOKENIZER.encode_within("Hm. So")
ANSWER = TOKENIZER.encode_within(" ab")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, SCHEMA], ids=["free", "constrained"])
def test_reasoning_is_counted_and_told_apart(
    stream: bool, fields: dict[str, Any], template: Callable[[str], dict[str, str]]
) -> None:
    """What a grammar writes keeps the blanks with which it begins."""
    output = [*THOUGHT, *CLOSING, *ANSWER, 2]

    async def scenario() -> None:
        async with frontend(says(output), **template(OPENED)) as setup:
            options = {"stream": stream, **fields}
            if stream:
                options["stream_options"] = {"include_usage": True}
            response = await setup.post(CHAT, {**BODY, **options})
            if stream:
                chunks = sse_data(response.text)[:-1]
                usage = chunks[-1]["usage"]
                deltas = [c["choices"][0]["delta"] for c in chunks[:-1]]
                names = [name for d in deltas for name in d if d[name] and name != "role"]
                assert names == sorted(names, reverse=True), "reasoning first"
                texts = {n: "".join(d.get(n) or "" for d in deltas) for n in set(names)}
            else:
                usage = response.json()["usage"]
                texts = response.json()["choices"][0]["message"]
            assert texts["reasoning_content"] == "Hm. So"
            assert texts["content"] == (" ab" if fields else "ab")
            assert usage["completion_tokens"] == len(output)
            assert usage["completion_tokens_details"]["reasoning_tokens"] == len(THOUGHT)
            response = await setup.post(
                "/v1/responses", {"model": BUNDLED_MODEL_NAME, "input": "hi"}
            )
            details = response.json()["usage"]["output_tokens_details"]
            assert details["reasoning_tokens"] == len(THOUGHT)

    run(scenario)


@pytest.mark.parametrize("num_kept", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "options", [{}, {"stop": "never"}, {"logprobs": True}, {"stream": True}], ids=str
)
def test_of_a_character_that_a_budget_cuts_nothing_is_shown(
    num_kept: int, options: dict[str, Any], template: Callable[[str], dict[str, str]]
) -> None:
    face = TOKENIZER.encode_within("\N{GRINNING FACE}")
    assert len(face) == 4, "a token a byte"
    thought = [*TOKENIZER.encode_within("Hm."), *face[:num_kept]]
    output = [*thought, *CLOSING, *ANSWER, 2]

    async def scenario() -> None:
        async with frontend(says(output), **template(OPENED)) as setup:
            fields = {**BODY, "thinking_token_budget": len(thought), **options}
            response = await setup.post(CHAT, fields)
            assert response.status_code == 200, response.text
            if "stream" in options:
                deltas = [c["choices"][0]["delta"] for c in sse_data(response.text)[:-1]]
                shown = "".join(delta.get("reasoning_content") or "" for delta in deltas)
                content = "".join(delta.get("content") or "" for delta in deltas)
            else:
                message = response.json()["choices"][0]["message"]
                shown, content = message["reasoning_content"], message["content"]
                details = response.json()["usage"]["completion_tokens_details"]
                assert details["reasoning_tokens"] == len(thought)
            assert shown == ("Hm." if num_kept < 4 else "Hm.\N{GRINNING FACE}")
            assert content == "ab"

    run(scenario)


def test_an_answer_of_a_grammar_that_does_not_think_is_content(
    template: Callable[[str], dict[str, str]],
) -> None:
    async def scenario() -> None:
        async with frontend(says([*ANSWER, 2]), **template(SWITCHED)) as setup:
            response = await setup.post(CHAT, {**BODY, **SCHEMA})
            message = response.json()["choices"][0]["message"]
            assert message["content"] == " ab"
            assert "reasoning_content" not in message
            details = response.json()["usage"]["completion_tokens_details"]
            assert details["reasoning_tokens"] == 0

    run(scenario)


HARMONY = "{% for m in messages %}{{ m.content }}{% endfor %}<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"


def test_answers_of_a_grammar_stand_on_the_final_channel(
    template: Callable[[str], dict[str, str]],
) -> None:
    """As gpt-oss writes them: it opens its reasoning in any case, and a call ends no budget's."""
    text = f"{ANALYSIS}Hm.<|end|><|start|>assistant{FINAL}"
    output = [*TOKENIZER.encode_within(text), *ANSWER, 2]

    async def scenario() -> None:
        flags = {**template(HARMONY), "reasoning_parser": "harmony"}
        async with frontend(says(output), **flags) as setup:
            known = await asked(setup, thinking_token_budget=5)
            assert known is not None
            assert known.endings == (
                f"<|end|><|start|>assistant{FINAL}",
                FINAL,
                "<|channel|>commentary",
            )
            constrained = await asked(setup, **SCHEMA)
            assert constrained is not None
            assert constrained.endings == known.endings[:2]
            assert (constrained.openings, constrained.is_sure) == ((ANALYSIS,), True)
            response = await setup.post(CHAT, {**BODY, **SCHEMA})
            message = response.json()["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("Hm.", " ab")
            num = response.json()["usage"]["completion_tokens_details"]["reasoning_tokens"]
            assert num == len(TOKENIZER.encode_within("Hm."))

    run(scenario)


@pytest.mark.parametrize("begun", range(4))
def test_marks_within_gpt_oss_reasoning_count_for_budget_and_usage_alike(
    begun: int, template: Callable[[str], dict[str, str]]
) -> None:
    """A budget that ends where the next message begins has the rest of the final one's marks."""
    closing = TOKENIZER.encode_within(f"<|end|><|start|>assistant{FINAL}")
    again = TOKENIZER.encode_within(f"<|end|><|start|>assistant{ANALYSIS}Hm.")
    thought = [*TOKENIZER.encode_within("Hm."), *again, *closing[:begun]]
    output = [*TOKENIZER.encode_within(ANALYSIS), *thought, *closing[begun:], *ANSWER, 2]

    async def scenario() -> None:
        flags = {**template(HARMONY), "reasoning_parser": "harmony"}
        async with frontend(says(output), **flags) as setup:
            response = await setup.post(CHAT, {**BODY, "thinking_token_budget": len(thought)})
            message = response.json()["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("Hm.Hm.", " ab")
            known = setup.router.submits[-1].thinking
            assert known is not None
            worker, written = Thought(known, TOKENIZER.bytes_of), list[int]()
            while not worker.is_over:
                forced = worker.forced()
                written.append(output[len(written)] if forced is None else forced)
                worker.consume(written[-1])
            assert written == output[: len(written)]
            num = response.json()["usage"]["completion_tokens_details"]["reasoning_tokens"]
            assert num == worker.num_tokens == len(thought) - begun

    run(scenario)
