"""Reasoning before a constraint, and within a budget: what the worker lets rows draw."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.config import ServeConfig
from lightserve.messages.common import (
    MAX_INT32,
    Constraint,
    JsonSchemaConstraint,
    RegexConstraint,
    Thinking,
    TokenSegment,
    pack_int32,
)
from lightserve.messages.router_worker import (
    AddSequence,
    OutputKind,
    PlanRow,
    SlotRange,
    StepPlan,
    row_results,
)
from lightserve.structured import model_vocabulary
from lightserve.tokenization.tokenizer import Tokenizer
from lightserve.types import RowId, SamplingParams, StepId
from lightserve.worker.build import build_runner
from lightserve.worker.matchers import Begun, RowMatchers
from lightserve.worker.model_runner import ModelRunner, Pending

OPEN, CLOSE = "<think>", "</think>"
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "sea": {"enum": ["old", "far"]}},
    "required": ["age", "sea"],
    "additionalProperties": False,
}
ENDS = [2, 17]
"""Of which the model draws the second before long; the driver goes on."""
JSON = JsonSchemaConstraint(schema=json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(BUNDLED_MODEL_DIR)


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield build_runner(ServeConfig(batch_invariant=True, max_model_len=512, max_kv_tokens=4096))
    torch.set_num_threads(threads)


def thinking_of(
    tokenizer: Tokenizer,
    *,
    budget: int = MAX_INT32,
    is_inside: bool = True,
    sentence: str = "",
    close: str = CLOSE,
) -> Thinking:
    opening, ending = (tuple(tokenizer.encode_within(tag)) for tag in (OPEN, close))
    assert len(ending) > 1, "this model spells its tags"
    openings = () if is_inside else (OPEN,)
    closing = (*(tokenizer.encode_within(sentence) if sentence else ()), *ending)
    return Thinking(openings, (close,), () if is_inside else opening, closing, ending, budget)


class Row:
    """One row of `RowMatchers`."""

    def __init__(
        self, tokenizer: Tokenizer, constraint: Constraint | None, thinking: Thinking
    ) -> None:
        self._tokenizer = tokenizer
        self._matchers = RowMatchers(model_vocabulary(tokenizer, 4096), tokenizer=tokenizer)
        self.begin(constraint, thinking, [])

    def begin(self, constraint: Constraint | None, thinking: Thinking, output: list[int]) -> None:
        self._matchers.update([], [Begun(0, constraint, pack_int32(output), True, thinking)])
        self._matchers._rows[0].matcher.result(60.0)
        self.output = output

    def may_draw(self) -> set[int]:
        """What the next token may be."""
        masks = self._matchers.masks([0])
        assert not (masks.failed or masks.unready)
        if masks.forced:
            return {masks.forced[0][1]}
        bits = np.frombuffer(masks.bits, dtype=np.uint8)
        return set(np.unpackbits(bits, bitorder="little")[:4096].nonzero()[0].tolist())

    @property
    def is_free(self) -> bool:
        return self._matchers.masks([0]).free == (0,)

    def draw(self, *token_ids: int) -> None:
        for token_id in token_ids:
            assert token_id in self.may_draw(), self._tokenizer.decode([*self.output, token_id])
            self._matchers.advance([0], [token_id])
            self.output.append(token_id)

    def write(self, text: str) -> None:
        self.draw(*self._tokenizer.encode_within(text))


def test_a_schema_begins_at_the_tag(tokenizer: Tokenizer) -> None:
    """Before it anything goes, but the model's end and tokens that would go on behind the tag."""
    row = Row(tokenizer, JSON, thinking_of(tokenizer, close="</a"))
    (eos,) = tokenizer.eos_token_ids
    everything = set(range(4096))
    assert row.may_draw() == everything - {eos}
    row.write("The sea is {")
    *first, last = tokenizer.encode_within("</a")
    row.draw(*first)
    rest = tokenizer.bytes_of(last)
    longer = {n for n in everything if tokenizer.bytes_of(n).startswith(rest)} - {last}
    assert everything - row.may_draw() == longer | {eos} and longer
    row.draw(last)
    assert len(row.may_draw()) < 20 and eos not in row.may_draw()
    row.write('{"age": 3, "sea": "far"}')
    assert row.may_draw() == {eos}


