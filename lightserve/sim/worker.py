"""A worker without a model: executes plans on book-keeping alone, and checks them as it goes.

It keeps what a real worker keeps (`req_to_slot`) and, instead of keys and values, a hash of all
that they depend on: the tokens up to their position. Every read of a slot that holds another
prefix is an error, so whatever drives it also tests the router's KV book-keeping. So are states of
recurrent layers: what is in their slots says after which tokens, and a step has to begin with the
state after exactly the tokens before it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from lightserve.cost.model import StepShape
from lightserve.messages.common import Int32Array, TokenLogprob, pack_int32, unpack_int32
from lightserve.messages.router_worker import (
    NO_TOKEN,
    DecodeColumns,
    KVCopies,
    OutputKind,
    PlanRow,
    RowResult,
    StateCopies,
    StepPlan,
    StepResult,
    check_states,
    plan_columns,
    plan_rows,
    unpack_decodes,
)
from lightserve.sim.images import SimulatedEncoder
from lightserve.sim.simulation import Worker
from lightserve.sim.virtual_gpus import Hardware

EOS_TOKEN_ID = 0


class PlanError(AssertionError):
    """A plan that a real worker would have executed wrongly."""


class SimulatedWorker:
    """Runs plans. A sequence's `seed` says how long it gets: prompt and output, EOS included."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_num_seqs: int,
        max_model_len: int,
        num_host_slots: int = 0,
        num_state_slots: int = 0,
        acceptance: float = 0.0,
    ) -> None:
        """`acceptance` is the chance that a draft is right whose predecessors are."""
        self._acceptance = acceptance
        self._num_state_slots = num_state_slots
        self._state_slots = np.full((max_num_seqs, num_state_slots), -1, dtype=np.int32)
        self._unsure: Int32Array = np.empty(0, dtype=np.int32)
        """Rows that had drafts in the last plan: the router may not know where they are."""
        self._req_to_slot = np.full((max_num_seqs, max_model_len), -1, dtype=np.int32)
        self._kv = np.zeros(num_slots, dtype=np.uint64)
        self._host = np.zeros(num_host_slots, dtype=np.uint64)
        self._prefixes = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.uint64)
        """Hash of the tokens of each row up to each position."""
        self._num_known = np.zeros(max_num_seqs, dtype=np.int64)
        self._total_len = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_prompt = np.zeros(max_num_seqs, dtype=np.int64)

    def execute(self, plan: StepPlan, *, exec_s: float, idle_s: float) -> StepResult:
        """Run one plan. Raises PlanError."""
        for sequence in plan.sequences:
            row = sequence.row
            self._req_to_slot[row] = self._state_slots[row] = -1
            tokens = unpack_int32(b"".join(part.token_ids for part in sequence.segments))
            self._num_known[row] = len(tokens)
            self._prefixes[row, : len(tokens)] = np.cumsum(_mixed(tokens, np.arange(len(tokens))))
            self._total_len[row] = sequence.sampling.seed
            self._num_prompt[row] = sequence.num_prompt_tokens
        check_states(plan, self._num_state_slots)
        for part in plan.slot_ranges:
            slots = unpack_int32(part.slots)
            if part.start_position < 0:
                self._state_slots[part.row] = slots
                continue
            end = part.start_position + len(slots)
            self._req_to_slot[part.row, part.start_position : end] = slots
        decodes = unpack_decodes(plan.decodes)
        place_slots(self._req_to_slot, decodes)
        _check_copies(plan)
        self._save(plan.saves)
        self._load(plan.loads)
        columns = plan_columns(plan)
        starts, moved = columns.start_positions.astype(np.int64), self._moved(decodes)
        if self._num_state_slots:
            self._copy_states(plan.state_loads)
            known = self._num_known[columns.rows[moved]]
            starts[moved] = np.minimum(starts[moved], known - 1)
            self._read_states(columns.rows, starts)
        of_decodes = self._decode(decodes)
        token_ids, width = [of_decodes.ravel()], of_decodes.shape[1]
        others: list[RowResult] = []
        for plan_row in plan.rows:
            result = self._run(plan_row)
            if result is None:
                continue
            is_plain = result.token_ids and not result.prompt_logprobs
            if not is_plain:
                others.append(result)
            if OutputKind.SAMPLE in plan_row.output:
                own = result.token_ids if is_plain else []
                token_ids.append(np.array([*own, *[NO_TOKEN] * (width - len(own))]))
        if self._num_state_slots:
            ends = starts + columns.num_tokens
            ends[moved] = self._num_known[columns.rows[moved]] - 1
            self._kv[self._state_slots[columns.rows]] = self._states_at(columns.rows, ends)
            self._copy_states(plan.state_saves)
        self._check_ahead_loads(plan)
        self._load(plan.ahead_loads)
        return StepResult(
            step_id=plan.step_id,
            incarnation=0,
            token_ids=pack_int32(np.concatenate(token_ids)),
            tokens_per_row=width,
            exec_s=exec_s,
            idle_s=idle_s,
            rows=others,
            drafted=plan.decodes.num_drafts + bytes(len(plan.decodes.num_drafts)),
            num_verified=int(decodes.num_drafts.sum()),
        )

    def _check_ahead_loads(self, plan: StepPlan) -> None:
        """Raise PlanError if a row of the plan uses a slot that is loaded beside it."""
        if not plan.ahead_loads.slots:
            return
        loaded = unpack_int32(plan.ahead_loads.slots)
        for row in plan_rows(plan):
            used = self._req_to_slot[row.row, : row.start_position + row.num_tokens]
            if len(np.intersect1d(used, loaded)):
                raise PlanError(f"row {row.row}: a slot of it is loaded ahead by the same plan")

    def _save(self, copies: KVCopies) -> None:
        if not copies.slots and not copies.host_slots:
            return
        slots, host_slots = self._places(copies)
        if not self._kv[slots].all():
            raise PlanError("a slot is saved that was never written")
        self._host[host_slots] = self._kv[slots]

    def _load(self, copies: KVCopies) -> None:
        if not copies.slots and not copies.host_slots:
            return
        slots, host_slots = self._places(copies)
        if not self._host[host_slots].all():
            raise PlanError("a host slot is loaded that was never written")
        self._kv[slots] = self._host[host_slots]

    def _copy_states(self, copies: StateCopies) -> None:
        from_slots, to_slots = unpack_int32(copies.from_slots), unpack_int32(copies.to_slots)
        if len(np.unique(to_slots)) != len(to_slots) or len(np.intersect1d(from_slots, to_slots)):
            raise PlanError("a state is copied over another copy, or over what is copied")
        if not self._kv[from_slots].all():
            raise PlanError("a state is copied that was never written")
        self._kv[to_slots] = self._kv[from_slots]

    def _moved(self, decodes: DecodeColumns) -> npt.NDArray[np.int64]:
        """Return which decodes end, or begin, where drafts say and not where the plan does."""
        has_drafts = decodes.num_tokens > 1
        return np.flatnonzero(has_drafts | np.isin(decodes.rows, self._unsure))

    def _states_at(self, rows: Int32Array, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Return what states of rows behind so many tokens are, [n, num_state_slots]."""
        prefixes = self._prefixes[rows, ends - 1]
        places = np.arange(self._num_state_slots, dtype=np.uint64) + np.uint64(1)
        return ~prefixes[:, None] * (np.uint64(2) * places + np.uint64(1))

    def _read_states(self, rows: Int32Array, starts: npt.NDArray[np.int64]) -> None:
        """Raise PlanError unless each row has the state behind exactly the tokens before it."""
        slots = self._state_slots[rows]
        if (slots < 0).any() or len(np.unique(slots)) != slots.size:
            raise PlanError("a row has no slots for its state, or another row has them as well")
        goes_on = starts > 0
        rows, starts, slots = rows[goes_on], starts[goes_on], slots[goes_on]
        is_wrong = (self._kv[slots] != self._states_at(rows, starts)).any(axis=1)
        if is_wrong.any():
            at = int(is_wrong.argmax())
            raise PlanError(f"row {rows[at]}: its state is not that behind {starts[at]} tokens")

    def _places(self, copies: KVCopies) -> tuple[Int32Array, Int32Array]:
        """Return places in the pool and on the host. Raises PlanError if they are none."""
        slots, host_slots = unpack_int32(copies.slots), unpack_int32(copies.host_slots)
        if len(slots) != len(host_slots):
            raise PlanError(f"{len(slots)} slots are copied, {len(host_slots)} host slots")
        for places, pool in ((slots, self._kv), (host_slots, self._host)):
            if len(np.unique(places)) != len(places):
                raise PlanError("a slot is copied twice")
            if ((places < 0) | (places >= len(pool))).any():
                raise PlanError("a copy names a place outside its pool")
        return slots, host_slots

    def _decode(self, decodes: DecodeColumns) -> npt.NDArray[np.int64]:
        """Run all decodes, and return their tokens, [n, most of a row]. Raises PlanError."""
        unsure, self._unsure = self._unsure, decodes.rows[decodes.num_drafts.nonzero()]
        if not len(decodes.num_drafts) and not np.isin(decodes.rows, unsure).any():
            return self._decode_plain(decodes)[:, None]
        known = self._num_known[decodes.rows]
        is_early = (decodes.start_positions >= known) & ~np.isin(decodes.rows, unsure)
        if len(early := decodes.rows[is_early]):
            raise PlanError(f"row {early[0]}: the position to compute has no token yet")
        total_len = self._total_len[decodes.rows]
        starts, num_accepted = verified(decodes, known, total_len, self._acceptance)
        token_ids = np.full((len(starts), int(decodes.num_tokens.max())), NO_TOKEN)
        each = zip(decodes.rows.tolist(), starts.tolist(), num_accepted.tolist(), strict=True)
        for index, (row, start, accepted) in enumerate(each):
            end = start + int(decodes.num_tokens[index])
            slots, prefixes = self._req_to_slot[row], self._prefixes[row]
            if (slots[:end] < 0).any():
                raise PlanError(f"row {row}: a position below {end} has no slot")
            if (self._kv[slots[:start]] != prefixes[:start]).any():
                raise PlanError(f"row {row}: KV before position {start} is lost")
            positions = np.arange(start + 1, start + 2 + accepted)
            tokens = token_ids[index, : accepted + 1] = _sampled(total_len[index], positions)
            prefixes[positions] = prefixes[start] + np.cumsum(_mixed(tokens, positions))
            self._kv[slots[start:end]] = ~prefixes[start]  # of refused drafts: wrong
            self._kv[slots[start : start + 1 + accepted]] = prefixes[start : start + 1 + accepted]
            self._num_known[row] = start + 2 + accepted
        return token_ids

    def _decode_plain(self, decodes: DecodeColumns) -> npt.NDArray[np.int64]:
        """Run decodes without drafts at once, and return their tokens. Raises PlanError."""
        rows, starts, slots, _ = decodes
        ends = starts + 1
        if len(early := rows[ends > self._num_known[rows]]):
            raise PlanError(f"row {early[0]}: the position to compute has no token yet")
        width = int(ends.max(initial=0))
        is_read = np.arange(width) < ends[:, None]
        table, prefixes = self._req_to_slot[rows, :width], self._prefixes[rows, :width]
        if len(bare := rows[((table < 0) & is_read).any(axis=1)]):
            raise PlanError(f"row {bare[0]}: a position that it reads has no slot")
        own = self._prefixes[rows, starts]
        self._kv[slots] = own
        is_lost = is_read & (self._kv[table] != prefixes)
        if is_lost.any():
            row, position = np.argwhere(is_lost)[0]
            raise PlanError(f"row {rows[row]}: KV of position {position} is lost")
        tokens = _sampled(self._total_len[rows], ends)
        self._num_known[rows] = ends + 1
        self._prefixes[rows, ends] = own + _mixed(tokens, ends)
        return tokens

    def _run(self, row: PlanRow) -> RowResult | None:
        end = row.start_position + row.num_tokens
        slots = self._req_to_slot[row.row, :end]
        if end > self._num_known[row.row]:
            raise PlanError(f"row {row.row}: position {end - 1} has no token yet")
        if (slots < 0).any():
            raise PlanError(f"row {row.row}: a position below {end} has no slot")
        prefixes = self._prefixes[row.row, :end]
        self._kv[slots[row.start_position :]] = prefixes[row.start_position :]
        whole = self._kv[slots] == prefixes
        if not whole.all():
            raise PlanError(f"row {row.row}: KV of position {int(np.argmin(whole))} is lost")
        if row.output is OutputKind.NONE:
            return None
        total_len = int(self._total_len[row.row])
        token_ids: list[int] = []
        if OutputKind.SAMPLE in row.output:
            self._num_known[row.row] = end + 1
            token_ids = [sampled_token(total_len, end)]
            mixed = _mixed(np.array(token_ids), np.array([end]))
            self._prefixes[row.row, end : end + 1] = prefixes[-1:] + mixed
        prompt_logprobs: list[TokenLogprob] = []
        if OutputKind.PROMPT_LOGPROBS in row.output:
            last = min(end + 1, int(self._num_prompt[row.row]))
            positions = range(row.start_position + 1, last)
            prompt_logprobs = [position_logprob(position) for position in positions]
        return RowResult(row.row, token_ids, prompt_logprobs=prompt_logprobs)


def place_slots(req_to_slot: Int32Array, decodes: DecodeColumns) -> None:
    """Write the slots of decodes into the table [rows, positions]."""
    counts = decodes.num_tokens
    offsets = np.arange(len(decodes.slots)) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = np.repeat(decodes.start_positions, counts) + offsets
    req_to_slot[np.repeat(decodes.rows, counts), positions] = decodes.slots


def verified(
    decodes: DecodeColumns,
    known: npt.NDArray[np.int64],
    total_len: npt.NDArray[np.int64],
    acceptance: float,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return where decodes begin, and how many drafts of each are accepted, int64 [n] both.

    `known` are the tokens of each, `total_len` makes the accepted ones those of the sequence, and
    `acceptance` is the chance of one whose predecessors are accepted.
    """
    starts = np.minimum(decodes.start_positions, known - 1)
    most = decodes.num_tokens - 1
    steps = np.arange(most.max(initial=0))
    positions = starts[:, None] + 1 + steps
    chances = _mixed(np.broadcast_to(total_len[:, None], positions.shape), positions)
    is_right = (chances >> np.uint64(11)).astype(np.float64) * 2.0**-53 < acceptance
    is_right &= steps < most[:, None]
    return starts, is_right.cumprod(axis=1).sum(axis=1)


def _check_copies(plan: StepPlan) -> None:
    """Raise PlanError if copies of a plan disturb each other."""
    for loads in (plan.loads, plan.ahead_loads):
        if _have_common(plan.saves.host_slots, loads.host_slots):
            raise PlanError("a host slot is saved to and loaded from by one plan")
    if _have_common(plan.loads.slots, plan.ahead_loads.slots):
        raise PlanError("a slot that is loaded ahead is in another copy of the plan")


def _have_common(places: bytes, others: bytes) -> bool:
    """Whether two lists of places name the same one; as a rule one of them is empty."""
    if not places or not others:
        return False
    return len(np.intersect1d(unpack_int32(places), unpack_int32(others))) > 0


def _mixed(token_ids: npt.NDArray[Any], positions: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return numbers of tokens at positions, uint64 [n]; their sums tell prefixes apart."""
    positions = (positions + 1).astype(np.uint64)
    mixed = (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= positions * np.uint64(0xBF58476D1CE4E5B9) | np.uint64(1)
    mixed ^= mixed >> np.uint64(32)
    return mixed


def position_logprob(position: int) -> TokenLogprob:
    """Return what the prompt's token at a position is given: its position, as a mark."""
    return TokenLogprob(-float(position), [], [])


def sampled_token(total_len: int, position: int) -> int:
    """Return the token that a sequence of `total_len` tokens has at a sampled position."""
    return int(_sampled(np.array(total_len), np.array(position)))


def _sampled(total_len: npt.NDArray[Any], positions: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return what sequences of these lengths have at sampled positions."""
    others = 1 + (total_len * 31 + positions * 7) % 997
    return np.where(positions == total_len - 1, EOS_TOKEN_ID, others)


# A worker of virtual hardware: how long its steps and copies take, and what they come to.
#
# A step takes what its `Hardware` says, times lognormal noise of mean one, plus the copies that
# it waits for. Copies made ahead run beside the forward pass of their plan, on the link alone, or
# follow it: what is left of them then, the next step waits for before it begins.

_TOKEN = EOS_TOKEN_ID + 1
_RUNS_EVERY = 50
"""Runs of slots are measured in every so many-th step."""


@dataclass
class WorkSums:
    """Sums over a worker's steps."""

    num_steps: int = 0
    busy_s: float = 0.0
    """Execution of all steps, copies that they waited for included."""
    copy_wait_s: float = 0.0
    num_tokens: int = 0
    """Computed, of prompts and decodes."""
    saved_tokens: int = 0
    loaded_tokens: int = 0
    """Tokens loaded from the host, the ones loaded ahead included."""
    ahead_wait_s: float = 0.0
    """Between steps, for copies made ahead."""
    plan_bytes: int = 0
    max_step_s: float = 0.0
    step_s: array[float] = field(default_factory=lambda: array("f"))
    """Execution of each step, copies that it waited for included."""
    step_tokens: array[int] = field(default_factory=lambda: array("i"))
    """Tokens that each computed."""


class VirtualWorker:
    """Times plans by a formula and lets `inner` say what tokens they yield."""

    def __init__(
        self, hardware: Hardware, inner: Worker, *, noise: float = 0.0, rng: np.random.Generator
    ) -> None:
        """`noise` is the standard deviation of the logarithm of a step's time."""
        self.sums = WorkSums()
        self._hardware = hardware
        self._inner = inner
        self._noise = noise
        self._rng = rng
        self._encoder = msgspec.msgpack.Encoder()
        self._link_left_s = 0.0
        """Copies ahead that are not finished when the next step could begin."""
        is_measured = hardware.per_encoder_token_s > 0.0
        self._images = SimulatedEncoder(hardware.encoder if is_measured else None)
        self._encoded = self._encode_s = 0.0
        """Work of the encoder in the step whose seconds were asked last, and its time."""
        self._waited_s = 0.0
        """Before the step whose seconds were asked last, for copies ahead of the one before."""
        self._copy_s = 0.0

    def seconds(self, plan: StepPlan) -> float:
        """Return how long the next step takes, the copies that it waits for included.

        So is the time before it in which copies ahead of the step before are finished: all that was
        left of them when that step ended, though the worker may have idled since.
        """
        shape = _shape_of(plan)
        forward_s = self._hardware.step_seconds(shape) if shape.num_new else 0.0
        self._encoded = self._images.work_of(plan)
        self._encode_s = self._hardware.per_encoder_token_s * self._encoded
        if self._noise:
            factor = self._rng.lognormal(-0.5 * self._noise**2, self._noise)
            forward_s *= factor
            self._encode_s *= factor
        forward_s += self._encode_s
        forward_s += self._hardware.gather_seconds(
            sum(map(_num_copied, (plan.saves, plan.loads, plan.ahead_loads)))
        )
        self._copy_s = self._hardware.copy_seconds(
            num_saved=_num_copied(plan.saves), num_loaded=_num_copied(plan.loads)
        )
        self._waited_s = self._link_left_s
        ahead_s = self._hardware.copy_seconds(num_loaded=_num_copied(plan.ahead_loads))
        beside_s = forward_s if self._hardware.overlaps_copies else 0.0
        self._link_left_s = max(0.0, ahead_s - beside_s)
        self._add(plan, shape.num_new, forward_s + self._copy_s)
        return self._waited_s + forward_s + self._copy_s

    def _add(self, plan: StepPlan, num_tokens: int, exec_s: float) -> None:
        sums = self.sums
        sums.num_steps += 1
        sums.num_tokens += num_tokens
        sums.busy_s += exec_s
        sums.max_step_s = max(sums.max_step_s, exec_s)
        sums.step_s.append(exec_s)
        sums.step_tokens.append(num_tokens)
        sums.copy_wait_s += self._copy_s
        sums.saved_tokens += _num_copied(plan.saves)
        sums.ahead_wait_s += self._waited_s
        sums.loaded_tokens += _num_copied(plan.loads) + _num_copied(plan.ahead_loads)
        sums.plan_bytes += len(self._encoder.encode(plan))

    def execute(self, plan: StepPlan, *, exec_s: float, idle_s: float) -> StepResult:
        """Run the plan whose seconds were asked last."""
        result = self._inner.execute(plan, exec_s=exec_s - self._waited_s, idle_s=idle_s)
        return msgspec.structs.replace(
            result, copy_s=self._copy_s, encode_s=self._encode_s, encoded=self._encoded
        )


def _shape_of(plan: StepPlan) -> StepShape:
    decodes = unpack_decodes(plan.decodes)
    starts = decodes.start_positions
    shape = StepShape().plus_decodes(len(starts), int(starts.sum()))
    if len(drafts := decodes.num_drafts.astype(np.int64)):
        shape = shape.plus_drafts(int(drafts.sum()), int((drafts * starts).sum()))
    for row in plan.rows:
        shape = shape.plus(row.start_position, row.num_tokens)
    return shape


def _num_copied(copies: KVCopies) -> int:
    return len(copies.slots) // 4


class RunLengths(NamedTuple):
    """How the slots of sequences lie: sums over sampled steps."""

    num_tokens: int = 0
    num_runs: int = 0
    """Stretches of neighbouring slots, ascending or descending."""


class LengthWorker:
    """Yields tokens by number alone: the last one is EOS. Checks nothing, costs little.

    See `SimulatedWorker` for the one that checks every read of KV; both end sequences at the
    length that their seed says.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int, acceptance: float = 0.0) -> None:
        """`acceptance` is the chance that a draft is right whose predecessors are."""
        self._acceptance = acceptance
        self._num_known = np.zeros(max_num_seqs, dtype=np.int64)
        self.run_lengths = RunLengths()
        self._total_len = np.zeros(max_num_seqs, dtype=np.int64)
        self._slots: Int32Array = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)

    def execute(self, plan: StepPlan, *, exec_s: float, idle_s: float) -> StepResult:
        """Run one plan."""
        for sequence in plan.sequences:
            self._total_len[sequence.row] = sequence.sampling.seed
            num_bytes = sum(len(part.token_ids) for part in sequence.segments)
            self._num_known[sequence.row] = num_bytes // 4
        for part in plan.slot_ranges:
            if (start := part.start_position) >= 0:
                slots = unpack_int32(part.slots)
                self._slots[part.row, start : start + len(slots)] = slots
        decodes = unpack_decodes(plan.decodes)
        place_slots(self._slots, decodes)
        if plan.step_id % _RUNS_EVERY == 0:
            self._measure_runs(plan)
        columns = plan_columns(plan)
        rows, num_decodes = columns.rows[columns.samples], len(decodes.rows)
        ends = (columns.start_positions + columns.num_tokens)[columns.samples].astype(np.int64)
        total_len, num_accepted = self._total_len[rows], np.zeros_like(ends)
        starts, num_accepted[:num_decodes] = verified(
            decodes, self._num_known[decodes.rows], total_len[:num_decodes], self._acceptance
        )
        ends[:num_decodes] = starts + 1
        steps = np.arange(1 + num_accepted.max(initial=0))
        places = ends[:, None] + steps
        tokens = np.where(places == total_len[:, None] - 1, EOS_TOKEN_ID, _TOKEN)
        tokens[steps > num_accepted[:, None]] = NO_TOKEN
        self._num_known[rows] = ends + num_accepted + 1
        return StepResult(
            step_id=plan.step_id,
            incarnation=0,
            token_ids=pack_int32(tokens.ravel()),
            tokens_per_row=len(steps),
            exec_s=exec_s,
            idle_s=idle_s,
            drafted=plan.decodes.num_drafts + bytes(len(plan.decodes.num_drafts)),
            num_verified=int(decodes.num_drafts.sum()),
        )

    def _measure_runs(self, plan: StepPlan) -> None:
        num_tokens, num_runs = self.run_lengths
        for row in plan_rows(plan):
            end = row.start_position + row.num_tokens
            num_tokens += end
            jumps = np.abs(np.diff(self._slots[row.row, :end])) != 1
            num_runs += 1 + int(np.count_nonzero(jumps))
        self.run_lengths = RunLengths(num_tokens, num_runs)
