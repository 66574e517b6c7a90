"""The gated feed-forward block."""

from __future__ import annotations

from torch import Tensor

from lightserve.models.context import ModelContext
from lightserve.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightserve.models.parallel import even_part


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up merged into one weight."""

    def __init__(self, context: ModelContext, prefix: str) -> None:
        config, tp = context.config, context.tp
        part = even_part(config.intermediate_size, tp)
        self._kernels = context.kernels
        self._gate_up = ColumnParallelLinear(
            context.method,
            context.reader,
            [(f"{prefix}.gate_proj", part), (f"{prefix}.up_proj", part)],
            in_size=config.hidden_size,
            has_bias=config.mlp_bias,
        )
        self._down = RowParallelLinear(
            context.method,
            context.reader,
            tp,
            f"{prefix}.down_proj",
            columns=part,
            out_size=config.hidden_size,
            has_bias=config.mlp_bias,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self._down(self._kernels.silu_and_mul(self._gate_up(x)))
