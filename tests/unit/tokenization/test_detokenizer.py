"""Deltas joined are the decoding of the whole, for tokens that split characters at will."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.grids import choose, more_when_long
from support.tokenizers_made import write_byte_level, write_metaspace, write_sentencepiece

from lightserve.tokenization.detokenizer import StopMatcher, Stopped
from lightserve.tokenization.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Family:
    """One tokenizer and the library's own view of it."""

    def __init__(self, model_dir: Path) -> None:
        self.ours = Tokenizer(model_dir)
        self.theirs = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def deltas(self, token_ids: list[int], *, prompt: list[int]) -> list[str]:
        detokenizer = self.ours.detokenizer(prompt)
        return [*(detokenizer.push([token]) for token in token_ids), detokenizer.finish()]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(write_byte_level(tmp_path_factory.mktemp("byte-level")))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(write_sentencepiece(tmp_path_factory.mktemp("sentencepiece")))


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(write_metaspace(tmp_path_factory.mktemp("metaspace")))


def _byte_tokens(data: bytes, *, first_id: int) -> list[int]:
    return [first_id + byte for byte in data]


# Bytes as they come from characters cut anywhere, and bytes that are no characters at all.
CUT_TEXT = st.lists(
    st.one_of(
        st.text(max_size=4).map(str.encode),
        st.text(min_size=1, max_size=1).map(lambda char: char.encode()[:-1]),
        st.binary(max_size=3),
        st.sampled_from(["😀".encode(), "👩‍👩‍👧".encode(), "é".encode(), b"\xf0\x9f", b"\xff"]),
    ),
    max_size=8,
).map(b"".join)


@more_when_long
@settings(max_examples=choose(120, 400), deadline=None)
@given(data=CUT_TEXT, specials=st.sets(st.integers(0, 20)))
@example(data=b"\xf0\x9f\x98", specials=set())
@example(data=b"\xe2\x28\xa1", specials=set())
def test_byte_level_equals_the_library(byte_level: Family, data: bytes, specials: set[int]) -> None:
    table = byte_level.theirs.get_vocab()
    alphabet = {byte: table[char] for char, byte in _alphabet().items()}
    token_ids = [alphabet[byte] for byte in data]
    for position in specials:
        token_ids.insert(position, 1)  # EOS, which has no text
    deltas = byte_level.deltas(token_ids, prompt=[0])
    assert "".join(deltas) == byte_level.theirs.decode(token_ids, skip_special_tokens=True)
    assert "".join(deltas) == data.decode("utf-8", "replace") == byte_level.ours.decode(token_ids)
    for delta in deltas:
        assert delta.encode().decode() == delta


def _alphabet() -> dict[str, int]:
    from lightserve.tokenization.detokenizer import byte_level_alphabet

    return byte_level_alphabet()


@more_when_long
@settings(max_examples=choose(120, 400), deadline=None)
@given(data=CUT_TEXT, pieces=st.lists(st.tuples(st.integers(0, 12), st.integers(259, 269))))
def test_byte_fallback_splits_characters_anywhere(
    sentencepiece: Family, data: bytes, pieces: list[tuple[int, int]]
) -> None:
    token_ids = _byte_tokens(data, first_id=3)
    for position, piece in pieces:
        token_ids.insert(position, piece)
    whole = sentencepiece.ours.decode(token_ids)
    alone = sentencepiece.deltas(token_ids, prompt=[1])
    assert "".join(alone) == whole
    library = sentencepiece.theirs.decode(token_ids, skip_special_tokens=True)
    if REPLACEMENT not in library:  # where bytes are invalid, the library loses valid neighbours
        assert whole == library
    # After a prompt the first space is a part of the text, not an artefact.
    hello = [267]
    continued = sentencepiece.deltas(token_ids, prompt=hello)
    prefix = sentencepiece.theirs.decode(hello)
    library = sentencepiece.theirs.decode([*hello, *token_ids], skip_special_tokens=True)
    if REPLACEMENT not in library:
        assert prefix + "".join(continued) == library


