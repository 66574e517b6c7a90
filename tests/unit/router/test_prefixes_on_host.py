"""Prefixes on the host: what is saved, what it costs to have it back, what is given up for what."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from support.core_scenes import make_core

from lightserve.messages.common import unpack_int32
from lightserve.router.commit import _left_by_paused
from lightserve.router.events import WorkersGone, WorkersReady
from lightserve.router.kv.cache import KVOptions, KVStore, Preemption
from lightserve.router.kv.host_tier import LONG_ODDS, HostTier
from lightserve.router.kv.prefix_node import task_aware
from lightserve.router.kv.prefix_tree import PrefixTree
from lightserve.router.request import Found, Request, RequestState
from lightserve.router.step import Loading
from lightserve.types import (
    FrontendId,
    RequestClass,
    RequestId,
    RequestKey,
    SamplingParams,
)

Cheaper = Callable[[int, int, int], bool]


def request_for(family: int, num_prompt: int, salt: str = "", number: int = 0) -> Request:
    """Return a request whose prompt begins as all of its family do."""
    return Request(
        key=RequestKey(FrontendId(0), RequestId(number)),
        prompt_token_ids=np.arange(1000 * family, 1000 * family + num_prompt, dtype=np.int32),
        max_tokens=20,
        eos_token_ids=frozenset(),
        sampling=SamplingParams(),
        request_class=RequestClass.BE,
        arrival_s=0.0,
        arrival_number=number,
        prefix_salt=salt,
        num_retained_tokens=num_prompt if number == 99 else 0,
        retention_s=60.0,
    )


class Scene:
    """A pool of 100 slots; requests compute their prompts and end."""

    def __init__(
        self,
        *,
        num_host_slots: int = 0,
        num_prefix_slots: int = 100,
        cheaper: Cheaper = lambda *_: True,
    ) -> None:
        options = KVOptions(
            cache_order=task_aware, preemption=Preemption.CHECKPOINT, max_retained_tokens=100
        )
        self.kv = KVStore(
            100,
            options,
            num_host_slots=num_host_slots,
            num_prefix_slots=num_prefix_slots,
            load_is_cheaper=cheaper,
        )
        assert self.kv.tree is not None and self.kv.tree.tier is not None
        self.tier = self.kv.tree.tier

    def start(self, request: Request) -> Found:
        """Compute a prompt, as one plan; its request runs."""
        kv = self.kv
        found = kv.look_up(request)
        kv.begin_plan([found])
        kv.start(request, found)
        kv.load(request, found.start - found.num_there)
        request.state = RequestState.RUNNING
        end = request.num_prompt_tokens
        assert request.slots is not None
        request.slots[found.start : end] = kv.acquire([(request, end - found.start)])
        request.num_computed_tokens = end
        kv.learn_prompt(request)
        kv.retain(request, 0.0)
        return found

    def serve(self, family: int, num_prompt: int, salt: str = "", number: int = 0) -> Found:
        """Compute a prompt and end its request; return what it found."""
        request = request_for(family, num_prompt, salt, number)
        found = self.start(request)
        self.copies()
        self.kv.release(request, keep=True)
        self.kv.check_integrity([])
        return found

    def copies(self) -> tuple[int, int, int]:
        """Tokens that the plan saves, loads, and loads beside its step."""
        lists = self.kv.take_copies()
        for copies in lists:
            slots = unpack_int32(copies.slots), unpack_int32(copies.host_slots)
            assert [len(set(places.tolist())) for places in slots] == [len(slots[0])] * 2
        saves, loads, ahead = (len(copies.slots) // 4 for copies in lists)
        return saves, loads, ahead

    def on_host(self, family: int, salt: str = "") -> int:
        """Tokens of a family's prompt that would come back from the host."""
        return self.kv.look_up(request_for(family, 90, salt)).num_loaded


def test_what_left_the_pool_comes_back() -> None:
    scene = Scene()
    scene.serve(1, 60)
    scene.serve(2, 70)
    assert scene.tier.num_tokens["saved"] == scene.on_host(1) == 30, "no more than had to go"
    found = scene.serve(1, 61)
    assert (found.start, found.num_there, found.num_loaded) == (60, 30, 30)
    assert found.num_left == 1
    assert scene.tier.num_tokens == {"saved": 61, "loaded": 30, "given_up": 0}


