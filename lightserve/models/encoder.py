"""Encoders of the BERT class: each token sees all others of its prompt, which is computed whole.

Devlin et al., 2019, sections 3 and A.2; with rotary positions and gates as Nomic Embed (Nussbaum et
al., 2024, section 3). No KV is kept, and there is no LM head. A cross-encoder scores a pair of
texts, which is one prompt (Nogueira and Cho, 2019, section 3).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lightserve.kernels.interface import AttentionBatch
from lightserve.models.base import DraftHead, ImageEncoding, KeepsStates, KVTensors, Part, Replaced
from lightserve.models.layers.attention import SelfAttention, rotary_table
from lightserve.models.layers.feed_forward import feed_forward
from lightserve.models.layers.linear import ModelContext, VocabEmbedding, VocabWeight, read_tensor
from lightserve.models.weight_files import EMBEDDING, POSITIONS, SCORE_DENSE, SCORE_OUT, TOKEN_TYPES

GPU_SHARE = 0.75
"""On a GPU, the shortest prompt of a group is at least this share of the longest: the rest is
padding, which costs less than a launch for each length."""


class Group(NamedTuple):
    """Prompts whose attention is one product, each as a line of the longest one's length."""

    tokens: Tensor
    """int64 [B, L], which of the step's tokens; for padding any of them."""
    places: Tensor
    """int64 [B, L], where their results stand; of padding behind all others."""
    mask: Tensor | None
    """bool [B, 1, 1, L], which are tokens; None: all."""


def groups_of(batch: AttentionBatch, share: float) -> list[Group]:
    """Return a step's prompts, those of about one length together.

    `share`: at least so much of the longest of a group is the shortest; 1: all are of one length,
    and no bit of a prompt depends on its neighbours. Waits for no device: rows are sorted on both
    sides, which gives the same order.
    """
    num_tokens = len(batch.positions)
    lengths = batch.cu_seqlens_q.diff()
    order = lengths.argsort(stable=True)
    sorted_lengths = sorted(batch.host_q_lens)
    groups, end = [], len(sorted_lengths)
    while end and sorted_lengths[end - 1]:
        longest = sorted_lengths[end - 1]
        first = bisect_left(sorted_lengths, max(1, math.ceil(share * longest)))
        rows = order[first:end]
        steps = torch.arange(longest, device=rows.device)
        tokens = batch.cu_seqlens_q[:-1][rows].long()[:, None] + steps
        mask, places = None, tokens
        if sorted_lengths[first] < longest:
            is_token = steps < lengths[rows][:, None]
            tokens, places = tokens.clamp_max(num_tokens - 1), tokens.where(is_token, num_tokens)
            mask = is_token[:, None, None]
        groups.append(Group(tokens, places, mask))
        end = first
    return groups


