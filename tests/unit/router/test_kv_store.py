"""Taking KV from a paused request and bringing it back: what is copied, lost, shared."""

from __future__ import annotations

import numpy as np
import pytest

from lightserve.messages.common import unpack_int32
from lightserve.router.kv.cache import KVOptions, KVStore, Preemption
from lightserve.router.kv.prefix_node import task_aware
from lightserve.router.request import Request, RequestState
from lightserve.types import (
    FrontendId,
    RequestClass,
    RequestId,
    RequestKey,
    RowId,
    SamplingParams,
)


def make_request(
    number: int, num_prompt: int = 20, *, request_class: RequestClass = RequestClass.BE
) -> Request:
    return Request(
        key=RequestKey(FrontendId(0), RequestId(number)),
        prompt_token_ids=np.arange(num_prompt, dtype=np.int32),  # all prompts begin alike
        max_tokens=20,
        eos_token_ids=frozenset(),
        sampling=SamplingParams(),
        request_class=request_class,
        arrival_s=0.0,
        arrival_number=number,
    )


class Scene:
    """A store whose requests compute all they know, and are paused and resumed."""

    def __init__(
        self,
        num_slots: int = 100,
        *,
        num_host_slots: int = 100,
        cached: bool = True,
        load_is_cheaper: bool = True,
        preemption: Preemption = Preemption.CHECKPOINT,
        num_state_slots: int = 0,
    ) -> None:
        options = KVOptions(
            cache_order=task_aware if cached else None,
            preemption=preemption,
            block_size=4,
        )
        self.kv = KVStore(
            num_slots,
            options,
            num_host_slots=num_host_slots,
            num_state_slots=num_state_slots,
            load_is_cheaper=lambda _num_tokens, _start, _num_loaded: load_is_cheaper,
        )

    def run(self, request: Request, num_output: int = 0) -> Request:
        """Start or resume a request and compute its prompt and `num_output` tokens."""
        kv = self.kv
        found = kv.look_up(request)
        kv.start(request, found)
        kv.load(request, found.start - found.num_there)
        request.state = RequestState.RUNNING
        assert request.slots is not None
        start, end = request.num_computed_tokens, request.num_prompt_tokens + num_output
        if end > start:
            request.slots[start:end] = kv.acquire([(request, end - start)])
            request.num_computed_tokens = end
        request.output_token_ids = [7] * (num_output + 1)
        if not request.is_prompt_shared:
            kv.learn_prompt(request)
        return request

    def copies(self) -> tuple[int, int]:
        """Tokens that the next plan saves and loads."""
        saves, loads, _ = self.kv.take_copies()
        assert [len(c.slots) for c in (saves, loads)] == [len(c.host_slots) for c in (saves, loads)]
        return len(saves.slots) // 4, len(loads.slots) // 4


def test_exactly_what_is_taken_is_copied_and_comes_back() -> None:
    scene = Scene(cached=False)
    request = scene.run(make_request(0), num_output=5)
    before = request.held_slots.copy()
    request.pause()
    assert scene.kv.take(request, 3) == 3
    saves = scene.kv.checkpoints.take_copies().saves
    assert unpack_int32(saves.slots).tolist() == before[-3:].tolist()
    assert (request.num_held_tokens, scene.kv.num_used) == (22, 22)
    assert scene.kv.take(request, 2) == 2, "the others are on the host already"
    assert scene.copies() == (2, 0)
    scene.run(request, num_output=6)
    assert scene.copies() == (0, 5)
    assert request.held_slots[:20].tolist() == before[:20].tolist(), "what was left has not moved"
    assert scene.kv.num_used == 26


def test_copies_stay_while_their_tokens_are_back() -> None:
    """KV is written once: taking the same tokens again costs nothing, new ones alone are saved."""
    scene = Scene(cached=False)
    request = scene.run(make_request(0), num_output=5)
    request.pause()
    scene.kv.take(request, 4)
    scene.run(request, num_output=8)
    scene.copies()
    request.pause()
    assert scene.kv.take(request, 7) == 3
    assert scene.copies() == (3, 0)


