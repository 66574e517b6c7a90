"""Executes plans: tables, one forward pass, sampling. Decides nothing.

`launch` puts a step into the device's queue and `finish` waits until its results are on the
host, so that the next step can be launched between the two. On a device the host waits nowhere
else: the tokens of the step before, which a step needs, are in the tables there.

    host     launch i ─► launch i+1 ─────► finish i ─► launch i+2 ─────► finish i+1
    device         └─ step i ──────────────┘└─ step i+1 ─────────────────┘└─ step i+2
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightserve.messages.common import GraphSizes, pack_int32
from lightserve.messages.images import EncoderWork, Image, digest_of
from lightserve.messages.router_worker import StepPlan, StepResult, check_states
from lightserve.models.base import Model, Replaced, TensorParallel
from lightserve.models.encoder import EncoderModel
from lightserve.models.pooling import Pooling
from lightserve.models.vision_config import projectors
from lightserve.types import RequestOutput, RowId
from lightserve.worker.constraints import Lengths, RowConstraints, StepMasks
from lightserve.worker.device import DeviceQueue
from lightserve.worker.draft_states import DraftStates, StateGraphs
from lightserve.worker.drafts import Proposer
from lightserve.worker.graphs import DecodeGraphs, DecodeTables
from lightserve.worker.head_drafts import HeadDrafts
from lightserve.worker.host_pool import HostPool
from lightserve.worker.images import RowImages
from lightserve.worker.memory import KVPool, StateTable
from lightserve.worker.mixed_graphs import MixedGraphs
from lightserve.worker.sampling.interface import KnownCounts, LogprobTensors, SamplingBatch
from lightserve.worker.sampling.sampler import (
    PROMPT_ROWS,
    logprob_tensors,
    sample,
)
from lightserve.worker.sampling.table import SamplingTable
from lightserve.worker.step_results import (
    DraftResults,
    Drawn,
    Pending,
    PromptLogprobs,
    StepMarks,
    Vectors,
    pooled,
    row_vectors,
    with_logits,
)
from lightserve.worker.tables import PromptSpan, SequenceTable, StepInputs


class _Passed(NamedTuple):
    """The results of a forward pass."""

    logits: Tensor | None
    """[L, vocab] of the rows that sample, of `logits_dtype`; None beyond rank 0."""
    prompt_hidden: Tensor
    """[sum of n, hidden_size] of the prompt spans' tokens, one span after the other."""
    vectors: Vectors | None = None
    """Vectors of the rows that ask for one, on the device; no tokens are drawn where all rows
    do."""


