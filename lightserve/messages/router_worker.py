"""The link between the router and the workers.

Every rank gets every `StepPlan`; rank 0 alone answers with `StepResult`. Plans are executed in
order, and one plan may wait at the worker while another runs. Full data once (`AddSequence`),
then deltas.

Worker state that a plan refers to, per row r: `token_ids[r, position]` (written by
`AddSequence` and by sampling) and `req_to_slot[r, position]` (written by `SlotRange`). A
`PlanRow` runs the model over positions start … start+num_tokens-1 of its row, whose KV goes to
the row's slots; if it samples, the new token is stored at position start+num_tokens. So a
decode never needs its input token from the router, and a row is simply overwritten by the next
`AddSequence` that names it: there is no removal message.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import ClassVar

import msgspec

from lightserve.messages.common import Constraint, Message, PromptSegment, TokenLogprob
from lightserve.messages.device import DeviceFacts
from lightserve.messages.step_cost import StepCoefficients
from lightserve.types import RowId, SamplingParams, StepId


class WorkerHello(Message, frozen=True):
    """First message of each rank, once its weights and pool are ready."""

    protocol_version: int
    boot_id: str
    config_hash: str
    generation: int
    """Which start of the worker group this is; messages of older ones are dropped."""
    rank: int
    num_kv_slots: int
    num_host_slots: int
    """Tokens whose KV the host pool holds beside those."""
    max_num_batched_tokens: int
    """Most new tokens of a step: what the configuration means on the rank's device."""
    step_cost: StepCoefficients | None = None
    """Rank 0's profile of its steps, if it has one."""
    device: DeviceFacts | None = None
    """What the rank computes on."""
    overlaps_copies: bool = False
    """Whether `ahead_saves` and `ahead_loads` run beside the forward pass of their plan, as on a
    GPU; otherwise between the steps."""


class AddSequence(msgspec.Struct, frozen=True, array_like=True):
    """Put a sequence into a row: its known tokens (prompt, then any already generated ones)."""

    row: RowId
    segments: list[PromptSegment]
    sampling: SamplingParams
    num_prompt_tokens: int
    """Tokens of `segments` from here on are output."""
    eos_token_ids: list[int]
    """What ends this sequence."""
    constraint: Constraint | None = None
    """What its output must satisfy; output in `segments` does so already."""
    is_real_time: bool = False
    """Whether its constraint goes before those of others where these have to wait."""


class SlotRange(msgspec.Struct, frozen=True, array_like=True):
    """Positions start_position … of a row get these slots, in order."""

    row: RowId
    start_position: int
    slots: bytes
    """int32, see `pack_int32`; any order, not necessarily contiguous."""


class OutputKind(IntFlag):
    """What a plan row wants back."""

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


class KVCopies(msgspec.Struct, frozen=True, array_like=True):
    """Tokens whose KV is copied between the pool and the host pool, all layers of them."""

    slots: bytes = b""
    """int32 [n], see `pack_int32`: places in the pool; each at most once."""
    host_slots: bytes = b""
    """int32 [n]: places in the host pool, 0 … num_host_slots-1; each at most once."""


NO_COPIES = KVCopies()


MAX_PLAN_BYTES = 128 * 1024 * 1024
"""Largest `StepPlan`: one sequence with all that may have to be done for it has to fit. Plans of
many are kept far smaller (`lightserve.router.plan_bytes`)."""


class StepPlan(Message, frozen=True):
    """One step: tables (`sequences`, then `slot_ranges`), `saves`, `loads`, one forward pass.

    Copies of several requests are merged. Nobody in the step waits for `ahead_saves` and
    `ahead_loads`: they begin behind `saves` and `loads`, go on beside the forward pass (or follow
    it, when the result has been sent), and are made before anything of the next plan is: its
    copies, its forward pass. So the next plan may read, save and overwrite their slots, and save
    to their host slots. A worker that dies takes them along with all other KV.

        plan i     saves  loads  forward pass ─────► result
                              └─ ahead_saves, ahead_loads ──┐
        plan i+1                                            └ saves  loads  forward pass …
    """

    MAX_BYTES: ClassVar[int] = MAX_PLAN_BYTES

    step_id: StepId
    sequences: list[AddSequence]
    slot_ranges: list[SlotRange]
    rows: list[PlanRow]
    """Each row at most once."""
    saves: KVCopies = NO_COPIES
    """To the host, before this plan writes anything to the pool."""
    loads: KVCopies = NO_COPIES
    """From the host, after `saves`; no host slot of them is one of `saves`."""
    ahead_saves: KVCopies = NO_COPIES
    """To the host, though the tokens stay where they are. Nothing else in the plan writes them."""
    ahead_loads: KVCopies = NO_COPIES
    """From the host, for requests that run in a later plan.

    Their slots are none that a row of this plan reads or writes, nor any of `loads` and
    `ahead_saves`; `saves` may have had them before. Their host slots are none of `saves` and
    `ahead_saves`."""
    left_rows: tuple[RowId, ...] = ()
    """Rows whose sequences have ended or paused since the last plan: what is kept for them can go.
    A row of `sequences` may be among them."""


RouterToWorker = StepPlan


class RowError(IntEnum):
    """Why a row has no token."""

    NON_FINITE_LOGITS = 1
    CONSTRAINT_FAILED = 2
    """The grammar of its constraint went beyond its limits."""


class RowResult(msgspec.Struct, frozen=True, array_like=True):
    """Output of one row that wanted any."""

    row: RowId
    token_ids: list[int]
    """0 … k tokens. None though one was asked for, without an error: the grammar of the row's
    constraint is not compiled yet, ask again."""
    error: RowError | None = None
    logprobs: list[TokenLogprob] = []
    """One for each of `token_ids`, if the sequence's `num_logprobs` is not None."""
    prompt_logprobs: list[TokenLogprob] = []
    """With PROMPT_LOGPROBS: of prompt tokens start+1 … start+num_tokens, those that exist."""


class StepResult(Message, frozen=True):
    """What a step gave, sent by rank 0 the moment its tokens are on the host."""

    MAX_BYTES: ClassVar[int] = 32 * 1024 * 1024
    """Holds 65,536 rows with twenty log-probabilities each, and as many of prompts as may be."""

    step_id: StepId
    generation: int
    rows: list[RowResult]
    """In the plan's order, rows with OutputKind.NONE left out."""
    exec_s: float
    """From the start of the step to its tokens on the host, `copy_s` included."""
    idle_s: float
    """From the end of the step before (or the first plan) to the start of this one."""
    copy_s: float = 0.0
    """What `saves` and `loads` added to the step."""
    launch_s: float = 0.0
    """What the host took to launch it, where the device works meanwhile: on a GPU. A plan must
    come so much earlier for the device to go on without a pause."""


WorkerToRouter = WorkerHello | StepResult
