"""No schedule changes a token, nothing that moves KV changes a bit of it.

`bench/engine/lossless.py` runs 1,000 schedules of the same kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from support.grids import choose, more_when_long
from support.kv_watch import KVChanged
from support.lossless import Catalogue, Fault, Tally, make_runner, make_schedule

from lightserve.messages.common import pack_int32, unpack_int32
from lightserve.messages.router_worker import KVCopies, StepPlan
from lightserve.router.kv.cache import Preemption
from lightserve.worker.model_runner import ModelRunner

NUM_SCHEDULES = choose(15, 50)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Catalogue:
    return Catalogue(make_runner(tmp_path_factory.mktemp("model")))


@more_when_long
def test_no_schedule_changes_a_token(catalogue: Catalogue) -> None:
    total = Tally()
    for number in range(NUM_SCHEDULES):
        total.add(catalogue.run(make_schedule(number)))
    assert total.num_different == 0
    assert total.seen.num_variants == 0, "computed again, KV came out differently"
    assert total.num_compared > 6 * NUM_SCHEDULES
    for part in ("num_pauses", "loaded_tokens", "lost_tokens", "num_prefix_hits"):
        assert getattr(total, part) > choose(5, 20), part
    assert total.num_aborts > choose(5, 20)
    assert total.seen.num_checked_resumed > 20 * NUM_SCHEDULES
    assert total.seen.num_saved == total.saved_tokens
    assert total.seen.num_loaded == total.loaded_tokens
    assert total.seen.num_loaded_ahead > choose(20, 100)


@more_when_long
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kv_is_the_same_bytes_after_it_moved(tmp_path: Path, dtype: str) -> None:
    """In the default mode; `Catalogue.run` raises KVChanged otherwise."""
    runner = make_runner(tmp_path, dtype=dtype, invariant=False)
    catalogue = Catalogue(runner)
    total = Tally()
    for number in range(choose(4, 6)):
        schedule = make_schedule(number, preemption=Preemption.CHECKPOINT, num_host_slots=600)
        total.add(catalogue.run(schedule))
    assert total.loaded_tokens > choose(50, 100)
    assert total.seen.num_checked_resumed > choose(100, 200)


@more_when_long
def test_what_is_saved_is_what_others_overwrite(catalogue: Catalogue) -> None:
    """Every saved token was in a slot that another request wrote next."""
    total = Tally()
    for number in range(100, choose(103, 108)):
        schedule = make_schedule(number, preemption=Preemption.CHECKPOINT, num_host_slots=600)
        total.add(catalogue.run(schedule))
    seen = total.seen
    assert seen.num_saved == total.saved_tokens > choose(50, 100)
    assert total.saved_tokens <= total.taken_tokens
    rest = seen.num_own_again + seen.num_never_overwritten
    assert seen.num_overwritten + rest == seen.num_saved
    assert rest == 0


def corrupt_a_host_slot(runner: ModelRunner, plan: StepPlan) -> StepPlan:
    for loads in (plan.loads, plan.ahead_loads):
        if not loads.host_slots:
            continue
        host_slot = int(unpack_int32(loads.host_slots)[0])
        runner.host_pool._tensors[0][1, 0, 0, host_slot, 0] += 3.0  # one value of one layer
    return plan


def change_a_place(runner: ModelRunner, plan: StepPlan) -> StepPlan:
    """One token of each save goes to the place of its neighbour, and the other way round."""
    del runner
    slots = unpack_int32(plan.saves.slots).copy()
    if len(slots) < 2:
        return plan
    slots[[0, 1]] = slots[[1, 0]]
    saves = KVCopies(pack_int32(slots.tolist()), plan.saves.host_slots)
    return msgspec.structs.replace(plan, saves=saves)


def skip_a_save(runner: ModelRunner, plan: StepPlan) -> StepPlan:
    """One save of one step is missing: its last token."""
    del runner
    saves = KVCopies(plan.saves.slots[:-4], plan.saves.host_slots[:-4])
    return msgspec.structs.replace(plan, saves=saves)


@pytest.mark.parametrize("fault", [corrupt_a_host_slot, change_a_place, skip_a_save])
def test_teeth(catalogue: Catalogue, fault: Fault) -> None:
    """Any of these faults is seen in the KV, and in the tokens by themselves."""
    num_seen = num_different = 0
    for number in range(100, 112):
        if num_seen and num_different:
            break
        schedule = make_schedule(number, preemption=Preemption.CHECKPOINT, num_host_slots=600)
        try:
            catalogue.run(schedule, fault=fault)
        except KVChanged:
            num_seen += 1
        num_different += catalogue.run(schedule, checks=False, fault=fault).num_different
    assert num_seen > 0
    assert num_different > 0
