"""Embedding and LM head, each rank holding an equal range of the vocabulary.

The vocabulary is padded to a multiple of the number of ranks; padded rows are zero, and padded
logits are cut off after the gather.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lightserve.kernels.interface import Kernels
from lightserve.models.base import logits_dtype
from lightserve.models.layers.weights import WeightReader
from lightserve.models.parallel import Part, TensorParallel


class VocabWeight:
    """This rank's rows [ceil(vocab / size), hidden] of an embedding or LM-head matrix."""

    def __init__(
        self,
        reader: WeightReader,
        tp: TensorParallel,
        name: str,
        *,
        vocab_size: int,
        hidden_size: int,
    ) -> None:
        self.vocab_size = vocab_size
        num_rows = -(-vocab_size // tp.size)
        self.first_id = tp.rank * num_rows
        self.num_ids = max(0, min(num_rows, vocab_size - self.first_id))
        self.tensor = torch.empty(num_rows, hidden_size, dtype=reader.dtype, device=reader.device)
        self.tensor[self.num_ids :].zero_()
        reader.read_into(self.tensor[: self.num_ids], name, rows=Part(self.first_id, self.num_ids))


class VocabEmbedding:
    """Token ids to hidden states."""

    def __init__(self, weight: VocabWeight, tp: TensorParallel) -> None:
        self._weight = weight
        self._tp = tp

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Look up int64 ids [T] in 0 … vocab_size-1 -> [T, hidden], on every rank."""
        weight = self._weight
        if self._tp.size == 1:
            return functional.embedding(input_ids, weight.tensor)
        local_ids = input_ids - weight.first_id
        elsewhere = (local_ids < 0) | (local_ids >= weight.num_ids)
        hidden = functional.embedding(local_ids.masked_fill(elsewhere, 0), weight.tensor)
        return self._tp.all_reduce(hidden.masked_fill_(elsewhere.unsqueeze(1), 0))


class LMHead:
    """Hidden states to logits on rank 0.

    Keeps its weight in the kernels' layout and not `weight` itself, which only the embedding of
    a tied model goes on using.
    """

    def __init__(self, weight: VocabWeight, tp: TensorParallel, kernels: Kernels) -> None:
        self._weight = kernels.pack_weight(weight.tensor)
        self._vocab_size = weight.vocab_size
        self._device = weight.tensor.device
        self._dtype = logits_dtype(weight.tensor.dtype, self._device)
        self._tp = tp
        self._kernels = kernels

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor | None:
        """Return logits [L, vocab] on rank 0, None elsewhere; hidden [L, hidden].

        `out` [L, vocab] is filled and returned instead of a new tensor.
        """
        local = self._kernels.linear(hidden, self._weight, None)
        logits = self._tp.gather(local)
        if logits is None:
            return None
        logits = logits[:, : self._vocab_size]
        return logits.to(self._dtype) if out is None else out.copy_(logits)

    def no_logits(self) -> Tensor | None:
        """Return what a pass without wanted logits returns: [0, vocab], None beyond rank 0."""
        if self._tp.rank != 0:
            return None
        return torch.empty(0, self._vocab_size, dtype=self._dtype, device=self._device)
