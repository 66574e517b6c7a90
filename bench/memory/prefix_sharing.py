"""The gain of the prefix cache: `python -m bench.memory.prefix_sharing`.

`--cache-policy` and the order of best-effort requests, on mooncake's block ids. The real
router core on virtual hardware (A100, Llama-2-7B): of each trace, rows of at most
MAX_PROMPT_TOKENS; a quarter of the conversations are real-time and come at the trace's times,
stretched; the others are a backlog of best-effort requests that is known from the start (Echo's
reference counts need that). The pool is far smaller than all that could be cached. Hit rate: prompt
tokens that were not computed when a request first started, of all prompt tokens of those
that have begun to answer. Questions about documents are a ground of `bench.scheduling.papers`
(`echo-documents`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.table import print_head, print_row
from lightserve.config import ServeConfig
from lightserve.router.config import make_scheduler_config
from lightserve.router.events import FromFrontend, WorkersReady
from lightserve.sim.simulation import Outcome, Simulation, TimedCore, TimedEvent
from lightserve.sim.traffic import (
    Job,
    Trace,
    TraceTraffic,
    parse_block_ids,
    read_trace,
)
from lightserve.sim.virtual_gpus import A100_LLAMA2_7B
from lightserve.sim.worker import LengthWorker, VirtualWorker
from lightserve.types import FrontendId, RequestClass, RequestId, RequestKey

TRACES = ("mooncake_conversation", "mooncake_synthetic")
ARMS = (
    ("off", "arrival"),
    ("lru", "arrival"),
    ("task-aware", "arrival"),
    ("lru", "sharing"),
    ("task-aware", "sharing"),
)
"""--cache-policy, and the order in which best-effort requests start: that of their arrival, or
first those who share most with what is cached (as the server does)."""
MAX_PROMPT_TOKENS = 16_384
STRETCH = {"mooncake_conversation": 2.5, "mooncake_synthetic": 1.5}
"""So many times slower than the trace: what one such GPU can serve."""
BE_SHARE = 0.75
"""Of the conversations."""
PEAK_S = 30.0
PEAK_SHARE = 0.1
"""RT peaks: of all stretches of PEAK_S, those with the most real-time prompt tokens."""
MAX_NUM_SEQS = 256
BUDGET_TOKENS = 2048


class Cell(NamedTuple):
    """One run."""

    trace: str
    cache_policy: str
    capacity_tokens: int
    be_order: str
    max_be_seqs: int
    """0: as many as fit, which leaves the cache next to nothing."""
    num_rows: int
    seed: int


class Sent(NamedTuple):
    """A request of a run."""

    request_class: RequestClass
    time_s: float
    num_prompt_tokens: int
    outcome: Outcome


class Answer(NamedTuple):
    """What a run came to; hit rates are shares of prompt tokens."""

    hit_rt: float
    hit_rt_peak: float
    hit_be: float
    hit_all: float
    rt_ttft_p50_s: float
    rt_ttft_p99_s: float
    be_finished: int
    be_tokens_per_s: float
    """Prompt and output tokens of best-effort requests that ended, by virtual second."""


def read_rows(name: str, num_rows: int) -> Trace:
    """Return the first rows of a trace whose prompts are not too long."""
    trace = read_trace(Path(__file__).parents[1] / "traces" / f"{name}.csv.gz")
    assert trace.arrival_s is not None and trace.block_ids is not None
    rows = np.flatnonzero(trace.prompt_tokens <= MAX_PROMPT_TOKENS)[:num_rows]
    return Trace(
        trace.prompt_tokens[rows],
        trace.output_tokens[rows],
        [trace.clients[row] for row in rows],
        trace.arrival_s[rows],
        [trace.block_ids[row] for row in rows],
    )


def classes_of(trace: Trace, rng: np.random.Generator) -> list[RequestClass]:
    """Return a class per row; rows whose prompts begin with the same two blocks have the same."""
    assert trace.block_ids is not None
    conversations = [tuple(parse_block_ids(ids)[:2]) for ids in trace.block_ids]
    is_be = {each: rng.random() < BE_SHARE for each in dict.fromkeys(conversations)}
    return [RequestClass.BE if is_be[each] else RequestClass.RT for each in conversations]


def events_of(cell: Cell) -> Iterator[tuple[RequestClass, TimedEvent, Job]]:
    """Yield all requests: real-time ones at their times, best-effort ones at the start."""
    rng = np.random.default_rng(cell.seed)
    trace = read_rows(cell.trace, cell.num_rows)
    classes = classes_of(trace, rng)
    jobs = TraceTraffic(trace, max_tokens=None).jobs(rng)
    for number, (request_class, (time_s, job)) in enumerate(zip(classes, jobs, strict=True)):
        at_s = 0.0 if request_class is RequestClass.BE else time_s * STRETCH[cell.trace]
        message = FromFrontend(FrontendId(0), job.submit(number, request_class))
        yield request_class, TimedEvent(at_s, message), job


def run(cell: Cell) -> Answer:
    """Run one cell until the last real-time arrival."""
    sent = list(events_of(cell))
    longest = max(len(job.prompt_token_ids) + job.max_tokens for _, _, job in sent)
    options: dict[str, Any] = {
        "policy": "priority",
        "max_be_seqs": cell.max_be_seqs,
        "cache_policy": cell.cache_policy,
        "be_order": cell.be_order,
        "max_num_batched_tokens": BUDGET_TOKENS,
        "max_num_seqs": MAX_NUM_SEQS,
        "be_max_waiting_requests": len(sent),
        "be_max_waiting_tokens": 1 << 40,
        "rt_max_waiting_requests": len(sent),
        "rt_max_waiting_tokens": 1 << 40,
    }
    config = make_scheduler_config(ServeConfig(**options), max_model_len=longest, seed=cell.seed)
    worker = VirtualWorker(
        A100_LLAMA2_7B,
        LengthWorker(max_num_seqs=config.max_num_seqs, max_model_len=longest),
        noise=0.0,
        rng=np.random.default_rng(cell.seed),
    )
    simulation = Simulation(
        TimedCore(config),
        worker,
        worker.seconds,
        WorkersReady(cell.capacity_tokens, num_host_slots=cell.capacity_tokens // 2),
    )
    end_s = max(event.time_s for _, event, _ in sent)
    simulation.run([event for _, event, _ in sent], until_s=end_s)
    seen = [
        Sent(request_class, event.time_s, len(job.prompt_token_ids), outcome)
        for number, (request_class, event, job) in enumerate(sent)
        if (outcome := simulation.outcomes.get(RequestKey(FrontendId(0), RequestId(number))))
    ]
    return answer(seen, end_s)


def answer(seen: Sequence[Sent], end_s: float) -> Answer:
    """Return the figures of a run that lasted `end_s`."""
    rt = [each for each in seen if each.request_class is RequestClass.RT]
    be = [each for each in seen if each.request_class is RequestClass.BE]
    ended = [each for each in be if each.outcome.finish_reason is not None]
    ttft_s = [
        (each.outcome.token_times_s[0] if each.outcome.token_times_s else end_s) - each.time_s
        for each in rt
    ]
    p50, p99 = np.percentile(ttft_s, [50, 99])
    tokens = sum(each.num_prompt_tokens + len(each.outcome.token_ids) for each in ended)
    return Answer(
        hit_rate(rt),
        hit_rate(in_peaks(rt)),
        hit_rate(be),
        hit_rate(seen),
        float(p50),
        float(p99),
        len(ended),
        tokens / end_s,
    )


def hit_rate(seen: Sequence[Sent]) -> float:
    """Return the cached share of the prompt tokens of requests that have begun to answer."""
    begun = [each for each in seen if each.outcome.token_times_s]
    cached = sum(each.outcome.num_cached_tokens for each in begun)
    return cached / max(1, sum(each.num_prompt_tokens for each in begun))


def in_peaks(rt: Sequence[Sent]) -> list[Sent]:
    """Return those that came in the stretches of time with the most prompt tokens."""
    stretches = np.array([int(each.time_s // PEAK_S) for each in rt])
    load = np.bincount(stretches, weights=[each.num_prompt_tokens for each in rt])
    busiest = np.argsort(load)[::-1][: max(1, round(PEAK_SHARE * len(load)))]
    return [each for each, stretch in zip(rt, stretches, strict=True) if stretch in busiest]


def compare_policies(args: argparse.Namespace) -> None:
    """Print the table of the cache policies."""
    cells = [
        Cell(trace, policy, args.capacity, be_order, max_be_seqs, args.rows, args.seed)
        for max_be_seqs, trace, (policy, be_order) in product(args.max_be_seqs, TRACES, ARMS)
    ]
    print_head(
        *(
            "trace",
            "most BE at once",
            "cache policy",
            "BE order",
            "hit RT",
            "RT peaks",
            "BE",
            "all",
        ),
        *("RT TTFT p50 s", "p99 s", "BE ended", "BE tokens/s"),
    )
    with ProcessPoolExecutor(args.processes) as pool:
        for cell, got in zip(cells, pool.map(run, cells), strict=True):
            rates = (got.hit_rt, got.hit_rt_peak, got.hit_be, got.hit_all)
            print_row(
                *(cell.trace, cell.max_be_seqs or "what fits", cell.cache_policy, cell.be_order),
                *(f"{rate:.1%}" for rate in rates),
                *(f"{got.rt_ttft_p50_s:.2f}", f"{got.rt_ttft_p99_s:.2f}"),
                *(got.be_finished, f"{got.be_tokens_per_s:,.0f}"),
            )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--capacity", type=int, default=120_000)
    parser.add_argument("--max-be-seqs", type=int, nargs="+", default=[8, 0])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    compare_policies(args)


if __name__ == "__main__":
    main()
