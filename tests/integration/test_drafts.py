"""Drafts change no token: on the CPU, on a device that is late, with graphs, when memory moves."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.drafted import Scripted
from support.graph_recorders import RerunRecorder, Tape, TapeRecorder
from support.grids import choose, long_but, more_when_long
from support.late_queue import LateQueue
from support.lossless import MAX_SEQS, Catalogue, Tally, make_runner, make_schedule
from support.random_model import RECURRENT
from support.recorded_plans import RecordedStep, record_steps
from support.recorded_plans import make_runner as make_small_runner
from support.tensor_kernels import FromTensors, TensorKernels
from support.tiny_models import find_tiny_model
from torch import Tensor

from lightserve.errors import StartupError
from lightserve.kernels.interface import Kernels
from lightserve.kernels.select import missing_core
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.kernels.weights import KeptInputs
from lightserve.messages.common import TokenSegment, pack_int32, unpack_int32
from lightserve.messages.router_worker import (
    AddSequence,
    StepPlan,
    StepResult,
    pack_decodes,
    row_results,
    unpack_decodes,
)
from lightserve.models.base import KVLayout
from lightserve.router.kv.cache import Preemption
from lightserve.types import MAX_DRAFTS, DraftSource, RowId, SamplingParams, StepId
from lightserve.worker import build
from lightserve.worker.device import HostQueue
from lightserve.worker.draft_states import DraftStates, StateGraphs, kept_bytes
from lightserve.worker.drafts import Drafted, Drafts, Lookup, Proposer, RecentAnswers, Rows
from lightserve.worker.graphs import DecodeGraphs
from lightserve.worker.memory import MIN_SLOTS, KVPool
from lightserve.worker.mixed_graphs import MixedGraphs
from lightserve.worker.model_runner import ModelRunner
from lightserve.worker.step_results import Pending
from lightserve.worker.tables import StepInputs


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Catalogue:
    return Catalogue(make_runner(tmp_path_factory.mktemp("model")))


def drafts_of(runner: ModelRunner) -> Drafts:
    drafts = runner._table._drafts
    assert drafts is not None
    return drafts


class SingleTokens(Lookup):
    """Proposes wherever a token has been before."""

    SHORTEST = 1


class Counted:
    """Counts the drafts of a runner's steps."""

    def __init__(self, runner: ModelRunner) -> None:
        self.counts: Counter[str] = Counter()
        self._execute = runner.execute
        runner.execute = self.execute  # type: ignore[method-assign]

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._execute(plan)
        if result.drafted:
            decodes = len(plan.decodes.rows) // 4
            own = unpack_int32(result.token_ids).reshape(-1, result.tokens_per_row)[:decodes]
            self.counts["verified"] += result.num_verified
            self.counts["drafted"] += int(unpack_int32(result.drafted)[:decodes].sum())
            self.counts["accepted"] += int((own >= 0).sum(axis=1).clip(1).sum()) - decodes
        return result


@more_when_long
@pytest.mark.parametrize("acceptance", [None, 0.7, 0.0])
def test_no_schedule_changes_a_token(catalogue: Catalogue, acceptance: float | None) -> None:
    """Batch invariant, with pauses, replays, aborts, copies; every answer as without drafts.

    `acceptance` None: what n-grams propose, else what the answers will be, so many tokens of them.
    """
    runner, total = catalogue._runner, Tally()
    execute, drafts = runner.execute, drafts_of(runner)
    counted, drafts._proposer = Counted(runner), SingleTokens(MAX_SEQS + 1, HostQueue())
    if acceptance is not None:
        catalogue.script_drafts(acceptance)
    try:
        for number in range(choose(6, 60)):
            schedule = replace(make_schedule(number), max_drafts=(8, 3, 1)[number % 3])
            total.add(catalogue.run(schedule))
    finally:
        runner.execute = execute  # type: ignore[method-assign]
    assert (total.num_different, total.seen.num_variants) == (0, 0)
    assert total.num_pauses > choose(5, 20) and total.lost_tokens > choose(5, 20)
    counts = counted.counts
    assert counts["verified"] == counts["drafted"] > choose(50, 500)
    if acceptance == 0.7:
        assert 0.3 < counts["accepted"] / counts["drafted"] < 0.7
    elif acceptance == 0.0:
        assert counts["accepted"] == 0


