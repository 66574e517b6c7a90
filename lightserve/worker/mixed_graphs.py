"""Steps with prompt chunks as CUDA graphs: chunks and decodes, all layers, in one launch.

A graph is recorded for a number of new tokens, whatever rows they belong to; a step runs as the
smallest that has room. What changes from step to step is read on the device, from one small table
that the host fills in one copy:

    rows         d  d  d  C  C  -          row of the tables; behind the last one no new tokens
    ends         1  2  3 40 50 50 …        new tokens up to the end of each row
    contexts    17  9 70 37 900  -         length of each row with its new tokens

Positions, places in the tables and the slots of new tokens are worked out from it in the graph, as
attention's lists are (`kernels.triton.plan`). Tokens behind the last one are padding: the padding
row's, whose KV goes to the scratch slot, and which no row attends. The graph ends with the hidden
states of all tokens, of which the step takes the ones that it wants: LM head and sampling are
launched one by one while the graph runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from lightserve.kernels.interface import (
    MAX_FEW_TOKENS,
    AttentionBatch,
    MostTokens,
    UnknownValues,
)
from lightserve.messages.common import size_within
from lightserve.worker.device import put
from lightserve.worker.graphs import Graphs, HostIntegers

MAX_TOKENS = 2048
"""Largest size unless --cuda-graph-max-tokens says otherwise; the start leaves out sizes from which
on launching takes the host a small part of the step (see `kept_sizes`)."""
LAUNCH_SHARE = 0.5
"""A graph gains where launching the kernels one by one takes the host this share of the step."""
_STEPS = ((64, 16), (128, 32), (640, 64), (1024, 128))
"""(up to this size, distance of a size to the next), from 16 on."""
_LAST_STEP = 256
_NUM_TIMED = 3
"""Replays of which the median counts."""


def mixed_ladder(max_tokens: int) -> tuple[int, ...]:
    """Return the numbers of new tokens to record, rising, the last of which is `max_tokens`."""
    sizes, size = [], 16
    while size < max_tokens:
        sizes.append(size)
        size += next((step for end, step in _STEPS if size < end), _LAST_STEP)
    return (*sizes, max_tokens) if max_tokens else ()


def kept_sizes(
    replay_s: Mapping[int, float], launch_s: Mapping[int, float], *, is_limited: bool
) -> tuple[int, ...]:
    """Return the sizes of a ladder that are worth their graphs, rising.

    A size that takes as long as a larger one only pads less: products are uneven in the number of
    their rows. And where the host launches a step in a small part of the time that it takes, a
    graph gains nothing, and padding costs.

    Args:
        replay_s: seconds of each size's graph on the device.
        launch_s: seconds that the host takes to launch the same pass kernel by kernel.
        is_limited: whether the largest size was asked for: then it is kept.
    """
    kept: list[int] = []
    for size in sorted(replay_s, reverse=True):
        gains = is_limited or launch_s[size] >= LAUNCH_SHARE * replay_s[size]
        if not kept and not gains:
            continue
        if not kept or replay_s[size] < min(replay_s[larger] for larger in kept):
            kept.append(size)
    return tuple(reversed(kept))


class MixedGraphs(Graphs):
    """Steps with chunks; sizes are numbers of new tokens."""

    unit = "new tokens"
    otherwise = "--cuda-graph-max-tokens 0 launches steps with prompts kernel by kernel"

    def _begin(self) -> None:
        """See `Graphs._begin`."""
        device = self._device
        self._step = torch.zeros(4, self._max_rows + 1, dtype=torch.int32, device=device)
        """Rows, ends, contexts and `DecodeTables.shifts`; the last entry stands for padding."""
        self._step[0].fill_(self._max_rows)
        self._tokens = torch.arange(self._sizes[-1], dtype=torch.int32, device=device)
        self._zero = torch.zeros(1, dtype=torch.int32, device=device)
        self._static = [self._step, self._tokens]
        self._hidden: Tensor | None = None
        """[largest size, hidden_size], of the last step."""

    def size_of(self, q_lens: HostIntegers) -> int | None:
        """Return the tokens of the graph that a step of such rows runs as; None: there is none.

        A graph has room for as many rows as tokens, and a row may have no new token.
        """
        num_tokens = int(np.sum(q_lens))
        if not num_tokens or len(q_lens) > self._max_rows:
            return None
        return size_within(self._sizes, max(num_tokens, len(q_lens)))

    def hidden(
        self,
        size: int,
        rows: HostIntegers,
        q_lens: HostIntegers,
        context_lens: HostIntegers,
        too_far: Tensor | None = None,
    ) -> Tensor:
        """Run a step as the graph of `size`, which `size_of` has named.

        Args:
            size: new tokens of the graph.
            rows: rows of the tables.
            q_lens: new tokens of each, which are in the tables.
            context_lens: length of each with its new tokens.
            too_far: int64 [rows] on the device, by how much these are too large; None: by nothing.

        Returns:
            Hidden states [at least T, hidden_size] of the step's tokens, in order. They are the
            graph's own: the next call overwrites them, behind what has been launched until then.
        """
        self._set(rows, q_lens, context_lens)
        if too_far is not None:
            self._step[2, : len(rows)].sub_(too_far)
        self._replays[size]()
        assert self._hidden is not None
        return self._hidden

    def unrecorded(
        self, size: int, rows: HostIntegers, q_lens: HostIntegers, context_lens: HostIntegers
    ) -> Tensor:
        """Run the same padded pass kernel by kernel; see `hidden`."""
        self._set(rows, q_lens, context_lens)
        return self._pass(size)

    @torch.inference_mode()
    def check(self) -> None:
        """Compare what every graph replays with the same padded pass, kernel by kernel.

        Three steps of rows that grow: prompts, then decodes, a few new tokens and further chunks
        behind them, so that each reads what the ones before it wrote. Every rank does the same.
        Tables are as before afterwards, what is in the pool is not.

        Raises:
            StartupError: a graph gives other bits.
        """
        tables, generator = self._tables, torch.Generator().manual_seed(0)
        for size in self._sizes:
            num_rows = min(self._max_rows, max(1, size // 24), 16)
            num_slots = (len(self._pool.k[0]) - 1) // num_rows - tables.num_state_slots
            steps = _check_steps(size, num_rows, min(tables.token_ids.shape[1] - 1, num_slots))
            if not steps:
                continue
            width = max(end for step in steps for _, end in step)
            tokens = torch.randint(
                self._model.config.vocab_size, (num_rows, width), generator=generator
            )
            with tables.with_rows(tokens):
                replayed = [found.clone() for found in self._each(self.hidden, size, steps)]
                one_by_one = self._each(self.unrecorded, size, steps)
                if not all(map(torch.equal, replayed, one_by_one)):
                    self._refuse(size, "replays other numbers than its kernels give one by one")

    def _each(
        self, run: Callable[..., Tensor], size: int, steps: Sequence[Sequence[tuple[int, int]]]
    ) -> Iterator[Tensor]:
        """Run steps of rows (new tokens, length with them) one after the other."""
        for step in steps:
            q_lens, ends = zip(*step, strict=True)
            yield run(size, range(len(step)), q_lens, ends)[: sum(q_lens)]

    @torch.inference_mode()
    def times(self, wait: Callable[[], None]) -> tuple[dict[int, float], dict[int, float]]:
        """Return the seconds of each size's graph, and of launching its pass kernel by kernel.

        The step is a prompt as long as the size, or as may be, over whatever is in the pool.
        `wait` returns when the device is idle.
        """
        replay_s, launch_s = {}, {}
        longest = self._tables.token_ids.shape[1] - 1
        for size in self._sizes:
            q_lens = [longest] * (size // longest) + [size % longest] * (size % longest > 0)
            rows = range(len(q_lens[: self._max_rows]))
            self._set(rows, q_lens[: len(rows)], q_lens[: len(rows)])
            taken = []
            for _ in range(_NUM_TIMED):
                wait()
                begun_s = time.perf_counter()
                self._replays[size]()
                wait()
                taken.append(time.perf_counter() - begun_s)
            begun_s = time.perf_counter()
            self._pass(size)
            launch_s[size] = time.perf_counter() - begun_s
            wait()
            replay_s[size] = sorted(taken)[_NUM_TIMED // 2]
        return replay_s, launch_s

    def keep(self, sizes: Sequence[int]) -> None:
        """Drop the graphs of all other sizes; at least one is kept."""
        self._sizes = tuple(sizes)
        self._replays = {size: self._replays[size] for size in sizes}

    def _set(self, rows: HostIntegers, q_lens: HostIntegers, context_lens: HostIntegers) -> None:
        """Put a step's rows where passes read them."""
        num_rows = len(rows)
        step = np.empty(self._step.shape, dtype=np.int32)
        step[0, :num_rows] = rows
        step[0, num_rows:] = self._max_rows
        step[1, :num_rows] = np.cumsum(q_lens)
        step[1, num_rows:] = step[1, num_rows - 1]
        step[2, :num_rows] = context_lens
        step[2, num_rows:] = 1
        step[3] = 0
        if self._tables.shifts is not None:
            step[3, :num_rows] = self._tables.shifts[np.asarray(rows)]
        put(step, self._step)

    def _run(self, size: int) -> None:
        """See `Graphs._run`: `size` new tokens. Keeps the hidden states."""
        hidden = self._pass(size)
        if self._hidden is None:  # the first warm-up, of the largest size
            self._hidden = torch.empty_like(hidden)
        self._hidden[:size].copy_(hidden)

    def _pass(self, size: int) -> Tensor:
        """Run the pass of `size` tokens, of the rows that are set and padding."""
        tables, num_rows = self._tables, min(self._max_rows, size)
        rows, ends, contexts, shifts = self._step
        tokens = self._tokens[:size]
        # Behind the last row's end all tokens are the last entry's, which has no end.
        owners = torch.searchsorted(ends[:-1], tokens, right=True)
        positions = tokens + (contexts - ends).index_select(0, owners)
        positions = torch.where(owners == self._max_rows, 0, positions).long()
        places = rows.index_select(0, owners).long() * tables.token_ids.shape[1] + positions
        batch = AttentionBatch(
            positions=positions,
            slot_mapping=tables.req_to_slot.view(-1).index_select(0, places).long(),
            req_to_slot=tables.req_to_slot,
            rows=rows[:num_rows].long(),
            cu_seqlens_q=torch.cat([self._zero, ends[:num_rows]]),
            context_lens=contexts[:num_rows],
            host_rows=UnknownValues("host_rows", num_rows),
            host_q_lens=UnknownValues("host_q_lens", num_rows),
            host_context_lens=UnknownValues("host_context_lens", num_rows),
            state_slots=tables.state_slots,
            kept=None if tables.kept is None else tables.kept.first(size),
            most=MostTokens(size, min(size, max(MAX_FEW_TOKENS, self._max_rows))),
            turned=None if tables.shifts is None else positions - shifts.index_select(0, owners),
        )
        input_ids = tables.token_ids.view(-1).index_select(0, places).long()
        return self._model.hidden(input_ids, batch, self._pool, None)


def _check_steps(size: int, num_rows: int, longest: int) -> list[list[tuple[int, int]]]:
    """Return steps of (new tokens, context) of each row, which begin empty: see `check`.

    Steps have as many tokens as `size` has room for; `longest` is the longest context.
    """
    ends, steps = [0] * num_rows, []
    for number in range(3):
        budget, step = size, []
        for row in range(num_rows):
            rest = num_rows - row - 1
            wanted = budget - rest  # the last row takes what is left
            if rest:
                wanted = (size // num_rows, 1, 3)[(row + number) % 3 if number else 0]
            new = max(0, min(wanted, budget - rest, longest - ends[row]))
            budget -= new
            ends[row] += new
            step.append((new, max(1, ends[row])))
        steps.append(step)
    return [step for step in steps if any(new for new, _ in step)]
