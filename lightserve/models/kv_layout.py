"""How much memory a token's keys and values take: the only module that knows. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.models.config import ModelConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class KVGroup:
    """Layers whose KV has one shape and one lifetime."""

    num_layers: int
    num_kv_heads: int
    """KV heads of one rank."""
    head_dim: int
    dtype: str
    """Key of DTYPE_BYTES."""

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in all layers of the group, on one rank."""
        per_layer = 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]
        return self.num_layers * per_layer


@dataclass(frozen=True)
class KVLayout:
    """The KV of one rank; a list of groups, of which today's models have one."""

    groups: tuple[KVGroup, ...]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one slot takes on one rank."""
        return sum(group.bytes_per_token for group in self.groups)


def kv_layout(config: ModelConfig, *, tp_size: int, dtype: str) -> KVLayout:
    """Return the layout of each rank's KV pool; `dtype` is float32, bfloat16 or float16."""
    group = KVGroup(
        num_layers=config.num_layers,
        num_kv_heads=max(1, config.num_kv_heads // tp_size),
        head_dim=config.head_dim,
        dtype=dtype,
    )
    return KVLayout(groups=(group,))
