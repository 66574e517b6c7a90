"""Turns of loops, by the clock on the wall and by the thread's own."""

from __future__ import annotations

import asyncio
import threading
import time

from lightserve.metrics.recording import Recorder
from lightserve.metrics.turns import TurnClock, TurnSelector

WORK_S = 0.02


def burn(cpu_s: float) -> None:
    """Compute for so much of this thread's time."""
    end_s = time.thread_time() + cpu_s
    while time.thread_time() < end_s:
        pass


def figures(recorder: Recorder) -> tuple[float, float, float]:
    """Return the longest turn by CPU and by wall time, and the number of turns."""
    values = {(s.family, *s.labels): s.values for s in recorder.snapshot()}
    cpu = values["lightserve_loop_turn_max_seconds", "router-0", "cpu"][0]
    wall = values["lightserve_loop_turn_max_seconds", "router-0", "wall"][0]
    _, *counts = values["lightserve_loop_turn_seconds", "router", "cpu"]
    return cpu, wall, sum(counts)


def test_what_the_thread_computes_is_cpu_time_and_what_it_waits_for_is_not() -> None:
    recorder = Recorder()
    clock = TurnClock(recorder, "router-0")
    clock.end()  # none has begun
    assert figures(recorder) == (0, 0, 0)
    clock.begin()
    time.sleep(WORK_S)
    clock.end()
    cpu_s, wall_s, num_turns = figures(recorder)
    assert wall_s >= WORK_S > cpu_s
    assert num_turns == 1
    clock.begin()
    burn(WORK_S)
    clock.end()
    assert figures(recorder)[0] >= WORK_S
    clock.begin()
    clock.end()
    assert figures(recorder)[0] >= WORK_S, "the longest stays"
    assert figures(recorder)[2] == 3


def test_another_threads_work_is_not_the_loops() -> None:
    recorder = Recorder()
    clock = TurnClock(recorder, "router-0")
    clock.begin()
    thread = threading.Thread(target=burn, args=(WORK_S,))
    thread.start()
    thread.join()
    clock.end()
    cpu_s, wall_s, _ = figures(recorder)
    assert cpu_s < WORK_S <= wall_s


def test_turns_of_an_event_loop_count_from_the_first_wait_on() -> None:
    recorder = Recorder()
    selector = TurnSelector()

    async def serve() -> None:
        burn(WORK_S)  # a start: no clock yet
        selector.clock = TurnClock(recorder, "router-0")
        burn(WORK_S)  # still the turn of the start
        for _ in range(5):
            await asyncio.sleep(0)
        before = figures(recorder)
        assert before[0] < WORK_S
        assert before[2] >= 4
        burn(WORK_S)
        await asyncio.sleep(0)
        assert figures(recorder)[0] >= WORK_S

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(serve())
