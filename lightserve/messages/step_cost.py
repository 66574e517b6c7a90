"""What a profile says of a worker's step times; part of its hello."""

from __future__ import annotations

import msgspec


class StepCoefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients of `lightserve.cost.model`, in seconds, none negative."""

    floor_s: float
    knee: float
    """New tokens up to which a step takes no longer than one token: AccelGen's pivot."""
    per_new_s: float
    """For each new token beyond the knee."""
    per_decode_s: float
    """For each row that computes one token."""
    per_chunk_s: float
    """For each row that computes more."""
    per_decode_context_s: float
    per_chunk_context_s: float
    """For each token that a row of several starts from: it is read once for all of them."""
    per_chunk_pair_s: float
    per_saved_token_s: float = 0.0
    """Copied to the host; 0: not measured."""
    per_loaded_token_s: float = 0.0
    """Copied back; 0: not measured."""