class ModelRunner:
    """One rank's model, pool and tables."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        tp: TensorParallel,
        *,
        host_pool: HostPool,
        queue: DeviceQueue,
        max_num_seqs: int,
        incarnation: int = 0,
        constraints: RowConstraints | None = None,
        pooling: Pooling | None = None,
        proposer: Proposer | None = None,
        max_drafted_tokens: int = 0,
    ) -> None:
        """Make the tables.

        Args:
            model: on the queue's device, as `pool` is.
            pool: KV of all layers.
            tp: this rank's group.
            host_pool: where `pool` is copied from and to.
            queue: the queue that steps are put into.
            max_num_seqs: rows of the tables.
            incarnation: of the worker group, see `StepResult`.
            constraints: enforces those of the sequences; rank 0 alone has it.
            pooling: of an encoder, all of whose rows are whole prompts.
            proposer: guesses drafts; None: no plan has any, or the model's own head guesses them.
            max_drafted_tokens: most tokens that rows with drafts have in a step, 0: no plan has
                any. Of a model with states their inputs are kept until the drafts are judged.
        """
        self._model = model
        self._head: HeadDrafts | None = None
        if model.draft_head is not None:
            proposer = self._head = HeadDrafts(model, model.draft_head, pool, tp, queue)
        self.max_drafted_tokens = max_drafted_tokens
        self.pool = pool
        self.host_pool = host_pool
        self._tp = tp
        self._queue = queue
        self._states = StateTable(max_num_seqs, pool, queue)
        vision = model.config.vision
        self._table = SequenceTable(
            max_num_seqs,
            model.context_len,
            queue,
            scratch_slot=pool.num_slots,
            state_slots=self._states.slots if pool.num_state_slots else None,
            proposer=proposer,
            placeholder=vision.placeholder if vision else 0,
        )
        self._draft_states = DraftStates(model, pool, self._states, queue, most=max_drafted_tokens)
        self._images = RowImages(model, queue, max_num_seqs)
        self._sampling = SamplingTable(max_num_seqs)
        self._known_counts: KnownCounts | None = None
        if queue.device.type != "cpu" and tp.rank == 0:
            vocab_size = model.config.vocab_size
            self._known_counts = KnownCounts(max_num_seqs, vocab_size, queue.device)
        self._incarnation = incarnation
        self._constraints = constraints
        self._pooling = pooling
        self._vector_rows: dict[RowId, tuple[int, ...]] = {}
        """Rows that are there for a vector, or with tokens for the logits of these."""
        self._graphs: DecodeGraphs | None = None
        self._mixed: MixedGraphs | None = None
        self._free_since = queue.mark()

    @property
    def tables(self) -> DecodeTables:
        """The state of all rows on the device, for `DecodeGraphs`."""
        table = self._table
        return DecodeTables(
            table.token_ids,
            table.req_to_slot,
            table.state_slots,
            self._images.shifts,
            self._draft_states.room,
        )

    @property
    def device(self) -> torch.device:
        """The device that steps run on."""
        return self._queue.device

    @property
    def max_num_seqs(self) -> int:
        """Rows of the tables."""
        return self._table.max_num_seqs

    @property
    def has_constraints(self) -> bool:
        """Whether constraints of sequences are enforced here."""
        return self._constraints is not None

    @property
    def graph_sizes(self) -> GraphSizes:
        """To which steps are padded."""
        return GraphSizes(
            () if self._graphs is None else self._graphs.sizes,
            () if self._mixed is None else self._mixed.sizes,
        )

    @property
    def context_len(self) -> int:
        """Longest sequence, in tokens."""
        return self._model.context_len

    def use_graphs(
        self,
        graphs: DecodeGraphs,
        mixed: MixedGraphs | None = None,
        states: StateGraphs | None = None,
    ) -> None:
        """Run steps of decodes alone as `graphs` from now on, others as `mixed`, and move the
        states of rows with drafts on as `states`; all captured."""
        self._graphs, self._mixed, self._draft_states.graphs = graphs, mixed, states

    @property
    def encoder(self) -> EncoderWork | None:
        """The work of the model's encoder of images; None: it has none."""
        vision = self._model.config.vision
        return None if vision is None else vision.work_within(self.context_len)

    @torch.inference_mode()
    def encode_any(self) -> None:
        """Encode a black image by two layers beside those that are kept, for the memory that all
        take; no effect without an encoder."""
        vision, image = self._model.config.vision, self.black_image(self.context_len)
        if vision is not None and image is not None:
            shape = (image.height, image.width, 3)
            black = torch.zeros(shape, dtype=torch.uint8, device=self.device)
            num_kept = vision.work_within(self.context_len).max_kept_tokens
            behind = max(1, len(projectors(vision))) * self._model.config.embedding_size
            size = max(behind, vision.merge**2 * vision.hidden_size)  # of a token in the layers
            kept = black.new_empty(num_kept * size * max(2, self.pool.k[-1].dtype.itemsize))
            self._model.encode(black).advance(2)
            del kept
            if vision.prompt.sees_itself:  # a layer reads all keys and values of a row at once
                slots = torch.zeros(self.context_len, dtype=torch.int64, device=self.device)
                read = [pool[slots] for pool in (self.pool.k[-1], self.pool.v[-1])]
                _ = [part.float() for part in read if part.dtype.itemsize == 1]

    def black_image(self, max_tokens: int = 64) -> Image | None:
        """Return a black image of about so many tokens at most; None: the model sees none."""
        if (vision := self._model.config.vision) is None:
            return None
        height, width = vision.processor.largest(max_tokens * vision.factor**2)
        pixels, num_tokens = bytes(3 * height * width), vision.num_tokens(height, width)
        digest, sees_itself = digest_of(height, width, pixels), vision.prompt.sees_itself
        return Image(0, num_tokens, height, width, pixels, digest, sees_itself)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan to its end; every rank does, rank 0's result counts."""
        return self.finish(self.launch(plan))

    @torch.inference_mode()
    def launch(
        self, plan: StepPlan, *, before_sampling: Callable[[], None] | None = None
    ) -> Pending:
        """Start one plan behind those that were launched before, and do not wait for it.

        On the CPU it has run when this returns.

        Args:
            plan: the next one.
            before_sampling: called when the forward pass is on its way: finishes the step before,
                see `Pending.must_precede`.

        Raises:
            ProtocolError: the plan's copies cannot be made, or the model has no such states;
                nothing was done.
            RuntimeError: the device is out of memory, or an earlier step failed on it.
        """
        begun_s = time.perf_counter()
        idle_since, start = self._free_since, self._queue.mark()
        check_states(plan, self.pool.num_state_slots)
        self.host_pool.check(plan)
        copies = self.host_pool.begin(plan)
        inputs = self._table.begin(plan)
        self._begin_vectors(plan)
        self._images.begin(plan)
        lengths = cache(lambda: inputs.lengths)
        masks = None if before_sampling is not None else self._begin_masks(plan, inputs, lengths)
        self._states.take_in(plan.slot_ranges)
        self.pool.copy(plan.state_loads, self._queue)
        passed = self._forward(inputs)
        self._images.encode(plan)
        self.pool.copy(plan.state_saves, self._queue)
        self._begin_sampling(plan)  # while the device has work
        if before_sampling is not None:
            waits_since_s = time.perf_counter()
            before_sampling()
            begun_s += time.perf_counter() - waits_since_s
            masks = self._begin_masks(plan, inputs, lengths)
        drawn = self._sample(inputs, passed, masks)
        prompts = self._prompt_logprobs(inputs.prompt_spans, passed.prompt_hidden)
        self._free_since = end = self._queue.mark()
        constraints = self._constraints
        return Pending(
            plan=plan,
            num_rows=len(inputs.rows),
            num_verified=inputs.num_verified,
            drawn=drawn,
            prompts=prompts,
            constrained_rows=(
                frozenset()
                if constraints is None
                else constraints.among(inputs.sampled_rows, lengths)
            ),
            marks=StepMarks(idle_since, start, end),
            copies=copies,
            encoding=self._images.take_time(),
            launch_s=0.0 if self.device.type == "cpu" else time.perf_counter() - begun_s,
        )

    def finish(self, pending: Pending) -> StepResult:
        """Wait for a launched step and return its result; steps are finished in order.

        Raises:
            RuntimeError: it failed on the device.
        """
        pending.marks.end.wait()
        token_ids, rows = pending.row_results()
        if self._constraints is not None and pending.constrained_rows:
            drawn = pending.drawn
            self._constraints.advance(
                drawn.rows, drawn.token_ids.tolist(), drawn.unready, pending.constrained_rows
            )
            if len(drawn.unready) == pending.num_rows:
                self._constraints.wait_for_any(drawn.rows)
        marks = pending.marks
        return StepResult(
            step_id=pending.plan.step_id,
            incarnation=self._incarnation,
            token_ids=pack_int32(token_ids.reshape(-1)),
            tokens_per_row=token_ids.shape[1],
            rows=rows,
            drafted=pack_int32(pending.drafted().reshape(-1)),
            num_verified=pending.num_verified,
            exec_s=marks.end.seconds_since(marks.start),
            idle_s=marks.start.seconds_since(marks.idle_since),
            copy_s=pending.copies.seconds(),
            encode_s=pending.encoding.seconds,
            encoded=pending.encoding.work,
            launch_s=pending.launch_s,
        )

    @torch.inference_mode()
    def copy_ahead(self, plan: StepPlan) -> None:
        """Make a launched plan's copies that are not waited for; this is not idle time.

        When its result has been sent, and always before the next plan is launched. Where copies
        run beside a step they have begun with it.
        """
        if plan.ahead_loads.slots:
            self.host_pool.end(plan)
            if not self.host_pool.overlaps_copies:
                self._free_since = self._queue.mark()

    def _begin_vectors(self, plan: StepPlan) -> None:
        """Take in which of a plan's new sequences are there for a vector."""
        for sequence in plan.sequences:
            self._vector_rows.pop(sequence.row, None)
            if sequence.output is not RequestOutput.TOKENS:
                self._vector_rows[sequence.row] = sequence.sampling.allowed_token_ids

    def _begin_sampling(self, plan: StepPlan) -> None:
        """Take in how a plan's new sequences are sampled."""
        rows = self._sampling.update(plan.sequences)
        if rows and self._known_counts is not None:
            self._known_counts.begin(self._queue.upload([np.array(rows, dtype=np.int64)])[0])

    def _begin_masks(
        self, plan: StepPlan, inputs: StepInputs, lengths: Lengths
    ) -> Callable[[], StepMasks] | None:
        """Start on the masks of constrained rows; None: there are none."""
        if self._constraints is None:
            free = all(sequence.constraint is None for sequence in plan.sequences)
            assert free or self._tp.rank != 0, "frontends refuse what is not enforced here"
            return None
        self._constraints.update(plan.left_rows, plan.sequences)
        return self._constraints.begin(inputs.sampled_rows, lengths, self._table.tokens_of)

    def _forward(self, inputs: StepInputs) -> _Passed:
        """Run the model: as a graph where there is one for the step."""
        if self._pooling is not None:
            return self._encode(inputs, self._pooling)
        graphs = self._graphs
        if not len(inputs.rows):  # the step encodes images alone
            return _Passed(None, torch.empty(0, 0, device=self._queue.device))
        images = self._images.embedded(inputs)
        indices: list[int] = []
        if self._vector_rows:  # where none ever came, no step looks for them
            indices = [i for i, row in enumerate(inputs.sampled_rows) if row in self._vector_rows]
        is_covered = graphs is not None and graphs.covers(len(inputs.rows))
        is_plain = inputs.is_plain_decode and images is None and not indices
        if graphs is not None and is_covered and is_plain:
            logits = graphs.logits(inputs.rows, inputs.context_lens - 1, inputs.too_far)
            if self._head is not None:
                input_ids, _ = self._table.unrecorded(inputs)
                states = graphs.states(len(inputs.rows))
                self._head.take_in(inputs, input_ids, states, self._table.req_to_slot)
            return _Passed(logits, torch.empty(0, 0, device=self._queue.device))
        hidden = self._hidden(inputs, images)
        num_sampled = len(inputs.sampled_rows)
        prompt_hidden = hidden[num_sampled:]
        if not indices:
            return _Passed(self._model.logits(hidden[:num_sampled]), prompt_hidden)
        drawn = sorted(set(range(num_sampled)).difference(indices))
        # Not as lists: torch would wait for the device while it brings them there.
        own_rows, drawn_rows = self._queue.upload(
            [np.array(part, dtype=np.int64) for part in (indices, drawn)]
        )
        states = hidden.index_select(0, own_rows)
        asked = {i: ids for i in indices if (ids := self._vector_rows[inputs.sampled_rows[i]])}
        vectors = row_vectors(indices, states)
        vectors = with_logits(vectors, asked, states, self._model.logits, self._queue)
        if not drawn:
            return _Passed(None, prompt_hidden, vectors)
        logits = self._model.logits(hidden.index_select(0, drawn_rows))
        if logits is not None:
            # Rows of vectors are drawn as well, which means nothing, but cost no product.
            all_rows = logits.new_zeros(num_sampled, logits.shape[1])
            logits = all_rows.index_copy_(0, drawn_rows, logits)
        return _Passed(logits, prompt_hidden, vectors)

    def _hidden(self, inputs: StepInputs, images: Replaced | None) -> Tensor:
        """Return the hidden states of the tokens whose logits are wanted."""
        wanted, kept = inputs.tensors.logit_rows, self._draft_states.hold(inputs)
        if self._head is not None:
            assert images is None and kept is None, "no model has both"
            input_ids, batch = self._table.unrecorded(inputs)
            hidden = self._recorded(inputs)
            if hidden is None:
                hidden = self._model.hidden(input_ids, batch, self.pool, None)
            hidden = hidden[: len(input_ids)]
            self._head.take_in(inputs, input_ids, hidden, self._table.req_to_slot)
            return hidden.index_select(0, wanted)
        turned = self._images.turned(inputs)
        if images is not None or (turned is not None and turned.ndim > 1):
            own = self._table.unrecorded(inputs, turned, kept)
            return self._model.hidden(*own, self.pool, wanted, images)
        hidden = self._recorded(inputs)
        if hidden is not None:
            return hidden.index_select(0, wanted)
        return self._model.hidden(*self._table.unrecorded(inputs, turned, kept), self.pool, wanted)

    def _recorded(self, inputs: StepInputs) -> Tensor | None:
        """Return the hidden states of all tokens of a step, and perhaps more, by a graph of it.

        None: there is none.
        """
        graphs, mixed = self._graphs, self._mixed
        if graphs is not None and inputs.is_decode and graphs.covers(len(inputs.rows)):
            return graphs.hidden(inputs.rows, inputs.context_lens - 1, inputs.too_far)
        size = None if mixed is None else mixed.size_of(inputs.q_lens)
        if mixed is None or size is None:
            return None
        rows = inputs.rows, inputs.q_lens, inputs.context_lens, inputs.too_far
        return mixed.hidden(size, *rows)

    def _encode(self, inputs: StepInputs, pooling: Pooling) -> _Passed:
        """Run an encoder, each of whose rows is a prompt as a whole."""
        hidden = self._model.hidden(*self._table.unrecorded(inputs), self.pool, None)
        places = {row: place for place, row in enumerate(inputs.rows.tolist())}
        rows = [places[row] for row in inputs.sampled_rows]
        vectors = None
        if rows:
            own = pooled(hidden, inputs.q_lens.tolist(), rows, pooling)
            vectors = row_vectors(range(len(rows)), own)
            if isinstance(self._model, EncoderModel) and pooling is Pooling.SCORE:
                vectors = vectors._replace(values=self._model.scores(own.to(hidden.dtype)).float())
        return _Passed(None, hidden[:0], vectors)

    def _sample(
        self, inputs: StepInputs, passed: _Passed, masks: Callable[[], StepMasks] | None
    ) -> Drawn:
        """Draw the tokens of a step; tokens of rows that ask for a vector mean nothing."""
        rows, vectors = inputs.sampled_rows, passed.vectors
        if vectors is None:
            return self._draw(inputs, passed.logits, masks)
        vectors = vectors.on_host(self._queue)
        if len(vectors.indices) == len(rows):
            return Drawn(rows, torch.zeros(len(rows), dtype=torch.int64), vectors=vectors)
        return replace(self._draw(inputs, passed.logits, masks), vectors=vectors)

    def _draw(
        self, inputs: StepInputs, logits: Tensor | None, masks: Callable[[], StepMasks] | None
    ) -> Drawn:
        """Draw on rank 0, tell the others, and store the tokens for the next plan."""
        rows, queue = inputs.sampled_rows, self._queue
        if not rows:
            return Drawn([], torch.empty(0, dtype=torch.int64))
        if logits is None:
            empty = torch.empty(len(rows), dtype=torch.int64, device=queue.device)
            token_ids = self._tp.broadcast(empty)
            self._store(inputs, token_ids)
            return Drawn(rows, queue.download([token_ids])[0])  # read by rank 0 alone
        params = self._sampling.rows(rows, queue.upload)
        allowed = None if masks is None else masks()
        batch = SamplingBatch(
            params,
            inputs.tensors.sampled_positions,
            self._table.token_ids,
            None if allowed is None else allowed.upload(len(rows), queue.upload),
            self._known_counts,
        )
        sampled = sample(logits, batch)
        token_ids = self._tp.broadcast(sampled.token_ids)
        accepted = self._store(inputs, token_ids)
        fetched = queue.download([token_ids, sampled.is_finite, *(sampled.logprobs or ())])
        drafted = None
        if inputs.draws is not None and accepted is not None:
            own = inputs.draws.drafted
            found = queue.download([own.counts, accepted, own.sources])
            drafted = DraftResults(inputs.draws.firsts, own.decodes, *found)
        return Drawn(
            rows,
            fetched[0],
            is_finite=fetched[1],
            drafted=drafted,
            failed=frozenset() if allowed is None else allowed.failed,
            unready=frozenset() if allowed is None else allowed.unready,
            logprobs=None if sampled.logprobs is None else LogprobTensors._make(fetched[2:]),
            logprob_indices=params.logprob_indices,
            num_logprobs=params.num_logprobs,
        )

    def _store(self, inputs: StepInputs, token_ids: Tensor) -> Tensor | None:
        """See `SequenceTable.append`; the states of rows with drafts move on as far as these
        are accepted."""
        accepted = self._table.append(inputs, token_ids)
        if inputs.draws is not None and accepted is not None:
            self._draft_states.move_on(inputs.draws.drafted, accepted)
        return accepted

    def _prompt_logprobs(
        self, spans: list[PromptSpan], hidden: Tensor
    ) -> dict[RowId, PromptLogprobs]:
        """Return each span's log-probabilities on rank 0.

        `hidden` [sum of n, hidden_size] is that of all spans, one after the other.
        """
        found: dict[RowId, PromptLogprobs] = {}
        if not spans or self._pooling is not None:
            return found
        for span, own in zip(
            spans, torch.split(hidden, [len(s.next_ids) for s in spans]), strict=True
        ):
            parts: list[LogprobTensors] = []
            for part, next_ids in zip(
                torch.split(own, PROMPT_ROWS), torch.split(span.next_ids, PROMPT_ROWS), strict=True
            ):
                logits = self._model.logits(part) if len(part) else None
                if logits is not None:
                    tensors = logprob_tensors(logits, next_ids, span.num_top)
                    parts.append(LogprobTensors._make(self._queue.download(tensors)))
            found[span.row] = PromptLogprobs(parts, span.num_top)
        return found
