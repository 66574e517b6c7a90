"""No attack at all: what the uninvolved notice then is what the other rows compare with."""

from __future__ import annotations

import time

from bench.abuse.arena import Arena, Attack, Outcome
from bench.abuse.client import percentile

SECONDS = 8.0


def rest(arena: Arena) -> Outcome:
    """Watch for a while."""
    time.sleep(SECONDS)
    p99_ms = percentile(arena.seen().livez_ms, 0.99)
    return Outcome(f"/livez p99 {p99_ms:.1f} ms", met=p99_ms <= 100)


ATTACKS = [
    Attack("no attack, worker idle", rest, "-", "/livez p99 <= 100 ms", has_victim=False),
    Attack("no attack, one stream", rest, "-", "/livez p99 <= 100 ms"),
]