def test_who_is_told_anew_goes_on_where_it_was(tokenizer: Tokenizer) -> None:
    """As a row that was preempted, at every token of its output."""
    known = thinking_of(tokenizer, budget=5, sentence=" So.")
    row, again = Row(tokenizer, JSON, known), Row(tokenizer, JSON, known)
    while len(row.output) < 40 and (allowed := row.may_draw()):
        again.begin(JSON, known, list(row.output))
        assert again.may_draw() == allowed
        if allowed == set(tokenizer.eos_token_ids):
            break
        row.draw(min(allowed, key=lambda token_id: (token_id * 7919) % 4099))
    text = tokenizer.decode(row.output)
    assert " So.</think>{" in text, text


def test_an_answer_without_reasoning_is_constrained_from_its_beginning(
    tokenizer: Tokenizer,
) -> None:
    known = thinking_of(tokenizer, is_inside=False)
    plain = Row(tokenizer, JSON, known)
    opening = tokenizer.encode_within(OPEN)
    first = plain.may_draw()
    assert opening[0] in first and len(first) < 20
    plain.write('{"age": 3')
    assert opening[0] not in plain.may_draw()
    thinks = Row(tokenizer, JSON, known)
    for number, token_id in enumerate(opening):
        assert number == 0 or thinks.may_draw() == {token_id}
        thinks.draw(token_id)
    thinks.write("Hm. </think>")
    assert opening[0] not in thinks.may_draw() and len(thinks.may_draw()) < 20
    # Where the grammar can begin as the tag does, it does.
    like = Row(tokenizer, RegexConstraint(pattern="<[a-z]{3}>"), known)
    like.draw(opening[0])
    like.write("abc>" if tokenizer.decode(opening[:1]) == "<" else "")


def test_a_budget_alone_forces_its_end_and_then_leaves_the_row_alone(tokenizer: Tokenizer) -> None:
    known = thinking_of(tokenizer, budget=3, sentence=" So.")
    row = Row(tokenizer, None, known)
    for _ in range(3):
        assert len(row.may_draw()) == 4096 and not row.is_free
        row.draw(7)
    for token_id in known.closing:
        assert row.may_draw() == {token_id}
        row.draw(token_id)
    assert row.is_free
    early = Row(tokenizer, None, thinking_of(tokenizer, budget=9))
    early.write(CLOSE)
    assert early.is_free
    begins_otherwise = Row(tokenizer, None, thinking_of(tokenizer, budget=0, is_inside=False))
    begins_otherwise.write("No")
    assert begins_otherwise.is_free


# On the runner, with the next step launched before the one before is finished wherever it may be.


