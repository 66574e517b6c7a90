"""What llguidance is told of the vocabularies of the families that are served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher
from support.tokenizers_made import write_byte_level, write_metaspace, write_sentencepiece

from lightserve.errors import GrammarError
from lightserve.messages.common import GrammarConstraint, JsonSchemaConstraint, RegexConstraint
from lightserve.structured import (
    MAX_GRAMMAR_BYTES,
    MAX_REGEX_BYTES,
    MAX_SCHEMA_BYTES,
    byte_vocabulary,
    compile_matcher,
    model_vocabulary,
)
from lightserve.tokenization.tokenizer import Tokenizer

PADDING = 7
"""Ids of the model that the tokenizer does not know."""
WRITERS = [write_sentencepiece, write_byte_level, write_metaspace]


def allowed(matcher: LLMatcher) -> list[int]:
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return [int(i) for i in np.unpackbits(mask, bitorder="little").nonzero()[0]]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("text", ["hello the hello", "hello", " a", "oleh"])
def test_every_way_through_a_grammar_spells_the_text(
    write: Callable[[Path], Path], text: str, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(write(tmp_path))
    vocab_size = max(tokenizer.largest_ids.values()) + 1 + PADDING
    vocabulary = model_vocabulary(tokenizer, vocab_size)
    assert vocabulary.vocab_size == vocab_size
    for first_choice in (0, -1):  # both ends of what is allowed, all the way
        matcher = compile_matcher(RegexConstraint(pattern=text), vocabulary)
        data = b""
        for _ in range(len(text.encode()) + 1):
            token_ids = allowed(matcher)
            assert token_ids and max(token_ids) < vocab_size - PADDING
            is_end = data == text.encode()
            assert (set(token_ids) == set(tokenizer.eos_token_ids)) is is_end
            if is_end:
                break
            token_id = token_ids[first_choice]
            assert not tokenizer.is_special(token_id)
            assert matcher.consume_token(token_id)
            data += tokenizer.bytes_of(token_id)
        assert data == text.encode()


@pytest.mark.parametrize("write", WRITERS[:2])
def test_single_bytes_spell_any_character(write: Callable[[Path], Path], tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path))
    vocab_size = max(tokenizer.largest_ids.values()) + 1
    vocabulary = model_vocabulary(tokenizer, vocab_size)
    matcher = compile_matcher(GrammarConstraint(grammar='start: "☃" | "♥"'), vocabulary)
    data = b""
    while (token_ids := allowed(matcher)) and token_ids[-1] not in tokenizer.eos_token_ids:
        data += tokenizer.bytes_of(token_ids[-1])
        assert matcher.consume_token(token_ids[-1])
    assert data.decode() in "☃♥"


@pytest.mark.parametrize(
    ("limit", "make"),
    [
        (MAX_SCHEMA_BYTES, lambda n: JsonSchemaConstraint(schema='{"const":"%s"}' % ("x" * n))),
        (MAX_REGEX_BYTES, lambda n: RegexConstraint(pattern="x" * (n + 12))),
        (MAX_GRAMMAR_BYTES, lambda n: GrammarConstraint(grammar='start: "a"#' + "x" * (n + 1))),
    ],
)
def test_limits_of_size(limit: int, make: Callable[[int], JsonSchemaConstraint]) -> None:
    vocabulary = byte_vocabulary()
    compile_matcher(make(limit - 12), vocabulary)
    with pytest.raises(GrammarError, match=f"at most {limit} bytes long, got {limit + 1}"):
        compile_matcher(make(limit - 11), vocabulary)


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ('{"a":1}', True),
        ('{ "a": 1 }', True),
        ('{\n    "a": 1\n}', True),
        ('{\r\n\t"a" : 1\r\n}', True),
        ('{  "a": 1}', False),
        ("{\n" + " " * 17 + '"a": 1}', False),
        ('\n{"a":1}', False),
    ],
)
def test_blanks_in_json_are_bounded(text: str, is_valid: bool) -> None:
    schema = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
    matcher = compile_matcher(JsonSchemaConstraint(schema=schema), byte_vocabulary())
    data = list(text.encode())
    assert (matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()) is is_valid
