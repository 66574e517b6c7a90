"""What `--policy unified` can be told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class UnifiedOptions:
    """Fields are options of `lightserve serve`; defaults are theirs."""

    late_min_share: float = 0.1
    be_min_share: float = 0.0
    best_first: bool = True
    """Whether best-effort requests start by what they gain; otherwise as the queue has them."""
    long_prompt_tokens: int = 4096
    """AccelGen's bound of long prompts."""
