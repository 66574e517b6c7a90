"""Time that is lent to best-effort requests in a step (architecture 7, step 6).

Deadlines alone lend too much. Longer steps keep real-time requests, and their KV, for longer: at
the same rate of arrival memory grows with the time of a step (Little's law), until newcomers wait
for it; and near capacity there is no time left in which it would fall again. So steps are kept to
the time at which real-time requests come to hold a share of the pool; the share is the smaller,
the less time is free, and it is left by and by as they hold more than that.

Below the knee of the cost model tokens cost next to nothing. A step is stretched by a share of
itself in any case, as far as there is free time, so that these are not left unused.
"""

from __future__ import annotations

from lightserve.router.demand import Outlook

IDLE_FLOORS = 2.0
"""Beyond the idle limit, so many times the shortest step: on slow machines that may be longer."""
MAX_SHARE = 0.85
"""Share of the pool that real-time requests may come to hold where most time is free."""
BUSY_SHARE, SHARE_PER_FREE = 0.1, 1.8
"""The share at full load, and its growth with the share of time that is free."""
OVER_SHARE, FADE = 0.1, 0.3
"""This much over its share nothing is lent, this much below that all of it."""
STRETCH_PER_FREE = 0.1
"""Share of a step by which it is stretched in any case, per share of time that is free."""


def lent_until_s(
    base_s: float, floor_s: float, held_share: float, outlook: Outlook, num_slots: int
) -> float:
    """Return how long a step may take, best-effort requests included, in seconds.

    Args:
        base_s: what its real-time requests take; 0: there are none.
        floor_s: what a step of one token takes.
        held_share: of the pool's slots, in real-time hands.
        outlook: what real-time requests ask for.
        num_slots: size of the pool.
    """
    free = min(1.0, max(0.0, 1.0 - outlook.load))
    share = min(MAX_SHARE, BUSY_SHARE + SHARE_PER_FREE * free)
    shortest_s = IDLE_FLOORS * floor_s
    limit_s = max(outlook.idle_limit_s, shortest_s)
    if outlook.kv_per_step_s > 0:
        limit_s = min(limit_s, share * num_slots / outlook.kv_per_step_s)
    limit_s *= min(1.0, max(0.0, (share + OVER_SHARE - held_share) / FADE))
    stretched_s = base_s * (1.0 + STRETCH_PER_FREE * free) if base_s > 0 else shortest_s
    return max(limit_s, stretched_s)
