"""Virtual hardware: how long a step takes, and what a recomputed prompt costs.

A100 with Llama-2-7B, fitted to public operator profiles (floor, then linear):

    T = max(9.4 ms, 64.1 us x new tokens + 2.25 ms)
        + 0.33 us x context of decodes + 3.5 ns x sum of chunk x context

and 21 us for each token whose KV is copied to the host or back (512 KiB at 25 GB/s).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VirtualHardware:
    """Coefficients of the step-time formula, in seconds."""

    floor_s: float
    per_new_token_s: float
    constant_s: float
    per_decode_context_s: float
    per_chunk_context_s: float
    """For each pair of a new prompt token and a token of its context."""
    per_copied_token_s: float
    """To the host or back."""
    kv_bytes_per_token: int

    def seconds(
        self, num_new: int, *, decode_context: float = 0, chunk_context: float = 0
    ) -> float:
        """Return the seconds of a step.

        Args:
            num_new: tokens computed, of prompts and decodes.
            decode_context: sum of the context lengths of decodes.
            chunk_context: sum over prompt tokens of the context each of them reads.
        """
        dense_s = max(self.floor_s, self.per_new_token_s * num_new + self.constant_s)
        attention_s = self.per_decode_context_s * decode_context
        return dense_s + attention_s + self.per_chunk_context_s * chunk_context


A100_LLAMA2_7B = VirtualHardware(
    floor_s=9.4e-3,
    per_new_token_s=64.1e-6,
    constant_s=2.25e-3,
    per_decode_context_s=0.33e-6,
    per_chunk_context_s=3.5e-9,
    per_copied_token_s=21e-6,
    kv_bytes_per_token=524_288,
)
"""The default of `lightserve simulate`."""
