"""Who advances in a step: the interface of a policy."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lightserve.router.admission.base import AdmissionRound
from lightserve.router.request import Request


class Allotment(NamedTuple):
    """One request's share of a step: its next `num_tokens` tokens."""

    request: Request
    num_tokens: int


@dataclass(frozen=True)
class StepLimits:
    """What a step may use."""

    max_num_batched_tokens: int
    num_free_rows: int


class Policy(Protocol):
    """Chooses the rows of a step. Changes nothing; the core commits what was chosen."""

    def select(
        self,
        running: Collection[Request],
        waiting: Iterable[Request],
        limits: StepLimits,
        admission: AdmissionRound,
    ) -> list[Allotment]:
        """Return who advances, each request at most once, each by 1 … num_schedulable_tokens.

        `running` comes in order of admission, without ended requests; `waiting` in the order
        of the queue. A waiting request may be chosen if `admission` admits it and a row is free.
        """
