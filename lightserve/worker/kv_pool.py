"""The KV tensors of one rank: one pool of token slots per layer."""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.models.kv_layout import KVLayout


class KVPool:
    """Keys and values of `num_slots` tokens; pages are touched only when they are written.

    In memory a head's tokens lie together, [num_kv_heads, num_slots + 1, head_dim]: what
    attention gathers is then in the order in which it multiplies, and consecutive slots need no
    gather.

        slot:  0 ······················ num_slots-1 │ num_slots
               └── the router gives these out ────┘ │ scratch: what pads CUDA graphs writes here
    """

    def __init__(self, layout: KVLayout, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        """Slots that can be given out; slot `num_slots`, behind them, belongs to nobody."""
        self.bytes_per_token = layout.bytes_per_token
        self.device = device
        self.tensors: list[Tensor] = []
        """One per group, [2, num_layers, num_kv_heads, num_slots + 1, head_dim], keys first."""
        self.k: list[Tensor] = []
        """One view [num_slots + 1, num_kv_heads, head_dim] per layer."""
        self.v: list[Tensor] = []
        for group in layout.groups:
            shape = (2, group.num_layers, group.num_kv_heads, num_slots + 1, group.head_dim)
            tensor = torch.empty(shape, dtype=getattr(torch, group.dtype), device=device)
            # Padding rows read the scratch slot: no garbage of before may become NaN.
            tensor.select(3, num_slots).zero_()
            self.tensors.append(tensor)
            keys, values = tensor.transpose(2, 3).unbind(0)
            self.k.extend(keys.unbind(0))
            self.v.extend(values.unbind(0))
