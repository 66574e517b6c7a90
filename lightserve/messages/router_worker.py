"""The link between the router and the workers.

Every rank gets every `StepPlan`; rank 0 alone answers with `StepResult`. Plans are executed in
order, and one plan may wait at the worker while another runs. Full data once (`AddSequence`),
then deltas.

Worker state that a plan refers to, per row r: `token_ids[r, position]` (written by
`AddSequence` and by sampling) and `req_to_slot[r, position]` (written by `SlotRange` and
`DecodeRows`). A `PlanRow` runs the model over positions start … start+num_tokens-1 of its row,
whose KV goes to the row's slots; if it samples, the new token is stored at position
start+num_tokens. So a decode never needs its input token from the router, and a row is simply
overwritten by the next `AddSequence` that names it: there is no removal message.

Most rows of most steps compute one token and sample the next. They travel as columns, in plans
(`DecodeRows`) as in results (`StepResult.token_ids`), so that neither side handles them one by one.
The functions at the end build and read both messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, IntFlag
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from lightserve.errors import ProtocolError
from lightserve.messages.common import (
    NO_SIZES,
    Constraint,
    DeviceFacts,
    GraphSizes,
    Int32Array,
    Message,
    PromptSegment,
    StepCoefficients,
    Thinking,
    TokenLogprob,
    pack_int32,
    unpack_int32,
)
from lightserve.messages.images import MAX_PIXEL_BYTES, EncodeOrder, EncoderWork, Image
from lightserve.types import MAX_DRAFTS, RequestOutput, RowId, SamplingParams, StepId


class WorkerHello(Message, frozen=True):
    """First message of each rank, once its weights and pool are ready."""

    protocol_version: int
    boot_id: str
    config_hash: str
    incarnation: int
    """Which start of the worker group this is; messages of older ones are dropped."""
    rank: int
    num_kv_slots: int
    num_host_slots: int
    """Tokens of paused requests whose KV the host pool holds beside those."""
    max_num_batched_tokens: int
    """Most new tokens of a step: what the configuration means on the rank's device."""
    step_cost: StepCoefficients | None = None
    """Rank 0's profile of its steps, if it has one."""
    device: DeviceFacts | None = None
    """Device of the rank."""
    overlaps_copies: bool = False
    """Whether `ahead_loads` run beside the forward pass of their plan, as on a GPU; otherwise
    between the steps."""
    graph_sizes: GraphSizes = NO_SIZES
    """To which its steps are padded."""
    encoder: EncoderWork | None = None
    """The work of its encoder of images; None: it has none."""
    num_state_slots: int = 0
    """Slots whose bytes hold the states of one sequence in all recurrent layers of the model; 0: it
    has none."""
    num_prefix_slots: int = 0
    """Tokens of prefixes whose KV the host pool holds besides."""


class AddSequence(msgspec.Struct, frozen=True, array_like=True):
    """Put a sequence into a row: its known tokens (prompt, then any already generated ones)."""

    row: RowId
    segments: list[PromptSegment]
    sampling: SamplingParams
    num_prompt_tokens: int
    """Tokens of `segments` from here on are output."""
    eos_token_ids: list[int]
    """Tokens that end this sequence."""
    constraint: Constraint | None = None
    """A constraint on its output; output in `segments` satisfies it already."""
    is_real_time: bool = False
    """Whether its constraint goes before those of others where these have to wait."""
    output: RequestOutput = RequestOutput.TOKENS
    """Where it is a vector, this is what its sample brings, with a token that means nothing."""
    thinking: Thinking | None = None
    """Reasoning before the constraint, or within a budget; None: neither."""
    prediction: bytes = b""
    """int32, see `pack_int32`: output that its client expects; empty: none."""
    draft_scope: int = 0
    """Answers of sequences with equal numbers may be guesses of this one's; 0: those of none."""
    images: tuple[Image, ...] = ()
    """Images in order, without pixels where the row has computed all tokens. In `segments` their
    tokens have ids of images."""


class SlotRange(msgspec.Struct, frozen=True, array_like=True):
    """Positions start_position … of a row get these slots, in order.

    Positions -num_state_slots … -1 stand for the row's state in all recurrent layers.
    """

    row: RowId
    start_position: int
    slots: bytes
    """int32, see `pack_int32`; any order, not necessarily contiguous."""


