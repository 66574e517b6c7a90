"""Copies of KV to the host and back: nothing is altered, nothing else is touched."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grids import choose, more_when_long
from support.immediate_copies import TorchCopies, immediate_copy_queues
from torch import Tensor

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError, ProtocolError
from lightserve.messages.common import pack_int32
from lightserve.messages.router_worker import KVCopies, StepPlan
from lightserve.models.base import KVGroup, KVLayout
from lightserve.sim.worker import PlanError, SimulatedWorker
from lightserve.types import StepId
from lightserve.worker.device import CopyStreams, Event
from lightserve.worker.host_pool import MIN_TOKENS_BY_LAYER, DirectHostPool
from lightserve.worker.memory import KVPool, host_sizes
from lightserve.worker.staged_host_pool import StagedHostPool, make_host_pool

NUM_SLOTS, NUM_HOST_SLOTS = 40, 16


def make_pools(dtype: str) -> tuple[KVPool, DirectHostPool]:
    layout = KVLayout((KVGroup(num_layers=3, num_kv_heads=2, head_dim=4, dtype=dtype),))
    pool = KVPool(layout, NUM_SLOTS, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for tensor in pool.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return pool, DirectHostPool(NUM_HOST_SLOTS, pool)


def copies(slots: list[int], host_slots: list[int]) -> KVCopies:
    return KVCopies(pack_int32(slots), pack_int32(host_slots))


def kv_at(pool: KVPool, slots: list[int]) -> torch.Tensor:
    """All layers' keys and values at these slots, as attention reads them."""
    return torch.stack([layer[slots] for layer in (*pool.k, *pool.v)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_kv_survives_overwriting_and_moving(dtype: str) -> None:
    pool, host = make_pools(dtype)
    slots, elsewhere = [7, 3, 39, 0], [11, 12, 4, 30]
    before = kv_at(pool, slots)
    untouched = [i for i in range(NUM_SLOTS) if i not in {*slots, *elsewhere}]
    others = kv_at(pool, untouched)
    host.save(copies(slots, [5, 0, 15, 2]))
    for layer in (*pool.k, *pool.v):
        layer[slots] = float("nan")
    host.load(copies(elsewhere, [5, 0, 15, 2]))
    assert torch.equal(kv_at(pool, elsewhere), before)
    assert torch.equal(kv_at(pool, untouched), others)


def test_copies_show_what_was_saved() -> None:
    """Teeth: another token of the host pool is another KV."""
    pool, host = make_pools("float32")
    before = kv_at(pool, [1, 2])
    host.save(copies([1, 2], [0, 1]))
    host.load(copies([1, 2], [1, 0]))
    assert torch.equal(kv_at(pool, [2, 1]), before)
    assert not torch.equal(kv_at(pool, [1, 2]), before)


def test_a_later_save_replaces_an_earlier_one() -> None:
    pool, host = make_pools("float32")
    host.save(copies([1], [3]))
    host.save(copies([2], [3]))
    second = kv_at(pool, [2])
    host.load(copies([9], [3]))
    assert torch.equal(kv_at(pool, [9]), second)


SCENES = {
    "slot too large": {"saves": ([NUM_SLOTS], [0])},
    "slot too small": {"saves": ([-1], [0])},
    "host slot too large": {"loads": ([0], [NUM_HOST_SLOTS])},
    "host slot too small": {"saves": ([0], [-1])},
    "lengths": {"saves": ([0, 1], [0])},
    "slot twice": {"loads": ([3, 3], [0, 1])},
    "host slot twice": {"saves": ([3, 4], [1, 1])},
    "saved and loaded": {"saves": ([3], [1]), "loads": ([4], [1])},
    "ahead: host slot too large": {"ahead_loads": ([0], [NUM_HOST_SLOTS])},
    "saved and loaded ahead": {"saves": ([3], [1]), "ahead_loads": ([4], [1])},
    "loaded twice to a slot": {"loads": ([3], [1]), "ahead_loads": ([3], [2])},
}


def plan_of(scene: dict[str, tuple[list[int], list[int]]]) -> StepPlan:
    lists = {name: copies(*places) for name, places in scene.items()}
    return StepPlan(step_id=StepId(0), sequences=[], slot_ranges=[], rows=[], **lists)


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_wrong_plans_are_refused(scene: dict[str, tuple[list[int], list[int]]]) -> None:
    """By the pool, which looks at all of a plan first, and by the simulated worker."""
    _, host = make_pools("float32")
    with pytest.raises(ProtocolError, match=r"cop|saved"):
        host.check(plan_of(scene))
    worker = SimulatedWorker(
        num_slots=NUM_SLOTS, max_num_seqs=1, max_model_len=8, num_host_slots=NUM_HOST_SLOTS
    )
    worker._kv[:] = worker._host[:] = 1
    with pytest.raises(PlanError):
        worker.execute(plan_of(scene), exec_s=0.0, idle_s=0.0)


@pytest.mark.parametrize("scene", [{"saves": ([3], [1])}, {"loads": ([3], [1])}])
def test_nothing_that_was_never_written_is_copied(
    scene: dict[str, tuple[list[int], list[int]]],
) -> None:
    worker = SimulatedWorker(num_slots=9, max_num_seqs=1, max_model_len=8, num_host_slots=9)
    with pytest.raises(PlanError, match="never written"):
        worker.execute(plan_of(scene), exec_s=0.0, idle_s=0.0)


@pytest.mark.parametrize("count", [MIN_TOKENS_BY_LAYER - 1, MIN_TOKENS_BY_LAYER, 200])
def test_many_tokens_are_copied_as_few_are(count: int) -> None:
    layout = KVLayout((KVGroup(num_layers=3, num_kv_heads=2, head_dim=4, dtype="bfloat16"),))
    pool = KVPool(layout, 400, torch.device("cpu"))
    for tensor in pool.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3)))
    host = DirectHostPool(300, pool)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(4)).tolist()
    slots, elsewhere = order[:count], order[count : 2 * count]
    host_slots = list(range(300))[::-1][:count]
    before = kv_at(pool, slots)
    host.save(copies(slots, host_slots))
    for layer in (*pool.k, *pool.v):
        layer[slots] = float("nan")
    host.load(copies(elsewhere, host_slots))
    assert torch.equal(kv_at(pool, elsewhere), before)


