"""CPU time of the router per step, and what steps wait for it: `python -m bench.router.process`.

The real router process (loop, core, ZeroMQ; policy `unified`, admission `risk`, 16 slots a block)
between a frontend that keeps 128 real-time requests in the system over a backlog of 10,000
best-effort ones, and a worker that sleeps 20 ms per step. Lengths are ShareGPT's, declared as up
to 2048 output tokens, of forty clients; prompts begin with one of 72 texts of 1,024 tokens. The
pool is so small that memory, not rows, limits the batch to about 256, and that every step evicts.

CPU time is that of the loop's thread. `whole` is all of it from one commit to the next: messages
received and decoded, results, planning, booking, encoding, sending, statistics. The parts are
measured in runs of their own, as taking their time takes time. `exposed` is the wall-clock time
at the worker from a result sent to the next plan received and decoded.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from bench.router.clock import Mode, StepFigures, run_router
from lightserve.channels import ZmqHub, ZmqLink, bind_hub, connect_link
from lightserve.config import ServeConfig
from lightserve.errors import ChannelFull
from lightserve.messages.common import PROTOCOL_VERSION, StepCoefficients
from lightserve.messages.frontend_router import (
    FrontendHello,
    FrontendMessage,
    RouterMessage,
    RouterWelcome,
    TokenDelta,
)
from lightserve.messages.router_worker import RouterToWorker, WorkerHello, WorkerToRouter
from lightserve.messages.supervision import ChildMessage, ChildSpec, Role, SupervisorMessage
from lightserve.sim.traffic import Job, load_workload
from lightserve.sim.worker import LengthWorker
from lightserve.types import SLO, FrontendId, RequestClass, RequestId

TRACE = str(Path(__file__).parents[1] / "traces" / "sharegpt_lengths.csv.gz")
NUM_REAL_TIME, NUM_QUEUED, NUM_CLIENTS = 128, 10_000, 40
NUM_SHARED, NUM_SHARED_TOKENS = 72, 1024
"""Prompts begin with one of so many texts of so many tokens."""
NUM_SLOTS = 141_000
STEP_S = 0.02
PROFILE = StepCoefficients(
    floor_s=STEP_S,
    knee=1024.0,
    per_new_s=0.0,
    per_decode_s=0.0,
    per_chunk_s=0.0,
    per_decode_context_s=0.0,
    per_chunk_context_s=0.0,
    per_chunk_pair_s=0.0,
)
"""What the worker says of its steps, as real ones do."""
VOCABULARY = (1, 32_000)
MAX_TOKENS = 2048
TARGETS = SLO(ttft_ms=1000.0, tpot_ms=100.0, mtpot_ms=400.0)
CONFIG = ServeConfig(policy="unified", max_num_seqs=384, max_num_batched_tokens=768)
BOOT_ID = "bench"
LIMITS_MS = {
    "admission": (0.5, 1.5),
    "kv": (0.5, 1.5),
    "planner": (1.0, 3.0),
    "whole": (2.0, 5.0),
    "exposed": (0.2, None),
}
"""Targets: p50 and p99."""


class Percentiles(NamedTuple):
    """Of all steps of a run, ms."""

    p50: float
    p99: float


class Run(NamedTuple):
    """What one run came to."""

    times: dict[str, Percentiles]
    mean: dict[str, float]
    """What the steps were like."""


def jobs(rng: np.random.Generator) -> Iterator[Job]:
    """Yield requests, for ever."""
    rows = load_workload(TRACE, num_requests=20_000, rng=rng)
    shared = rng.integers(*VOCABULARY, (NUM_SHARED, NUM_SHARED_TOKENS), dtype=np.int32)
    while True:
        for num_prompt, num_output in zip(rows.prompt_tokens, rows.output_tokens, strict=True):
            own = rng.integers(*VOCABULARY, int(num_prompt), dtype=np.int32)
            prompt = np.concatenate([shared[rng.integers(NUM_SHARED)], own])
            client = str(rng.integers(NUM_CLIENTS))
            yield Job(prompt, min(int(num_output), MAX_TOKENS), MAX_TOKENS, client)


# ---------------------------------------------------------------- the worker


def run_worker(spec: ChildSpec, result: Connection, num_warm_up: int) -> None:
    """Sleep through plans until told to stop; send the seconds between results and next plans."""
    link: ZmqLink[WorkerToRouter, RouterToWorker] = connect_link(
        spec.workers_address, name="worker-0", send_type=WorkerToRouter, recv_type=RouterToWorker
    )
    link.send(
        WorkerHello(
            protocol_version=PROTOCOL_VERSION,
            boot_id=BOOT_ID,
            config_hash=spec.config.digest,
            incarnation=0,
            rank=0,
            num_kv_slots=NUM_SLOTS,
            num_host_slots=NUM_SLOTS // 2,
            max_num_batched_tokens=CONFIG.max_num_batched_tokens,
            step_cost=PROFILE,
        )
    )
    inner = LengthWorker(max_num_seqs=spec.config.max_num_seqs, max_model_len=32_768)
    gaps_s: list[float] = []
    sent_s = time.monotonic()
    while not result.poll():
        plan = link.receive(timeout_s=0.5)
        now_s = time.monotonic()
        if plan is None:
            continue
        gaps_s.append(now_s - sent_s)
        answer = inner.execute(plan, exec_s=STEP_S, idle_s=0.0)
        time.sleep(max(0.0, now_s + STEP_S - time.monotonic()))
        link.send(answer)
        sent_s = time.monotonic()
    result.send_bytes(msgspec.msgpack.encode(gaps_s[num_warm_up:]))
    link.close()


# ---------------------------------------------------------------- the frontend


class Frontend:
    """Sends requests of both classes; one that ends is replaced by one of its class."""

    def __init__(self, spec: ChildSpec) -> None:
        self._link: ZmqLink[FrontendMessage, RouterMessage] = connect_link(
            spec.frontends_address,
            name="frontend-0",
            send_type=FrontendMessage,
            recv_type=RouterMessage,
        )
        self._jobs = jobs(np.random.default_rng(0))
        self._classes: list[RequestClass] = []
        """Of all requests, by number."""
        hello = FrontendHello(
            session=1,
            protocol_version=PROTOCOL_VERSION,
            boot_id=BOOT_ID,
            config_hash=spec.config.digest,
            frontend_id=FrontendId(0),
            incarnation=0,
        )
        self._link.send(hello)

    def serve(self, router: BaseProcess, finished: Connection) -> None:
        """Keep the router busy until it has sent its figures."""
        due_s = time.monotonic() + 30.0
        while not isinstance(self._link.receive(timeout_s=1.0), RouterWelcome):
            if time.monotonic() > due_s:
                raise RuntimeError("the router does not welcome its frontend")
        classes = [RequestClass.BE] * NUM_QUEUED + [RequestClass.RT] * NUM_REAL_TIME
        for number, request_class in enumerate(classes):
            self._submit(request_class, router)
            if number % 1000 == 999:
                time.sleep(0.1)  # the router's socket takes 4096 messages
        while not finished.poll():
            if not router.is_alive():
                raise RuntimeError("the router has died")
            news = self._link.receive(timeout_s=0.5)
            if isinstance(news, TokenDelta):
                for delta in news.requests:
                    if delta.finish_reason is not None:
                        self._submit(self._classes[delta.request_id], router)

    def _submit(self, request_class: RequestClass, router: BaseProcess) -> None:
        number = RequestId(len(self._classes))
        self._classes.append(request_class)
        slo = TARGETS if request_class is RequestClass.RT else SLO()
        message = next(self._jobs).submit(number, request_class, slo)
        while True:
            try:
                return self._link.send(message)
            except ChannelFull:
                if not router.is_alive():
                    raise
                time.sleep(0.05)  # the router is slow to read: others want its core

    def close(self) -> None:
        """Release the link."""
        self._link.close()


# ---------------------------------------------------------------- runs


def measure(mode: Mode, num_warm_up: int, num_steps: int) -> Run:
    """Run router, worker and frontend once."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        spec = ChildSpec(
            role=Role.ROUTER,
            index=0,
            incarnation=0,
            boot_id=BOOT_ID,
            config=CONFIG,
            control_address=f"ipc://{directory}/control",
            frontends_address=f"ipc://{directory}/frontends",
            workers_address=f"ipc://{directory}/workers",
        )
        control: ZmqHub[SupervisorMessage, ChildMessage] = bind_hub(
            spec.control_address, send_type=SupervisorMessage, recv_type=ChildMessage
        )
        router_end, router_child = context.Pipe()
        worker_end, worker_child = context.Pipe()
        num_all = num_warm_up + num_steps
        router = context.Process(target=run_router, args=(spec, mode, num_all, router_child))
        worker = context.Process(target=run_worker, args=(spec, worker_child, num_warm_up))
        router.start()
        worker.start()
        frontend = Frontend(spec)
        try:
            frontend.serve(router, router_end)
            steps = msgspec.msgpack.decode(router_end.recv_bytes(), type=list[StepFigures])
            worker_end.send_bytes(b"stop")
            gaps_s = msgspec.msgpack.decode(worker_end.recv_bytes(), type=list[float])
        finally:
            frontend.close()
            control.close()
            for process in (router, worker):
                process.join(5.0)
                process.kill()
    return _summary(mode, steps[num_warm_up:], gaps_s)