class OutputKind(IntFlag):
    """Output that a plan row wants back."""

    NONE = 0
    SAMPLE = 1
    """The token after its last one."""
    PROMPT_LOGPROBS = 2
    """A log-probability for each prompt token that follows one of its tokens."""


MAX_PROMPT_LOGPROB_POSITIONS = 512
"""Most tokens, over all rows of a step with PROMPT_LOGPROBS: each needs a row of logits."""


class PlanRow(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's share of a step."""

    row: RowId
    start_position: int
    num_tokens: int
    """>= 1."""
    output: OutputKind


class DecodeRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows that compute one token and sample the next; int32 [n] each, see `pack_int32`.

    A row with k drafts computes its last known token and k that a proposer guesses, and samples
    behind each of them: 1 … k+1 of these tokens count, as a draft is accepted if it is the token
    that is drawn. How many the router does not know before it sends the next plan. So the positions
    that it names are the furthest that the row can be at; the worker takes the row's last known
    token where it knows fewer.
    """

    rows: bytes = b""
    start_positions: bytes = b""
    """The position that each computes, or the first of them."""
    slots: bytes = b""
    """Slots of the KV of these positions, one row's after the other's, 1 + drafts each; no
    `SlotRange` says it again."""
    num_drafts: bytes = b""
    """0 … MAX_DRAFTS of each row; empty: no row has any."""


NO_DECODES = DecodeRows()


class KVCopies(msgspec.Struct, frozen=True, array_like=True):
    """Tokens whose KV is copied between the pool and the host pool, all layers of them."""

    slots: bytes = b""
    """int32 [n], see `pack_int32`: places in the pool; each at most once."""
    host_slots: bytes = b""
    """int32 [n]: places in the host pool, 0 … num_host_slots-1; each at most once."""


NO_COPIES = KVCopies()


class StateCopies(msgspec.Struct, frozen=True, array_like=True):
    """Slots whose recurrent bytes, of all layers, are copied inside the pool.

    Each copy of a state is num_state_slots of them, in the order of their positions.
    """

    from_slots: bytes = b""
    """int32 [n], see `pack_int32`; several copies may read one."""
    to_slots: bytes = b""
    """int32 [n]; each at most once, and none of `from_slots`."""


NO_STATE_COPIES = StateCopies()


MAX_PLAN_BYTES = MAX_PIXEL_BYTES + 128 * 1024 * 1024
"""Largest `StepPlan`: one sequence with all that may have to be done for it has to fit, beside
images that others wait for. Plans of many are far smaller (`lightserve.router.from_submit`)."""


class StepPlan(Message, frozen=True):
    """One step: tables (`sequences`, `slot_ranges`, the slots of `decodes`), `saves`, `loads`,
    `state_loads`, one forward pass over the rows of `decodes`, then `rows`, and `state_saves`.

    Copies of several requests are merged. Nothing in the step waits for `ahead_loads`: they begin
    behind `saves` and `loads`, go on beside the forward pass (or follow it, when the result has
    been sent), and are made before anything of the next plan is: its copies, its forward pass. So
    the next plan may read, save and overwrite their slots, and save to their host slots. A worker
    that dies takes them along with all other KV.

        plan i     saves  loads  state_loads  forward pass ─► state_saves, result
                              └─ ahead_loads ───────────────────┐
        plan i+1                                                └ saves  loads  forward pass …

    In a model with recurrent layers a row that computes from position 0 on begins with states of
    zeros, whatever its slots hold; every other row reads them from its slots. Each row writes them
    back as they are behind the last of its tokens in the step.
    """

    MAX_BYTES: ClassVar[int] = MAX_PLAN_BYTES

    step_id: StepId
    sequences: list[AddSequence]
    slot_ranges: list[SlotRange]
    rows: list[PlanRow]
    """Each row at most once, here or in `decodes`."""
    decodes: DecodeRows = NO_DECODES
    """The plain ones: what samples after one token and wants nothing of its prompt. A row of
    `sequences` is never among them."""
    saves: KVCopies = NO_COPIES
    """To the host, before this plan writes anything to the pool."""
    loads: KVCopies = NO_COPIES
    """From the host, after `saves`; no host slot of them is one of `saves`."""
    ahead_loads: KVCopies = NO_COPIES
    """From the host, for requests that run in a later plan.

    Their slots are none that a row of this plan reads or writes, nor any of `loads`; `saves` may
    have had them before. Their host slots are none of `saves`."""
    left_rows: tuple[RowId, ...] = ()
    """Rows whose sequences have ended or paused since the last plan: what is kept for them can go.
    A row of `sequences` may be among them."""
    encodes: tuple[EncodeOrder, ...] = ()
    """Layers of images that rows of later plans compute tokens of; behind the forward pass, which
    encodes the rest of what its own rows need."""
    state_loads: StateCopies = NO_STATE_COPIES
    """Snapshots that rows go on from, to the slots of these rows: after `loads`, before the forward
    pass."""
    state_saves: StateCopies = NO_STATE_COPIES
    """States of rows as the step leaves them, to the slots of snapshots: behind the forward pass,
    before all of the next plan."""


RouterToWorker = StepPlan


class RowError(IntEnum):
    """Why a row has no token."""

    NON_FINITE_LOGITS = 1
    CONSTRAINT_FAILED = 2
    """The grammar of its constraint went beyond its limits."""


class RowResult(msgspec.Struct, frozen=True, array_like=True):
    """Output of one row that has more to say than its tokens."""

    row: RowId
    token_ids: list[int]
    """0 … k tokens. None though one was asked for, without an error: the grammar of the row's
    constraint is not compiled yet, ask again."""
    error: RowError | None = None
    logprobs: list[TokenLogprob] = []
    """One for each of `token_ids`, if the sequence's `num_logprobs` is not None."""
    prompt_logprobs: list[TokenLogprob] = []
    """With PROMPT_LOGPROBS: of prompt tokens start+1 … start+num_tokens, those that exist."""
    vector: bytes = b""
    """float32 [hidden_size] of length 1, where the sequence's `output` is one."""


NO_TOKEN = -1


class StepResult(Message, frozen=True):
    """Result of a step; rank 0 sends it the moment its tokens are on the host."""

    MAX_BYTES: ClassVar[int] = 32 * 1024 * 1024
    """Holds 65,536 rows with twenty log-probabilities each, and as many of prompts as may be."""

    step_id: StepId
    incarnation: int
    token_ids: bytes
    """int32 [rows that sample, tokens_per_row], see `pack_int32`, in the plan's order: first
    `decodes`, then those of `rows` with SAMPLE. A row's tokens, then NO_TOKEN; nothing else where
    `rows` has the row."""
    exec_s: float
    """From the start of the step to its tokens on the host, `copy_s` included."""
    idle_s: float
    """From the end of the step before (or the first plan) to the start of this one."""
    tokens_per_row: int = 1
    """Most tokens that a row of this step yields."""
    rows: list[RowResult] = msgspec.field(default_factory=list)
    """Rows that have more to say, in any order: an error, log-probabilities, or no token though one
    was asked for; and all that want PROMPT_LOGPROBS alone."""
    copy_s: float = 0.0
    """Seconds that `saves` and `loads` added to the step."""
    encode_s: float = 0.0
    """Seconds of it in which images were encoded."""
    encoded: float = 0.0
    """The work of that, see `EncoderWork.of_layer`."""
    launch_s: float = 0.0
    """Seconds of the host to launch it, where the device works meanwhile: on a GPU. A plan must
    come so much earlier for the device to go on without a pause."""
    drafted: bytes = b""
    """int32 [2, n of the plan's `decodes`]: tokens that were proposed for each, of the drafts that
    it may have, and their `DraftSource`; empty: none may have any."""
    num_verified: int = 0
    """Tokens that the step computed for drafts, proposed or not."""


class StepTimesMeasured(Message, frozen=True):
    """Step times that rank 0 measured after its hello, before the first plan came."""

    incarnation: int
    step_cost: StepCoefficients
    max_num_batched_tokens: int
    """See `WorkerHello`: it follows from the profile."""


WorkerToRouter = WorkerHello | StepTimesMeasured | StepResult


# ------------------------------------------------------------------------ plans


def check_states(plan: StepPlan, num_state_slots: int) -> None:
    """Raise ProtocolError unless what a plan says of states fits a model with so many slots.

    A row that begins needs slots for its state, all of them.
    """
    begun = set()
    for part in plan.slot_ranges:
        if part.start_position < 0:
            begun.add(part.row)
            if (count := len(part.slots) // 4) != num_state_slots or part.start_position != -count:
                raise ProtocolError(
                    f"slot_ranges: {count} slots from position {part.start_position}, where a state"
                    f" has {num_state_slots} slots"
                )
    if num_state_slots and (rows := {part.row for part in plan.sequences} - begun):
        raise ProtocolError(f"sequences: rows {sorted(rows)} have no slots for their states")
    for name, copies in (("state_loads", plan.state_loads), ("state_saves", plan.state_saves)):
        lengths = len(copies.from_slots), len(copies.to_slots)
        if lengths == (0, 0):
            continue
        if not num_state_slots or lengths[0] != lengths[1] or lengths[0] % (4 * num_state_slots):
            raise ProtocolError(
                f"{name}: {lengths[0]} bytes of slots to {lengths[1]}, where a state has"
                f" {num_state_slots} slots"
            )


class DecodeColumns(NamedTuple):
    """`DecodeRows` as arrays."""

    rows: Int32Array
    start_positions: Int32Array
    slots: Int32Array
    num_drafts: Int32Array
    """Drafts of each row; empty: no row has any."""

    @property
    def num_tokens(self) -> Int32Array:
        """Tokens that each computes, int32 [n]."""
        return 1 + self.num_drafts if len(self.num_drafts) else np.ones_like(self.rows)


class PlanColumns(NamedTuple):
    """All rows of a plan as arrays [R], in its order: first `decodes`, then `rows`."""

    rows: Int32Array
    start_positions: Int32Array
    num_tokens: Int32Array
    """Drafts included."""
    outputs: Int32Array
    """`OutputKind`s."""

    @property
    def samples(self) -> npt.NDArray[np.bool_]:
        """Return which of them sample."""
        wants: npt.NDArray[np.bool_] = (self.outputs & int(OutputKind.SAMPLE)) != 0
        return wants


def pack_decodes(
    rows: Sequence[int] | Int32Array,
    start_positions: Sequence[int] | Int32Array,
    slots: Sequence[int] | Int32Array,
    num_drafts: Sequence[int] | Int32Array = (),
) -> DecodeRows:
    """Return the columns as a message."""
    columns = (rows, start_positions, slots, num_drafts)
    return DecodeRows(*(pack_int32(column) for column in columns))


def unpack_decodes(decodes: DecodeRows) -> DecodeColumns:
    """Return the columns of a message; they are read-only.

    Raises:
        ProtocolError: they are of different lengths, or none of int32, or a row has more drafts
            than it may.
    """
    lengths = len(decodes.rows), len(decodes.start_positions), len(decodes.slots)
    drafts = decodes.num_drafts
    what = "decodes: {} bytes of rows, {} of start_positions, {} of slots".format(*lengths)
    if drafts:
        what += f", {len(drafts)} of num_drafts"
    if (
        lengths[0] != lengths[1]
        or len(drafts) not in (0, lengths[0])
        or any(n % 4 for n in lengths)
    ):
        raise ProtocolError(what)
    columns = DecodeColumns(*(unpack_int32(column) for column in msgspec.structs.astuple(decodes)))
    num_drafts = int(columns.num_drafts.sum()) if drafts else 0
    if len(columns.rows) + num_drafts != len(columns.slots):
        raise ProtocolError(what)
    if drafts and not 0 <= columns.num_drafts.min() <= columns.num_drafts.max() <= MAX_DRAFTS:
        raise ProtocolError(f"decodes: a row has more than {MAX_DRAFTS} drafts, or fewer than 0")
    return columns


def plan_columns(plan: StepPlan, decodes: DecodeColumns | None = None) -> PlanColumns:
    """Return all rows of a plan, whose unpacked decodes may be given. Raises ProtocolError as
    `unpack_decodes` does."""
    decodes = unpack_decodes(plan.decodes) if decodes is None else decodes
    rows, starts, counts = decodes.rows, decodes.start_positions, decodes.num_tokens
    num_decodes = len(rows)
    ones = np.ones(num_decodes, dtype=np.int32)
    if not plan.rows:
        return PlanColumns(rows, starts, counts, ones)  # SAMPLE is 1
    table = [(row.row, row.start_position, row.num_tokens, row.output) for row in plan.rows]
    others = np.array(table, dtype=np.int32).T
    if not num_decodes:
        return PlanColumns(*others)
    parts = zip((rows, starts, counts, ones), others, strict=True)
    return PlanColumns(*(np.concatenate(pair) for pair in parts))


def plan_rows(plan: StepPlan) -> list[PlanRow]:
    """Return all rows of a plan one by one. Raises ProtocolError as `unpack_decodes` does."""
    decodes = unpack_decodes(plan.decodes)
    columns = (decodes.rows, decodes.start_positions, decodes.num_tokens)
    each = zip(*(column.tolist() for column in columns), strict=True)
    own = [PlanRow(row, start, count, OutputKind.SAMPLE) for row, start, count in each]
    return [*own, *plan.rows]


# ------------------------------------------------------------------------ results


class StepOutput(NamedTuple):
    """Results of a step's rows."""

    rows: Int32Array
    """Rows that sample, in the plan's order."""
    token_ids: Int32Array
    """[rows that sample, tokens_per_row], in the plan's order; a row's tokens, then NO_TOKEN."""
    others: dict[RowId, RowResult]
    """Rows that have more to say, with their tokens."""


def sampling_rows(plan: StepPlan) -> Int32Array:
    """Return the rows that sample, in the plan's order. Raises as `unpack_decodes` does."""
    decodes = unpack_decodes(plan.decodes).rows
    others = [row.row for row in plan.rows if row.output & OutputKind.SAMPLE]
    return np.concatenate([decodes, np.array(others, dtype=np.int32)]) if others else decodes


def read_result(plan: StepPlan, result: StepResult) -> StepOutput:
    """Return what the rows of a plan gave.

    Raises:
        ProtocolError: the result does not fit the plan; the text says what of it.
    """
    rows, width = sampling_rows(plan), result.tokens_per_row
    if width < 1 or len(result.token_ids) != 4 * width * len(rows):
        raise ProtocolError(
            f"{len(result.token_ids)} bytes of tokens for {len(rows)} rows of {width}"
        )
    token_ids = unpack_int32(result.token_ids).reshape(len(rows), width)
    is_token = token_ids >= 0
    if not is_token.all() and (
        (token_ids < NO_TOKEN).any() or (is_token[:, 1:] & ~is_token[:, :-1]).any()
    ):
        raise ProtocolError("a token that is none")
    others = {other.row: other for other in result.rows}
    _check_others(plan, result, others, rows[~is_token[:, 0]].tolist())
    return StepOutput(rows, token_ids, others)


def _check_others(
    plan: StepPlan, result: StepResult, others: dict[RowId, RowResult], without: list[RowId]
) -> None:
    """Raise ProtocolError unless exactly those rows are in `rows` that have to be.

    `without` are rows that sample and have no token of their own in the columns.
    """
    alone = [row.row for row in plan.rows if row.output == OutputKind.PROMPT_LOGPROBS]
    if not others and not without and not alone:
        return
    if len(others) != len(result.rows):
        raise ProtocolError("a row has two results")
    wanted = {*without, *alone}
    if missing := wanted - others.keys():
        raise ProtocolError(f"row {min(missing)} has no result")
    if odd := others.keys() - wanted:
        raise ProtocolError(f"row {min(odd)} has a result though it has tokens, or wants none")


def row_results(plan: StepPlan, result: StepResult) -> list[RowResult]:
    """Return the output of every row that wants any, one by one, in the plan's order.

    Raises:
        ProtocolError: as `read_result` does.
    """
    _, token_ids, others = read_result(plan, result)
    tokens = iter(token_ids.tolist())
    found: list[RowResult] = []
    for row in plan_rows(plan):
        own = next(tokens) if row.output & OutputKind.SAMPLE else []
        if row.output:
            own_result = others.get(row.row)
            known = [token_id for token_id in own if token_id != NO_TOKEN]
            found.append(own_result or RowResult(row.row, known))
    return found
