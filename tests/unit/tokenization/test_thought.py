"""Where reasoning ends, token by token: as texts are told apart, and within budgets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightserve.frontend.openai.thinking import ThinkText
from lightserve.messages.common import MAX_INT32, Thinking
from lightserve.model_formats import ReasoningFormat
from lightserve.tokenization.thought import Phase, Thought

OPEN, CLOSE = "<think>", "</think>"
PIECES = (OPEN, CLOSE, "<", "</", "think", ">", ">\n", "</think", "a", " ", "\n", "b </", "k>x")
"""Tokens by id: the tags whole, and in parts."""
FORM = ReasoningFormat((), (OPEN,), (CLOSE,))


def bytes_of(token_id: int) -> bytes:
    return PIECES[token_id].encode()


def thinking(budget: int = MAX_INT32, *, is_inside: bool = False) -> Thinking:
    openings, opening = ((), ()) if is_inside else ((OPEN,), (0,))
    return Thinking(openings, (CLOSE,), opening, (8, 3, 4, 5), (3, 4, 5), budget)


def content_at(token_ids: list[int], *, is_inside: bool) -> int | None:
    """After how many tokens the text is known to be in its answer; None: it is not."""
    said: list[str] = []
    text = ThinkText(FORM, lambda _: None, said.append, is_inside=is_inside)
    for number, token_id in enumerate(token_ids, 1):
        text.push(PIECES[token_id])
        if text._start is None and not text._is_inside:
            return number
    return None


@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=24), st.booleans())
def test_the_answer_begins_where_the_text_says_so(token_ids: list[int], is_inside: bool) -> None:
    thought, found = Thought(thinking(is_inside=is_inside), bytes_of), None
    for number, token_id in enumerate(token_ids, 1):
        thought.consume(token_id)
        if thought.is_over:
            found = number
            break
    assert found == content_at(token_ids, is_inside=is_inside)
    assert 0 <= thought.num_tokens <= len(token_ids)


def told(thought: Thought, *pieces: str) -> Thought:
    for piece in pieces:
        thought.consume(PIECES.index(piece))
    return thought


def test_tags_are_not_counted() -> None:
    assert told(Thought(thinking(), bytes_of), OPEN, "a", " ", CLOSE).num_tokens == 2
    assert told(Thought(thinking(), bytes_of), "<", "think", ">", "a", "</", "think", ">\n").is_over
    assert (
        told(Thought(thinking(), bytes_of), "<", "think", ">", "a", "</think", ">").num_tokens == 1
    )
    inside = Thought(thinking(is_inside=True), bytes_of)
    assert told(inside, "a", "b </", "think", ">").num_tokens == 2, "its beginning is reasoning"
    assert told(Thought(thinking(), bytes_of), "a").num_tokens == 0
    assert told(Thought(thinking(is_inside=True), bytes_of), CLOSE).num_tokens == 0


@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=20), st.integers(0, 8), st.booleans())
def test_a_budget_is_kept_and_what_was_drawn_before_says_where_it_is(
    drawn: list[int], budget: int, is_inside: bool
) -> None:
    """At each token one that is told all of them anew forces the same."""
    known = thinking(budget, is_inside=is_inside)
    thought, output = Thought(known, bytes_of), list[int]()
    for token_id in drawn:
        again = Thought(known, bytes_of)
        for before in output:
            again.consume(before)
        forced = thought.forced()
        assert again.forced() == forced
        assert again.phase is thought.phase
        output.append(token_id if forced is None else forced)
        thought.consume(output[-1])
        assert thought.num_tokens <= budget + len(known.closing)
        if thought.is_over:
            break
    if thought.phase is Phase.INSIDE:
        assert thought.num_tokens <= budget


def test_a_budget_that_is_used_up_is_closed_by_its_sentence_and_tag() -> None:
    thought, output = Thought(thinking(2, is_inside=True), bytes_of), list[int]()
    while not thought.is_over:
        forced = thought.forced()
        output.append(PIECES.index(" ") if forced is None else forced)
        thought.consume(output[-1])
    assert [PIECES[token_id] for token_id in output] == [" ", " ", "a", "</", "think", ">"]
    assert thought.num_tokens == 3, "the sentence is reasoning, the tag is not"


def test_an_opening_that_has_begun_goes_on_where_it_is_strict() -> None:
    known = Thinking((OPEN,), (CLOSE,), (2, 4, 5), (1,), (1,))
    strict, free = (Thought(known, bytes_of, is_strict=is_strict) for is_strict in (True, False))
    assert strict.forced() is None
    for thought in (strict, free):
        thought.consume(2)
    assert (strict.forced(), free.forced()) == (4, None)
    sure = Thinking((OPEN,), (CLOSE,), (2, 4, 5), (1,), (1,), is_sure=True)
    assert Thought(sure, bytes_of, is_strict=True).forced() == 2
    assert Thought(sure, bytes_of).forced() is None


def test_a_budget_that_ends_within_the_tag_is_closed_by_the_rest_of_it() -> None:
    for budget, begun in ((2, ["a", "</"]), (3, ["a", "</", "think"])):
        thought = told(Thought(thinking(budget, is_inside=True), bytes_of), *begun)
        output = []
        while not thought.is_over:
            token_id = thought.forced()
            assert token_id is not None
            output.append(PIECES[token_id])
            thought.consume(token_id)
        assert "".join([*begun, *output]) == f"a{CLOSE}"
        assert thought.num_tokens == 1
