"""One token per row: the same call on the CPU and on a GPU.

    constraint -> options that change logits, typical-p -> temperature -> min-p
        -> top-k and top-p -> draw

at one uniform number per row (`uniform_at`). A row's token is a function of its own logits, options
and known tokens, never of its neighbours. Tokens that top-k or top-p leave are drawn in the order
of falling probability, all others in the order of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.kernels.cpu.core import Core, CoreMissingError, load_core
from lightserve.messages.common import TokenLogprob
from lightserve.worker.sampling.interface import (
    Adjustments,
    LogprobTensors,
    Sampled,
    SamplingBatch,
    Tokens,
    bar_words,
    keep_typical,
    uniform_at,
)

# Log-probabilities of tokens: the model's own, before any option changed them.
#
# In two halves: `logprob_tensors` where the logits are, `to_token_logprobs` on the host once its
# tensors are there.

PROMPT_ROWS = 64
"""Places of a prompt whose logits are there at a time: a vocabulary of them is large."""


def logprob_tensors(
    logits: Tensor, token_ids: Tensor, num_top: int, is_finite: Tensor | None = None
) -> LogprobTensors:
    """Return log-probabilities of given tokens and of the most probable ones.

    Args:
        logits: [n, vocab], float32 on the CPU, n >= 1.
        token_ids: int64 [n].
        num_top: how many of the most probable ones, the same for each row.
        is_finite: bool [n], whether each row's logits are, if that is known.
    """
    num_top = min(num_top, logits.shape[1])
    if logits.device.type != "cpu":
        # Triton: an optional dependency, which a CPU does without.
        from lightserve.worker.sampling.device import logprobs_on_device  # noqa: PLC0415

        return logprobs_on_device(logits, token_ids, num_top)
    if is_finite is None:
        is_finite = torch.isfinite(logits).all(dim=-1)
    return _on_host(logits, token_ids, num_top, is_finite)


def to_token_logprobs(tensors: LogprobTensors, num_top: Sequence[int]) -> list[TokenLogprob]:
    """Return tensors that have come to the host as one message per row, with its own number."""
    tokens, ids, values = (part.tolist() for part in tensors[:3])
    return [
        TokenLogprob(tokens[row], ids[row][:num], values[row][:num])
        for row, num in enumerate(num_top)
    ]


def _on_host(logits: Tensor, token_ids: Tensor, num_top: int, is_finite: Tensor) -> LogprobTensors:
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = (logits.gather(1, token_ids[:, None]) - total).squeeze(1)
    ids = torch.zeros(len(logits), num_top, dtype=torch.int64)
    if num_top:
        top = logits.topk(num_top, dim=-1)
        for row in range(len(logits)):
            ids[row] = _best(logits[row], top.values[row], top.indices[row])
    return LogprobTensors(chosen, ids.int(), logits.gather(1, ids) - total, is_finite)


def _best(logits: Tensor, values: Tensor, ids: Tensor) -> Tensor:
    """Return the ids of a row's largest logits, equal ones by id; int64 [n].

    `topk` takes any of the tokens that are equal at its end.
    """
    last = values[-1]
    above = ids[values > last]
    equal = (logits == last).nonzero().flatten()[: len(ids) - len(above)]
    found = torch.cat([above[_by_value(logits[above], above)], equal])
    # Without a number among them nothing is equal to anything; such rows mean nothing.
    return found if len(found) == len(ids) else ids


def _by_value(values: Tensor, ids: Tensor) -> Tensor:
    """Return the order of falling values, equal ones by rising id."""
    by_id = ids.argsort()
    return by_id[values[by_id].argsort(descending=True, stable=True)]


def sample(logits: Tensor, batch: SamplingBatch) -> Sampled:
    """Draw one token per row; on a GPU this waits for nothing.

    Args:
        logits: [L, vocab], float32 on the CPU, unchanged afterwards, L >= 1.
        batch: how; on the device of the logits.
    """
    token_ids, is_finite = _sample(logits, batch)
    rows, masks = batch.rows, batch.masks
    if masks is not None and masks.forced_rows is not None and masks.forced_ids is not None:
        token_ids.index_copy_(0, masks.forced_rows, masks.forced_ids)
        whole = logits.index_select(0, masks.forced_rows).isfinite().all(-1)
        is_finite.index_copy_(0, masks.forced_rows, whole)
    if not rows.logprob_indices:
        return Sampled(token_ids, is_finite, None)
    wanted, chosen, known = logits, token_ids, is_finite
    if len(rows.logprob_indices) < len(rows):
        wanted, chosen, known = (part[rows.logprob_rows] for part in (wanted, chosen, known))
    most = max(rows.num_logprobs)
    return Sampled(token_ids, is_finite, logprob_tensors(wanted, chosen, most, known))


def _sample(logits: Tensor, batch: SamplingBatch) -> Tokens:
    if logits.device.type == "cpu":
        return sample_on_host(logits, batch)
    # Triton: an optional dependency, which a CPU does without.
    from lightserve.worker.sampling.device import sample_on_device  # noqa: PLC0415

    return sample_on_device(logits, batch)


# ----------------------------------------------------------------------
# The sampler of the CPU: torch, vectorised over the batch, every row on its own.


# What requests do to their logits before a token is drawn, on the CPU, over all rows at once.
#
# A row is a function of its own logits, options and known tokens alone: nothing is kept between
# steps, so a recomputed row gets the same tokens. Rows without options cost nothing but a copy.


def adjust(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return logits, float32 [L, vocab], as constraints, bias, penalties and bars change them."""
    logits = logits.clone()
    if batch.masks is not None and batch.masks.indices:
        assert batch.masks.allowed is not None, "constraints of the CPU come unpacked"
        rows = torch.tensor(batch.masks.indices)
        logits[rows] = logits[rows].masked_fill_(~batch.masks.allowed, float("-inf"))
    options = batch.rows.adjustments
    if options is not None:
        _add_bias(logits, options)
        lengths = batch.positions[options.indices]
        if options.has_penalties:
            _penalise(logits, batch, options, lengths)
        _allow(logits, options)
        _bar_end(logits, options, lengths - options.num_prompt_tokens)
        bar_words(logits, options.indices, options, batch)
        temperature = batch.rows.temperature[options.indices]
        keep_typical(logits, options.indices, options, temperature)
    return logits


