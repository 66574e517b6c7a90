"""States of recurrent layers: each step begins with the state behind exactly the tokens before.

The simulated worker keeps in the slots of every state behind which tokens it is, so a state that
was lost, moved on too far, loaded from elsewhere, or overwritten, is an error at the next step.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from support.core_scenes import MAX_SEQS, Arrival, make_core, step_time, submit
from support.drafted import force_drafts
from support.grids import choose, more_when_long
from support.storms import Storm, play

from bench.scheduling.paper_loads import echo_load
from lightserve.errors import ConfigError
from lightserve.messages.common import (
    Int32Array,
    RegexConstraint,
)
from lightserve.messages.router_worker import (
    NO_TOKEN,
    DecodeColumns,
    OutputKind,
    PlanRow,
    RowResult,
    StepPlan,
    StepResult,
    unpack_decodes,
)
from lightserve.router.config import SchedulerConfig
from lightserve.router.events import FromFrontend, WorkersReady
from lightserve.router.kv.cache import Preemption
from lightserve.router.kv.host import Checkpoints
from lightserve.router.kv.prefix_node import Hit, task_aware
from lightserve.router.kv.prefix_tree import PrefixTree
from lightserve.router.kv.states import States, wanted_borders
from lightserve.router.memory_plan import MemoryPlan
from lightserve.router.policies.unified import UnifiedPolicy
from lightserve.router.request import Request
from lightserve.sim.hybrid import HybridConfig, HybridRun, run_hybrid
from lightserve.sim.simulation import Simulation, TimedEvent
from lightserve.sim.virtual_gpus import GPUS, MODELS, read_hardware, virtual_gpus
from lightserve.sim.worker import PlanError, SimulatedWorker
from lightserve.types import FrontendId, RequestClass, RequestId, RequestKey

NUM_STORMS = choose(20, 1000)
JOBS_START_AGAIN = (8285, 9329)
"""Storms in which an urgent job starts again sixteen times, each time out of turn."""
CUT = States.cut


class LateGrammars(SimulatedWorker):
    """A worker whose grammars are compiled late: until then their rows have no token."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self._late: set[int] = set()
        self._rng = random.Random(0)
        self.num_retries = 0

    def execute(self, plan: StepPlan, *, exec_s: float, idle_s: float) -> StepResult:
        for sequence in plan.sequences:
            (self._late.discard if sequence.constraint is None else self._late.add)(sequence.row)
        decodes = unpack_decodes(plan.decodes).rows
        self._late -= {row for row in [*self._late] if self._rng.random() < 0.5}
        result = super().execute(plan, exec_s=exec_s, idle_s=idle_s)
        without = [RowResult(row, []) for row in decodes.tolist() if row in self._late]
        return msgspec.structs.replace(result, rows=[*result.rows, *without])

    def _decode(self, decodes: DecodeColumns) -> np.ndarray[Any, Any]:
        token_ids = super()._decode(decodes)
        for index, row in enumerate(decodes.rows.tolist()):
            if row in self._late:
                token_ids[index] = NO_TOKEN
                self._num_known[row] -= 1
                self.num_retries += 1
        return token_ids

    def _run(self, row: PlanRow) -> RowResult | None:
        if row.row not in self._late or OutputKind.SAMPLE not in row.output:
            return super()._run(row)
        self.num_retries += 1
        super()._run(PlanRow(row.row, row.start_position, row.num_tokens, OutputKind.NONE))
        return RowResult(row.row, [])


class StateStorm(Storm):
    """A storm over a model with states, of which worker groups differ in size.

    Who is late is not judged: a chunk that has to end before its draw may cost a decode its time.
    """

    worker_type = LateGrammars

    def _config(self) -> SchedulerConfig:
        config = super()._config()
        kv = dataclasses.replace(config.kv, is_exclusive=False)
        if self.rng.random() < 0.5:  # often enough there is a host, with room for some
            self.num_host_slots = self.rng.choice([40, 90, 400])
            kv = dataclasses.replace(kv, preemption=Preemption.CHECKPOINT)
        return dataclasses.replace(config, kv=kv, policy=UnifiedPolicy())

    def start_workers(self) -> None:
        self.num_state_slots = random.Random(self._group).choice([1, 4, 7])
        super().start_workers()

    def more_of_request(self) -> dict[str, Any]:
        if self.rng.random() < 0.8:
            return {}
        return {"constraint": RegexConstraint(pattern="late")}


