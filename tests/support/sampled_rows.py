"""Batches of rows to sample, from parameters, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightserve.messages.common import RegexConstraint
from lightserve.messages.router_worker import AddSequence
from lightserve.types import RowId, SamplingParams
from lightserve.worker.constraints import StepMasks
from lightserve.worker.sampling.host import sample_on_host
from lightserve.worker.sampling.interface import SamplingBatch, Tokens
from lightserve.worker.sampling.table import SamplingTable


@dataclass(frozen=True)
class History:
    """What a row's options refer to."""

    token_ids: Sequence[int]
    num_prompt_tokens: int
    eos_token_ids: Sequence[int] = ()


def upload(arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
    return [torch.from_numpy(array) for array in arrays]


def make_batch(
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    histories: Sequence[History | None] = (),
    allowed: torch.Tensor | None = None,
) -> SamplingBatch:
    """Put row i of the step into another row of the table.

    A history's length is its row's position. `allowed`, bool [L, vocab], is a constraint of every
    row.
    """
    num_rows = len(params)
    histories = histories or [None] * num_rows
    rows = [RowId(num_rows - index) for index in range(num_rows)]
    table = SamplingTable(num_rows + 1)
    known = [() if history is None else history.token_ids for history in histories]
    token_ids = torch.full((num_rows + 2, max(map(len, known)) + 1), -1, dtype=torch.int32)
    at = list(positions)
    for index, history in enumerate(histories):
        if history is not None:
            at[index] = len(history.token_ids)
            token_ids[rows[index], : at[index]] = torch.tensor(history.token_ids)
    constraint = None if allowed is None else RegexConstraint(pattern="")
    table.update(
        [
            AddSequence(
                rows[index],
                [],
                params[index],
                1 if history is None else history.num_prompt_tokens,
                [] if history is None else list(history.eos_token_ids),
                constraint,
            )
            for index, history in enumerate(histories)
        ]
    )
    batch = SamplingBatch(table.rows(rows, upload), torch.tensor(at), token_ids)
    if allowed is None:
        return batch
    bits = np.packbits(allowed.numpy(), axis=1, bitorder="little")
    padded = np.pad(bits, ((0, 0), (0, -bits.shape[1] % 4)))
    masks = StepMasks(list(range(num_rows)), padded, allowed, frozenset())
    return replace(batch, masks=masks.upload(num_rows, upload))


def draw(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    histories: Sequence[History | None] = (),
) -> Tokens:
    """Sample rows on the CPU."""
    if histories or len(set(map(id, params))) > 1:
        return sample_on_host(logits, make_batch(params, positions, histories))
    # Thousands of rows are sampled like one.
    table = SamplingTable(1)
    table.update([AddSequence(RowId(0), [], params[0], 1, [])])
    rows = table.rows([RowId(0)] * len(params), upload)
    empty = torch.empty((1, 1), dtype=torch.int32)
    return sample_on_host(logits, SamplingBatch(rows, torch.tensor(positions), empty))
