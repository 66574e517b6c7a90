"""`plan` writes nothing: what the scheduler knows is the same after it, and so is the next plan."""

from __future__ import annotations

import copy
from array import array
from collections import deque
from collections.abc import Mapping
from enum import Enum
from itertools import count
from typing import Any

import numpy as np
import pytest
from support.storms import Storm, WatchedPolicy, play

from lightserve.router.admission.classwise import ClasswiseAdmission
from lightserve.router.request import WAITING, Request
from lightserve.router.request_table import RequestTable
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep
from lightserve.router.step_cost import StepCost

NOTES = {"hit", "num_pinned_by_start", "num_loaded_by_start", "_next_position"}
"""Of a request that waits: what starting it would take, which every plan finds out anew."""
MEMOS = {
    RequestTable: {"_rows"},
    StepCost: {"_guard"},
    WatchedPolicy: {"num_loads", "num_timed"},
}
"""What follows from the rest, kept until that changes; counters of the test's own."""
KEPT = (ClasswiseAdmission, count)
"""Samples of futures, which no answer depends on; numbers given out."""
PLAIN = (int, float, str, bytes, bool, type(None), Enum, frozenset)


def differences(one: Any, other: Any, at: str, seen: dict[int, Any]) -> list[str]:
    """Return where two graphs of objects differ."""
    if id(one) in seen or isinstance(one, KEPT) or callable(one):
        return []
    if type(one) is not type(other):
        return [f"{at}: {type(one)} is now {type(other)}"]
    if isinstance(one, PLAIN):
        return [] if one == other else [f"{at}: {one!r} is now {other!r}"]
    seen[id(one)] = one
    if isinstance(one, np.ndarray | array):
        return (
            [] if np.array_equal(one, other, equal_nan=np.asarray(one).dtype.kind == "f") else [at]
        )
    if isinstance(one, Mapping):
        pairs = zip(one.items(), other.items(), strict=False)
        found = [] if len(one) == len(other) else [f"{at}: {len(one)} items, now {len(other)}"]
        for (key, value), (other_key, other_value) in pairs:
            found += differences(key, other_key, f"{at} key", seen)
            found += differences(value, other_value, f"{at}[{key!r:.30}]", seen)
        return found
    if isinstance(one, list | tuple | deque | set):
        if len(one) != len(other):
            return [f"{at}: {len(one)} items, now {len(other)}"]
        pairs = zip(one, other, strict=True) if not isinstance(one, set) else ()
        return [
            found
            for number, (item, other_item) in enumerate(pairs)
            for found in differences(item, other_item, f"{at}[{number}]", seen)
        ]
    skipped = MEMOS.get(type(one), set())
    if isinstance(one, Request) and one.state is WAITING:
        skipped = NOTES
    return [
        found
        for name in fields_of(one)
        if name not in skipped and hasattr(one, name)
        for found in differences(getattr(one, name), getattr(other, name), f"{at}.{name}", seen)
    ]


def fields_of(thing: Any) -> list[str]:
    slots = [name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())]
    return [*getattr(thing, "__dict__", {}), *(name for name in slots if name != "__weakref__")]


class ComparingCore(Scheduler):
    """Compares itself with a copy that was made before each plan."""

    num_plans = 0
    num_steps = 0

    def plan(self, now_s: float) -> Any:
        before = copy.deepcopy(self)
        step = super().plan(now_s)
        assert differences(before, self, "core", {}) == []
        again = super().plan(now_s)
        self.num_plans += 1
        if isinstance(step, PlannedStep):
            self.num_steps += 1
            assert isinstance(again, PlannedStep)
            assert again.scheduled == step.scheduled
            assert again.skipped == step.skipped
            assert (again.paused, again.checkpointed, again.preempted, again.loaded) == (
                (step.paused, step.checkpointed, step.preempted, step.loaded)
            )
        else:
            assert again == step
        return step


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_changes_nothing(seed: int) -> None:
    storm = Storm(seed)
    storm.core.__class__ = ComparingCore
    play(storm, num_events=12)
    assert isinstance(storm.core, ComparingCore) and storm.core.num_steps > 10


def test_a_change_would_be_found() -> None:
    core = Storm(0).core
    before = copy.deepcopy(core)
    assert differences(before, core, "core", {}) == []
    core._rows.cells["num_output"][0] += 1
    core._waiting.num_since_oldest += 1
    found = differences(before, core, "core", {})
    assert any("num_output" in where for where in found)
    assert any("num_since_oldest" in where for where in found)
