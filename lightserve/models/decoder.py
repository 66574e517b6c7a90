"""The decoder that Llama, Mistral and Qwen share: pre-norm attention and gated MLP.

Architectures differ by their configuration, and a few by their `Family`; see `families.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightserve.kernels.interface import (
    AttentionBatch,
    Can,
    Kernels,
    NotRecordableError,
    PassInputs,
)
from lightserve.models.base import (
    DraftHead,
    ImageEncoding,
    KeepsStates,
    KVTensors,
    Part,
    Replaced,
    TensorParallel,
)
from lightserve.models.config import ModelConfig
from lightserve.models.layers.attention import (
    Attention,
    AttentionInputs,
    SelfAttention,
    in_chunks,
    rotary_table,
)
from lightserve.models.layers.feed_forward import feed_forward
from lightserve.models.layers.linear import (
    Linear,
    LMHead,
    ModelContext,
    Norm,
    VocabEmbedding,
    VocabWeight,
    read_tensor,
    rounded_root,
)
from lightserve.models.layers.recurrent import RecurrentLayer, recurrent_layer
from lightserve.models.vision import VisionEncoder
from lightserve.models.weight_files import (
    DRAFT_JOIN,
    DRAFT_NORMS,
    EMBEDDING,
    EMBEDDING_NORM,
    LAYER_EMBEDDING,
    LAYER_NORM,
    LAYER_PROJECTION,
    LM_HEAD,
    LM_HEAD_BIAS,
    POSITIONS,
    PROJECT_IN,
    PROJECT_OUT,
)

log = logging.getLogger(__name__)


class DecoderLayer:
    """One layer: x = x + attention(norm(x)); x = x + mlp(norm(x)).

    The sum is kept apart as `residual`, so that each addition is fused with the norm after it.
    """

    def __init__(self, context: ModelContext, layer: int, attention: type[Attention]) -> None:
        prefix = f"model.layers.{layer}"
        hidden_size = context.config.hidden_size
        self._attention_norm = context.norm(f"{prefix}.input_layernorm", size=hidden_size)
        self._attention = attention(context, f"{prefix}.self_attn", layer=layer)
        self._mlp_norm = context.norm(f"{prefix}.post_attention_layernorm", size=hidden_size)
        self._mlp = feed_forward(context, layer)

    def attend(
        self, x: Tensor, residual: Tensor | None, inputs: AttentionInputs, kv: KVTensors
    ) -> tuple[Tensor, Tensor]:
        """Write every new token's KV and attend.

        Args:
            x: [T, hidden], the last layer's output, not yet added to the residual.
            residual: [T, hidden], None in the first layer; may be overwritten.
            inputs: batch and rotary tables of the pass.
            kv: pool, written.

        Returns:
            (heads [T, Hq * D], residual [T, hidden]) for `finish`.
        """
        if residual is None:
            return self._attention.mix(self._attention_norm(x), inputs, kv), x
        return self._attention.mix_behind(self._attention_norm, x, residual, inputs, kv)

    def finish(self, heads: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (x, residual), each [N, hidden], of any N of the tokens; their sum counts."""
        return self._mlp.behind(self._mlp_norm, self._attention.project(heads), residual)

    @property
    def states(self) -> KeepsStates:
        """The part of a layer that keeps states."""
        assert isinstance(self._attention, RecurrentLayer)
        return self._attention


