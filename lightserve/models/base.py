"""What the engine sees of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch
from lightserve.models.config import ModelConfig


class KVPool(Protocol):
    """The KV of all layers, addressed by slots."""

    @property
    def k(self) -> Sequence[Tensor]:
        """Keys, one tensor [num_slots, num_kv_heads, head_dim] per layer."""

    @property
    def v(self) -> Sequence[Tensor]:
        """Values, as `k`."""


def logits_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type of the logits of a model of type `dtype`.

    The CPU's sampler computes with them as they are; a GPU's kernels read the model's own type, of
    which a copy in float32 would take twice the memory and say no more.
    """
    return torch.float32 if device.type == "cpu" else dtype


class Model(Protocol):
    """A loaded model, or one rank's part of it."""

    config: ModelConfig
    context_len: int
    """Longest sequence it was loaded for: positions must be below."""

    def forward(
        self, input_ids: Tensor, batch: AttentionBatch, kv: KVPool, logit_rows: Tensor
    ) -> Tensor | None:
        """Run one mixed pass of prefill chunks and decodes under `torch.inference_mode`.

        Args:
            input_ids: int64 [T], every id below vocab_size.
            batch: where each token stands and where its KV goes.
            kv: this rank's pool; the new tokens' slots are written.
            logit_rows: int64 [L], indices into the T tokens, L >= 0.

        Returns:
            logits [L, vocab_size] of `logits_dtype` on rank 0, None on the others. With L = 0 the
            LM head and the last layer's feed-forward are not computed.
        """

    def hidden(
        self, input_ids: Tensor, batch: AttentionBatch, kv: KVPool, logit_rows: Tensor | None
    ) -> Tensor:
        """Run the same pass up to the LM head; return its input [L, hidden_size].

        `logit_rows` None stands for all T tokens, in order.
        """

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor | None:
        """Return the logits of any rows of `hidden`, as `forward`; every rank must take part.

        They are put into `out`, [L, vocab_size] with L > 0, if rank 0 gives one.
        """
