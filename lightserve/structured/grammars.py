"""Constraints compiled by llguidance, within limits of size and work.

The limits are counts of work, not of time: the same grammar is accepted or refused everywhere,
and what a frontend has compiled compiles on rank 0 too. Measured on one core, what they let
through compiles within a tenth of a second (a thousand optional properties), most schemas within
a millisecond; llguidance lets other threads run meanwhile.
"""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from lightserve.errors import GrammarError
from lightserve.messages.common import Constraint, JsonSchemaConstraint, RegexConstraint
from lightserve.structured.limits import (
    MAX_GRAMMAR_BYTES,
    MAX_REGEX_BYTES,
    MAX_SCHEMA_BYTES,
    WHITESPACE,
)

_MAX_COMPLAINT_CHARS = 300
_MIN_KEPT_BYTES = 512


def text_of(constraint: Constraint) -> str:
    """Return the schema, pattern or grammar."""
    if isinstance(constraint, JsonSchemaConstraint):
        return constraint.schema
    return constraint.pattern if isinstance(constraint, RegexConstraint) else constraint.grammar


def kept_bytes(constraint: Constraint) -> int:
    """Return what a compiled constraint counts where a bounded amount of them is kept.

    Its text: compiled, it takes up to some 2,000 times as much memory.
    """
    return max(_MIN_KEPT_BYTES, len(text_of(constraint).encode()))


def compile_matcher(constraint: Constraint, vocabulary: LLTokenizer) -> LLMatcher:
    """Return a matcher at the start of an output; at least one token may come first.

    Raises:
        GrammarError: too large, not valid, not supported, beyond the limits, or nothing fits it.
    """
    _check_size(constraint)
    try:
        matcher = LLMatcher(vocabulary, _source(constraint), log_level=0, limits=_limits())
    except ValueError as error:
        raise GrammarError(_one_line(str(error))) from error
    if matcher.is_error():
        raise GrammarError(_one_line(matcher.get_error()))
    mask = matcher.compute_bitmask()
    if matcher.is_error() or not any(mask):
        too_much = "TooComplex" in matcher.get_error()
        raise GrammarError("it is too complex" if too_much else "no output can satisfy it")
    return matcher


def _source(constraint: Constraint) -> str:
    """Return the constraint in llguidance's own form. Raises ValueError for what is not JSON."""
    if isinstance(constraint, JsonSchemaConstraint):
        return LLMatcher.grammar_from_json_schema(
            constraint.schema, overrides={"whitespace_pattern": WHITESPACE}
        )
    if isinstance(constraint, RegexConstraint):
        return LLMatcher.grammar_from_regex(constraint.pattern)
    return LLMatcher.grammar_from_lark(constraint.grammar)


def _check_size(constraint: Constraint) -> None:
    limit = MAX_GRAMMAR_BYTES
    if isinstance(constraint, JsonSchemaConstraint):
        limit = MAX_SCHEMA_BYTES
    elif isinstance(constraint, RegexConstraint):
        limit = MAX_REGEX_BYTES
    try:
        size = len(text_of(constraint).encode())
    except UnicodeEncodeError:
        raise GrammarError("it holds half of a surrogate pair, which is not Unicode text") from None
    if size > limit:
        raise GrammarError(f"it must be at most {limit} bytes long, got {size}")


def _limits() -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=1000,
        initial_lexer_fuel=100_000,
        step_lexer_fuel=50_000,
        step_max_items=5_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def _one_line(text: str) -> str:
    text = " ".join(text.replace("<non-verbose/>", "").split())
    return text if len(text) <= _MAX_COMPLAINT_CHARS else text[:_MAX_COMPLAINT_CHARS] + "…"
