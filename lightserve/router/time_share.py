"""What share of the time of recent steps some requests got while they wanted more. Pure.

`Pipeline` tells it of every step that is sent; a policy that owes a least share asks it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY_S = 10.0
"""Time constant; what is owed is never more than the share of this."""


@dataclass(slots=True)
class TimeShare:
    """Sums over steps, the recent ones counting most."""

    total_s: float = 0.0
    given_s: float = 0.0

    def observe(self, step_s: float, given_s: float | None) -> None:
        """Note a step that was planned to take so long.

        `given_s`: what it takes longer because of them; None: they had all that they wanted, and
        nothing is owed to them any more.
        """
        if given_s is None:
            self.total_s = self.given_s = 0.0
            return
        keep = math.exp(-step_s / MEMORY_S)
        self.total_s = keep * self.total_s + step_s
        self.given_s = keep * self.given_s + given_s

    def owed_s(self, min_share: float) -> float:
        """Return the seconds that are missing from a share of the time; 0: none."""
        return max(0.0, min_share * self.total_s - self.given_s)
