"""Tokens that several requests hold count once, until their last user leaves: every rule that
looks ahead against a step-by-step simulation of the same futures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.grids import choose, more_when_long
from test_admission import history, make_request, make_rule

from lightserve.messages.common import Int32Array
from lightserve.router.admission import ADMISSION_RULES
from lightserve.router.admission.base import PoolView
from lightserve.router.admission.classwise import ClasswiseAdmission
from lightserve.router.admission.peak import PeakRound
from lightserve.router.future_memory import IntArray
from lightserve.router.kv.prefix_node import Hit
from lightserve.router.kv.prefix_tree import PrefixTree
from lightserve.router.request import Found, Request, progress
from lightserve.types import RequestClass

NUM_FUTURES = 3
KEY = ""


@dataclass(frozen=True)
class Member:
    """One request: its prompt, what it has generated, what it will (by future)."""

    prompt: tuple[int, ...]
    generated: int
    rest: tuple[int, ...]


# Few prefixes, so that they are shared, extended and cut in the middle.
trunks = st.sampled_from([(), (1, 1, 1), (1, 1, 1, 2, 2), (1, 1, 3, 3, 3, 3), (4, 4)])
tails = st.lists(st.integers(5, 9), min_size=1, max_size=6).map(tuple)
members = st.builds(
    lambda trunk, tail, generated, rest: Member(trunk + tail, generated, rest),
    trunks,
    tails,
    st.integers(0, 9),
    st.tuples(*[st.integers(1, 12)] * NUM_FUTURES),
)


class Scene:
    """Requests over a prefix tree, as `KVStore` keeps them."""

    def __init__(self, live: Sequence[Member], cached: Sequence[Member]) -> None:
        self.tree = PrefixTree()
        self._num_slots = 0
        self.members: dict[Request, Member] = {}
        self.hits: dict[Request, Hit] = {}
        for member in cached:
            self.tree.release(self._start(member).lease)  # type: ignore[arg-type]
        self.live = [self._start(member) for member in live]

    def _slots(self, count: int) -> Int32Array:
        self._num_slots += count
        return np.arange(self._num_slots - count, self._num_slots, dtype=np.int32)

    def request(self, member: Member) -> Request:
        request = make_request(len(self.members), prompt=1, generated=member.generated)
        request.prompt_token_ids = np.array(member.prompt, dtype=np.int32)
        request.num_prompt_tokens = len(member.prompt)
        self.members[request] = member
        return request

    def _start(self, member: Member) -> Request:
        """Let a request run: it holds its whole prompt in the tree."""
        request = self.request(member)
        tokens = request.prompt_token_ids
        request.lease, slots = self.tree.acquire(KEY, tokens, is_real_time=True)
        new = tokens[len(slots) :]
        assert len(self.tree.extend(request.lease, new, self._slots(len(new)))) == 0
        return request

    def newcomer(self, member: Member) -> Request:
        request = self.request(member)
        hit = self.tree.look_up(KEY, request.prompt_token_ids[:-1])
        if hit.num_tokens:
            self.hits[request] = hit
        return request

    def found(self, request: Request) -> Found:
        return progress(request)._replace(hit=self.hits.get(request))

    def pool(self, num_slots: int, **options: Any) -> PoolView:
        return PoolView(num_slots, found=self.found, **options)

    def sample(self, requests: Sequence[Request], generated: IntArray) -> IntArray:
        del generated
        return np.array(
            [[self.members[r].generated + rest for rest in self.members[r].rest] for r in requests],
            dtype=np.int64,
        ).reshape(len(requests), NUM_FUTURES)

    def peaks_by_brute_force(self, batch: Sequence[Request]) -> list[int]:
        return [self._peak(batch, future) for future in range(NUM_FUTURES)]

    def _peak(self, batch: Sequence[Request], future: int) -> int:
        """Step by step: what the tree holds for those alive, once; all else, each its own."""
        rest = {request: self.members[request].rest[future] for request in batch}
        peak = 0
        for step in range(max(rest.values(), default=0) + 1):
            alive = [request for request in batch if rest[request] >= step]
            shared = {position for request in alive for position in self._positions(request)}
            own = sum(r.num_known_tokens - len(self._positions(r)) + step for r in alive)
            peak = max(peak, len(shared) + own)
        return peak

    def _positions(self, request: Request) -> set[tuple[int, ...]]:
        """Tokens that it has in the tree, each known by the prefix that it ends."""
        num_tokens = 0
        if request in self.hits:
            num_tokens = self.hits[request].num_tokens
        elif request.lease is not None:
            num_tokens = request.lease.num_tokens
        prompt = self.members[request].prompt
        return {prompt[: end + 1] for end in range(num_tokens)}


class Asked:
    """A round of a rule that knows the futures, and the peaks it came to."""

    def __init__(self, scene: Scene, live: Sequence[Request]) -> None:
        self.peaks = [0] * NUM_FUTURES

        def bound(peaks: IntArray, request: Request) -> int:
            self.peaks = peaks.tolist()
            return int(peaks.max())

        self.round = PeakRound(live, scene.sample, bound, 1 << 30, found=scene.found)


@more_when_long
@settings(max_examples=choose(150, 600), deadline=None)
@given(
    live=st.lists(members, max_size=7),
    cached=st.lists(members, max_size=3),
    newcomer=members,
)
def test_the_peak_with_a_newcomer_equals_brute_force(
    live: list[Member], cached: list[Member], newcomer: Member
) -> None:
    scene = Scene(live, cached)
    asked = Asked(scene, scene.live)
    request = scene.newcomer(newcomer)
    assert asked.round.admit(request)
    expected = scene.peaks_by_brute_force([*scene.live, request])
    assert asked.peaks == expected
    assert asked.round.peaks is not None and asked.round.peaks.tolist() == expected


@more_when_long
@settings(max_examples=choose(100, 400), deadline=None)
@given(live=st.lists(members, max_size=5), newcomers=st.lists(members, min_size=2, max_size=4))
@example(
    live=[Member((1, 1, 1, 5), 0, (2, 2, 9)), Member((1, 1, 1, 6), 0, (3, 3, 3))],
    newcomers=[Member((1, 1, 1, 7), 0, (5, 8, 8)), Member((1, 1, 1, 8), 0, (7, 6, 12))],
)
def test_newcomers_of_one_round_are_never_counted_too_little(
    live: list[Member], newcomers: list[Member]
) -> None:
    """Exact where none of them cuts a node; else at most what they would need without sharing."""
    scene = Scene(live, ())
    asked = Asked(scene, scene.live)
    unshared = Asked(scene, [_private(scene, request) for request in scene.live])
    batch = list(scene.live)
    is_exact = True
    for member in newcomers:
        request, before = scene.newcomer(member), asked.peaks
        assert asked.round.admit(request)
        assert unshared.round.admit(_private(scene, request))
        batch.append(request)
        exact = scene.peaks_by_brute_force(batch)
        bounds = zip(before, exact, asked.peaks, unshared.peaks, strict=True)
        assert all(max(old, low) <= peak <= high for old, low, peak, high in bounds)
        is_exact = is_exact and not _cuts_a_node(scene.hits.get(request))
        assert asked.peaks == exact or not is_exact


def _private(scene: Scene, request: Request) -> Request:
    """The same request, holding everything alone."""
    copy = scene.request(scene.members[request])
    copy.lease = None
    return copy


def _cuts_a_node(hit: Hit | None) -> bool:
    if hit is None or hit.node is None:
        return False
    node, num_tokens = hit.node, 0
    while node.parent is not None:
        num_tokens += len(node.tokens)
        node = node.parent
    return num_tokens != hit.num_tokens


def shared_scene() -> tuple[Scene, Request]:
    """Two that hold 50 tokens of a prompt together, and one that would, and 9 of its own."""
    prompt = tuple(range(50))
    live = [Member((*prompt, 60), 10, (9,) * NUM_FUTURES), Member((*prompt, 61), 5, (4,) * 3)]
    scene = Scene(live, ())
    return scene, scene.newcomer(Member((*prompt, *range(70, 79)), 0, (20,) * 3))


# All end at 20 tokens: when the first does, each has grown by 10.
@pytest.mark.parametrize(
    ("name", "options", "needed"),
    [
        ("conservative", {}, 50 + 1 + 99 + 1 + 99 + 9 + 99),
        ("aggressive", {"watermark": 1.0}, 50 + 1 + 10 + 1 + 5 + 9),
        ("past-future", {"reserve": 0.0}, 50 + 1 + 10 + 1 + 5 + 9 + 30),
        ("ema", {}, 50 + 1 + 10 + 1 + 5 + 9 + 30),
        ("risk", {}, 50 + 1 + 10 + 1 + 5 + 9 + 30),
    ],
)
def test_every_rule_counts_shared_tokens_once(
    name: str, options: dict[str, float], needed: int
) -> None:
    scene, newcomer = shared_scene()
    rule = make_rule(name, history(20), **options)
    assert rule.begin(scene.live, scene.pool(needed)).admit(newcomer)
    assert not rule.begin(scene.live, scene.pool(needed - 1)).admit(newcomer)


@pytest.mark.parametrize("name", sorted(ADMISSION_RULES))
def test_newcomers_of_one_round_share_with_each_other(name: str) -> None:
    """The prompt is cached and not held: the first to hold it brings it, for all of them."""
    prompt = tuple(range(900))
    scene = Scene([], [Member(prompt, 0, (1,) * 3)])
    round_ = make_rule(name, history(20)).begin([], scene.pool(2000))
    for _ in range(8):
        assert round_.admit(scene.newcomer(Member((*prompt, 1000), 0, (20,) * 3)))


def test_by_class_what_best_effort_requests_hold_is_no_gift() -> None:
    """Their memory can be called in, but what a real-time one reads of it cannot."""
    scene, newcomer = shared_scene()
    for request in scene.live:
        request.request_class = RequestClass.BE
    rt = make_request(9, prompt=30)
    rule = ClasswiseAdmission(*(make_rule("aggressive", history(20)) for _ in range(2)))

    def admits(num_slots: int) -> list[bool]:
        round_ = rule.begin(scene.live, scene.pool(num_slots))
        return [round_.admit(rt), round_.admit(newcomer)]

    # 0.95 of the pool: the real-time ones need 30 + 59.
    assert admits(94) == [True, True]
    assert admits(93) == [True, False]
    scene.live[0].request_class = RequestClass.RT  # it holds 61, the newcomer brings 9
    assert admits(106) == [True, True]
    assert admits(105) == [True, False]
    newcomer.request_class = RequestClass.BE  # all of them: 61 + 6 + 30 + 9
    assert admits(112) == [True, True]
    assert admits(111) == [True, False]


def test_of_the_room_for_best_effort_requests_shared_tokens_take_their_part_once() -> None:
    """Of 60 tokens that two hold together a newcomer brings none, only its own three."""
    prompt = tuple(range(60))
    scene = Scene([Member((*prompt, 100 + i), 1, (9,) * 3) for i in range(2)], ())
    newcomers = [scene.newcomer(Member((*prompt, 200 + i, 1, 2), 0, (9,) * 3)) for i in range(2)]
    for request in [*scene.live, *newcomers]:
        request.request_class = RequestClass.BE
    rule = ClasswiseAdmission(*(make_rule("aggressive", history(20)) for _ in range(2)))
    for be_room, admitted in ((2, [False, False]), (3, [True, False]), (6, [True, True])):
        round_ = rule.begin(scene.live, scene.pool(1000, be_room=lambda room=be_room: room))
        assert [round_.admit(request) for request in newcomers] == admitted
