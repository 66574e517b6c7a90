"""Reasoning that a model writes before its answer, told apart from it by the tags of its format."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

from lightserve.errors import InvalidRequest
from lightserve.frontend.harmony import OPENING
from lightserve.frontend.json_body import show
from lightserve.frontend.service import Service
from lightserve.messages.common import MAX_INT32, Thinking
from lightserve.model_formats import HARMONY, HARMONY_CALL, NONE, REASONING_FORMATS, ReasoningFormat
from lightserve.models.architectures import Architecture

Emit = Callable[[str], None]


class Found(NamedTuple):
    """A mark in a text."""

    mark: str
    after: str
    blanks: str
    """Before the mark; they have not been passed on."""


class Until:
    """Passes text on up to a mark; holds back what may be its beginning, and blanks before it."""

    def __init__(self, marks: Sequence[str], emit: Emit) -> None:
        """Without marks, everything is passed on at once."""
        self._marks = marks
        self._emit = emit
        self._held = ""
        self._blanks = io.StringIO()
        """Before what is held; while nothing is, they are not looked at again with each more."""

    def push(self, text: str) -> Found | None:
        """Take in text; return the first mark and what follows it once it is there."""
        if not self._marks:
            self._emit(text)
            return None
        if not self._held and text.isspace():
            self._blanks.write(text)
            return None
        held = self._blanks.getvalue() + self._held + text
        self._blanks = io.StringIO()
        places = [(place, mark) for mark in self._marks if (place := held.find(mark)) >= 0]
        if places:
            place, mark = min(places)
            self._held = ""
            shown = held[:place].rstrip()
            self._emit(shown)
            return Found(mark, held[place + len(mark) :], held[len(shown) : place])
        before = held[: len(held) - max(_beginning(held, mark) for mark in self._marks)]
        shown = before.rstrip()
        self._emit(shown)
        self._blanks.write(before[len(shown) :])
        self._held = held[len(before) :]
        return None

    def finish(self) -> None:
        """No mark comes."""
        self._emit(self._blanks.getvalue() + self._held)
        self._held, self._blanks = "", io.StringIO()


def _beginning(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `mark`."""
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((n for n in lengths if mark.startswith(text[-n:])), 0)


class Unwrapped:
    """Passes an answer on without the tags that may stand around it."""

    def __init__(self, tags: tuple[str, str], emit: Emit) -> None:
        self._opening, ending = tags
        self._emit = emit
        self._start: str | None = ""
        """Text that may be the first tag; None: the first tag is known."""
        self._until = Until((ending,), emit)
        self._is_over = False

    def push(self, text: str) -> None:
        """Take in text, without blanks at its beginning."""
        if self._start is not None:
            self._start += text
            if len(self._start) < len(self._opening) and self._opening.startswith(self._start):
                return
            text, self._start = self._start.removeprefix(self._opening), None
        if self._is_over:
            self._emit(text)
        elif (found := self._until.push(text)) is not None:
            self._is_over = True
            self._emit(found.after)

    def finish(self) -> None:
        """Pass on what was held back."""
        if self._start is not None:
            self._emit(self._start)
        elif not self._is_over:
            self._until.finish()


class ThinkText:
    """`<think>` reasoning `</think>` content; without the first tag, all is content."""

    def __init__(
        self,
        form: ReasoningFormat,
        reasoning: Emit,
        content: Emit,
        *,
        is_inside: bool,
        continues: bool = False,
        keeps_blanks: bool = False,
    ) -> None:
        """`continues`: the text had begun before, so that blanks in front belong to it.

        `keeps_blanks`: those behind the reasoning belong to the answer.
        """
        self._keeps_blanks = keeps_blanks
        self._openings = form.openings
        self._answer = None if form.answer is None else Unwrapped(form.answer, content)
        """Behind reasoning."""
        self._content = content
        self._start = "" if not is_inside else None
        """Text that may be the first tag; None: the first tag is known."""
        self._blanks = io.StringIO()
        """Before that."""
        self._is_inside = is_inside
        self._drops_blanks = not continues
        self._until = Until(form.endings, reasoning)

    def push(self, text: str) -> None:
        """Take in text."""
        if self._start is not None:
            stripped = text if self._start else text.lstrip()
            self._blanks.write(text[: len(text) - len(stripped)])
            self._start += stripped
            start = self._start
            if any(len(start) < len(tag) and tag.startswith(start) for tag in self._openings):
                return
            self._start = None
            tag = next((tag for tag in self._openings if start.startswith(tag)), None)
            if tag is not None:
                self._is_inside = True
                text = start.removeprefix(tag)
            else:
                self._drops_blanks = False
                text = self._blanks.getvalue() + start
        if self._is_inside:
            self._reason(text)
        else:
            self._pass_on(text)

    def _reason(self, text: str) -> None:
        if self._drops_blanks:
            text = text.lstrip()
            self._drops_blanks = not text
        found = self._until.push(text)
        if found is not None:
            self._is_inside, self._drops_blanks = False, not self._keeps_blanks
            if self._answer is not None:
                self._content = self._answer.push
            self._pass_on(found.after)

    def _pass_on(self, text: str) -> None:
        if self._drops_blanks:
            text = text.lstrip()
            self._drops_blanks = not text
        if text:
            self._content(text)

    def finish(self) -> None:
        """Pass on what was held back."""
        if self._start is not None:
            self._content(self._blanks.getvalue() + self._start)
        elif self._is_inside:
            self._until.finish()
        elif self._answer is not None:
            self._answer.finish()


