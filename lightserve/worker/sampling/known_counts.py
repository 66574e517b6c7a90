"""How often each token is known in rows with penalties: kept on a GPU from step to step.

    counts[row, token]    of the row's first `num_counted[row]` known tokens

Nothing tells it of tokens that are drawn: before a row's penalties are applied, the kernel of
`kernels.triton.sampling_adjust` counts what the token table has beyond `num_counted`. That is one
token in steady decoding, none when the same token is drawn once more (its grammar was not ready),
and everything when a sequence has come to the row, new, resumed or from another row.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KnownCounts:
    """Of one rank's rows."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
        """As `count_kernel` has it."""
        self.num_counted = torch.zeros(num_rows, dtype=torch.int32, device=device)

    def begin(self, rows: Tensor) -> None:
        """Forget what was in rows, int64 [n], to which other sequences have come."""
        self.counts.index_fill_(0, rows, 0)
        self.num_counted.index_fill_(0, rows, 0)