class LateGuesses(LateGrammars):
    """The same, with some guesses right."""

    num_drafts = 0

    def __init__(self, **sizes: Any) -> None:
        super().__init__(acceptance=0.6, **sizes)

    def execute(self, plan: StepPlan, *, exec_s: float, idle_s: float) -> StepResult:
        LateGuesses.num_drafts += int(unpack_decodes(plan.decodes).num_drafts.sum())
        return super().execute(plan, exec_s=exec_s, idle_s=idle_s)


class GuessedStorm(StateStorm):
    """The same with as many drafts as may be."""

    worker_type = LateGuesses

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        force_drafts(self.core, seed, most=(8, 3, 1)[seed % 3])


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what storms do to states."""
    found: Counter[str] = Counter()

    def count(of: type, name: str, happens: Callable[..., bool] = lambda *_: True) -> None:
        plain = getattr(of, name)

        def counted(self: object, *args: Any, **named: Any) -> Any:
            found[name] += happens(self, *args)
            return plain(self, *args, **named)

        monkeypatch.setattr(of, name, counted)

    count(Checkpoints, "load_state")
    count(States, "retry", lambda _, request: len(request.recurrent.spare) > 0)
    count(States, "hold", lambda _, r: r.num_shared_tokens > 0 and not len(r.recurrent.slots))
    count(PrefixTree, "put_snapshot")
    count(PrefixTree, "_drop_snapshot")
    count(States, "_put")
    return found


@more_when_long
def test_random_schedules(seen: Counter[str]) -> None:
    """No row ever has another state than that of its tokens, whatever happens to it."""
    for seed in (*range(NUM_STORMS), *JOBS_START_AGAIN):
        play(StateStorm(seed))
    assert min(seen.values()) > NUM_STORMS / 10, seen


def test_drafts_move_states_on_as_far_as_they_are_right() -> None:
    LateGuesses.num_drafts = 0
    for seed in range(choose(8, 1000)):
        play(GuessedStorm(seed))
    assert LateGuesses.num_drafts > 50


def test_trees_are_walked_once_a_plan_for_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    """By each request of an attempt, however often it is asked; by none where a model has none."""
    walks, asked, most = Counter[Request](), Counter[str](), Counter[str]()
    plain, begin, is_planning = States.borders, MemoryPlan.__init__, [False]

    def borders(self: States, request: Request) -> list[int]:
        walks[request] += is_planning[-1]
        most["walks"] = max(most["walks"], walks[request])
        most["borders"] += 1
        return plain(self, request)

    def begun(self: MemoryPlan, *args: Any, **named: Any) -> None:
        walks.clear()
        begin(self, *args, **named)

    def cut(self: States, request: Request, *args: Any) -> int:
        asked["cut"] += 1
        asked["again"] += walks[request] > 0
        return CUT(self, request, *args)

    monkeypatch.setattr(States, "borders", borders)
    monkeypatch.setattr(States, "cut", cut)
    monkeypatch.setattr(MemoryPlan, "__init__", begun)
    for seed in range(12):
        storm = StateStorm(seed)
        plan = storm.core.plan

        def planned(now_s: float, plan: Any = plan) -> Any:
            is_planning.append(True)
            found = plan(now_s)
            is_planning.append(False)
            return found

        monkeypatch.setattr(storm.core, "plan", planned)
        play(storm)
    assert most["walks"] == 1 and asked["again"] > 5, asked
    most.clear()
    play(Storm(0))
    assert not most


# What keeps states right is needed: without one of the rules the worker finds a wrong state.


LOOK_UP = PrefixTree.look_up


def without_snapshots(self: PrefixTree, *args: Any, **named: Any) -> Hit:
    self._has_snapshots = False
    try:
        return LOOK_UP(self, *args, **named)
    finally:
        self._has_snapshots = True


def nothing(*_: Any) -> None:
    pass


def takes_less(_self: States, num_takeable: int, num_missing: int) -> int:
    return max(0, min(num_takeable, num_missing))


def cuts_nothing(
    _self: States, _request: Request, _start: int, num_tokens: int, _borders: object
) -> int:
    return num_tokens


def a_token_late(self: States, request: Request, num_tokens: int) -> None:
    """Make a snapshot of the state behind a chunk, for one token less."""
    if num_tokens > 1 and self._pool.num_free > self.num_slots:
        slots = self._acquire(request, self.num_slots)
        self._saves.add(request.recurrent.slots, slots)
        request.recurrent.snapshots.append((request.next_position + num_tokens - 1, slots))


FAULTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "a prefix without a snapshot is a hit": (PrefixTree, "look_up", without_snapshots),
    "a draw is made again from the state behind it": (States, "retry", nothing),
    "no state is kept for that": (States, "keep_for_retry", nothing),
    "a chunk goes on beyond a draw that may be made again": (States, "cut", cuts_nothing),
    "the end of a request's memory is taken alone": (States, "portion", takes_less),
    "a snapshot is not kept until it was copied": (States, "hold", nothing),
    "a snapshot is that of another token": (States, "end_chunk", a_token_late),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_rule_is_needed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises((PlanError, AssertionError)):
        for seed in range(300):
            play(StateStorm(seed))


# Where snapshots are worth their slots, and what of a tree goes first.

WORTH = 10


def tokens(*parts: str) -> Int32Array:
    """Return one token for each letter."""
    return np.array([ord(letter) for letter in "".join(parts)], dtype=np.int32)


@pytest.mark.parametrize(
    ("waiting", "known", "expected"),
    [
        ([], [], []),
        (["a" * 12 + "x"], [], [12]),
        (["a" * 9 + "x"], [], []),  # ten tokens are not saved
        (["a" * 5 + "x", "a" * 5 + "y"], [], [5]),  # by two together they are
        (["a" * 12 + "x", "a" * 24 + "x"], [], [12, 24]),
        (["a" * 12 + "x", "a" * 18 + "x"], [], [12]),  # the second saves six more
        (["a" * 30], [], [29]),  # the last token is computed in any case
        ([], ["a" * 12 + "x"], [12]),  # another prompt had as much of it
        (["b" * 30], ["c" * 30], []),
    ],
)
def test_borders(waiting: list[str], known: list[str], expected: list[int]) -> None:
    tree = PrefixTree(has_snapshots=True)
    own = tree.expect("", tokens("a" * 30))
    for text in waiting:
        tree.expect("", tokens(text))
    for number, text in enumerate(known):
        put(tree, text, first_slot=100 * number)
    root = tree.root("")
    assert root is not None
    assert wanted_borders(root, tokens("a" * 29), 1, WORTH) == expected
    tree.forget(own)
    root = tree.root("")
    assert expected == ([] if root is None else wanted_borders(root, tokens("a" * 29), 0, WORTH))


def put(tree: PrefixTree, text: str, *, first_slot: int, snapshots: Sequence[int] = ()) -> None:
    """Let a tree know a text, with snapshots of two slots at some positions."""
    lease, _ = tree.acquire("", tokens(), is_real_time=False)
    start = 0
    for end in sorted({*snapshots, len(text)}):
        slots = np.arange(first_slot + start, first_slot + end, dtype=np.int32)
        tree.extend(lease, tokens(text[start:end]), slots)
        start = end
        if end in snapshots:
            assert tree.put_snapshot(lease.node, -np.array([end, end + 1000], dtype=np.int32))
    tree.release(lease)


def test_a_hit_is_the_longest_prefix_with_a_snapshot() -> None:
    tree = PrefixTree(has_snapshots=True)
    put(tree, "aaaabbbbcccc", first_slot=0, snapshots=[4, 8])
    found = [tree.look_up("", tokens("aaaabbbbcccc"[:end])).num_tokens for end in range(1, 13)]
    assert found == [0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 8]
    hit = tree.look_up("", tokens("aaaabbbbcccc"))
    assert hit.node is not None and hit.node.snapshot is not None
    assert hit.num_evictable == 8 + 2, "tokens, and the snapshot itself"


def test_what_no_request_can_use_goes_first() -> None:
    """KV behind the last snapshot, a snapshot that a later one replaced, then the last ones."""
    tree = PrefixTree(has_snapshots=True)
    put(tree, "aaaabbbbcccc", first_slot=0, snapshots=[4, 8])
    put(tree, "dddd", first_slot=50, snapshots=[4])
    assert tree.num_evictable == 12 + 4 + 3 * 2
    assert sorted(tree.evict(4).tolist()) == [8, 9, 10, 11]
    assert sorted(tree.evict(2).tolist()) == [-1004, -4], "of `aaaa`: `aaaabbbb` has one"
    assert tree.look_up("", tokens("aaaabbbb")).num_tokens == 8
    tree.expect("", tokens("aaaabbbbx"))
    assert sorted(tree.evict(2).tolist()) == [-1004, -4], "of `dddd`: the other is awaited"
    assert tree.num_awaited == 2
    assert sorted(tree.evict(20).tolist())[:2] == [-1008, -8]
    assert (tree.num_evictable, tree.num_in_snapshots, tree.num_awaited) == (0, 0, 0)


def test_a_snapshot_that_is_read_stays() -> None:
    tree = PrefixTree(has_snapshots=True)
    put(tree, "aaaa", first_slot=0, snapshots=[4])
    node = tree.look_up("", tokens("aaaa")).node
    assert node is not None
    tree.read(node, 1)
    assert tree.num_evictable == 4
    tree.read(node, 1)
    tree.read(node, -1)
    assert tree.num_evictable == 4
    tree.read(node, -1)
    assert len(tree.evict(6)) == 6


# Questions about documents, with Qwen3.5-0.8B's sizes: Echo's scene, with fewer documents.


class Asked(NamedTuple):
    """What came of all questions."""

    num_answers: int
    hit_rate: float
    seconds: float
    num_made: int


def ask(folder: Path, order: str, duration_s: float) -> Asked:
    load = echo_load(folder, 0, documents=10)
    options = {"be_order": order, "cache_policy": "task-aware"}
    load |= {"rt": None, "rt_lengths": None, "duration_s": duration_s, "margin_s": 0.0}
    hardware = virtual_gpus(MODELS["qwen3.5-0.8b"], GPUS["a100-80g"], 1)
    run = HybridRun(HybridConfig(**load, hardware=hardware, serve_options=options))
    run.advance(duration_s)
    seen = [one for one in run.seen()[RequestClass.BE] if one.token_times_s]
    ended = [one for one in seen if one.is_finished]
    num_prompt = sum(one.num_prompt_tokens for one in seen)
    return Asked(
        len(ended),
        sum(one.num_cached_tokens for one in seen) / num_prompt,
        max(one.token_times_s[-1] for one in ended),
        run.core.counters[RequestClass.BE].num_snapshots,
    )


def test_questions_about_one_document_go_on_from_its_end(tmp_path: Path) -> None:
    together, as_they_came = ask(tmp_path, "sharing", 30.0), ask(tmp_path, "arrival", 6.0)
    assert together.num_answers == 200 and together.num_made >= 10
    assert together.hit_rate > 0.8
    rate = together.num_answers / together.seconds
    assert rate > 2.5 * as_they_came.num_answers / as_they_came.seconds


def small(**options: Any) -> HybridConfig:
    """Return a run of chats on the same model."""
    hardware = virtual_gpus(MODELS["qwen3.5-0.8b"], GPUS["a100-80g"], 1)
    values: dict[str, Any] = {"be": "closed:12", "be_lengths": "uniform:100-900,10-90"}
    values |= {"duration_s": 4.0, "margin_s": 1.0, "hardware": hardware}
    return HybridConfig(**(values | options))


def test_a_pool_holds_a_state_and_a_request() -> None:
    assert HybridRun(small(capacity_tokens=900 + 90 - 1 + 1590)) is not None
    with pytest.raises(ConfigError, match="must be at least 2579, the most that one request"):
        HybridRun(small(capacity_tokens=900 + 90 - 2 + 1590))


def test_states_of_real_size_are_right(seen: Counter[str]) -> None:
    """Real-time chats take the memory of others, which wait on the host for a while."""
    chats = {"rt": "poisson:12", "rt_lengths": "uniform:100-400,10-60"}
    run = HybridRun(small(capacity_tokens=14_000, host_kv_tokens=20_000, checks_kv=True, **chats))
    run.advance(4.0)
    assert sum(one.is_finished for one in run.seen()[RequestClass.BE]) > 30
    assert seen["load_state"] > 0
    run.core.check_integrity()


@pytest.mark.parametrize("num_state_slots", [0, 4])
def test_the_next_turn_goes_on_from_the_end_of_the_last_one(num_state_slots: int) -> None:
    """The state that a request leaves is a snapshot, at no cost: as far as KV alone would be."""
    core = make_core("chunked", 64, cache_order=task_aware, max_model_len=200)
    ready = WorkersReady(200, num_state_slots=num_state_slots)
    worker = SimulatedWorker(
        num_slots=200, num_state_slots=num_state_slots, max_num_seqs=MAX_SEQS, max_model_len=200
    )
    simulation = Simulation(core, worker, step_time, ready)
    prompt: list[int] = [7] * 30
    found = []
    for turn in range(3):
        arrival = Arrival(0.0, len(prompt), 12, 12)
        key = RequestKey(FrontendId(0), RequestId(turn))
        event = FromFrontend(FrontendId(0), submit(turn, arrival, prompt=prompt))
        simulation.run([TimedEvent(float(turn), event)])
        outcome = simulation.outcomes[key]
        found.append(outcome.num_cached_tokens)
        prompt = [*prompt, *outcome.token_ids, *[8 + turn] * 10]
    assert found == [0, 30 + 12 - 1, 42 + 10 + 12 - 1]  # of the last token there is no KV
    core.check_integrity()


def test_a_server_that_would_not_start_is_not_simulated() -> None:
    hardware = read_hardware("qwen3.5-0.8b@a100-80g")
    said = (
        "--block-owner must be two-ended with --hardware qwen3.5-0.8b@a100-80g, whose model has"
        " recurrent layers, got exclusive"
    )
    options = {"block_owner": "exclusive", "preemption": "recompute", "cache_policy": "off"}
    with pytest.raises(ConfigError, match=re.escape(said)):
        HybridRun(small(hardware=hardware, serve_options=options))


def test_gpus_guess_beside_states() -> None:
    """A lone chat is written faster, and the states that workers find are the right ones."""
    chat: dict[str, Any] = {"be": None, "be_lengths": None, "rt": "closed:1"}
    tokens_per_s = [
        run_hybrid(
            small(
                serve_options={"speculation": way},
                draft_acceptance=0.8 if way == "ngram" else 0.0,
                checks_kv=True,
                rt_lengths="uniform:100-400,100-300",
                **chat,
            )
        ).rt.throughput_tps
        for way in ("off", "ngram")
    ]
    assert tokens_per_s[1] > 1.3 * tokens_per_s[0]


def test_virtual_hardware_has_no_layer_that_guesses() -> None:
    with pytest.raises(ConfigError, match="--speculation must not be mtp with virtual hardware"):
        HybridRun(small(serve_options={"speculation": "mtp"}))