def _summary(mode: Mode, steps: list[StepFigures], gaps_s: list[float]) -> Run:
    if mode is Mode.WHOLE:
        columns = {"whole": [step.cpu_s for step in steps], "exposed": gaps_s}
    else:
        parts = ("admission", "kv", "planner")
        columns = {part: [step.by_part.get(part, 0.0) for step in steps] for part in parts}
    return Run(
        {name: _percentiles(column) for name, column in columns.items()},
        {
            name: float(np.mean([getattr(step, name) for step in steps]))
            for name in ("num_rows", "num_live", "num_queued", "num_tree_tokens", "num_started")
        },
    )


def _percentiles(seconds: list[float]) -> Percentiles:
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    return Percentiles(float(p50), float(p99))


def main() -> None:
    """Print p50 and p99 of each part, the best of several runs, beside the targets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=500, help="steps that do not count")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--modes", nargs="+", type=Mode, default=list(Mode))
    args = parser.parse_args()
    start_s = time.perf_counter()
    runs = [
        measure(mode, args.warm_up, args.steps) for mode in args.modes for _ in range(args.runs)
    ]
    print("| per step | p50 ms | p99 ms | target | |\n| --- | --- | --- | --- | --- |")
    for name, (p50_limit, p99_limit) in LIMITS_MS.items():
        found = [run.times[name] for run in runs if name in run.times]
        if not found:
            continue
        p50, p99 = min(found)
        is_met = p50 <= p50_limit and (p99_limit is None or p99 <= p99_limit)
        target = f"≤{p50_limit:g}" + ("" if p99_limit is None else f" / ≤{p99_limit:g}")
        print(f"| {name} | {p50:.2f} | {p99:.2f} | {target} | {'met' if is_met else 'missed'} |")
    means = {name: np.mean([run.mean[name] for run in runs]) for name in runs[0].mean}
    print("\nPer step, mean: " + ", ".join(f"{name} {value:,.1f}" for name, value in means.items()))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{time.perf_counter() - start_s:.0f} s, best of {args.runs} runs; load {load}")


if __name__ == "__main__":
    main()
