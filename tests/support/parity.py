"""Comparison with transformers, teacher-forced on the reference's tokens.

A *sequence* is a random prompt and what the reference says after it. Whatever computes logits
for given sequences can be compared: here the model alone, driven pass by pass over a pool with
scattered slots (`DirectDriver`).

The reference is transformers in float32, for bfloat16 over the same (bfloat16) weights: then
the difference is lightserve's own rounding. Two bfloat16 computations differ by the rounding of
both, which puts some 6 of 100,000 positions beyond four ulps whatever computes
them; that comparison is made too (`logits_of`), but only reported and bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightserve.kernels.interface import FACTOR_BYTES, AttentionBatch
from lightserve.kernels.weights import StateBank
from lightserve.models.base import Model, kv_layout
from lightserve.worker.memory import KVPool

FP32_TIE = 1e-4
FP32_LOGPROB = 1e-4
FP32_EXCUSED_SHARE = 1e-3
BF16_TIE_ULPS = 4
CPU = torch.device("cpu")


@dataclass(frozen=True)
class TokenSequence:
    """Tokens and the reference's logits after each of them."""

    tokens: Tensor
    """int64 [N]."""
    logits: Tensor
    """float32 [N, vocab]."""


@dataclass(frozen=True)
class ParityReport:
    """Figures of the comparison over some positions."""

    num_positions: int = 0
    num_different: int = 0
    """Argmax differs and the reference's top two are not tied."""
    num_excused: int = 0
    """Argmax differs and they are."""
    max_logprob_delta: float = 0.0
    """Over all positions and the whole vocabulary."""

    def __add__(self, other: ParityReport) -> ParityReport:
        return ParityReport(
            self.num_positions + other.num_positions,
            self.num_different + other.num_different,
            self.num_excused + other.num_excused,
            max(self.max_logprob_delta, other.max_logprob_delta),
        )

    def holds(self, dtype: torch.dtype, *, logprob: float = FP32_LOGPROB) -> bool:
        """Whether the limits are kept; `logprob`: that of log-probabilities in float32."""
        if self.num_different:
            return False
        if dtype != torch.float32:
            return True
        return (
            self.max_logprob_delta <= logprob
            and self.num_excused <= FP32_EXCUSED_SHARE * self.num_positions
        )


def make_sequences(
    reference: Any, lengths: Sequence[tuple[int, int]], *, seed: int
) -> list[TokenSequence]:
    """Return one sequence per (prompt length, number of tokens that the reference adds)."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size = reference.config.vocab_size
    sequences = []
    for prompt_len, num_new in lengths:
        tokens = torch.randint(0, vocab_size, (prompt_len,), generator=generator)
        sequences.append(_continue(reference, tokens, num_new, generator))
    return sequences


@torch.inference_mode()
def _continue(
    reference: Any, tokens: Tensor, num_new: int, generator: torch.Generator
) -> TokenSequence:
    """Let the reference go on at temperature 1: greedily, random models repeat themselves."""
    new, known = tokens, None
    for _ in range(num_new):
        output = reference(new[None], past_key_values=known, use_cache=True)
        known = output.past_key_values
        new = output.logits[0, -1].float().softmax(-1).multinomial(1, generator=generator)
        tokens = torch.cat((tokens, new))
    return TokenSequence(tokens, reference(tokens[None], use_cache=False).logits[0].float())


@torch.inference_mode()
def logits_of(reference: Any, sequences: Sequence[TokenSequence]) -> list[Tensor]:
    """Return what another reference says to the same tokens, float32 [N, vocab] each."""
    return [reference(sequence.tokens[None]).logits[0].float() for sequence in sequences]


def compare(expected: Tensor, actual: Tensor, dtype: torch.dtype) -> ParityReport:
    """Compare logits [N, vocab] of the reference and of lightserve at the same positions."""
    top_two = expected.topk(2, dim=-1).values
    gap = top_two[:, 0] - top_two[:, 1]
    if dtype == torch.float32:
        tie = torch.full_like(gap, FP32_TIE)
    else:
        exponent = top_two[:, 0].abs().clamp(min=1e-30).log2().floor()
        tie = BF16_TIE_ULPS * torch.exp2(exponent - 7)
    differs = expected.argmax(-1) != actual.argmax(-1)
    delta = (expected.log_softmax(-1) - actual.log_softmax(-1)).abs().max().item()
    return ParityReport(
        num_positions=len(expected),
        num_different=int((differs & (gap >= tie)).sum()),
        num_excused=int((differs & (gap < tie)).sum()),
        max_logprob_delta=delta if math.isfinite(delta) else math.inf,
    )


def compare_all(
    sequences: Sequence[TokenSequence], actual: Sequence[Tensor], dtype: torch.dtype
) -> ParityReport:
    """Compare whole sequences and add up."""
    reports = (
        compare(sequence.logits, logits, dtype)
        for sequence, logits in zip(sequences, actual, strict=True)
    )
    return sum(reports, ParityReport())


class Chunk(NamedTuple):
    """A sequence's share of one pass."""

    row: int
    start: int
    num_tokens: int


def schedule(lengths: Sequence[int], *, chunk: int | None, num_decodes: int) -> list[list[Chunk]]:
    """Return passes over sequences 0 … that mix prefill chunks and decodes.

    Each sequence prefills in chunks (None: whole) up to its last `num_decodes` tokens, which
    go one at a time; every third sequence joins one pass after its neighbours.
    """
    done = [0] * len(lengths)
    passes: list[list[Chunk]] = []
    while any(computed < length for computed, length in zip(done, lengths, strict=True)):
        chunks = []
        for row, length in enumerate(lengths):
            if done[row] == length or row // 3 > len(passes):
                continue
            prefill = length - num_decodes - done[row]
            num_tokens = 1 if prefill <= 0 else min(prefill, chunk or prefill)
            chunks.append(Chunk(row, done[row], num_tokens))
            done[row] += num_tokens
        passes.append(chunks)
    return passes