@more_when_long
@pytest.mark.parametrize(
    ("name", "acceptance"), [("qwen3.5", 0.5), ("granite-hybrid", 1.0), ("lfm2", 0.0)]
)
def test_drafts_leave_states_alone(name: str, acceptance: float, tmp_path: Path) -> None:
    """Of recurrent layers of each kind: a refused draft has moved none on, an accepted one has."""
    numbers = range(choose(3, 40))
    schedules = [replace(make_schedule(n), max_drafts=(8, 3, 1)[n % 3]) for n in numbers]
    chosen = {number for schedule in schedules for number in schedule.requests}
    runner = make_runner(tmp_path, model=find_tiny_model(name))
    catalogue, total = Catalogue(runner, chosen=sorted(chosen)), Tally()
    counted, room = Counted(runner), runner._draft_states.room
    assert room is not None
    room_bytes = room.inputs.nbytes + room.rates.nbytes
    assert room_bytes == kept_bytes(runner._model.recurrent, MAX_SEQS * (1 + MAX_DRAFTS))
    catalogue.script_drafts(acceptance)
    for schedule in schedules:
        total.add(catalogue.run(schedule))
    if not missing_core():
        recorded = runner._model._passes._recorded  # type: ignore[attr-defined]
        assert {is_plain for *_, is_plain in recorded} == {True, False}, "one call of the core"
    assert (total.num_different, total.seen.num_variants) == (0, 0)
    assert total.num_pauses > 0 and total.num_prefix_hits >= choose(0, 1)
    counts = counted.counts
    assert counts["verified"] == counts["drafted"] > choose(30, 300)
    share = counts["accepted"] / counts["drafted"]  # but for rows with log-probabilities
    assert abs(share - acceptance) < 0.3 and (share > 0.0) == (acceptance > 0.0)


INPUTS_DO_NOT_FIT = r"MiB for inputs of guesses \(--speculation\) .* lower --max-draft-tokens"


def test_inputs_for_which_there_is_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "free_memory_bytes", lambda: 2**16)
    with pytest.raises(StartupError, match=INPUTS_DO_NOT_FIT):
        make_runner(tmp_path, model=find_tiny_model("qwen3.5"))


class FullGpu:
    """A GPU of a MiB, of which weights and libraries leave 64 KiB."""

    def __init__(self, device: torch.device) -> None:
        del device

    def total(self) -> int:
        return 2**20

    def begin(self) -> int:
        return 2**19

    def others(self) -> int:
        return 2**19 - 2**16


def test_inputs_for_which_a_gpu_has_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start says so before a runner takes what is not there."""

    def make_pools(_: object, layout: KVLayout, device: torch.device, **options: Any) -> None:
        options["measure"](KVPool(layout, MIN_SLOTS, device))

    def runner_without_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    for name, fake in (
        ("CudaStatistics", FullGpu),
        ("make_pools", make_pools),
        ("ModelRunner", runner_without_memory),
    ):
        monkeypatch.setattr(build, name, fake)
    with pytest.raises(StartupError, match=INPUTS_DO_NOT_FIT) as raised:
        make_runner(tmp_path, model=find_tiny_model("qwen3.5"))
    assert "are more than the 0 MiB that are free on cpu" in str(raised.value)
    with pytest.raises(torch.OutOfMemoryError):  # of what needs no such room
        make_runner(tmp_path / "plain")


def test_a_state_that_moves_on_too_far_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the test above would test nothing: states behind all drafts, accepted or not."""
    schedule = replace(make_schedule(0), max_drafts=3)
    runner = make_runner(tmp_path, model=find_tiny_model("qwen3.5"))
    catalogue = Catalogue(runner, chosen=schedule.requests)
    catalogue.script_drafts(0.0)
    monkeypatch.setattr(DraftStates, "hold", lambda *_: None)
    assert catalogue.run(schedule, checks=False).num_different > 0


