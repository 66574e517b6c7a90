"""The forecast that knows how lengths are distributed: what it draws from, and what it is told."""

from __future__ import annotations

import numpy as np

from bench.memory.known_lengths import (
    ARRIVAL,
    POOLED,
    Found,
    TrueLengths,
    best_in_hindsight,
    grouped,
    reordered,
)
from lightserve.sim.traffic import Workload
from lightserve.types import RequestClass

RT = RequestClass.RT


def test_lengths_are_drawn_from_those_of_the_group_that_are_longer() -> None:
    truth = TrueLengths({"a": [5, 1, 9, 7], "b": [30]})
    uniforms = np.tile(np.array([0.0, 0.4, 0.7, 0.999], np.float32), (4, 1))
    generated = np.array([0, 5, 9, 0])
    keys = [(RT, "a"), (RT, "a"), (RT, "a"), (RT, "b")]
    drawn = truth.sample(generated, np.array([100, 100, 100, 20]), uniforms, keys)
    assert drawn[0].tolist() == [1, 5, 7, 9]
    assert drawn[1].tolist() == [7, 7, 9, 9], "longer than what is generated"
    assert drawn[2].tolist() == [10] * 4, "beyond the longest: one more"
    assert drawn[3].tolist() == [20] * 4, "cut at the limit"


def test_what_is_known_of_a_request() -> None:
    rows = Workload(
        np.array([10, 12, 40]),
        np.array([3, 9, 10]),
        np.array([16] * 3),
        ("x", "y", "x"),
        np.zeros(3),
    )
    assert set(grouped(rows, POOLED).clients) == {POOLED}
    assert grouped(rows, ARRIVAL).clients == ("x 3", "y 3", "x 5")
    one, two, three = grouped(rows, "2").clients
    assert one != two == three
    turned = reordered(rows, np.array([2, 0, 1]))
    assert turned.output_tokens.tolist() == [10, 3, 9] and turned.clients == ("x", "x", "y")


def test_the_best_quantile_is_the_fewest_steps_that_evict_no_more_than_may_be() -> None:
    bold, right, shy = Found(90, 3.0, 1.0), Found(100, 1.9, 1.0), Found(110, 0.5, 1.0)
    assert best_in_hindsight([bold, right, shy]) == right
    assert best_in_hindsight([bold, bold._replace(evicted_pct=2.5)]).evicted_pct == 2.5
