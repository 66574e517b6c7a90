"""How the KV pool is kept: choices of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lightserve.router.kv.prefix_node import EvictionOrder


class Preemption(StrEnum):
    """What becomes of the KV of a request whose memory is needed; choices of `--preemption`."""

    CHECKPOINT = "checkpoint"
    """It loses as much from its end as is needed, which is saved on the host (BROS)."""
    SWAP = "swap"
    """All that nobody else reads is saved and taken at once."""
    RECOMPUTE = "recompute"
    """All is given up, and computed again."""


@dataclass(frozen=True, kw_only=True)
class KVOptions:
    """What `KVStore` is made of."""

    cache_order: EvictionOrder | None = None
    """In which order cached prefixes go; None: nothing is cached."""
    block_size: int = 1
    """Slots per block of the allocator."""
    is_exclusive: bool = False
    """Whether a block belongs to one request; then nothing is cached."""
    preemption: Preemption = Preemption.RECOMPUTE
    clean_ahead_tokens: int = 0
    """Tokens of the next victims that are kept on the host as well; -1: 2 % of the pool."""
    rt_cache_min_tokens: int = 0
    """Cached tokens of real-time requests that best-effort ones may not take."""
    max_retained_tokens: int = 0
    """Of each key, tokens that are kept longer where requests ask for it; -1: a tenth of the
    pool."""

    def num_retained(self, num_slots: int) -> int:
        """Return how many tokens of each key may be kept longer in a pool of `num_slots`."""
        return num_slots // 10 if self.max_retained_tokens < 0 else self.max_retained_tokens

    def num_clean_ahead(self, num_slots: int) -> int:
        """Return the tokens to be kept clean in a pool of `num_slots`."""
        if self.preemption is not Preemption.CHECKPOINT:
            return 0
        return num_slots // 50 if self.clean_ahead_tokens < 0 else self.clean_ahead_tokens
