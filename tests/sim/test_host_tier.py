"""Prefixes on the host: whatever happens, no request reads KV that is not its tokens'."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.grids import choose, more_when_long
from support.storms import Storm, play

from lightserve.config import ServeConfig
from lightserve.messages.common import Int32Array, TokenSegment, pack_int32
from lightserve.messages.frontend_router import RequestDelta, Submit
from lightserve.router.config import make_scheduler_config
from lightserve.router.events import FromFrontend, WorkersReady
from lightserve.router.kv import host_tier
from lightserve.router.kv.cache import KVStore
from lightserve.router.kv.host_tier import HostTier
from lightserve.router.kv.prefix_node import PrefixNode
from lightserve.router.kv.prefix_tree import PrefixTree
from lightserve.router.scheduler import Scheduler
from lightserve.sim.simulation import Simulation, TimedEvent
from lightserve.sim.virtual_gpus import H200_LLAMA_8B
from lightserve.sim.worker import (
    EOS_TOKEN_ID,
    LengthWorker,
    PlanError,
    SimulatedWorker,
    VirtualWorker,
)
from lightserve.types import SLO, FrontendId, RequestClass, RequestId, SamplingParams

NUM_STORMS = choose(40, 1000)


class TierStorm(Storm):
    """A storm of prompts that begin alike, more than the pool holds, and hosts of all sizes."""

    families = (None, *range(6))

    def more_prefix_slots(self, rng: random.Random) -> int:
        return rng.choice([1, 10, 40, 150, 1000])

    def more_of_request(self) -> dict[str, Any]:
        return {"prefix_salt": self.rng.choice(["", "", "other"])}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what storms do to copies."""
    found: Counter[str] = Counter()

    def count(of: type, name: str, happens: Callable[..., bool] = lambda *_, **__: True) -> None:
        plain = getattr(of, name)

        def counted(self: object, *args: Any, **named: Any) -> Any:
            found[name] += happens(self, *args, **named)
            return plain(self, *args, **named)

        monkeypatch.setattr(of, name, counted)

    count(HostTier, "keep", lambda _, node: node.host_slots is not None)
    count(HostTier, "_give_up")
    count(HostTier, "bring", lambda _, node, tokens, **named: len(tokens) > 0)
    count(KVStore, "_load_prefix", lambda self, request, *_, **__: request in self._held_ahead)
    return found


@more_when_long
def test_random_schedules(seen: Counter[str]) -> None:
    """The worker knows which tokens are in each slot, in the pool and on the host."""
    for seed in range(NUM_STORMS):
        play(TierStorm(seed))
    assert min(seen.values()) > NUM_STORMS / 10, seen


# What keeps copies right is needed: without one of the rules the worker finds a wrong one.


def nothing(*_: Any) -> None:
    pass


KEEP, BRING = HostTier.keep, HostTier.bring


def keeps_another(self: HostTier, node: PrefixNode) -> None:
    assert node.slots is not None
    slots, node.slots = node.slots, np.roll(node.slots, 1)
    KEEP(self, node)
    node.slots = slots


def keeps_too_late(self: HostTier, node: PrefixNode) -> None:
    if node.host_slots is None and len(node.tokens) <= self._memory.host.num_free:
        KEEP(self, node)
        self._memory.saves.take()


def brings_another(self: HostTier, *of: Any, **named: Any) -> Int32Array:
    return np.roll(BRING(self, *of, **named), 1)


def is_end(node: PrefixNode) -> bool:
    return node.host_slots is not None and node.num_on_host == 0


SPLIT = PrefixTree._split


def splits_the_rest_twice(self: PrefixTree, node: PrefixNode, length: int) -> PrefixNode:
    slots = node.host_slots
    first = SPLIT(self, node, length)
    if slots is not None and first is not node and 2 * length <= len(slots):
        first.host_slots, node.host_slots = slots[-length:], slots[: len(slots) - length]
    return first


FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "slots are saved in another order": (HostTier, "keep", keeps_another),
    "nothing is saved": (HostTier, "keep", keeps_too_late),
    "copies come back in another order": (HostTier, "bring", brings_another),
    "what a plan saves or reads is given up by it": (host_tier, "_is_end", is_end),
    "a split mixes copies up": (PrefixTree, "_split", splits_the_rest_twice),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_rule_is_needed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises((PlanError, AssertionError)):
        for seed in range(300):
            play(TierStorm(seed))


# Chats of several turns, of three times as many tokens as the pool holds.

SAID, ANSWER, NUM_TURNS, THINK_S = 180, 30, 8, 20.0
"""Tokens that a turn adds, those of its answer, turns of a chat, mean seconds between turns."""
LONGEST = NUM_TURNS * (SAID + ANSWER) + 500


