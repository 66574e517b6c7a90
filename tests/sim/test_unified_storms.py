"""Storms over the unified planner: no hang, no leak, no circle, none starved or made late.

What is random, and what is checked at every move: `support.storms`.
"""

from __future__ import annotations

from collections import Counter

import pytest
from support.storms import storm

NUM_STORMS, PER_BLOCK = 10, 5


@pytest.mark.parametrize("block", range(NUM_STORMS // PER_BLOCK))
def test_every_request_gets_its_tokens(block: int) -> None:
    ends: Counter[str] = Counter()
    num_timed = 0
    for seed in range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
        over = storm(seed)
        ends += over.ends
        num_timed += over.policy.num_timed
    assert ends["whole"] > 10 * PER_BLOCK, "most requests get through"
    assert ends["stop string"] > 0
    assert num_timed > 10 * PER_BLOCK, "deadlines limited steps"