def test_the_shared_part_of_a_prompt_is_not_taken() -> None:
    scene = Scene()
    first = scene.run(make_request(0, 20), num_output=5)
    second = scene.run(make_request(1, 30), num_output=5)
    assert second.num_cached_tokens is None and second.num_shared_tokens == 30
    first.pause()
    second.pause()
    assert scene.kv.takeable(first) == 5, "its whole prompt is read by the other one"
    assert scene.kv.takeable(second) == 15
    scene.kv.take(second, 15)
    assert scene.kv.takeable(second) == 0
    assert scene.kv.takeable(first) == 5
    scene.kv.check_integrity([first, second])


def test_what_is_taken_out_of_the_tree_is_private_and_back_on_resume() -> None:
    scene = Scene()
    request = scene.run(make_request(0), num_output=5)
    request.pause()
    assert scene.kv.takeable(request) == 25
    scene.kv.take(request, 15)
    assert scene.kv.look_up(make_request(9)).start == 10, "the rest stays shareable"
    scene.run(request, num_output=6)
    assert scene.copies() == (15, 15)
    assert scene.kv.look_up(make_request(9)).start == 19, "shared anew"
    scene.kv.check_integrity([request])


def test_a_checkpoint_is_dropped_if_another_computed_the_same() -> None:
    scene = Scene()
    request = scene.run(make_request(0), num_output=5)
    request.pause()
    scene.kv.take(request, 20)
    other = scene.run(make_request(1, 24), num_output=2)
    scene.copies()
    scene.run(request, num_output=6)
    assert scene.copies() == (0, 5), "its prompt is in the tree again, its output is not"
    scene.kv.check_integrity([request, other])


def test_its_own_copies_of_what_is_cached_are_freed_as_it_resumes() -> None:
    """One of two alike that was not counted could wait for ever for room that it held itself."""
    scene = Scene()
    request = make_request(0)
    scene.kv.start(request, scene.kv.look_up(request))
    assert request.slots is not None
    request.slots[:10] = scene.kv.acquire([(request, 10)])
    request.num_computed_tokens = 10
    request.state = RequestState.RUNNING
    request.pause()
    scene.kv.release(scene.run(make_request(1, 30)), keep=True)
    before, found = scene.kv.num_available, scene.kv.look_up(request)
    assert found.num_there == 19 and request.num_own_slots == 10
    scene.kv.start(request, found)
    assert before - scene.kv.num_available == found.num_pinned == 9


def test_what_it_loaded_ahead_is_freed_as_it_goes_on_from_a_snapshot() -> None:
    """The same where a state is on the host yet, and a longer prefix has been cached meanwhile."""
    scene = Scene(num_state_slots=4)
    request = scene.run(make_request(0), num_output=5)
    request.pause()
    assert scene.kv.take(request, 29) == 29
    scene.kv.hold(request, scene.kv.look_up(request))
    scene.kv.load(request, 12, is_ahead=True)
    scene.kv.release(scene.run(make_request(1)), keep=True)
    scene.kv._load_is_cheaper = lambda _num_tokens, _start, _num_loaded: False
    before, found = scene.kv.num_available, scene.kv.look_up(request)
    assert (found.start, found.num_loaded, request.num_own_slots) == (20, 0, 12)
    scene.kv.start(request, found)
    assert before - scene.kv.num_available == found.num_pinned > 0