def test_other_keys_do_not_find_it() -> None:
    scene = Scene()
    scene.serve(1, 60, "a")
    scene.serve(2, 90, "b")
    assert scene.on_host(1, "a") == 50
    assert scene.on_host(1, "b") == scene.on_host(1) == 0


def test_a_copy_stays_and_leaving_again_costs_nothing() -> None:
    scene = Scene(num_prefix_slots=200)
    for family in (1, 2, 1, 2, 1, 2):
        scene.serve(family, 80)
    num_saved = scene.tier.num_tokens["saved"]
    assert num_saved <= 160 and scene.tier.num_tokens["loaded"] >= 200
    scene.serve(1, 80)
    assert scene.tier.num_tokens["saved"] == num_saved


@pytest.mark.parametrize(("num_tokens", "is_saved"), [(60, True), (20, False)])
def test_short_prefixes_are_computed_again(num_tokens: int, is_saved: bool) -> None:
    """Where copies have an overhead that so few tokens are not worth, there and back."""
    scene = Scene(cheaper=lambda computed, _, copied: computed > 20 + copied // 4)
    scene.serve(1, num_tokens)
    scene.serve(2, 100)
    assert (scene.tier.num_used == num_tokens) == is_saved
    assert scene.on_host(1) == (num_tokens if is_saved else 0)


def test_a_prefix_is_saved_to_its_beginning_or_not_at_all() -> None:
    """The end goes first; a beginning that alone is not worth a copy goes after it."""
    scene = Scene(num_prefix_slots=200, cheaper=lambda computed, *_: computed > 30)
    scene.serve(1, 60)
    for family in (2, 3, 4):
        scene.serve(family, 21)
        scene.serve(family, 25)
    scene.serve(5, 100)
    assert scene.on_host(1) == 60


def test_a_copy_that_is_dearer_than_computing_is_left_where_it_is() -> None:
    asked: list[tuple[int, int, int]] = []

    def cheaper(*numbers: int) -> bool:
        asked.append(numbers)  # type: ignore[arg-type]
        return numbers[2] != 30

    scene = Scene(cheaper=cheaper)
    scene.serve(1, 60)
    scene.serve(2, 70)
    assert scene.tier.num_used == 30 and scene.on_host(1) == 0
    assert asked[-1] == (30, 30, 30), "so many, from where on, so many copies"
    found = scene.serve(1, 61)
    assert (found.start, found.num_loaded) == (30, 0)


def test_a_key_whose_copies_never_come_back_saves_a_sample() -> None:
    scene = Scene(num_prefix_slots=100)
    for family in range(100):
        scene.serve(family, 60, "a")
    before = scene.tier.num_tokens["saved"]
    for family in range(100, 100 + 5 * LONG_ODDS):
        scene.serve(family, 60, "a")
    saved = scene.tier.num_tokens["saved"] - before
    assert 0 < saved < 60 * 15, "of 4,800 tokens"
    scene.serve(200, 60, "b")
    scene.serve(201, 100, "b")
    assert scene.on_host(200, "b") == 60, "another key's are"
    scene.kv.expect(awaited := request_for(300, 60, "a", number=1))
    scene.serve(300, 60, "a")
    scene.serve(301, 100, "a")
    assert scene.on_host(300, "a") == 60, "one waits for them"
    scene.kv.forget(awaited)
    scene.serve(400, 60, "a", number=99)
    scene.serve(401, 100, "a")
    assert scene.on_host(400, "a") == 60, "they were to be kept"


def test_copies_that_nothing_waits_for_go_first_and_of_them_the_oldest() -> None:
    scene = Scene(num_prefix_slots=120)
    scene.kv.expect(awaited := request_for(1, 30, number=1))
    for family in (1, 2, 3):
        scene.serve(family, 30)
    scene.serve(4, 100)
    assert [scene.on_host(family) for family in (1, 2, 3)] == [30, 30, 30]
    scene.serve(5, 60)
    assert [scene.on_host(family) for family in (1, 2, 3)] == [30, 0, 30], "room for 60 more"
    scene.kv.forget(awaited)
    assert scene.kv.look_up(awaited).num_loaded == 29


def test_spare_copies_go_before_those_that_are_needed() -> None:
    scene = Scene(num_prefix_slots=120)
    scene.serve(1, 60)
    scene.serve(2, 100)
    scene.serve(1, 61)  # is back, its copy is spare
    assert scene.tier.num_used == 120
    scene.kv.expect(request_for(1, 61, number=1))
    scene.serve(3, 39)
    assert scene.on_host(2) > 0
    assert scene.kv.look_up(request_for(1, 61)).num_there == 60


@pytest.mark.parametrize("num_prefix_slots", [1, 30])
def test_paused_requests_have_precedence(num_prefix_slots: int) -> None:
    """Prefixes use what requests leave of their part, and give it back at once."""
    scene = Scene(num_host_slots=50, num_prefix_slots=num_prefix_slots)
    scene.serve(1, 60)
    request = request_for(2, 90)
    scene.start(request)
    scene.copies()
    assert scene.tier.num_used == 50
    assert scene.tier.num_slots == 50 + num_prefix_slots
    request.pause()
    assert scene.kv.take(request, 50) == 50
    assert scene.tier.num_used <= num_prefix_slots == scene.tier.num_slots
    assert scene.kv.checkpoints.num_used == 50
    scene.kv.check_integrity([request])
    request_too_many = scene.kv.take(request, 1)
    assert request_too_many is None, "its part is as large as without prefixes"


def test_what_a_plan_brings_back_is_not_given_up_by_it() -> None:
    scene = Scene(num_host_slots=60, num_prefix_slots=1)
    scene.serve(1, 60)
    victim = request_for(2, 90)
    scene.start(victim)
    scene.copies()
    victim.pause()
    newcomer = request_for(1, 60)
    found = scene.kv.look_up(newcomer)
    assert found.num_loaded == 49
    scene.kv.begin_plan([found])
    assert scene.kv.take(victim, 20) is None, "the host is full of what is just read"
    scene.kv.release(victim, keep=False)
    victim.lose_kv()
    scene.kv.start(newcomer, found)
    assert scene.kv.load(newcomer, found.start - found.num_there) == 49
    newcomer.state = RequestState.RUNNING
    assert scene.copies()[:2] == (0, 49)
    scene.kv.check_integrity([newcomer])


def test_a_request_that_pauses_goes_before_what_comes_back_beside_its_step() -> None:
    """The request that was to have it goes on waiting; without a need its copies are kept."""
    for num_taken, is_left in ((20, False), (0, True)):
        scene = Scene(num_host_slots=60, num_prefix_slots=1)
        scene.serve(1, 60)
        victim, waiting = request_for(2, 90), request_for(1, 60)
        scene.start(victim)
        scene.copies()
        found = scene.kv.look_up(waiting)
        step = SimpleNamespace(loaded=(Loading(waiting, 49),), found={waiting: found})
        victim.pause()
        if num_taken:
            assert scene.kv.take(victim, num_taken) == num_taken
        left = _left_by_paused(step, scene.kv)  # type: ignore[arg-type]
        assert left == (step.loaded if is_left else ())
        scene.tier.make_room(61)
        assert scene.tier.num_used == (50 if is_left else 0), "what is read stays"
        scene.copies()
        scene.kv.check_integrity([victim])


def test_two_newcomers_of_a_plan_bring_a_prefix_back_once() -> None:
    scene = Scene()
    scene.serve(1, 40)
    scene.serve(2, 100)
    newcomers = [request_for(1, 40, number=n) for n in (1, 2)]
    found = [scene.kv.look_up(request) for request in newcomers]
    scene.kv.begin_plan(found)
    for request, of in zip(newcomers, found, strict=True):
        scene.kv.start(request, of)
    for request, of in zip(newcomers, found, strict=True):
        scene.kv.load(request, of.start - of.num_there)
        request.state = RequestState.RUNNING
    assert scene.copies() == (39, 39, 0)
    first, second = newcomers
    assert first.held_slots.tolist() == second.held_slots.tolist()
    scene.kv.check_integrity(newcomers)


def test_some_comes_back_beside_a_step_for_a_request_that_goes_on_waiting() -> None:
    scene = Scene()
    scene.serve(1, 60)
    scene.serve(2, 100)
    request = request_for(1, 60)
    scene.kv.expect(request)
    for num_there in (0, 25):
        found = scene.kv.look_up(request)
        assert (found.num_there, found.num_loaded) == (num_there, 59 - num_there)
        scene.kv.begin_plan([found])
        scene.kv.hold(request, found)
        assert scene.kv.load(request, 25, is_ahead=True) == 25
        with pytest.raises(ValueError, match="slots asked for"):
            scene.kv.acquire([(request_for(3, 1), 80)])  # what is loaded is held until then
        assert scene.copies()[1:] == (0, 25)
        scene.kv.check_integrity([])
    assert request.slots is None and scene.kv.num_used == 0
    assert scene.kv.look_up(request).num_there == 50


@pytest.mark.parametrize("num_pieces", [1, 4])
def test_what_comes_back_in_pieces_comes_back_once(num_pieces: int) -> None:
    """As of a key that has been without luck before: one return is one."""
    scene = Scene()
    scene.serve(1, 60)
    scene.serve(2, 100)
    assert scene.kv.tree is not None
    root = scene.kv.tree._roots[""]
    root.return_share = 0.0
    request = request_for(1, 60)
    for left in reversed(range(num_pieces)):
        found = scene.kv.look_up(request)
        scene.kv.begin_plan([found])
        scene.kv.hold(request, found)
        size = found.num_loaded if left == 0 else 12
        num_left = found.num_loaded - size
        scene.kv.load(request, size, is_ahead=True, left=num_left)
        scene.copies()
        assert (root.return_share == 0.0) == (left > 0)
    assert root.return_share == 1 / LONG_ODDS
    scene.kv.check_integrity([])


def test_counts_go_on_when_workers_begin_anew() -> None:
    core = make_core("unified", cache_order=task_aware)
    ready = WorkersReady(100, 50, num_prefix_slots=100)
    core.on_message(ready, 1.0)

    def tier() -> HostTier | None:
        assert core.kv is not None and core.kv.tree is not None
        return core.kv.tree.tier

    first = tier()
    assert first is not None
    first.num_tokens["saved"] += 7
    core.on_message(WorkersGone(), 2.0)
    core.on_message(ready, 3.0)
    second = tier()
    assert second is not None and second is not first
    assert second.num_tokens == {"saved": 7, "loaded": 0, "given_up": 0}
    second.num_tokens["loaded"] += 2
    core.on_message(WorkersGone(), 4.0)
    core.on_message(WorkersReady(100, 50), 5.0)
    assert tier() is None
    core.on_message(WorkersGone(), 6.0)
    core.on_message(ready, 7.0)
    third = tier()
    assert third is not None
    assert third.num_tokens == {"saved": 7, "loaded": 2, "given_up": 0}


def test_what_comes_back_is_never_too_deep() -> None:
    """Loading a part of a node splits it, which makes the path deeper than prompts make it."""
    tree = PrefixTree(task_aware, max_depth=2)
    lease, _ = tree.acquire("", np.empty(0, np.int32), is_real_time=False)
    tokens = np.arange(8, dtype=np.int32).reshape(4, 2)
    assert [len(tree.extend(lease, own, own)) for own in tokens[:3]] == [0, 0, 2]
    assert len(tree.extend(lease, tokens[2], tokens[2], is_found=True)) == 0
    assert lease.num_tokens == 6


def test_no_option_no_tier() -> None:
    kv = KVStore(100, KVOptions(cache_order=task_aware), num_host_slots=50)
    assert kv.tree is not None and kv.tree.tier is None
    assert KVStore(100, KVOptions(), num_prefix_slots=50).tree is None, "nothing is cached"
