"""Drafts for tests: as many as a core may plan, whether they pay or not; a proposer that knows."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightserve.cost.model import StepShape
from lightserve.router.request_table import Decodes
from lightserve.router.scheduler import Scheduler
from lightserve.types import MAX_DRAFTS
from lightserve.worker.drafts import Proposal, Rows


def force_drafts(core: Scheduler, seed: int, *, most: int = MAX_DRAFTS) -> Scheduler:
    """Have a core plan any number of drafts that may be, in every step; returns it."""
    rng, drafting = random.Random(seed), core._planner.drafting
    if not most:
        return core
    drafting.most = most

    def choose(
        decodes: Decodes, shape: StepShape, seconds: object, *, room: int, **_: object
    ) -> npt.NDArray[np.int64]:
        del shape, seconds
        counts = [rng.choice((0, 1, most, rng.randint(0, most))) for _ in range(len(decodes))]
        drafts = np.minimum(np.array(counts, dtype=np.int64), drafting._most_of(decodes))
        while drafts.sum() > max(0, room):
            drafts[drafts.argmax()] -= 1
        return drafts if drafts.any() else drafts[:0]

    drafting.choose = choose  # type: ignore[method-assign]
    return core


class Scripted:
    """Proposes what sequences will be, each token wrong with some chance."""

    def __init__(self, sequences: Mapping[tuple[int, ...], list[int]], acceptance: float) -> None:
        """`sequences`: outputs by prompt."""
        self._sequences = [[*prompt, *output] for prompt, output in sequences.items()]
        self._acceptance = acceptance
        self._rng = random.Random(0)
        self.num_proposed = 0

    needs_lengths = needs_slots = False

    def begin(self, *_: object) -> None:
        pass

    def learn(self, *_: object) -> None:
        pass

    def propose(self, table: Tensor, rows: Rows) -> Proposal:
        most = int(rows.most.max())
        guesses = torch.zeros(len(rows.ids), most, dtype=torch.int64)
        counts = torch.zeros(len(rows.ids), dtype=torch.int64)
        for index, (row, length) in enumerate(zip(rows.ids, rows.lengths.tolist(), strict=True)):
            known = table[row, :length].tolist()
            whole = next((s for s in self._sequences if s[:length] == known), known)
            own = [
                token if self._rng.random() < self._acceptance else abs(token - 1)
                for token in whole[length : length + most]
            ]
            guesses[index, : len(own)] = torch.tensor(own, dtype=torch.int64)
            counts[index] = len(own)
            self.num_proposed += len(own)
        return Proposal(guesses, counts, torch.zeros_like(counts))