class Chats:
    """Users of one virtual H200; each says something when it has thought about the answer."""

    def __init__(
        self, num_users: int, *, num_slots: int, num_prefix_slots: int, checks_kv: bool = False
    ) -> None:
        config = ServeConfig(max_num_seqs=256, max_num_batched_tokens=1024)
        self.core = Scheduler(make_scheduler_config(config, max_model_len=LONGEST))
        sizes = {"max_num_seqs": 256, "max_model_len": LONGEST}
        inner = (
            SimulatedWorker(num_slots=num_slots, num_host_slots=num_prefix_slots, **sizes)
            if checks_kv
            else LengthWorker(**sizes)
        )
        self._rng = np.random.default_rng(7)
        self.worker = VirtualWorker(H200_LLAMA_8B, inner, rng=np.random.default_rng(1))
        self.simulation = Simulation(
            self.core,
            self.worker,
            self.worker.seconds,
            WorkersReady(
                num_slots,
                num_prefix_slots=num_prefix_slots,
                step_cost=H200_LLAMA_8B.step_cost,
                overlaps_copies=True,
                graph_sizes=H200_LLAMA_8B.graph_sizes,
            ),
            frontend=self._on_news,
        )
        self._said: dict[int, list[int]] = {}
        """Tokens of each user's chat so far; a user's requests have its number modulo users."""
        self._num_users = num_users
        self._num_sent = [0] * num_users
        self._answers: dict[int, list[int]] = {}
        self._num_known: dict[int, int] = {}
        """By request: tokens of its prompt that were said before."""

    def run(self, seconds: float) -> None:
        starts = self._rng.uniform(0.0, 2 * THINK_S, self._num_users)
        first = [self._next(user, at_s) for user, at_s in enumerate(starts)]
        self.simulation.run(first, until_s=seconds)
        self.core.check_integrity()

    def _next(self, user: int, at_s: float) -> TimedEvent:
        number = user + self._num_users * self._num_sent[user]
        if self._num_sent[user] % NUM_TURNS == 0:
            self._said[user] = []
        self._num_sent[user] += 1
        said = self._said[user]
        self._num_known[number] = len(said)
        said += self._rng.integers(1000, 100_000, int(self._rng.uniform(0.5, 1.5) * SAID)).tolist()
        num_output = int(self._rng.uniform(0.5, 1.5) * ANSWER)
        self._answers[number] = []
        message = Submit(
            request_id=RequestId(number),
            prompt=[TokenSegment(token_ids=pack_int32(said))],
            max_tokens=2 * ANSWER,
            eos_token_ids=[EOS_TOKEN_ID],
            request_class=RequestClass.RT,
            sampling=SamplingParams(seed=len(said) + num_output),
            slo=SLO(ttft_ms=1000.0),
            age_s=0.0,
        )
        return TimedEvent(at_s, FromFrontend(FrontendId(0), message))

    def _on_news(self, _: FrontendId, delta: RequestDelta, now_s: float) -> list[TimedEvent]:
        answer = self._answers[delta.request_id]
        answer += delta.token_ids
        if delta.finish_reason is None:
            return []
        user = delta.request_id % self._num_users
        self._said[user] += answer
        return [self._next(user, now_s + self._rng.exponential(THINK_S))]

    @property
    def hit_share(self) -> float:
        """Tokens that were not computed, of those that were said before."""
        outcomes = self.simulation.outcomes
        num_known = sum(self._num_known[key.request_id] for key in outcomes)
        return sum(outcome.num_cached_tokens for outcome in outcomes.values()) / num_known

    def first_token_s(self) -> tuple[float, float, float]:
        """Mean, median and 95th percentile of the time to the first token."""
        times = [
            o.token_times_s[0] - o.arrival_s
            for o in self.simulation.outcomes.values()
            if o.token_times_s
        ]
        return float(np.mean(times)), *np.percentile(times, [50, 95]).tolist()

    def num_known(self) -> int:
        """Tokens of all chats now."""
        return sum(map(len, self._said.values()))


@pytest.fixture(scope="module")
def chats() -> dict[str, Chats]:
    """The same users with the tier, without it, and with a pool that holds everything."""
    sizes = {"tier": (6_000, 54_000), "none": (6_000, 0), "all in the pool": (60_000, 0)}
    scenes: dict[str, Chats] = {}
    for name, (num_slots, num_prefix_slots) in sizes.items():
        scenes[name] = Chats(24, num_slots=num_slots, num_prefix_slots=num_prefix_slots)
        scenes[name].run(140.0)
    return scenes


def test_chats_find_on_the_host_what_the_pool_has_no_room_for(chats: dict[str, Chats]) -> None:
    hits = {name: scene.hit_share for name, scene in chats.items()}
    means = {name: scene.first_token_s()[0] for name, scene in chats.items()}
    assert chats["tier"].num_known() > 2.5 * 6_000
    assert hits["all in the pool"] > 0.95 and hits["tier"] > 0.98 * hits["all in the pool"], hits
    assert hits["none"] < 0.5 * hits["tier"], hits
    assert means["tier"] < means["none"], means


def test_copies_are_right_while_many_chats_share_the_pool() -> None:
    """The worker knows each token on the host, which is too small for all."""
    scene = Chats(30, num_slots=6_000, num_prefix_slots=12_000, checks_kv=True)
    scene.run(60.0)
    assert scene.core.kv is not None and scene.core.kv.tree is not None
    tier = scene.core.kv.tree.tier
    assert tier is not None and min(tier.num_tokens.values()) > 1000, tier


def test_where_all_fits_the_tier_changes_no_decision() -> None:
    scenes = [Chats(20, num_slots=40_000, num_prefix_slots=size) for size in (0, 40_000)]
    for scene in scenes:
        scene.run(60.0)
    first, second = (scene.simulation.outcomes for scene in scenes)
    assert first == second and len(first) > 30
