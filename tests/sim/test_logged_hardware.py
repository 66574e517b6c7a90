"""Steps that take as long as a log's did at the same time."""

from __future__ import annotations

import pytest

from lightserve.cost.model import StepShape
from lightserve.messages.common import StepCoefficients
from lightserve.sim.logged_hardware import LoggedHardware, LoggedStep

DECODE = StepShape().plus_decodes(1, 0)
CHUNK = StepShape().plus(0, 10)
COST = StepCoefficients(
    floor_s=0.0,
    per_new_s=0.01,
    knee=0.0,
    per_decode_s=0.0,
    per_chunk_s=0.0,
    per_decode_context_s=0.0,
    per_chunk_context_s=0.0,
    per_chunk_pair_s=0.0,
)


def _log() -> list[LoggedStep]:
    """A hundred decodes as the formula says, a hundred twice as long; one of each is stalled."""
    steps, now_s = [], 0.0
    for number in range(200):
        exec_s = (0.01 if number < 100 else 0.02) + (0.5 if number in (50, 150) else 0.0)
        steps.append(LoggedStep(DECODE, exec_s, 0.0, now_s))
        now_s += exec_s
    return steps


def test_steps_are_as_slow_as_those_of_their_time_whatever_they_compute() -> None:
    now_s = 0.2
    hardware = LoggedHardware(COST, _log(), overlaps_copies=False, clock=lambda: now_s)
    assert hardware.step_seconds(CHUNK) == pytest.approx(0.1)
    now_s = 2.2  # in the slow half
    assert hardware.step_seconds(CHUNK) == pytest.approx(0.2)


def test_a_stall_is_as_long_as_it_was_and_comes_once() -> None:
    now_s = 0.505  # the 51st step takes half a second more
    hardware = LoggedHardware(COST, _log(), overlaps_copies=False, clock=lambda: now_s)
    assert hardware.step_seconds(CHUNK) == pytest.approx(0.6)
    assert hardware.step_seconds(DECODE) == pytest.approx(0.01)


def test_a_faster_machine_comes_sooner_to_what_slowed_it() -> None:
    now_s = 0.26
    hardware = LoggedHardware(COST, _log(), overlaps_copies=False, speed=2.0, clock=lambda: now_s)
    assert hardware.step_seconds(DECODE) == pytest.approx(0.51 / 2)
