"""Builds a RouterCore from the server's configuration."""

from __future__ import annotations

from lightserve.config import ServeConfig
from lightserve.router.admission.registry import ADMISSION_RULES
from lightserve.router.core import CoreConfig, RouterCore
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.policies.registry import POLICIES


def make_core(config: ServeConfig, *, max_model_len: int, seed: int = 0) -> RouterCore:
    """Return a core with the configured policy and admission rule."""
    lengths = OutputLengths(max_output_tokens=max_model_len)
    return RouterCore(
        CoreConfig(
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_waiting_requests=config.max_waiting_requests,
            policy=POLICIES[config.policy](),
            admission=ADMISSION_RULES[config.admission](config, lengths, seed),
            lengths=lengths,
        )
    )