@pytest.mark.parametrize(
    ("num_host_slots", "load_is_cheaper", "num_loaded"),
    [(100, True, 8), (100, False, 0), (7, True, 0)],
)
def test_what_does_not_come_back_is_computed(
    num_host_slots: int, load_is_cheaper: bool, num_loaded: int
) -> None:
    """Because that is cheaper, or because the host had no room."""
    scene = Scene(cached=False, num_host_slots=num_host_slots, load_is_cheaper=load_is_cheaper)
    request = scene.run(make_request(0), num_output=5)
    request.pause()
    assert scene.kv.take(request, 8) == (8 if num_host_slots >= 8 else None)
    found = scene.kv.look_up(request)
    assert (found.start, found.num_left) == (17 + num_loaded, 26 - 17 - num_loaded)
    scene.run(request, num_output=6)
    assert scene.copies()[1] == num_loaded
    scene.kv.release(request, keep=False)
    assert (scene.kv.num_used, scene.kv.checkpoints.num_used) == (0, 0)


def test_a_state_goes_and_comes_with_all_kv() -> None:
    scene = Scene(cached=False, num_state_slots=4)
    request = scene.run(make_request(0), num_output=5)
    state = request.recurrent.slots.copy()
    assert scene.kv.num_used == 25 + 4
    request.pause()
    assert scene.kv.states.portion(scene.kv.takeable(request), 3) == 29, "all, or nothing"
    before = request.held_slots.copy()
    assert scene.kv.take(request, 29) == 29
    saves = scene.kv.checkpoints.take_copies().saves
    assert unpack_int32(saves.slots).tolist() == [*before, *state]
    assert (scene.kv.num_used, scene.kv.checkpoints.num_used) == (0, 29)
    found = scene.kv.look_up(request)
    assert (found.start, found.num_loaded, found.num_there) == (25, 29, 0)
    scene.run(request, num_output=6)
    assert scene.copies() == (0, 29)
    assert scene.kv.checkpoints.num_used == 25, (
        "the step has changed the state: no copy of it stays"
    )
    request.pause()
    assert scene.kv.take(request, 30) == 1 + 4, "the KV of the others is on the host already"
    scene.kv.check_integrity([request])


@pytest.mark.parametrize(("num_host_slots", "load_is_cheaper"), [(28, True), (100, False)])
def test_a_state_that_does_not_come_back_leaves_nothing(
    num_host_slots: int, load_is_cheaper: bool
) -> None:
    """No KV helps without the state behind it: all is computed again, from the last snapshot on."""
    scene = Scene(num_state_slots=4, num_host_slots=num_host_slots, load_is_cheaper=load_is_cheaper)
    request = scene.run(make_request(0), num_output=5)
    request.pause()
    assert scene.kv.take(request, 29) == (None if num_host_slots < 29 else 29)
    assert (scene.kv.num_used, request.num_held_tokens) == (0, 0)
    assert scene.kv.look_up(request).start == 0
    other = scene.run(make_request(1), num_output=0)
    scene.kv.release(other, keep=True)
    assert scene.kv.look_up(request).start == 20, "where another of the same prompt has ended"
    scene.copies()
    scene.run(request, num_output=6)
    assert scene.copies() == (0, 0)
    assert scene.kv.checkpoints.num_used == 0
    assert len(unpack_int32(scene.kv.states.take_changes().state_loads.to_slots)) == 4
    scene.kv.check_integrity([request])


def test_kv_comes_back_bit_by_bit_and_goes_again_at_no_cost() -> None:
    """A paused request holds what it has loaded; its copies stay on the host."""
    scene = Scene(cached=False)
    request = scene.run(make_request(0), num_output=5)
    before = request.held_slots.copy()
    request.pause()
    scene.kv.take(request, 20)
    scene.copies()
    for num_loaded, num_held in ((7, 12), (6, 18)):
        scene.kv.hold(request, scene.kv.look_up(request))
        assert scene.kv.load(request, num_loaded, is_ahead=True) == num_loaded
        copies = scene.kv.take_copies()
        assert copies.loads.slots == copies.saves.slots == b""
        assert unpack_int32(copies.ahead_loads.slots).tolist() == (
            request.held_slots[-num_loaded:].tolist()
        )
        assert (request.num_held_tokens, scene.kv.num_used) == (num_held, num_held)
        assert scene.kv.look_up(request).num_loaded == 25 - num_held
        scene.kv.check_integrity([request])
    assert scene.kv.take(request, 4) == 0
    assert scene.copies() == (0, 0) and scene.kv.num_used == 14
    scene.run(request, num_output=6)
    assert scene.copies() == (0, 11), "the rest in one go"
    assert request.held_slots[:5].tolist() == before[:5].tolist()
    scene.kv.release(request, keep=False)
    assert (scene.kv.num_used, scene.kv.checkpoints.num_used) == (0, 0)