def test_no_copies_need_no_host_pool() -> None:
    layout = KVLayout((KVGroup(num_layers=1, num_kv_heads=1, head_dim=4, dtype="float32"),))
    host = DirectHostPool(0, KVPool(layout, 4, torch.device("cpu")))
    host.save(KVCopies())
    host.load(KVCopies())


@pytest.mark.parametrize(
    ("text", "num_slots", "free", "expected"),
    [
        ("auto", 100, 1_000_000, 50),  # half of the KV pool
        ("auto", 100, 12_480, 15),  # half of the 30 tokens that it leaves
        ("auto", 100, 9_600, 0),
        ("0", 100, 1_000_000, 0),
        ("9600B", 10, 1_000_000, 100),
    ],
)
def test_sizes(text: str, num_slots: int, free: int, expected: int) -> None:
    layout = KVLayout((KVGroup(num_layers=1, num_kv_heads=1, head_dim=12, dtype="float32"),))
    assert layout.bytes_per_token == 96
    config = ServeConfig(host_kv_memory=text)
    sizes = host_sizes(config, layout, num_slots=num_slots, free_bytes=free)
    assert sizes.num_slots == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (50, 100)),  # as large as the KV pool
        ({"tp": 2}, (25, 12)),  # of 150 tokens of a rank half of what both other pools leave
        ({"prefix_host_memory": "9600B"}, (50, 100)),
        ({"prefix_host_memory": "0"}, (50, 0)),
        ({"host_kv_memory": "0"}, (0, 100)),
        ({"preemption": "recompute"}, (0, 100)),
        ({"cache_policy": "off"}, (50, 0)),
    ],
)
def test_sizes_for_prefixes(fields: dict[str, Any], expected: tuple[int, int]) -> None:
    layout = KVLayout((KVGroup(num_layers=1, num_kv_heads=1, head_dim=12, dtype="float32"),))
    config, free = ServeConfig(**fields), 28_800 if "tp" in fields else 1_000_000
    assert host_sizes(config, layout, num_slots=100, free_bytes=free) == expected


@pytest.mark.parametrize(
    ("fields", "num_state_slots", "message"),
    [
        ({"prefix_host_memory": "1GiB"}, 0, "--prefix-host-memory 1GiB for 1 rank.* 2 MiB"),
        ({"prefix_host_memory": "1MiB"}, 3, "--prefix-host-memory 1MiB does not go with"),
    ],
)
def test_prefixes_without_room_or_use_are_refused(
    fields: dict[str, Any], num_state_slots: int, message: str
) -> None:
    layout = SimpleNamespace(bytes_per_token=96, num_state_slots=num_state_slots)
    with pytest.raises(ConfigError, match=message):
        host_sizes(
            ServeConfig(**fields),
            layout,  # type: ignore[arg-type]
            num_slots=10,
            free_bytes=2_000_000,
        )