class EncoderAttention(SelfAttention):
    """Attention of each row's new tokens, which are all that it has, to each other."""

    def attend(
        self, x: Tensor, groups: Sequence[Group], tables: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """x [T, hidden] -> [T, Hq * D]; `tables` has cos and sin, None: nothing is rotated."""
        num_tokens = x.shape[0]
        q, k, v = self._qkv(x).split_with_sizes(self._sizes, dim=-1)
        q, k, v = (
            part.reshape(num_tokens, -1, self._head_dim) for part in (*self.normalised(q, k), v)
        )
        q, k, v = self.prepared(q, k, v)
        if tables is not None:
            q, k = self._kernels.rotary(q, k, *tables)
        out = q.new_empty(num_tokens + 1, *q.shape[1:])
        for group in groups:
            own_q, own_k, own_v = (part[group.tokens].transpose(1, 2) for part in (q, k, v))
            mixed = functional.scaled_dot_product_attention(
                own_q, own_k, own_v, attn_mask=group.mask, scale=self._scale
            )
            out[group.places] = mixed.transpose(1, 2)
        return out[:num_tokens].flatten(1)

    def prepared(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return heads [T, H, D] as they are turned and attended; here they are what they were."""
        return q, k, v


class EncoderLayer:
    """x = norm(x + attention(x)); x = norm(x + mlp(x))."""

    def __init__(self, context: ModelContext, layer: int) -> None:
        prefix, config = f"model.layers.{layer}", context.config
        self._is_rotated = layer not in config.unrotated_layers
        self._attention = EncoderAttention(context, f"{prefix}.self_attn", layer=layer)
        self._mlp = feed_forward(context, layer)
        self._attention_norm, self._mlp_norm = (
            context.norm(f"{prefix}.{name}", size=config.hidden_size) for name in config.layer_norms
        )

    def __call__(self, x: Tensor, groups: Sequence[Group], tables: tuple[Tensor, Tensor]) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        heads = self._attention.attend(x, groups, tables if self._is_rotated else None)
        x, _ = self._attention_norm.add(self._attention.project(heads), x)
        x, _ = self._mlp_norm.add(self._mlp(x), x)
        return x


class EncoderModel:
    """Embeddings of words, positions and types, their norm, layers, and perhaps a score head."""

    def __init__(self, context: ModelContext) -> None:
        config, reader, hidden = context.config, context.reader, context.config.hidden_size
        assert config.encoder is not None
        self.config = config
        self.context_len = context.context_len
        self.draft_head: DraftHead | None = None
        self.recurrent: Sequence[KeepsStates] = ()
        self._rotary = rotary_table(context, config.rope, config.shape_of(0).rotary_dim)
        words = VocabWeight(
            reader,
            context.tp,
            EMBEDDING,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
        )
        self._words = VocabEmbedding(words, context.tp)
        self._positions: Tensor | None = None
        if config.position_offset is not None:
            rows = Part(config.position_offset, self.context_len)
            self._positions = read_tensor(reader, POSITIONS, rows.size, hidden, rows=rows)
        rows = Part(0, 1 + config.encoder.tells_pairs)
        self._types = read_tensor(reader, TOKEN_TYPES, rows.size, hidden, rows=rows)
        self._norm = context.norm("model.norm", size=config.hidden_size)
        self._layers = [EncoderLayer(context, layer) for layer in range(config.num_layers)]
        self._head: list[tuple[Tensor, Tensor]] = []
        """Weight and bias of the score head's two products."""
        if config.encoder.has_score_head:
            for name, size in ((SCORE_DENSE, hidden), (SCORE_OUT, 1)):
                weight = read_tensor(reader, f"{name}.weight", size, hidden)
                self._head.append((weight, read_tensor(reader, f"{name}.bias", size)))

    def forward(
        self, input_ids: Tensor, batch: AttentionBatch, kv: KVTensors, logit_rows: Tensor
    ) -> Tensor | None:
        """Return None: there are no logits."""
        return None

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor | None:
        """Return None: there are none."""
        return None

    def encode(self, pixels: Tensor) -> ImageEncoding:
        """Raise RuntimeError: an encoder of texts sees no images, and no plan brings it any."""
        raise RuntimeError("an encoder of texts sees no images")

    def hidden(
        self,
        input_ids: Tensor,
        batch: AttentionBatch,
        kv: KVTensors,
        logit_rows: Tensor | None,
        replaced: Replaced | None = None,
    ) -> Tensor:
        """See `Model.hidden`; every row's new tokens are all of its prompt. `kv` is not used."""
        if len(self._types) == 1:
            x = self._words(input_ids) + self._types
        else:
            kinds = input_ids // self.config.vocab_size
            words = self._words(input_ids - kinds * self.config.vocab_size)
            x = words + self._types.index_select(0, kinds)
        if self._positions is not None:
            x = x + self._positions.index_select(0, batch.positions)
        x = self._norm(x)
        tables = self._rotary.select(batch.positions)
        groups = groups_of(batch, GPU_SHARE if x.is_cuda else 1.0)
        for layer in self._layers:
            x = layer(x, groups, tables)
        return x if logit_rows is None else x.index_select(0, logit_rows)

    def scores(self, first: Tensor) -> Tensor:
        """Return the scores of pairs, [n, 1], from the states of their first tokens [n, hidden]."""
        (dense, dense_bias), (out, out_bias) = self._head
        return functional.linear(functional.linear(first, dense, dense_bias).tanh(), out, out_bias)