def test_what_is_cached_again_is_held_before_the_rest_is_loaded() -> None:
    scene = Scene()
    request = scene.run(make_request(0), num_output=5)
    request.pause()
    scene.kv.take(request, 20)
    other = scene.run(make_request(1, 24), num_output=2)
    scene.copies()
    scene.kv.hold(request, scene.kv.look_up(request))
    assert (request.num_held_tokens, request.num_shared_tokens) == (20, 20)
    scene.kv.load(request, 2, is_ahead=True)
    scene.kv.release(other, keep=False)
    scene.kv.check_integrity([request])
    assert scene.kv.look_up(request).num_loaded == 3
    scene.run(request, num_output=6)
    assert scene.copies() == (0, 3)
    scene.kv.check_integrity([request])


def test_spare_copies_make_room_for_needed_ones() -> None:
    scene = Scene(cached=False, num_host_slots=10)
    first = scene.run(make_request(0), num_output=5)
    second = scene.run(make_request(1), num_output=5)
    first.pause()
    scene.kv.take(first, 8)
    scene.run(first, num_output=6)  # its copies are spare now
    second.pause()
    assert scene.kv.take(second, 6) == 6
    assert first.host is None and scene.kv.checkpoints.num_used == 6
    scene.kv.check_integrity([first, second])


def test_nothing_is_taken_where_all_is_computed_again() -> None:
    scene = Scene(cached=False, preemption=Preemption.RECOMPUTE)
    request = scene.run(make_request(0), num_output=5)
    assert scene.kv.takeable(request) == 0
    assert scene.kv.num_freed_by([request]) == 25


def test_best_effort_leaves_some_of_what_real_time_cached() -> None:
    options = KVOptions(cache_order=task_aware, rt_cache_min_tokens=10)
    kv = KVStore(40, options)
    scene = Scene()
    scene.kv = kv
    request = scene.run(make_request(0, 30, request_class=RequestClass.RT))
    kv.release(request, keep=True)
    assert (kv.num_cached, kv.num_reserved_for_rt, kv.num_available) == (30, 10, 40)
    other = make_request(1)
    other.prompt_token_ids = other.prompt_token_ids + 1000
    kv.acquire([(other, 30)])
    assert (kv.num_cached, kv.num_available) == (10, 10)


def test_one_slot_for_each_row_evicts_as_slots_for_each_request_do() -> None:
    """Also after one was paused and resumed in another row."""
    stores: list[list[list[int]]] = []
    for by_rows in (True, False):
        scene = Scene(num_slots=64)
        gone = scene.run(make_request(9, 33))
        scene.kv.release(gone, keep=True)
        running = [make_request(number, 4) for number in range(3)]
        running[1].request_class = RequestClass.RT
        for row, request in enumerate(running):
            request.prompt_token_ids = np.full(4, 50 + row, dtype=np.int32)
            request.row = RowId(row)
            scene.run(request)
        running[0].pause()
        running[0].row = RowId(3)
        scene.run(running[0])
        taken = []
        for _ in range(12):
            if by_rows:
                rows = np.array([int(request.row or 0) for request in running])
                slots = scene.kv.acquire_one_each(rows)
            else:
                slots = scene.kv.acquire([(request, 1) for request in running])
            taken.append(slots.tolist())
        stores.append(taken)
        assert scene.kv.num_cached < 33, "some of what was cached made room"
    assert stores[0] == stores[1]