def _add_bias(logits: Tensor, options: Adjustments) -> None:
    if len(options.bias_values):
        rows = options.indices[options.bias_rows]
        logits[rows, options.bias_token_ids] += options.bias_values


def _penalise(logits: Tensor, batch: SamplingBatch, options: Adjustments, lengths: Tensor) -> None:
    """Apply the repetition penalty, then the penalties for frequency and presence."""
    starts = torch.zeros_like(lengths)
    if bool((options.repetition != 1).any()):
        some = (options.repetition != 1).nonzero().flatten()
        owner, tokens = _known(batch, options, some, starts[some], lengths[some])
        # A token that is there twice is written twice, with the same value.
        place = options.indices[owner] * logits.shape[1] + tokens
        values, factor = logits.view(-1)[place], options.repetition[owner]
        logits.view(-1)[place] = torch.where(values > 0, values / factor, values * factor)
    counts = (options.frequency != 0) | (options.presence != 0)
    if bool(counts.any()):
        some = counts.nonzero().flatten()
        starts = options.num_prompt_tokens[some].long()
        owner, tokens = _known(batch, options, some, starts, lengths[some])
        keys = owner * logits.shape[1] + tokens
        seen, number = keys.unique(return_counts=True)  # type: ignore[no-untyped-call]
        owner = seen // logits.shape[1]
        place = seen + (options.indices[owner] - owner) * logits.shape[1]
        logits.view(-1)[place] -= options.frequency[owner] * number + options.presence[owner]