class ScatteredPool:
    """A KV pool whose slots are handed out in random order."""

    def __init__(
        self,
        model: Model,
        *,
        num_kv_heads: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        is_small = dtype.itemsize == 1
        size = model.config.head_dim + (FACTOR_BYTES if is_small else 0)
        shape = (num_slots, num_kv_heads, size)
        latent = model.config.latent
        self.states: list[tuple[StateBank, ...]] = []
        # As a factor of 8-bit numbers, bytes of -1 are no number either.
        self.k, self.v = (
            [
                torch.full(shape, torch.nan, dtype=dtype, device=device)
                if not is_small
                else torch.full(shape, 0xFF, dtype=torch.uint8, device=device).view(dtype)
                for _ in range(model.config.num_layers)
            ]
            for _ in range(2)
        )
        if latent is not None:
            self.v = [pool[..., : latent.rank] for pool in self.k]


class DirectDriver:
    """Runs passes on a model, as a worker would, and collects logits at every position."""

    def __init__(
        self,
        model: Model,
        *,
        num_kv_heads: int,
        dtype: torch.dtype,
        lengths: Sequence[int],
        seed: int = 0,
        device: torch.device = CPU,
        num_generated: int | None = None,
    ) -> None:
        """`device`: where the model is; tokens and logits are on the host.

        `num_generated`: tokens at the end of each sequence that are no prompt's; None: all are.
        """
        self._prompt_lens = [0 if num_generated is None else n - num_generated for n in lengths]
        layout = kv_layout(
            model.config,
            tp_size=model.config.num_kv_heads // num_kv_heads,
            dtype=str(dtype).removeprefix("torch."),
        )
        num_states = layout.num_state_slots
        num_slots = sum(lengths) + num_states * len(lengths) + 8
        slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))
        self._model = model
        self._device = device
        self.pool: ScatteredPool | KVPool
        if num_states or len(layout.groups) > 1:
            self.pool = KVPool(layout, num_slots, device)
            for tensor in self.pool.tensors:
                tensor.fill_(torch.nan)
        else:
            self.pool = ScatteredPool(
                model, num_kv_heads=num_kv_heads, num_slots=num_slots, dtype=dtype, device=device
            )
        self.req_to_slot = torch.zeros(len(lengths), max(lengths), dtype=torch.int32)
        start = 0
        for row, length in enumerate(lengths):
            self.req_to_slot[row, :length] = slots[start : start + length]
            start += length
        self._table = self.req_to_slot.to(device)
        of_rows = slots[start : start + num_states * len(lengths)].view(len(lengths), -1)
        self._states = of_rows.int().to(device) if num_states else None

    @torch.inference_mode()
    def run_pass(self, tokens: Sequence[Tensor], chunks: Sequence[Chunk]) -> list[Tensor] | None:
        """Return logits [num_tokens, vocab] per chunk; None on ranks other than 0."""
        pieces = [tokens[c.row][c.start : c.start + c.num_tokens] for c in chunks]
        input_ids = torch.cat(pieces).to(self._device)
        wanted = torch.arange(len(input_ids), device=self._device)
        batch = self.batch(chunks)
        logits = self._model.forward(input_ids, batch, self.pool, wanted)
        if logits is None:
            return None
        return list(logits.cpu().float().split([c.num_tokens for c in chunks]))

    def batch(self, chunks: Sequence[Chunk]) -> AttentionBatch:
        positions = [torch.arange(c.start, c.start + c.num_tokens) for c in chunks]
        slots = [
            self.req_to_slot[c.row, at].long() for c, at in zip(chunks, positions, strict=True)
        ]
        rows = [c.row for c in chunks]
        q_lens = [c.num_tokens for c in chunks]
        context_lens = [c.start + c.num_tokens for c in chunks]
        offsets = torch.tensor([0, *q_lens]).cumsum(0)
        return AttentionBatch(
            positions=torch.cat(positions).to(self._device),
            slot_mapping=torch.cat(slots).to(self._device),
            req_to_slot=self._table,
            rows=torch.tensor(rows, device=self._device),
            cu_seqlens_q=offsets.to(self._device, torch.int32),
            context_lens=torch.tensor(context_lens, dtype=torch.int32, device=self._device),
            host_rows=tuple(rows),
            host_q_lens=tuple(q_lens),
            host_context_lens=tuple(context_lens),
            state_slots=self._states,
            host_prompt_lens=tuple(
                max(0, min(c.num_tokens, self._prompt_lens[c.row] - c.start)) for c in chunks
            ),
        )


def run_sequences(
    driver: DirectDriver,
    tokens: Sequence[Tensor],
    passes: Sequence[Sequence[Chunk]],
    *,
    before_pass: Callable[[int], None] | None = None,
) -> list[Tensor] | None:
    """Run all passes; return logits [N, vocab] per sequence, None on ranks other than 0."""
    pieces: list[list[Tensor]] = [[] for _ in tokens]
    for number, chunks in enumerate(passes):
        if before_pass is not None:
            before_pass(number)
        logits = driver.run_pass(tokens, chunks)
        if logits is not None:
            for chunk, piece in zip(chunks, logits, strict=True):
                pieces[chunk.row].append(piece)
    if not pieces[0]:
        return None
    return [torch.cat(sequence) for sequence in pieces]