def test_more_than_is_free_is_refused() -> None:
    layout = KVLayout((KVGroup(num_layers=1, num_kv_heads=1, head_dim=12, dtype="float32"),))
    with pytest.raises(ConfigError, match="--host-kv-memory 1GiB for 1 rank"):
        host_sizes(ServeConfig(host_kv_memory="1GiB"), layout, num_slots=10, free_bytes=1_000_000)


# Copies beside a GPU's work: right in every order that its streams may choose. Queues of this
# module run nothing until they must. Then they take the next piece of work from any queue that no
# event holds back, at random or with one queue as late as possible, as a GPU might. What each
# forward pass finds in its slots, and what each load brings, is compared with plans carried out
# one after the other. Every rule of `staged_host_pool` is also broken on purpose, which some
# order must show.

STAGED_SLOTS, STAGED_HOST_SLOTS = 24, 16
LAYOUT = KVLayout((KVGroup(num_layers=2, num_kv_heads=1, head_dim=3, dtype="float32"),))


@dataclass(eq=False)
class LateEvent:
    is_reached: bool = False

    def seconds_since(self, earlier: Event) -> float:
        return 0.0


@dataclass(eq=False)
class LateQueue:
    """Holds work, events to reach and events to wait for."""

    name: str
    items: list[Callable[[], None] | LateEvent] = field(default_factory=list)
    waits: dict[int, LateEvent] = field(default_factory=dict)
    """By index of an item that is nothing but a wait."""
    next: int = 0
    ignored_waits: frozenset[str] = frozenset()
    """Names of queues whose events are not waited for."""
    owner: dict[LateEvent, str] = field(default_factory=dict)

    def run(self, work: Callable[[], None]) -> None:
        self.items.append(work)

    def upload(self, host: Tensor) -> Tensor:
        return host

    def record(self, *, is_timed: bool = False) -> Event:
        event = LateEvent()
        self.owner[event] = self.name
        self.items.append(event)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, LateEvent)
        if self.owner[event] not in self.ignored_waits:
            self.waits[len(self.items)] = event
            self.items.append(lambda: None)

    def step(self) -> bool:
        """Do the next item; whether there was one that nothing holds back."""
        if self.next == len(self.items):
            return False
        if (held := self.waits.get(self.next)) is not None and not held.is_reached:
            return False
        item = self.items[self.next]
        self.next += 1
        if isinstance(item, LateEvent):
            item.is_reached = True
        else:
            item()
        return True


class LateQueues:
    """Three queues and who comes first: at random, or always the earlier names of `order`."""

    def __init__(self, seed: int, order: tuple[str, ...] = (), **ignored: str) -> None:
        owner: dict[LateEvent, str] = {}
        self._queues = {
            name: LateQueue(
                name, owner=owner, ignored_waits=frozenset(ignored.get(name, "").split())
            )
            for name in ("compute", "pool", "drain")
        }
        self.queues = CopyStreams(**self._queues)
        self._random = random.Random(seed)
        self._order = order

    def finish(self) -> None:
        """Run all there is."""
        while True:
            names = list(self._order or self._queues)
            if not self._order:
                self._random.shuffle(names)
            if not any(self._queues[name].step() for name in names):
                break
        assert all(queue.next == len(queue.items) for queue in self._queues.values()), "deadlock"

    def run_some(self) -> None:
        """Let the device catch up by a few items, as it does while the host plans."""
        for _ in range(self._random.randrange(6)):
            names = list(self._queues)
            self._random.shuffle(names)
            any(self._queues[name].step() for name in names)


@dataclass
class Model:
    """Plans one after the other over numbers: what each slot holds, None for nothing."""

    slots: list[int | None] = field(default_factory=lambda: [None] * STAGED_SLOTS)
    host: list[int | None] = field(default_factory=lambda: [None] * STAGED_HOST_SLOTS)
    next_value: int = 1


@dataclass
class Step:
    """A plan's copies, and what its forward pass reads and writes."""

    saves: list[tuple[int, int]]
    loads: list[tuple[int, int]]
    ahead_loads: list[tuple[int, int]]
    reads: list[tuple[int, int]]
    """Slot and the value that must be in it."""
    writes: list[tuple[int, int]]


def random_steps(seed: int, count: int) -> tuple[list[Step], Model]:
    """Return steps that keep the contract of `StepPlan`, and what is left at their end."""
    rng, model = random.Random(seed), Model()
    return [random_step(rng, model) for _ in range(count)], model