# ----------------------------------------------------------------------
# What is known of an output's reasoning before it begins: whether there may be some, and how much.


class Start(Enum):
    """The part of an answer's beginning that a prompt has."""

    NOTHING = auto()
    INSIDE = auto()
    """Reasoning goes on: the tag that opens it is the prompt's."""
    ANSWER = auto()
    """There is no reasoning, or it is over."""


def start_behind(ending: str, begun: str, reasoning: str) -> Start:
    """Return what a prompt has of an answer.

    `ending`: see `EncodedChat.ending`; `begun`: the message that the output continues, or empty;
    `reasoning`: a key of `REASONING_FORMATS`.
    """
    form = REASONING_FORMATS[reasoning]
    if reasoning == HARMONY:
        return Start.NOTHING if ending.rstrip().endswith(OPENING) else Start.ANSWER
    if _ends_inside(begun, form) or ending.rstrip().endswith(form.openings):
        return Start.INSIDE
    has_ended = any(tag in ending for tag in form.endings)
    return Start.ANSWER if begun.strip() or has_ended else Start.NOTHING


def _ends_inside(text: str, form: ReasoningFormat) -> bool:
    """Whether a text that goes on has begun reasoning and not ended it."""
    begun = max((text.rfind(tag) for tag in form.openings), default=-1)
    return begun > max((text.rfind(tag) for tag in form.endings), default=-1)


EFFORT_BUDGETS: Mapping[str | None, int] = {
    "none": 0,
    "minimal": 256,
    "low": 1024,
    "medium": 4096,
    "high": 16_384,
}
"""Tokens of reasoning at the levels of `reasoning_effort`, where the model's template has none of
its own; at those that are not here there is no budget."""
EFFORT_SHARE = 0.75
"""Largest share of an answer's tokens that such a level leaves to reasoning."""


_QWEN_CLOSING = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the"
    " thinking directly now.\n"
)
CLOSING_SENTENCES = dict.fromkeys((Architecture.QWEN3, Architecture.QWEN3_MOE), _QWEN_CLOSING)
"""With which models were shown to end reasoning whose budget is used up, as their repositories say:
Qwen3's documentation (Thinking Budget)."""


def takes_levels(reasoning: str) -> bool:
    """Whether levels of `reasoning_effort` become budgets where a template has none of its own."""
    return reasoning not in (NONE, HARMONY)


def thinking_of(
    service: Service, start: Start, budget_of: Callable[[int], int], *, has_constraint: bool
) -> Thinking | None:
    """Return the reasoning of an answer that begins like this; None: there is none.

    `budget_of`: makes the budget of the number of tokens that would end the reasoning there. Raises
    what it raises.
    """
    reasoning = service.formats.reasoning
    form, tokens = REASONING_FORMATS[reasoning], service.encoder.tokens_of
    sentence = CLOSING_SENTENCES.get(service.model.architecture, "")
    endings = form.endings
    if reasoning == HARMONY and not has_constraint:
        endings = (*endings, HARMONY_CALL)
    ending = tokens(endings[0])
    closing = (*(tokens(sentence) if sentence else ()), *ending)
    budget = budget_of(len(closing))
    if start is Start.ANSWER:
        return None
    openings = form.openings if start is Start.NOTHING else ()
    opening = tokens(openings[0]) if openings else ()
    is_sure = reasoning == HARMONY
    return Thinking(openings, endings, opening, closing, ending, budget, is_sure)


def budget_within(
    asked: int | None, level: str | None, max_tokens: int, limit_param: str, num_closing: int
) -> int:
    """Return the most tokens of reasoning that leave an answer.

    Args:
        asked: `thinking_token_budget`; -1: there is no budget.
        level: `reasoning_effort`, if it becomes a budget.
        max_tokens: of the output.
        limit_param: the name under which the request gives that.
        num_closing: tokens that end the reasoning.

    Raises:
        InvalidRequest: as many as were asked for leave none.
    """
    most = max_tokens - num_closing - 1
    if asked == -1 or (asked is None and level not in EFFORT_BUDGETS):
        return MAX_INT32
    if asked is None:
        return max(0, min(EFFORT_BUDGETS[level], int(EFFORT_SHARE * max_tokens), most))
    if asked > most:
        raise InvalidRequest(
            f"thinking_token_budget must be at most {most}: {limit_param} ({max_tokens}) less"
            f" {num_closing} tokens that end the reasoning and one of the answer, got"
            f" {show(asked)}",
            param="thinking_token_budget",
        )
    return asked