def _known(
    batch: SamplingBatch, options: Adjustments, some: Tensor, starts: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (index among the A, token) of the known tokens start … end - 1 of some rows."""
    rows = batch.rows.rows[options.indices[some]].tolist()
    spans = zip(rows, starts.tolist(), ends.tolist(), strict=True)
    tokens = torch.cat([batch.token_ids[row, start:end] for row, start, end in spans])
    return some.repeat_interleave(ends - starts), tokens.long()


def _allow(logits: Tensor, options: Adjustments) -> None:
    """Bar tokens that are not in `allowed_token_ids`."""
    limited = options.indices[options.allowed_rows >= 0].tolist()
    for index, token_ids in zip(limited, options.allowed_token_ids, strict=True):
        row, allowed = logits[index], torch.from_numpy(token_ids)
        kept = row[allowed]
        row.fill_(float("-inf"))
        row[allowed] = kept


def _bar_end(logits: Tensor, options: Adjustments, num_output_tokens: Tensor) -> None:
    """Bar the end before `min_tokens`."""
    barred = (num_output_tokens < options.min_tokens)[:, None] & (options.eos_token_ids >= 0)
    owner, which = barred.nonzero(as_tuple=True)
    if len(owner):
        tokens = options.eos_token_ids[owner, which].long()
        logits[options.indices[owner], tokens] = float("-inf")


BLOCK = 256
"""Tokens of the vocabulary that a draw takes together at first."""
CANDIDATES = 256
"""Most probable tokens that top-k and top-p look at first."""
MORE = 32
"""Times as many are looked at next by the native core, where a row keeps more."""


def sample_on_host(logits: Tensor, batch: SamplingBatch) -> Tokens:
    """Return the tokens of float32 logits [L, vocab] on the CPU."""
    rows, core = batch.rows, _core()
    token_ids, is_finite = _scan(logits, core)
    if rows.adjustments is not None or batch.masks is not None:
        logits = adjust(logits, batch)
        token_ids, _ = _scan(logits, core)
        is_finite &= logits.gather(1, token_ids[:, None]).squeeze(1).isfinite()
    if not bool(is_finite.all()):
        logits = torch.where(is_finite[:, None], logits, 0.0)
    for is_truncated, chosen in ((True, rows.truncated), (False, rows.drawn)):
        if not chosen:
            continue
        numbers = _numbers(batch, chosen)
        options = _Options(
            rows.temperature[chosen, None],
            rows.min_p[chosen, None] if rows.has_min_p else None,
            rows.top_k[chosen, None].long(),
            rows.top_p[chosen, None],
        )
        if core is None:
            some = logits if len(chosen) == len(rows) else logits[chosen]
            draw = _draw_truncated if is_truncated else _draw
            token_ids[chosen] = draw(_probabilities(some, options), options, numbers)
        else:
            native = _ChosenRows(core, logits, token_ids, chosen, options)
            draw_rows = native.draw_truncated if is_truncated else native.draw
            token_ids[chosen] = draw_rows(numbers)
    return Tokens(torch.where(is_finite, token_ids, 0), is_finite)


def _core() -> Core | None:
    """Return the native core, where there is one: it reads a vocabulary once or twice."""
    try:
        return load_core()
    except CoreMissingError:
        return None


def _scan(logits: Tensor, core: Core | None) -> tuple[Tensor, Tensor]:
    """Return the first of each row's largest logits, int64 [L], and whether all are finite."""
    if core is None:
        return _largest(logits), _finite_rows(logits)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, vocab_size = logits.shape
    largest = torch.empty(num_rows, dtype=torch.int64)
    is_finite = torch.empty(num_rows, dtype=torch.bool)
    core.drawing.scan(
        logits.data_ptr(),
        logits.stride(0),
        num_rows,
        vocab_size,
        largest.data_ptr(),
        is_finite.data_ptr(),
        int(core.level),
        torch.get_num_threads(),
    )
    return largest, is_finite


class _Options(NamedTuple):
    """Options of some rows, each [rows, 1]."""

    temperature: Tensor
    min_p: Tensor | None
    top_k: Tensor
    top_p: Tensor

    def of(self, rows: Tensor) -> _Options:
        min_p = None if self.min_p is None else self.min_p[rows]
        return _Options(self.temperature[rows], min_p, self.top_k[rows], self.top_p[rows])


class _ChosenRows:
    """Rows that are drawn, as the native core reads them."""

    def __init__(
        self, core: Core, logits: Tensor, largest: Tensor, chosen: list[int], options: _Options
    ) -> None:
        """`logits` and `largest` are of all rows; logits are finite where they are largest."""
        self._core = core
        self._logits = logits if logits.stride(1) == 1 else logits.contiguous()
        self._options = options
        self._rows = torch.tensor(chosen)
        self._largest_of_all = largest
        self._largest = largest[self._rows]
        self._temperature = options.temperature.contiguous()
        self._min_p = None if options.min_p is None else options.min_p.contiguous()

    def draw(self, numbers: Tensor) -> Tensor:
        """Draw from the whole vocabulary, in its own order; int64 [rows]."""
        token_ids = torch.empty_like(self._rows)
        numbers = numbers.contiguous()
        self._core.drawing.draw(
            *self._inputs(), numbers.data_ptr(), token_ids.data_ptr(), *self._how()
        )
        return token_ids

    def draw_truncated(self, numbers: Tensor, count: int = CANDIDATES) -> Tensor:
        """Draw from the most probable tokens that top-k and then top-p keep; int64 [rows].

        `count` of them are looked at, and more for rows that keep more.
        """
        num_rows, vocab_size = len(self._rows), self._logits.shape[1]
        count = min(count, vocab_size)
        values = torch.empty(num_rows, count)
        order = torch.empty(num_rows, count, dtype=torch.int64)
        everything = torch.empty(num_rows, 1, dtype=torch.float64)
        outputs = (values.data_ptr(), order.data_ptr(), everything.data_ptr())
        self._core.drawing.top(*self._inputs(), count, *outputs, *self._how())
        top = _Top(values.double(), order, everything)
        drawn = _draw_from_top(top, self._options, numbers, vocab_size)
        missing = (~drawn.is_certain).nonzero().flatten()
        if len(missing):
            rest = _ChosenRows(
                self._core,
                self._logits,
                self._largest_of_all,
                self._rows[missing].tolist(),
                self._options.of(missing),
            )
            drawn.token_ids[missing] = rest.draw_truncated(numbers[missing], MORE * count)
        return drawn.token_ids

    def _inputs(self) -> tuple[int | None, ...]:
        return (
            self._logits.data_ptr(),
            self._logits.stride(0),
            self._logits.shape[1],
            self._rows.data_ptr(),
            len(self._rows),
            self._largest.data_ptr(),
            self._temperature.data_ptr(),
            None if self._min_p is None else self._min_p.data_ptr(),
        )

    def _how(self) -> tuple[int, int]:
        return int(self._core.level), torch.get_num_threads()


def _finite_rows(logits: Tensor) -> Tensor:
    """Return whether all of each row is finite, bool [L]."""
    # One pass where all is well: a sum is finite only if its terms are.
    if bool(logits.sum().isfinite()):
        return torch.ones(logits.shape[0], dtype=torch.bool)
    return torch.isfinite(logits).all(dim=-1)


def _largest(logits: Tensor) -> Tensor:
    """Return the first of the largest logits of each row, int64 [L]."""
    # On a CPU numpy takes a tenth of torch's time for the same.
    return torch.from_numpy(logits.numpy().argmax(axis=-1))


def _numbers(batch: SamplingBatch, chosen: list[int]) -> Tensor:
    """Return each chosen row's uniform number, float64 [rows, 1]."""
    states = batch.rows.states.numpy().view(np.uint64)[chosen]
    positions = batch.positions.numpy().view(np.uint64)[chosen]
    return torch.from_numpy(uniform_at(states, positions))[:, None]


def _probabilities(logits: Tensor, options: _Options) -> Tensor:
    """Return softmax(logits / temperature) without tokens that min-p drops, float32 [L, vocab]."""
    # The largest logit becomes 0 first, so that small temperatures cannot overflow.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).div_(options.temperature)
    torch.softmax(scaled, dim=-1, out=scaled)
    if options.min_p is not None:
        least = options.min_p * scaled.amax(-1, keepdim=True)
        scaled.masked_fill_(scaled < least, 0.0)
    return scaled


def _draw(probabilities: Tensor, options: _Options, numbers: Tensor) -> Tensor:
    """Draw from the whole vocabulary, in its own order; int64 [L].

    First a block of tokens, then a token of it: running sums over everything are slow.
    """
    del options
    num_rows, vocab_size = probabilities.shape
    if vocab_size % BLOCK:
        probabilities = F.pad(probabilities, (0, -vocab_size % BLOCK))
    blocks = probabilities.view(num_rows, -1, BLOCK)
    totals = blocks.sum(dim=-1).double()
    cumulative = totals.cumsum(dim=-1)
    target = numbers * cumulative[:, -1:]
    block = _invert(cumulative, target)
    target -= cumulative.gather(1, block) - totals.gather(1, block)
    within = blocks[torch.arange(num_rows), block.squeeze(1)].double().cumsum(dim=-1)
    # The block's two sums differ by a rounding: the target must not pass the second one.
    target = torch.minimum(target, within[:, -1:] * (1 - 1e-15)).clamp(min=0.0)
    return (block * BLOCK + _invert(within, target)).squeeze(1)


def _draw_truncated(probabilities: Tensor, options: _Options, numbers: Tensor) -> Tensor:
    """Draw from the most probable tokens that top-k and then top-p keep; int64 [L]."""
    vocab_size = probabilities.shape[-1]
    top = _top_of(probabilities, min(CANDIDATES, vocab_size))
    drawn = _draw_from_top(top, options, numbers, vocab_size)
    missing = (~drawn.is_certain).nonzero().flatten()
    if len(missing):
        rest, everything = options.of(missing), _top_of(probabilities[missing], vocab_size)
        again = _draw_from_top(everything, rest, numbers[missing], vocab_size)
        drawn.token_ids[missing] = again.token_ids
    return drawn.token_ids


class _Drawn(NamedTuple):
    token_ids: Tensor
    """int64 [L]."""
    is_certain: Tensor
    """bool [L], False where tokens that were not looked at may be kept too."""


class _Top(NamedTuple):
    """The most probable tokens of some rows."""

    values: Tensor
    """float64 [rows, count], falling; a token's share is its value of `everything`."""
    order: Tensor
    """int64 [rows, count]."""
    everything: Tensor
    """float64 [rows, 1]."""


def _top_of(probabilities: Tensor, count: int) -> _Top:
    values, order = probabilities.topk(count, dim=-1)
    everything = probabilities.sum(dim=-1, keepdim=True, dtype=torch.float64)
    return _Top(values.double(), order, everything)


def _draw_from_top(top: _Top, options: _Options, numbers: Tensor, vocab_size: int) -> _Drawn:
    """Draw as if the vocabulary were each row's most probable tokens."""
    values, order, everything = top
    count = values.shape[1]
    top_k = torch.where(options.top_k > 0, options.top_k, vocab_size).clamp(max=vocab_size)
    cumulative = values.cumsum(dim=-1)
    limit = top_k.clamp(max=count)
    # What top-k leaves, of which top-p takes the smallest prefix that reaches its share.
    total = cumulative.gather(1, limit - 1)
    if count < vocab_size:
        total = torch.where(top_k > count, everything, total)
    in_top_p = (cumulative - values < options.top_p * total).sum(dim=-1, keepdim=True)
    last = torch.minimum(limit, in_top_p).clamp(min=1) - 1
    index = _invert(cumulative, numbers * cumulative.gather(1, last))
    token_ids = order.gather(1, torch.minimum(index, last)).squeeze(1)
    reaches = (top_k == vocab_size) & (cumulative[:, -1:] >= options.top_p * total)
    return _Drawn(token_ids, ((top_k <= count) | reaches).squeeze(1))


def _invert(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the first index at which the cumulative sum exceeds the target; int64 [L, 1]."""
    index = torch.searchsorted(cumulative, target, right=True)
    return index.clamp(max=cumulative.shape[-1] - 1)
