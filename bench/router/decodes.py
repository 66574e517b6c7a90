"""CPU time of the router's core per step of plain decodes: `python -m bench.router.decodes`.

So many requests run and nothing else happens: no arrivals, no ends, nothing waits. What a step
takes then is what the router adds to every step of a fast model. One core, virtual time, the
smallest of several rounds; `encode` is the plan made into bytes, `decode` the result read.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import time

import msgspec
import numpy as np

from bench.router.process import PROFILE
from lightserve.config import ServeConfig
from lightserve.messages.common import TokenSegment, pack_int32
from lightserve.messages.frontend_router import Submit
from lightserve.messages.router_worker import StepPlan, StepResult, sampling_rows
from lightserve.router.config import make_scheduler_config
from lightserve.router.events import FromFrontend, WorkersReady
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep
from lightserve.types import NO_SLO, SLO, FrontendId, RequestClass, RequestId, SamplingParams

NUM_PROMPT_TOKENS = 64
STEP_S = 0.005
CALLS = ("plan", "commit", "encode", "decode", "on_result", "deltas")


def make_core(num_running: int, *, policy: str, targets: bool, best_effort: int) -> Scheduler:
    """Return a core in which so many requests decode, `best_effort` of them of that class."""
    config = ServeConfig(model="none", policy=policy, max_num_seqs=num_running)
    core = Scheduler(make_scheduler_config(config, max_model_len=8192))
    ready = WorkersReady(num_running * 4096, step_cost=PROFILE, max_num_batched_tokens=8192)
    core.on_message(ready, 0.0)
    slo = SLO(ttft_ms=60_000.0, tpot_ms=100.0, mtpot_ms=400.0) if targets else NO_SLO
    rng = np.random.default_rng(0)
    for number in range(num_running):
        is_best_effort = number < best_effort
        submit = Submit(
            request_id=RequestId(number),
            prompt=[TokenSegment(token_ids=pack_int32(rng.integers(0, 999, NUM_PROMPT_TOKENS)))],
            max_tokens=4000,
            eos_token_ids=[1],
            sampling=SamplingParams(),
            request_class=RequestClass.BE if is_best_effort else RequestClass.RT,
            age_s=0.0,
            slo=NO_SLO if is_best_effort else slo,
        )
        core.on_message(FromFrontend(FrontendId(number % 2), submit), 0.0)
    return core


class Clock:
    """Runs steps on virtual time and keeps the CPU time of each call."""

    def __init__(self, core: Scheduler) -> None:
        self.core = core
        self.now_s = 0.0
        self.spent_s = dict.fromkeys(CALLS, 0.0)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(StepResult)

    def step(self) -> int:
        """Run a step whole; returns how many rows it had."""
        marks = [time.thread_time()]
        planned = self.core.plan(self.now_s)
        assert isinstance(planned, PlannedStep), planned
        marks.append(time.thread_time())
        plan = self.core.commit(planned, self.now_s)
        marks.append(time.thread_time())
        self._encoder.encode(plan)
        marks.append(time.thread_time())
        self.now_s += STEP_S
        encoded = self._encoder.encode(answer(plan))
        before = time.thread_time()
        result = self._decoder.decode(encoded)
        marks.append(marks[-1] + time.thread_time() - before)
        before = time.thread_time()
        news = self.core.on_result(result, self.now_s)
        marks.append(marks[-1] + time.thread_time() - before)
        before = time.thread_time()
        for outgoing in news:
            self._encoder.encode(outgoing.message)
        marks.append(marks[-1] + time.thread_time() - before)
        for call, start_s, end_s in zip(CALLS, marks, marks[1:], strict=False):
            self.spent_s[call] += end_s - start_s
        return len(sampling_rows(plan))


def answer(plan: StepPlan) -> StepResult:
    """Return what workers would answer: a token for each row that samples."""
    token_ids = np.full(len(sampling_rows(plan)), 7, dtype=np.int32)
    return StepResult(
        step_id=plan.step_id,
        incarnation=0,
        token_ids=pack_int32(token_ids),
        exec_s=STEP_S,
        idle_s=0.0,
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--policy", default="unified")
    parser.add_argument("--targets", action="store_true", help="with deadlines")
    parser.add_argument("--best-effort", type=float, default=0.0, help="share of the requests")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    args = parser.parse_args()
    print(f"{'rows':>6} " + " ".join(f"{call:>9}" for call in CALLS) + "     whole  (ms)")
    for num_rows in args.rows:
        core = make_core(
            num_rows,
            policy=args.policy,
            targets=args.targets,
            best_effort=round(args.best_effort * num_rows),
        )
        clock = Clock(core)
        while clock.step() < num_rows or len(core.running) < num_rows:
            pass
        for _ in range(20):
            clock.step()
        best: dict[str, float] = {}
        profile = cProfile.Profile()
        gc.collect()
        gc.disable()
        for _ in range(args.rounds):
            clock.spent_s = dict.fromkeys(CALLS, 0.0)
            if args.profile:
                profile.enable()
            for _ in range(args.steps):
                assert clock.step() == num_rows
            profile.disable()
            if not best or sum(clock.spent_s.values()) < sum(best.values()):
                best = clock.spent_s
        gc.enable()
        of_step = [best[call] / args.steps * 1e3 for call in CALLS]
        print(f"{num_rows:>6} " + " ".join(f"{ms:9.3f}" for ms in of_step), f"{sum(of_step):9.3f}")
        if args.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