@more_when_long
@settings(max_examples=choose(100, 300), deadline=None)
@given(token_ids=st.lists(st.integers(0, 13), max_size=12))
def test_metaspace_equals_the_library(metaspace: Family, token_ids: list[int]) -> None:
    library = metaspace.theirs.decode(token_ids, skip_special_tokens=True)
    assert metaspace.ours.decode(token_ids) == library
    assert "".join(metaspace.deltas(token_ids, prompt=[1])) == library


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("😀".encode(), ["", "", "", "😀", ""]),
        ("é!".encode(), ["", "é", "!", ""]),
        (b"\xf0\x9fA", ["", "", f"{REPLACEMENT}A", ""]),
        (b"\xf0\x9f\x98", ["", "", "", REPLACEMENT]),
        (b"\xffA", [REPLACEMENT, "A", ""]),
    ],
)
def test_characters_are_held_back_until_whole(
    sentencepiece: Family, data: bytes, expected: list[str]
) -> None:
    assert sentencepiece.deltas(_byte_tokens(data, first_id=3), prompt=[267]) == expected


def test_unknown_ids_have_no_text(byte_level: Family) -> None:
    assert byte_level.deltas([10_000_000], prompt=[0]) == ["", ""]


def test_added_tokens_that_are_not_special_are_text(byte_level: Family) -> None:
    token_id = byte_level.theirs.token_to_id("<tool call>")
    assert byte_level.ours.decode([token_id]) == "<tool call>"


# `StopMatcher` against a naive search of everything so far, after each piece.

PIECES = st.lists(st.text("abé", max_size=4), max_size=12)
STOPS = st.lists(st.text("abé", min_size=1, max_size=5), min_size=1, max_size=4)


def _naive(pieces: Sequence[str], stops: Sequence[str], *, include: bool) -> tuple[str, str, int]:
    """Return what is shown, the stop string (or nothing), and how many pieces were looked at."""
    text = ""
    for number, piece in enumerate(pieces, 1):
        text += piece
        found = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
        if found:
            start, _, stop = min(found)
            return text[: start + include * len(stop)], stop, number
    return text, "", len(pieces)


@more_when_long
@given(PIECES, STOPS, st.booleans())
@settings(max_examples=choose(120, 400), deadline=None)
def test_as_a_naive_search(pieces: list[str], stops: list[str], include: bool) -> None:
    matcher = StopMatcher(stops, include=include)
    shown, stop, num_pieces = "", "", 0
    for piece in pieces:
        num_pieces += 1
        found = matcher.push(piece)
        if isinstance(found, Stopped):
            shown, stop = shown + found.text, found.stop
            break
        shown += found
    else:
        shown += matcher.finish()
    assert (shown, stop, num_pieces) == _naive(pieces, stops, include=include)


@more_when_long
@given(PIECES, STOPS)
@settings(max_examples=choose(150, 500), deadline=None)
def test_no_more_is_held_back_than_could_become_a_stop_string(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops, include=False)
    shown = text = ""
    for piece in pieces:
        text += piece
        found = matcher.push(piece)
        if isinstance(found, Stopped):
            return
        shown += found
        held = text[len(shown) :]
        assert text == shown + held
        assert not held or any(stop.startswith(held) for stop in stops)
        ends = [text[start:] for start in range(len(shown))]
        assert not any(end and stop.startswith(end) for end in ends for stop in stops)


@pytest.mark.parametrize(
    ("stops", "piece", "expected"),
    [
        (["b", "ab"], "xab", Stopped("x", "ab")),  # begins first
        (["a", "ab"], "xab", Stopped("x", "ab")),  # the longest
        (["ab", "b"], "xb ab", Stopped("x", "b")),
    ],
)
def test_of_several_complete_at_once(stops: list[str], piece: str, expected: Stopped) -> None:
    assert StopMatcher(stops, include=False).push(piece) == expected