def accept_all(self: Drafts, drafted: Drafted, firsts: Tensor, token_ids: Tensor) -> Tensor:
    del firsts, token_ids
    self._lengths.index_copy_(0, drafted.rows, drafted.lengths + 1 + drafted.counts)
    return drafted.counts


def test_teeth(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that accepts a draft which is wrong is noticed."""
    monkeypatch.setattr(Drafts, "accept", accept_all)
    catalogue.script_drafts(0.5)
    total = Tally()
    for number in range(4):
        total.add(catalogue.run(replace(make_schedule(number), max_drafts=3), checks=False))
    assert total.num_different > 5


def sequences_of(steps: list[RecordedStep]) -> dict[tuple[int, ...], list[int]]:
    """Return the longest of what rows held, by their prompts."""
    found: dict[tuple[int, ...], list[int]] = {}
    at: dict[int, tuple[tuple[int, ...], list[int]]] = {}
    for step in steps:
        for sequence in step.plan.sequences:
            tokens = unpack_int32(sequence.segments[0].token_ids).tolist()
            prompt = tuple(tokens[: sequence.num_prompt_tokens])
            at[sequence.row] = prompt, tokens[sequence.num_prompt_tokens :]
        for result in row_results(step.plan, step.result):
            prompt, output = at[result.row]
            output += result.token_ids
            found[prompt] = max(found.get(prompt, []), output, key=len)
    return found


def with_drafts(proposer: Proposer, seed: int, kind: str | None = None) -> list[RecordedStep]:
    runner = make_small_runner(kernels=TensorKernels(), kind=kind)
    drafts_of(runner)._proposer = proposer
    return record_steps(runner, seed, preemption=Preemption.CHECKPOINT, max_drafts=8)


def overlapped(runner: ModelRunner, steps: list[RecordedStep]) -> list[StepResult]:
    """Run plans, each launched before the one ahead of it is finished."""
    launched: deque[Pending] = deque()
    found = []
    for step in steps:
        launched.append(runner.launch(step.plan))
        runner.copy_ahead(step.plan)
        if len(launched) > 1:
            found.append(runner.finish(launched.popleft()))
    return [*found, runner.finish(launched.popleft())]


def launched(*_: object) -> None:
    """Stand for the replay of a layer where graphs are recorded."""
    raise AssertionError("states move on kernel by kernel")


def late_results(
    kind: str | None,
    *,
    has_graphs: bool,
    seed: int = 0,
    kernels: Kernels | None = None,
    num_steps: int = 10**6,
) -> tuple[list[RecordedStep], list[StepResult]]:
    """Return the first steps with drafts, some of which are right, and what a late device says.

    `kind`: of recurrent layers, see `RECURRENT`; `kernels`: of the late device, None: plain ones.
    """
    first = make_small_runner(kernels=TensorKernels(), kind=kind)
    plain = record_steps(first, seed, preemption=Preemption.CHECKPOINT)
    answers = sequences_of(plain)
    steps = with_drafts(Scripted(answers, 0.6), seed, kind)
    assert sequences_of(steps) == answers
    runner = make_small_runner(LateQueue(), kernels or FromTensors(), kind=kind)
    drafts_of(runner)._proposer = Scripted(answers, 0.6)
    if has_graphs:
        recorder = TapeRecorder() if kernels is None else RerunRecorder()
        tables = runner.tables
        decodes = DecodeGraphs(
            runner._model,
            runner.pool,
            tables,
            sizes=(1, 2, 4, 6) if kernels is None else (6,),
            recorder=recorder,
            has_logits=True,
        )
        sizes = (16, 32, 64) if kernels is None else (40,)
        mixed = MixedGraphs(runner._model, runner.pool, tables, sizes=sizes, recorder=recorder)
        states = None
        if tables.kept is not None:
            sizes = (8, len(tables.kept.tokens))
            states = StateGraphs(runner._model, runner.pool, tables, sizes=sizes, recorder=recorder)
            states.capture()
        with torch.inference_mode():
            decodes.capture()
            mixed.capture()
        runner.use_graphs(decodes, mixed, states)
        if states is not None and kernels is None:
            states.check()
            for layer in runner._model.recurrent:
                layer.replay = launched  # type: ignore[method-assign]
    return steps[:num_steps], overlapped(runner, steps[:num_steps])


LATE = [
    *((None, True, 0), (None, False, 1)),
    *(("delta", True, 0), ("mamba", False, 1), ("convolution", True, 1)),
]


@pytest.mark.parametrize(
    ("kind", "has_graphs", "seed"),
    long_but(itertools.product([None, *RECURRENT], (False, True), range(8)), LATE),
)
def test_a_device_that_is_late_says_the_same(
    kind: str | None, has_graphs: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows are is read on the device: plans say the furthest that they can be at.

    So is how far states move on: the host has no say in it, and keeps inputs of drafts alone.
    """
    watched = WatchedStates(monkeypatch, kind)
    steps, found = late_results(kind, has_graphs=has_graphs, seed=seed)
    assert num_several(steps, found) > 20
    assert watched.are_alike()
    assert (kind is None) == (not watched.num_kept)
    for kept, drafted, logits in watched.num_kept:
        assert kept == drafted <= logits
    assert kind is None or any(kept < logits for kept, _, logits in watched.num_kept), "other rows"


def num_several(steps: list[RecordedStep], found: list[StepResult]) -> int:
    """Compare results, and return how many rows got several tokens at once."""
    count = 0
    for step, result in zip(steps, found, strict=True):
        own, wanted = (row_results(step.plan, r) for r in (result, step.result))
        assert [row.token_ids for row in own] == [row.token_ids for row in wanted]
        assert result.drafted == step.result.drafted
        assert result.num_verified >= step.result.num_verified
        count += sum(len(row.token_ids) > 1 for row in own)
    return count


class WatchedStates:
    """Has nothing wait for a late device when states are held and move on, and notes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str | None) -> None:
        """`kind`: of recurrent layers, see `RECURRENT`."""
        sizes = () if kind is None else RECURRENT[kind].state_bytes(4)
        self.num_kept: list[tuple[int, int, int]] = []
        """Tokens whose inputs a step keeps, those that rows with drafts have, and those whose
        logits are wanted."""
        self._states: dict[bool, list[Tensor]] = {False: [], True: []}
        """States of rows with drafts behind each step, by whether a device is late."""
        hold, move_on = DraftStates.hold, DraftStates.move_on

        def watched_hold(states: DraftStates, inputs: StepInputs) -> KeptInputs | None:
            with Tape():
                kept = hold(states, inputs)
            if kept is not None and inputs.draws is not None:
                drafted = int(inputs.q_lens[inputs.draws.drafted.decodes].sum())
                self.num_kept.append((len(kept.tokens), drafted, len(inputs.tensors.logit_rows)))
            return kept

        def watched_move_on(states: DraftStates, drafted: Drafted, accepted: Tensor) -> None:
            is_late = not states._queue.is_at_once
            with Tape() if is_late else nullcontext():
                move_on(states, drafted, accepted)
            if states._layers and drafted.counts.any():
                self._states[is_late] += states_of(states, drafted.rows, sizes)

        monkeypatch.setattr(DraftStates, "hold", watched_hold)
        monkeypatch.setattr(DraftStates, "move_on", watched_move_on)

    def are_alike(self) -> bool:
        """Return whether a late device's are those of one that is not, as far as it has come."""
        at_once, late = self._states[False], self._states[True]
        pairs = zip(at_once[: len(late)], late, strict=True)
        return all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in pairs)


