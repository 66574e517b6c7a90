"""Batches of rows to sample, from parameters, without a model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import TypeAdapter

from lightserve.frontend.request_options import SAMPLING_TYPES, resolve_sampling
from lightserve.messages.common import RegexConstraint
from lightserve.messages.router_worker import AddSequence
from lightserve.types import PLAIN_SAMPLING, RowId, SamplingParams
from lightserve.worker.constraints import StepMasks
from lightserve.worker.sampling.interface import KnownCounts, SamplingBatch, Tokens
from lightserve.worker.sampling.sampler import sample_on_host
from lightserve.worker.sampling.table import SamplingTable


@dataclass(frozen=True)
class History:
    """What a row's options refer to."""

    token_ids: Sequence[int]
    num_prompt_tokens: int
    eos_token_ids: Sequence[int] = ()


MAX_VOCAB = 9001
"""Of rows that a GPU's sampler changes."""
_LEAST = 5e-324
"""The smallest number above 0."""
EXTREMES: dict[str, list[Any]] = {
    "temperature": [0, _LEAST, 1e-300, 1e-30, 1.0, 2.0],
    "top_p": [_LEAST, 1e-30, 0.5, 1.0],
    "top_k": [-1, 0, 1, 2, "vocabulary"],
    "min_p": [0, _LEAST, 0.5, 1.0],
    "seed": [-(2**63), 0, 2**63 - 1],
    "frequency_penalty": [-2.0, 0, _LEAST, 2.0],
    "presence_penalty": [-2.0, 0, _LEAST, 2.0],
    "repetition_penalty": [0.01, 1.0, 10.0],
    "logit_bias": [{}, {"0": 100.0}, {"0": -100.0, "1": -100.0, "2": _LEAST}],
    "allowed_token_ids": [None, [0, 1], [1, 2, 3], "vocabulary"],
    "min_tokens": [0, 1, 2**62],
}
"""The ends of each field's range."""


def extreme_rows(
    count: int, vocab_size: int, *, num_known: int
) -> list[tuple[SamplingParams, History]]:
    """Return rows that clients can have, with all fields at their ends, in chance combinations.

    Tokens 0 and 2 end the output. Known are one token, or `num_known` times the same one or two.
    """
    choose = random.Random(count)
    rows = []
    for number in range(count):
        fields: dict[str, Any] = {}
        for name, values in EXTREMES.items():
            value = choose.choice(values)
            if value == "vocabulary":
                value = vocab_size if name == "top_k" else list(range(vocab_size))
            if value is not None:
                fields[name] = TypeAdapter(SAMPLING_TYPES[name]).validate_python(value)
        params = resolve_sampling(PLAIN_SAMPLING, fields, vocab_size=vocab_size)
        known = [[1], [0, 1] * (num_known // 2), [vocab_size - 1] * num_known][number % 3]
        rows.append((params, History(known, 1, eos_token_ids=(0, 2))))
    return rows


def barred_tokens(params: SamplingParams, history: History, vocab_size: int) -> set[int]:
    """Return the tokens that a row may not draw."""
    barred = set(range(vocab_size)).difference(params.allowed_token_ids or range(vocab_size))
    if len(history.token_ids) - history.num_prompt_tokens < params.min_tokens:
        barred.update(history.eos_token_ids)
    return barred


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
    counts = KnownCounts(num_rows + 2, MAX_VOCAB, torch.device("cpu"))
    batch = SamplingBatch(
        table.rows(rows, upload), torch.tensor(at), token_ids, known_counts=counts
    )
    if allowed is None:
        return batch
    bits = np.packbits(allowed.numpy(), axis=1, bitorder="little")
    padded = np.pad(bits, ((0, 0), (0, -bits.shape[1] % 4)))
    masks = StepMasks(list(range(num_rows)), padded, allowed, frozenset(), frozenset())
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
