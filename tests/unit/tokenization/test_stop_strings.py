"""`StopMatcher` against a naive search of everything so far, after each piece."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightserve.tokenization.detokenizer import StopMatcher, Stopped

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


@given(PIECES, STOPS, st.booleans())
@settings(max_examples=1000, deadline=None)
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


@given(PIECES, STOPS)
@settings(max_examples=500, deadline=None)
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