def generate(
    runner: ModelRunner, sequences: Sequence[AddSequence], num_tokens: int
) -> tuple[list[list[int]], int]:
    """Return the tokens of sequences that decode together, and how many steps did not overlap."""
    lengths = [sum(len(s.token_ids) // 4 for s in q.segments) for q in sequences]
    found: list[list[int]] = [[] for _ in sequences]
    pending: Pending | None = None
    num_waits = 0

    def finish(step: Pending) -> None:
        for tokens, result in zip(found, row_results(step.plan, runner.finish(step)), strict=True):
            assert result.error is None
            tokens.extend(result.token_ids)

    for step in range(num_tokens):
        ranges, rows = [], []
        for number, length in enumerate(lengths):
            start, end = (0, length) if step == 0 else (length + step - 1, length + step)
            slots = [number * 512 + position for position in range(start, end)]
            ranges.append(SlotRange(RowId(number), start, pack_int32(slots)))
            rows.append(PlanRow(RowId(number), start, end - start, OutputKind.SAMPLE))
        plan = StepPlan(
            step_id=StepId(step),
            sequences=list(sequences) if step == 0 else [],
            slot_ranges=ranges,
            rows=rows,
        )
        if pending is not None and pending.must_precede(plan):
            num_waits += 1
            finish(pending)
            pending = None
        launched = runner.launch(plan)
        if pending is not None:
            finish(pending)
        pending = launched
    assert pending is not None
    finish(pending)
    return found, num_waits


def sequence(
    number: int, tokenizer: Tokenizer, thinking: Thinking | None, **sampling: Any
) -> AddSequence:
    prompt = tokenizer.encode(f"Tell me a story of {number}.", add_special_tokens=True)
    params = SamplingParams(**{"temperature": 1.0, "seed": number, **sampling})
    segments = [TokenSegment(token_ids=pack_int32(prompt))]
    return AddSequence(RowId(number), segments, params, len(prompt), ENDS, None, thinking=thinking)


def test_rows_with_budgets_wait_for_the_host_only_where_these_end(
    runner: ModelRunner, tokenizer: Tokenizer
) -> None:
    budget, num_tokens = 20, 60
    known = thinking_of(tokenizer, budget=budget)
    plain = [sequence(number, tokenizer, None) for number in range(3)]
    bounded = [sequence(number, tokenizer, known) for number in range(3)]
    free, waits = generate(runner, plain, num_tokens)
    assert waits == 0
    found, waits = generate(runner, bounded, num_tokens)
    assert waits <= len(known.closing) + 3
    for tokens, others in zip(found, free, strict=True):
        assert tokens[:budget] == others[:budget], "a budget changes nothing before it"
        assert tuple(tokens[budget : budget + len(known.closing)]) == known.closing
        assert len(tokens) == num_tokens


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": (5, 6, 7)},
        {"bad_words": ((17,),)},
        {"logit_bias": ((5, 100.0),)},
        {"min_tokens": 50},
        {"repetition_penalty": 1.5, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"min_p": 0.9, "top_k": 2, "top_p": 0.5},
        {"typical_p": 0.3},
    ],
    ids=",".join,
)
def test_options_hold_within_reasoning_and_behind_it_but_for_its_forced_end(
    runner: ModelRunner, tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    budget = 8
    known = thinking_of(tokenizer, budget=budget)
    end = budget + len(known.closing)
    (tokens,), _ = generate(runner, [sequence(0, tokenizer, known, **options)], 40)
    assert tuple(tokens[budget:end]) == known.closing
    (others,), _ = generate(runner, [sequence(0, tokenizer, None, **options)], budget)
    assert tokens[:budget] == others, "within"
    (unbounded,), _ = generate(runner, [sequence(0, tokenizer, known)], 40)
    assert tokens != unbounded, "they change what is drawn"
    # Behind: as a prompt that has all of it would go on, drawn at the same places.
    whole = sequence(0, tokenizer, None, **options)
    before = TokenSegment(token_ids=pack_int32(tokens[:end]))
    resumed = AddSequence(
        RowId(0),
        [*whole.segments, before],
        whole.sampling,
        whole.num_prompt_tokens,
        ENDS,
    )
    (rest,), _ = generate(runner, [resumed], 40 - end)
    assert tokens[end:] == rest
    if "allowed_token_ids" in options:
        assert set(tokens[:budget] + tokens[end:]) <= {5, 6, 7}


def test_logprobs_of_forced_tokens_are_the_models(
    runner: ModelRunner, tokenizer: Tokenizer
) -> None:
    known = thinking_of(tokenizer, budget=0)
    plan_of = sequence(0, tokenizer, known, num_logprobs=2, temperature=0.0)
    prompt = plan_of.segments[0]
    length = len(prompt.token_ids) // 4
    slots = pack_int32(list(range(length)))
    plan = StepPlan(
        step_id=StepId(0),
        sequences=[plan_of],
        slot_ranges=[SlotRange(RowId(0), 0, slots)],
        rows=[PlanRow(RowId(0), 0, length, OutputKind.SAMPLE)],
    )
    (result,) = row_results(plan, runner.execute(plan))
    assert result.token_ids == [known.closing[0]]
    (logprob,) = result.logprobs
    assert logprob.logprob <= logprob.top_logprobs[-1]
    assert re.fullmatch(r"-\d+\.\d+", str(logprob.logprob))