def states_of(states: DraftStates, rows: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return each state tensor of the first layer, of so many bytes, float32 [rows, numbers]."""
    found = []
    for bank, num_bytes in zip(states._kv.states[0], sizes, strict=True):
        slots = states._slots[rows, bank.first : bank.first + bank.num_slots].long()
        own = bank.pieces[:, :, slots].movedim(2, 0).flatten(1)
        found.append(own[:, :num_bytes].contiguous().view(torch.float32))
    return found


@pytest.mark.parametrize("too_far", [-1, 1])
def test_states_that_a_late_device_moves_on_wrongly_are_seen(
    too_far: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a token less or more than count."""
    move_on = DraftStates.move_on

    def wrong(self: DraftStates, drafted: Drafted, accepted: Tensor) -> None:
        own = accepted if self._queue.is_at_once else (accepted + too_far).clamp(min=0)
        move_on(self, drafted, torch.minimum(own, drafted.counts))

    monkeypatch.setattr(DraftStates, "move_on", wrong)
    watched = WatchedStates(monkeypatch, "delta")
    late_results("delta", has_graphs=True)
    assert not watched.are_alike()


STATE_FAULTS = [
    *("nothing is replayed", "the inputs of the recording", "rows begin", "all inputs count"),
    *("one input less", "rows stay held", "tokens stay"),
]


@pytest.mark.parametrize("fault", STATE_FAULTS)
def test_a_graph_of_states_that_leaves_others_is_seen(fault: str) -> None:
    """At the start, to the bit: rows begin and go on, of whose inputs some count."""

    class Wrong(TapeRecorder):
        def record(self, function: Any) -> Any:
            replay, graphs = super().record(function), function.func.__self__
            old = graphs._kept.inputs.clone()

            def wrong() -> None:
                kept, (rows, firsts, counts, lengths) = graphs._kept, graphs._held
                new, tokens, is_own = kept.inputs.clone(), kept.tokens.clone(), counts > 0
                if fault == "the inputs of the recording":
                    kept.inputs.copy_(old)
                elif fault == "rows begin":
                    lengths.copy_(counts)
                elif fault == "all inputs count":
                    counts.copy_(torch.where(is_own, firsts.max() // is_own.sum().sub(1), 0))
                elif fault == "one input less":
                    counts.sub_(is_own.long())
                if fault != "nothing is replayed":
                    replay()
                kept.inputs.copy_(new)
                if fault == "rows stay held":
                    kept.is_held.index_fill_(0, rows[is_own], 1)
                elif fault == "tokens stay":
                    kept.tokens.copy_(tokens)

            return wrong

    for recorder, is_seen in ((Wrong(), True), (TapeRecorder(), False)):
        runner = make_small_runner(LateQueue(), TensorKernels(), kind="delta")
        own = runner._model, runner.pool, runner.tables
        states = StateGraphs(*own, sizes=(8, 40), recorder=recorder)
        states.capture()
        message = "graph of 8 inputs of guesses leaves other states .* --cuda-graphs off"
        with pytest.raises(StartupError, match=message) if is_seen else nullcontext():
            states.check()


def test_a_check_of_graphs_of_states_copies_the_states_of_a_few_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pool has the memory by then: of 256 rows of Qwen3.5-0.8B the states are 5 GB."""
    runner = make_small_runner(LateQueue(), TensorKernels(), kind="delta")
    states = StateGraphs(
        runner._model, runner.pool, runner.tables, sizes=(40,), recorder=TapeRecorder()
    )
    states.capture()
    num_bytes, equal = [], torch.equal
    assert states._kept is not None
    small = {states._kept.is_held.shape, (40,)}

    def watched(left: torch.Tensor, right: torch.Tensor) -> bool:
        num_bytes.append(left.nbytes * (left.shape not in small))
        return equal(left, right)

    monkeypatch.setattr(torch, "equal", watched)
    states.check()
    (tensor,) = runner.pool.tensors
    of_a_slot = tensor.nbytes // tensor.shape[3]
    assert runner.max_num_seqs > 4 and 0 < sum(num_bytes) <= 4 * (
        of_a_slot * runner.pool.num_state_slots
    )


@pytest.mark.parametrize(
    ("kind", "has_graphs"),
    long_but(itertools.product(RECURRENT, (False, True)), [("delta", True), ("mamba", False)]),
)
def test_gpu_kernels_move_states_on(
    kind: str, has_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's, interpreted, those of chunks and of single tokens."""
    watched = WatchedStates(monkeypatch, kind)
    steps, found = late_results(
        kind, has_graphs=has_graphs, kernels=TritonKernels(), num_steps=choose(6, 40)
    )
    assert num_several(steps, found) > 1
    assert watched.are_alike() and watched.num_kept


def waits(*_: object, **__: object) -> None:
    """Stand for `torch.tensor` in a step: on a GPU the host would wait until all before is done."""
    raise AssertionError("a list is brought to the device beside the queue")


class Texts:
    """Rows with known tokens, looked up as a CPU does it and as a device does."""

    def __init__(self, known: list[list[int]], *, num_prompt: int = 0, **options: Any) -> None:
        self.table = torch.zeros(len(known) + 1, 200, dtype=torch.int32)
        for row, tokens in enumerate(known):
            self.table[row, : len(tokens)] = torch.tensor(tokens)
        self.lengths = torch.tensor([*map(len, known), 1])
        self.num_prompt = num_prompt
        queues = HostQueue(), LateQueue()
        self.lookups = [Lookup(len(self.table), queue, **options) for queue in queues]

    def begin(self, left: tuple[int, ...] = (), **fields: Any) -> None:
        """Have every row begin anew with its tokens; `fields` of `AddSequence`."""
        rows = range(len(self.table) - 1)
        tokens = [TokenSegment(token_ids=pack_int32(self.known(row))) for row in rows]
        sequences = [
            AddSequence(RowId(row), [tokens[row]], PLAIN, self.num_prompt, [], **fields)
            for row in rows
        ]
        self._begin(StepPlan(StepId(0), sequences, [], [], left_rows=left))

    def step(self, row: int, token_ids: list[int], left: tuple[int, ...] = ()) -> None:
        """Have a row draw tokens."""
        for token_id in token_ids:
            length = int(self.lengths[row])
            decodes = pack_decodes([row], [length - 1], [0])
            self._begin(StepPlan(StepId(0), [], [], [], decodes, left_rows=left))
            self.table[row, length], self.lengths[row] = token_id, length + 1

    def _begin(self, plan: StepPlan) -> None:
        for lookup in self.lookups:
            lookup.begin(plan, unpack_decodes(plan.decodes), self.table, self.lengths)

    def known(self, row: int) -> list[int]:
        return self.table[row, : self.lengths[row]].tolist()

    def guesses(self, most: int = 4) -> list[tuple[list[int], int]]:
        """Return the guesses of each row, and their source."""
        ids = torch.arange(len(self.table) - 1)
        counts = np.full(len(ids), most)
        lengths = self.lengths[:-1]
        rows = Rows(ids.numpy(), ids, lengths, lengths.numpy(), None, counts, ids)
        both = []
        for lookup in self.lookups:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "tensor", waits)
                guesses, counts, sources = lookup.propose(self.table, rows)
            own = zip(guesses.tolist(), counts.tolist(), sources.tolist(), strict=True)
            both.append([(tokens[:count], count and source) for tokens, count, source in own])
        assert both[0] == both[1]
        return both[0]

    def learn(self, row: int, source: DraftSource, counts: int, accepted: int) -> None:
        one = torch.tensor([row])
        drafted = Drafted(one, one, torch.tensor([counts]), one, np.array([0]), one * 0 + source)
        for lookup in self.lookups:
            lookup.learn(drafted, torch.tensor([accepted]))


PLAIN = SamplingParams()


def test_n_grams() -> None:
    texts = Texts(
        [
            [1, 2, 3, 4, 9, 1, 2, 3],  # 4 followed the last three
            [5, 6, 5, 6, 5, 6],  # goes on in a circle
            [1, 2, 3, 4, 5, 6, 7, 8, 9, 4],  # one token is too few
            [3, 4, 7, 9, 3, 4, 8, 3, 4],  # of two places the latest
            [7],
        ]
    )
    found = [tokens for tokens, _ in texts.guesses()]
    assert found == [[4, 9, 1, 2], [5, 6, 5, 6], [], [8, 3, 4, 8], []]


def test_host_and_device_find_the_same() -> None:
    rng, sources = random.Random(0), set()
    for seed in range(20):
        known = [rng.choices(range(3), k=rng.randint(3, 40)) for _ in range(30)]
        texts = Texts(known, num_prompt=rng.randint(1, 3), keeps_answers=True)
        prediction = pack_int32(rng.choices(range(3), k=30)) if seed % 2 else b""
        fields = {"prediction": prediction, "draft_scope": seed % 3}
        texts.begin(**fields)
        for row in range(3):
            texts.step(row, rng.choices(range(3), k=20))
        texts.begin((0, 1, 2), **fields)
        sources |= {source for _ in range(3) for tokens, source in texts.guesses() if tokens}
    assert sources == {*DraftSource} - {DraftSource.MTP}


def test_predictions() -> None:
    """By the last tokens of the output; where these are there twice, near where it was."""
    prediction = [1, 2, 3, 9, 5, 6, 7, 2, 3, 4, 8]
    texts = Texts([[7, 8, 2, 3, 1]], num_prompt=4)
    texts.begin(prediction=pack_int32(prediction))
    assert texts.guesses() == [([2, 3, 9, 5], DraftSource.PREDICTION)]
    texts.step(0, [2, 3])
    assert texts.guesses() == [([9, 5, 6, 7], DraftSource.PREDICTION)]
    texts.step(0, [0, 5, 6, 7, 2, 3])  # one token was another
    assert texts.guesses() == [([4, 8], DraftSource.PREDICTION)]
    texts.step(0, [4, 8])  # its end
    assert texts.guesses() == [([], 0)]
    texts.begin()
    texts.step(0, [1, 2, 3])
    assert all(source is not DraftSource.PREDICTION for _, source in texts.guesses())


def test_recent_answers() -> None:
    """Those of the row's scope; the prompt's last tokens tell how an answer begins."""
    answer = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
    texts = Texts([[1, 2, 3, 4], [5, 6, 3, 4]], num_prompt=4, keeps_answers=True)
    texts.begin(draft_scope=7)
    texts.step(0, answer)
    assert texts.guesses() == [([], 0)] * 2
    texts.begin((0,), draft_scope=7)
    texts.lengths[:] = 4
    assert texts.guesses() == [(answer[:4], DraftSource.SUFFIX)] * 2
    assert texts.guesses(8)[0] == (answer[:8], DraftSource.SUFFIX)
    texts.begin(draft_scope=8)
    assert texts.guesses() == [([], 0)] * 2


def test_memory_of_recent_answers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecentAnswers, "TOKENS", 32)
    monkeypatch.setattr(RecentAnswers, "SCOPES", 3)
    texts = Texts([[1, 2, 3, 4]], num_prompt=4, keeps_answers=True)
    for number in range(10):
        texts.begin((0,), draft_scope=number // 2 + 1)
        texts.lengths[0] = 4
        texts.step(0, [100 + number, *range(20 + number, 36 + number)])
    for lookup in texts.lookups:
        assert lookup._answers is not None
        rings = lookup._answers._rings
        assert list(rings) == [3, 4, 5]
        assert {len(ring.token_ids) for ring in rings.values()} == {32}
        # Full: the older answer is overwritten.
        assert {106, 107} & {*rings[4].token_ids.tolist()} == {107}
    texts.begin((0,), draft_scope=5)
    texts.lengths[0] = 4
    texts.step(0, [109])
    assert texts.guesses() == [([29, 30, 31, 32], DraftSource.SUFFIX)]


def test_the_source_that_was_right_is_taken() -> None:
    known = [1, 2, 3, 30, 31, 1, 2, 3]
    texts = Texts([known], num_prompt=1)
    texts.begin(prediction=pack_int32([2, 3, 40, 41]))
    assert texts.guesses(2) == [([40, 41], DraftSource.PREDICTION)]
    for _ in range(5):
        texts.learn(0, DraftSource.PREDICTION, 2, 0)
        texts.learn(0, DraftSource.NGRAM, 2, 2)
    assert texts.guesses(2) == [([30, 31], DraftSource.NGRAM)]
    texts.begin(prediction=pack_int32([2, 3, 40, 41]))  # another request
    assert texts.guesses(2) == [([40, 41], DraftSource.PREDICTION)]