class OutputNormLayer(DecoderLayer):
    """A layer that norms the results of its parts, too: x = x + norm(attention(norm(x))), as the
    MLP.

    `ModelConfig.layer_norms` names the four, in the order of their use.
    """

    _beside: Callable[[Tensor, Tensor], Tensor] | None = None
    """Gives the sum of the MLP's results and of others, by what the MLP has read."""

    def __init__(self, context: ModelContext, layer: int, attention: type[Attention]) -> None:
        prefix, size = f"model.layers.{layer}", context.config.hidden_size
        self._attention = attention(context, f"{prefix}.self_attn", layer=layer)
        self._mlp = feed_forward(context, layer)
        self._attention_norm, self._attention_output_norm, self._mlp_norm, self._mlp_output_norm = (
            context.norm(f"{prefix}.{name}", size=size) for name in context.config.layer_norms
        )

    def finish(self, heads: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.finish`."""
        added = self._attention_output_norm(self._attention.project(heads))
        x, residual = self._mlp.behind(self._mlp_norm, added, residual)
        if self._beside is not None:
            x = self._beside(x, residual)
        return self._mlp_output_norm(x), residual


class ParallelLayer(DecoderLayer):
    """x = x + attention(norm(x)) + mlp(norm(x)), with one norm for both or one for each."""

    def __init__(self, context: ModelContext, layer: int, attention: type[Attention]) -> None:
        prefix, config = f"model.layers.{layer}", context.config
        self._attention = attention(context, f"{prefix}.self_attn", layer=layer)
        self._mlp = feed_forward(context, layer)
        norms = [
            context.norm(f"{prefix}.{name}", size=config.hidden_size) for name in config.layer_norms
        ]
        self._attention_norm, self._mlp_norm = norms[0], norms[-1]

    def finish(self, heads: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.finish`."""
        return self._attention.project(heads) + self._mlp(self._mlp_norm(residual)), residual


class PostNormLayer(DecoderLayer):
    """x = norm(x + attention(x)); x = norm(x + mlp(x)).

    The second norm is left to the following layer, or to the model's last norm, which
    `ModelConfig.stored_names` makes that of the last layer: sums stay fused with their norms.
    """

    def __init__(self, context: ModelContext, layer: int, attention: type[Attention]) -> None:
        config = context.config
        prefix, size = f"model.layers.{layer}", config.hidden_size
        behind_attention, behind_mlp = config.layer_norms
        self._attention = attention(context, f"{prefix}.self_attn", layer=layer)
        self._attention_norm = context.norm(f"{prefix}.{behind_attention}", size=size)
        self._mlp = feed_forward(context, layer)
        if layer:
            self._norm_before = context.norm(f"model.layers.{layer - 1}.{behind_mlp}", size=size)

    def attend(
        self, x: Tensor, residual: Tensor | None, inputs: AttentionInputs, kv: KVTensors
    ) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.attend`."""
        if residual is not None:
            x, _ = self._norm_before.add(x, residual)
        return self._attention.mix(x, inputs, kv), x

    def finish(self, heads: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.finish`."""
        x, _ = self._attention_norm.add(self._attention.project(heads), residual)
        return self._mlp(x), x


class LayerInputs:
    """The embeddings of tokens that each layer of Gemma 4 has for itself: looked up by their ids,
    and made of the embedding that all layers have.
    """

    def __init__(self, context: ModelContext) -> None:
        config, reader, own = context.config, context.reader, context.config.gemma4
        assert own is not None
        size, hidden = own.input_size, config.hidden_size
        total = config.num_layers * size
        weight = VocabWeight(
            reader, context.tp, LAYER_EMBEDDING, vocab_size=own.input_vocab, hidden_size=total
        )
        self._embedding = VocabEmbedding(weight, context.tp)
        self._projection = context.whole(LAYER_PROJECTION, total, hidden)
        self._norm = context.norm(LAYER_NORM, size=size)
        self._size, self._hidden = size, hidden

    def __call__(self, input_ids: Tensor, x: Tensor) -> Tensor:
        """Return them side by side, [T, num_layers * size]; int64 ids [T], x [T, hidden]."""
        own = self._embedding(input_ids) * rounded_root(self._size, x.dtype)
        made = self._projection.apply(x) * self._hidden**-0.5
        made = self._norm(made.view(-1, self._size)).view_as(own)
        return (made + own) * math.sqrt(0.5)


class Gemma4Ending:
    """Behind a layer of Gemma 4: x = scale * (x + norm(project(GELU(gate(x)) * its embedding)))."""

    def __init__(self, context: ModelContext, layer: int) -> None:
        own, prefix = context.config.gemma4, f"model.layers.{layer}"
        assert own is not None
        hidden, size = context.config.hidden_size, own.input_size
        self._kernels = context.kernels
        self._scale = read_tensor(context.reader, f"{prefix}.layer_scalar", 1)
        self._part = slice(layer * size, (layer + 1) * size)
        if size:
            self._gate = context.whole(f"{prefix}.per_layer_input_gate", size, hidden)
            self._projection = context.whole(f"{prefix}.per_layer_projection", hidden, size)
            self._norm = context.norm(f"{prefix}.post_per_layer_input_norm", size=hidden)

    def __call__(
        self, x: Tensor, residual: Tensor, of_layers: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return both, whose sum counts; `of_layers`: embeddings of all layers, side by side."""
        if of_layers is not None:
            residual = x + residual
            gates = self._kernels.gelu(self._gate.apply(residual), of_layers[:, self._part])
            x = self._norm(self._projection.apply(gates))
        return x * self._scale, residual * self._scale


class Family(NamedTuple):
    """The parts of an architecture that its configuration does not describe."""

    layer: type[DecoderLayer] = DecoderLayer
    attention: type[Attention] = SelfAttention
    recurrent_layer: type[DecoderLayer] | None = None
    """Class of layers that keep a state; None: that of the others."""


PLAIN = Family()


class NextTokenHead:
    """The layer behind a model's last that guesses the token behind the next one.

    Of token t at position i, and the model's state h of position i - 1 behind its last norm,

        x_i = join([norm(embedding(t_i)); norm(h_{i-1})]),  a layer over x_1 … x_i,  a norm

    makes a state whose logits, by the model's own head, are of the token at position i + 1. What it
    keeps of position i depends on tokens up to i alone, as in every other layer. Embedding and
    output layer are the model's.

    Source: DeepSeek-V3 Technical Report (DeepSeek-AI 2024), section 2.2, with depth 1.
    """

    def __init__(
        self,
        context: ModelContext,
        layer: DecoderLayer,
        embed: Callable[[Tensor], Tensor],
        tables: Callable[[Tensor], tuple[Tensor, ...]],
    ) -> None:
        """`layer` is the last of the files; `embed` and `tables`: see `DecoderModel`."""
        size = context.config.hidden_size
        prefix = f"model.layers.{context.config.num_layers - 1}"
        self.dtype = context.reader.dtype
        self._layer, self._embed, self._tables = layer, embed, tables
        self._word_norm, self._state_norm, self._norm = (
            context.norm(f"{prefix}.{name}", size=size) for name in DRAFT_NORMS
        )
        self._join = context.whole(f"{prefix}.{DRAFT_JOIN}", size, 2 * size)
        self._passes = Passes(context.kernels, context.tp, self._through_layer)

    def states(
        self,
        input_ids: Tensor,
        before: Tensor,
        batch: AttentionBatch,
        kv: KVTensors,
        *,
        writes_only: bool = False,
    ) -> Tensor:
        """See `DraftHead.states`."""
        words = self._word_norm(self._embed(input_ids))
        x = self._join.apply(torch.cat([words, self._state_norm(before)], dim=-1))
        wanted = batch.rows[:0] if writes_only else None
        return self._passes.run(PassInputs(x, batch, self._tables(batch.positions), wanted), kv)

    def _through_layer(self, inputs: PassInputs, kv: KVTensors) -> Tensor:
        x, batch, (cos, sin, *_), wanted = inputs
        heads, residual = self._layer.attend(x, None, AttentionInputs(batch, cos, sin), kv)
        if wanted is not None:
            return x[:0]
        hidden, _ = self._norm.add(*self._layer.finish(heads, residual))
        return hidden


class DecoderModel:
    """Embedding, layers, norm and LM head."""

    def __init__(self, context: ModelContext, family: Family = PLAIN) -> None:
        config = context.config
        self.config = config
        self.context_len = context.context_len
        last = config.num_layers - 1 - config.has_draft_head
        windowed = [layer for layer, size in enumerate(config.sliding_windows) if size is not None]
        rotary_dim = config.shape_of(last).rotary_dim  # Gemma 4's last layer has no window
        self._rotary = rotary_table(context, config.rope, rotary_dim)
        self._local_rotary = None
        if config.local_rope is not None and windowed:
            rotary_dim = config.shape_of(windowed[0]).rotary_dim
            self._local_rotary = rotary_table(context, config.local_rope, rotary_dim)
        embedding, head = _vocab_weights(context)
        if config.has_normalised_head:
            head.normalise()
        self._embedding = VocabEmbedding(embedding, context.tp)
        root = rounded_root(config.hidden_size, context.reader.dtype)
        self._multiplier = config.embedding_multiplier or root
        self._project_in, self._project_out = _projections(context)
        self._embedding_norm: Norm | None = None
        if config.has_embedding_norm:
            self._embedding_norm = context.norm(EMBEDDING_NORM, size=config.hidden_size)
        self._positions: Tensor | None = None
        if config.position_offset is not None:
            self._positions = _positions(context, config.position_offset)
        self._layers = [
            _layer(context if layer < last else context.exact, family, layer)
            for layer in range(config.num_layers)
        ]
        self.draft_head: DraftHead | None = None
        if config.has_draft_head:
            own = self._layers.pop()
            self.draft_head = NextTokenHead(context, own, self._embedding, self._tables)
        numbers = () if config.recurrent is None else sorted(config.recurrent.layers)
        self.recurrent: Sequence[KeepsStates] = [self._layers[n].states for n in numbers]
        self._endings: list[Gemma4Ending] = []
        if config.gemma4 is not None:
            self._endings = [Gemma4Ending(context, layer) for layer in range(config.num_layers)]
        self._layer_inputs: LayerInputs | None = None
        if config.gemma4 is not None and config.gemma4.input_size:
            self._layer_inputs = LayerInputs(context)
        self._begin_pass = context.method.begin_pass
        self._kinds = _kinds(config)[: len(self._layers)]
        self._chunk: int | None = None
        """Size of the chunks within which layers of the first kind attend."""
        if (config.attention_chunk or context.context_len) < context.context_len:
            self._chunk = config.attention_chunk
        self._norm = context.norm("model.norm", size=config.hidden_size)
        self._passes = Passes(context.kernels, context.tp, self._through_layers)
        bias = head.read_bias(context.reader, LM_HEAD_BIAS) if config.lm_head_bias else None
        self._lm_head = LMHead(head, context.tp, context.method, bias=bias)
        self._vision = None if config.vision is None else VisionEncoder(context, config.vision)

    def forward(
        self, input_ids: Tensor, batch: AttentionBatch, kv: KVTensors, logit_rows: Tensor
    ) -> Tensor | None:
        """See `Model.forward`."""
        return self.logits(self.hidden(input_ids, batch, kv, logit_rows))

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor | None:
        """See `Model.logits`."""
        if not hidden.shape[0]:
            return self._lm_head.no_logits()
        if self._project_out is not None:
            hidden = self._project_out.apply(hidden)
        logits = self._lm_head(hidden, out)
        if logits is not None and self.config.logits_divisor != 1.0:
            logits.div_(self.config.logits_divisor)
        if logits is not None and (cap := self.config.logits_soft_cap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def encode(self, pixels: Tensor) -> ImageEncoding:
        """See `Model.encode`."""
        assert self._vision is not None
        return self._vision.encode(pixels)

    def hidden(
        self,
        input_ids: Tensor,
        batch: AttentionBatch,
        kv: KVTensors,
        logit_rows: Tensor | None,
        replaced: Replaced | None = None,
    ) -> Tensor:
        """See `Model.hidden`.

        Every token's KV is written in every layer, but past the last layer's attention only the
        tokens whose logits are wanted go on.
        """
        x = self._embedding(input_ids)
        if self._project_in is not None:
            x = self._project_in.apply(x)
        if self._multiplier != 1.0:
            x = x * self._multiplier
        deep: list[Tensor] = []
        if replaced is not None:
            values = replaced.values.to(x.dtype)
            sizes = [x.shape[1]] * (values.shape[1] // x.shape[1])
            own, *deep = values.split_with_sizes(sizes, dim=1)
            x = x.index_copy(0, replaced.places, own)
        if self._positions is not None:
            x = x + self._positions.index_select(0, batch.positions)
        if self._embedding_norm is not None:
            x = self._embedding_norm(x)
        turned = batch.positions if batch.turned is None else batch.turned
        tables = self._tables(turned)
        if self._layer_inputs is not None:
            if replaced is not None and (gemma4 := self.config.gemma4) is not None:
                input_ids = input_ids.index_fill(0, replaced.places, gemma4.pad_id)
            tables = (*tables, self._layer_inputs(input_ids, x))
        if replaced is not None and replaced.seen:
            batch = replace(batch, seen=replaced.seen)
        inputs = PassInputs(x, batch, tables, logit_rows)
        if replaced is not None and (deep or replaced.seen):  # recorded passes know neither
            return self._through_layers(inputs, kv, replaced.places, deep)
        return self._passes.run(inputs, kv)

    def _through_layers(
        self,
        inputs: PassInputs,
        kv: KVTensors,
        places: Tensor | None = None,
        deep: Sequence[Tensor] = (),
    ) -> Tensor:
        """Compute `hidden`; inputs are its x, cos and sin of each kind of layers, and their own.

        Each of `deep` is added to the tokens at `places` behind one of the first layers.
        """
        x, batch, tables, logit_rows = inputs
        self._begin_pass(batch)
        of_layers: Tensor | None = None
        if self._layer_inputs is not None:
            tables, of_layers = tables[:-1], tables[-1]
        kinds = [AttentionInputs(batch, tables[i], tables[i + 1]) for i in range(0, len(tables), 2)]
        if self._chunk is not None:
            kinds[0] = kinds[0]._replace(batch=in_chunks(batch, self._chunk))
        residual: Tensor | None = None
        for number, kind in enumerate(self._kinds[:-1]):
            layer = self._layers[number]
            heads, residual = layer.attend(x, residual, kinds[kind], kv)
            x, residual = layer.finish(heads, residual)
            if self._endings:
                x, residual = self._endings[number](x, residual, of_layers)
            if number < len(deep) and places is not None:
                x = x.index_add(0, places, deep[number])
        last = self._layers[-1]
        heads, residual = last.attend(x, residual, kinds[self._kinds[-1]], kv)
        if logit_rows is not None:
            if logit_rows.shape[0] == 0:
                return x[:0]
            heads = heads.index_select(0, logit_rows)
            residual = residual.index_select(0, logit_rows)
            if of_layers is not None:
                of_layers = of_layers.index_select(0, logit_rows)
        x, residual = last.finish(heads, residual)
        if self._endings:
            x, residual = self._endings[-1](x, residual, of_layers)
        hidden, _ = self._norm.add(x, residual)
        return hidden

    def _tables(self, positions: Tensor) -> tuple[Tensor, ...]:
        """Return cos and sin of each kind of layers; `_kinds` says which is which."""
        tables: tuple[Tensor, ...] = self._rotary.select(positions)
        if self.config.unrotated_layers:
            tables = (*tables, torch.ones_like(tables[0]), torch.zeros_like(tables[1]))
        if self._local_rotary is not None:
            tables = (*tables, *self._local_rotary.select(positions))
        return tables


def _layer(context: ModelContext, family: Family, layer: int) -> DecoderLayer:
    """Load a layer."""
    config = context.config
    if (states := config.shape_of(layer).states) is not None:
        layer_type = family.recurrent_layer or family.layer
        return layer_type(context, layer, recurrent_layer(states))
    layer_type = family.layer
    if config.is_parallel or config.is_post_norm:
        layer_type = ParallelLayer if config.is_parallel else PostNormLayer
    return layer_type(context, layer, family.attention)


def _kinds(config: ModelConfig) -> list[int]:
    """Return for each layer which tables it has: rotary ones, none, or local ones."""
    still, local = 1, 1 + bool(config.unrotated_layers)
    kinds = [still if layer in config.unrotated_layers else 0 for layer in range(config.num_layers)]
    if config.local_rope is not None:
        for layer, window in enumerate(config.sliding_windows):
            if window is not None:
                kinds[layer] = local
    return kinds


def _positions(context: ModelContext, offset: int) -> Tensor:
    """Load learned positions, [positions, hidden], whole on every rank."""
    shape = (context.config.max_position_embeddings, context.config.hidden_size)
    return read_tensor(context.reader, POSITIONS, *shape, rows=Part(offset, shape[0]))


def _projections(context: ModelContext) -> tuple[Linear | None, Linear | None]:
    """Load the products between the embedding's size and the layers', whole on every rank."""
    config = context.config
    inner, outer = config.hidden_size, config.embedding_size
    if inner == outer:
        return None, None

    first, last = (name.removesuffix(".weight") for name in (PROJECT_IN, PROJECT_OUT))
    return context.whole(first, inner, outer), context.whole(last, outer, inner)


def _vocab_weights(context: ModelContext) -> tuple[VocabWeight, VocabWeight]:
    """Load embedding and LM head, one and the same where they are tied.

    As transformers: a tied model may have either tensor or both, and both are kept when they
    differ.
    """
    config, reader = context.config, context.reader

    def load(name: str) -> VocabWeight:
        return VocabWeight(
            reader,
            context.tp,
            name,
            vocab_size=config.vocab_size,
            hidden_size=config.embedding_size,
        )

    if not config.tie_word_embeddings:
        return load(EMBEDDING), load(LM_HEAD)
    if not reader.has(EMBEDDING):
        head = load(LM_HEAD)
        return head, head
    embedding = load(EMBEDDING)
    if not reader.has(LM_HEAD):
        return embedding, embedding
    head = load(LM_HEAD)
    return embedding, embedding if torch.equal(embedding.tensor, head.tensor) else head


class Passes:
    """Runs a model's layers, recorded where the kernels can."""

    def __init__(
        self,
        kernels: Kernels,
        tp: TensorParallel,
        layers: Callable[[PassInputs, KVTensors], Tensor],
    ) -> None:
        """`layers` does one operation at a time."""
        self._layers = layers
        self._ranks = tp if tp.size > 1 else None
        self._kernels = kernels if Can.RECORD in kernels.can else None
        self._kv: KVTensors | None = None
        self._recorded: dict[tuple[bool, int, bool], Callable[[PassInputs], Tensor]] = {}
        """By whether all tokens are wanted, the stride of the table of slots, and whether the
        states of all rows change."""
        self._left: set[tuple[bool, int, bool]] = set()
        """Kinds of passes that cannot be recorded."""

    def run(self, inputs: PassInputs, kv: KVTensors) -> Tensor:
        """Return the hidden states of the wanted tokens, and write the KV of all."""
        if self._kernels is None or not len(inputs.x) or _wants_none(inputs):
            return self._layers(inputs, kv)
        if kv is not self._kv:
            self._kv = kv
            self._recorded.clear()
        batch = inputs.batch
        key = (inputs.logit_rows is None, batch.req_to_slot.stride(0), batch.kept is None)
        if key in self._left:
            return self._layers(inputs, kv)
        recorded = self._recorded.get(key)
        if recorded is None:
            try:
                recorded = self._kernels.record(
                    lambda given: self._layers(given, kv), inputs, self._ranks
                )
            except NotRecordableError as error:
                if not self._left:
                    log.info("layers run one operation at a time, which takes longer: %s", error)
                self._left.add(key)
                return self._layers(inputs, kv)
            self._recorded[key] = recorded
        return recorded(inputs)


def _wants_none(inputs: PassInputs) -> bool:
    return inputs.logit_rows is not None and not len(inputs.logit_rows)