def random_step(rng: random.Random, model: Model) -> Step:
    def pick(places: list[int]) -> list[int]:
        return rng.sample(places, rng.randrange(len(places) // 2 + 1)) if rng.random() < 0.6 else []

    def pairs(slots: list[int], host_slots: list[int]) -> list[tuple[int, int]]:
        return list(zip(slots, host_slots, strict=False))

    def full(values: list[int | None]) -> list[int]:
        return [place for place, value in enumerate(values) if value is not None]

    host_free = rng.sample(range(STAGED_HOST_SLOTS), STAGED_HOST_SLOTS)
    saves = pairs(pick(full(model.slots)), host_free)
    for slot, host_slot in saves:
        model.host[host_slot] = model.slots[slot]
    saved = {host_slot for _, host_slot in saves}
    loadable = [host_slot for host_slot in full(model.host) if host_slot not in saved]
    # What was saved is overwritten at once wherever possible: that is the point.
    targets = [slot for slot, _ in saves] + pick(list(range(STAGED_SLOTS)))
    loads = pairs(list(dict.fromkeys(targets)), pick(loadable))
    for slot, host_slot in loads:
        model.slots[slot] = model.host[host_slot]
    busy = {slot for slot, _ in loads}
    ahead_loads = pairs(pick([s for s in range(STAGED_SLOTS) if s not in busy]), pick(loadable))
    ahead_loaded = {slot for slot, _ in ahead_loads}
    usable = [slot for slot in range(STAGED_SLOTS) if slot not in ahead_loaded]
    written = pick(usable)
    reads = [(s, v) for s in usable if (v := model.slots[s]) is not None and s not in written]
    writes = []
    for slot in written:
        writes.append((slot, model.next_value))
        model.slots[slot] = model.next_value
        model.next_value += 1
    for slot, host_slot in ahead_loads:
        model.slots[slot] = model.host[host_slot]
    return Step(saves, loads, ahead_loads, reads, writes)


def staged_plan_of(step: Step) -> StepPlan:
    def copies(pairs: list[tuple[int, int]]) -> KVCopies:
        return KVCopies(pack_int32([s for s, _ in pairs]), pack_int32([h for _, h in pairs]))

    return StepPlan(
        step_id=StepId(0),
        sequences=[],
        slot_ranges=[],
        rows=[],
        saves=copies(step.saves),
        loads=copies(step.loads),
        ahead_loads=copies(step.ahead_loads),
    )


def kv_of(value: int) -> Tensor:
    """[2, 2, 1, 3], all of a token's layers."""
    return torch.arange(12.0).view(2, 2, 1, 3) + 100.0 * value


class Worker:
    """Launches steps; forward passes look at their slots when they run at last."""

    def __init__(self, queues: CopyStreams, num_staged: int, max_runs: int = 32) -> None:
        self.pool = KVPool(LAYOUT, STAGED_SLOTS, torch.device("cpu"))
        self.rows = torch.full((STAGED_HOST_SLOTS, 4, 3), torch.nan)
        staging = torch.full((num_staged, 4, 3), torch.nan)
        for tensor in self.pool.tensors:
            tensor.fill_(torch.nan)
        self.host_pool = StagedHostPool(
            self.pool,
            [self.rows],
            [staging],
            queues=queues,
            kernels=TorchCopies(),
            max_runs=max_runs,
        )
        self.queues = queues
        self.num_wrong = 0

    def launch(self, step: Step) -> None:
        plan = staged_plan_of(step)
        self.host_pool.check(plan)
        self.host_pool.begin(plan)
        # A pass reads first and writes later: others get in between, if nothing holds them back.
        self.queues.compute.run(partial(self._read, step.reads))
        self.queues.compute.run(partial(self._write, step.writes))
        self.queues.compute.run(partial(self._read, [*step.reads, *step.writes]))
        self.host_pool.end(plan)

    def _read(self, reads: list[tuple[int, int]]) -> None:
        [tensor] = self.pool.tensors
        self.num_wrong += sum(
            not torch.equal(tensor[:, :, :, slot], kv_of(value)) for slot, value in reads
        )

    def _write(self, writes: list[tuple[int, int]]) -> None:
        [tensor] = self.pool.tensors
        for slot, value in writes:
            tensor[:, :, :, slot] = kv_of(value)

    def count_wrong(self, model: Model) -> int:
        """Return how often a pass found something else, and how many places hold something else."""
        [tensor] = self.pool.tensors
        wrong = self.num_wrong
        for slot, value in enumerate(model.slots):
            wrong += value is not None and not torch.equal(tensor[:, :, :, slot], kv_of(value))
        for row, value in zip(self.rows, model.host, strict=True):
            wrong += value is not None and not torch.equal(row, kv_of(value).view(4, 3))
        return wrong


ORDERS = [
    (),
    ("compute", "pool", "drain"),
    ("compute", "drain", "pool"),
    ("pool", "compute", "drain"),
    ("pool", "drain", "compute"),
    ("drain", "compute", "pool"),
]


def count_wrong(
    seed: int, order: tuple[str, ...], num_staged: int, max_runs: int = 32, **ignored: str
) -> int:
    steps, model = random_steps(seed, 12)
    late = LateQueues(seed, order, **ignored)
    worker = Worker(late.queues, num_staged, max_runs)
    for step in steps:
        worker.launch(step)
        if not order:
            late.run_some()
    late.finish()
    return worker.count_wrong(model)


@more_when_long
@settings(max_examples=choose(30, 80), deadline=None)
@given(
    seed=st.integers(0, 10**9),
    order=st.sampled_from(ORDERS),
    num_staged=st.sampled_from([1, 3, 8, 17, 64]),
    max_runs=st.sampled_from([0, 1, 32]),
)
def test_every_order_gives_what_plans_one_after_the_other_give(
    seed: int, order: tuple[str, ...], num_staged: int, max_runs: int
) -> None:
    assert count_wrong(seed, order, num_staged, max_runs) == 0


@pytest.mark.parametrize(
    "broken",
    [
        {"pool": "compute"},  # rule 1
        {"compute": "pool"},  # rule 2
        {"pool": "drain"},  # rules 3 and 5
        {"drain": "pool"},  # rule 4
    ],
    ids=str,
)
def test_without_a_rule_some_order_goes_wrong(broken: dict[str, str]) -> None:
    assert any(count_wrong(seed, order, 3, **broken) > 0 for order in ORDERS for seed in range(5))


@pytest.mark.parametrize("name", ["reuse", "loads"])
def test_each_wait_for_drains_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging memory reused too early (rule 3), host slots loaded too early (rule 5)."""
    module = "lightserve.worker.staged_host_pool."
    if name == "reuse":
        monkeypatch.setattr(module + "_overlap", lambda *_: False)
    else:
        monkeypatch.setattr(module + "_Ring.wait_for", lambda *_: None)
    num_staged = 3 if name == "reuse" else 64
    assert any(count_wrong(seed, order, num_staged) > 0 for order in ORDERS for seed in range(5))


def test_the_cpu_needs_no_queues() -> None:
    steps, model = random_steps(7, 40)
    worker = Worker(immediate_copy_queues(), 5)
    worker.host_pool.warm_up()
    for step in steps:
        worker.launch(step)
    assert worker.count_wrong(model) == 0


def test_nothing_waits_for_drains_where_staging_is_large() -> None:
    """A step that overwrites what it saves does not wait for the host, however slow."""
    late = LateQueues(0, ("compute", "pool", "drain"))
    worker = Worker(late.queues, 64)
    first = [(slot, slot + 1) for slot in range(6)]
    worker.launch(Step([], [], [], [], first))
    again = [(slot, slot + 50) for slot in range(6)]
    worker.launch(Step([(slot, slot) for slot in range(6)], [], [], [], again))
    while any(queue.step() for queue in (late.queues.compute, late.queues.pool)):  # type: ignore[attr-defined]
        pass
    [tensor] = worker.pool.tensors
    assert torch.equal(tensor[:, :, :, 0], kv_of(50)), "the pass has run"
    assert worker.rows.isnan().all(), "and nothing has drained"
    late.finish()
    assert torch.equal(worker.rows[0], kv_of(1).view(4, 3)), "yet what was saved is of before"


def test_a_plan_without_copies_queues_nothing() -> None:
    late = LateQueues(0)
    worker = Worker(late.queues, 4)
    wait = worker.host_pool.begin(staged_plan_of(Step([], [], [], [], [])))
    assert wait.seconds() == 0.0
    assert not any(queue.items for queue in late.queues)  # type: ignore[attr-defined]


def test_beside_a_cpu_pool_copies_are_direct() -> None:
    pool = KVPool(LAYOUT, 4, torch.device("cpu"))
    host_pool = make_host_pool(8, pool, num_staged=2)
    assert not host_pool.overlaps_copies and host_pool.num_slots == 8
