"""What a workload leaves room for at most: best-effort tokens, and requests that are in time.

True lengths are known, load is even, and no memory is lost between requests. In the mean over a
long time let s steps begin a second, and x best-effort requests end a second:

    time       s * constant + tokens * per token + what is read  <= 1
               s * floor + what is read                          <= 1
    memory     (r * o * h + x * O * H) / s  <= M       (Little's law: one token of each a step)
    deadlines  s >= 1 / (gap that real-time requests allow)

where r real-time requests come a second, with o (best-effort ones: O) decodes each that hold h (H)
slots in the mean. More steps need less memory and more time: so s is the least that memory and
deadlines allow, and x the largest with which time is enough, found by halving. What bursts, the
end of a batch that the next one waits for and unknown lengths cost is not taken off: so what is
near the bound cannot be much better. Of a backlog that is more than can be done, the shortest
prompts count, as it may be these that are done.

Of real-time requests alone an oracle's schedule says how many can have their first token in time:
it knows all arrivals and lengths, gives up those that would make most others late, and works on the
earliest deadline at every moment, as fast as decodes leave it (AccelGen's Oracle; the rule of Moore
and Hodgson, with times of arrival). Steps have no length there: so it is optimistic.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightserve.sim.hybrid import Clients, HybridConfig, HybridRun
from lightserve.sim.traffic import BLOCK_TOKENS, parse_block_ids, read_trace
from lightserve.sim.virtual_gpus import VirtualHardware
from lightserve.types import BE, RT

IntArray = npt.NDArray[np.int64]
NUM_ROUNDS = 6
"""Of a backlog more than can be done: that many times it is asked how many of the shortest are."""
NUM_DRAWN = 4000
"""Requests that are drawn without end: so many make their mean."""


@dataclass(frozen=True)
class Means:
    """Of the requests of a class, per request."""

    prompt_tokens: float
    """That have to be computed: what others have computed before is left out."""
    prompt_pairs: float
    """Of a token that is computed and one that it reads."""
    output_tokens: float
    decodes: float
    """Steps after the one with the first token."""
    context: float
    """Tokens that these read, summed."""
    held: float
    """Slots of its own, summed over these steps."""


def means_of(prompts: IntArray, outputs: IntArray, shared: IntArray) -> Means:
    """Return the means of requests, int64 [n] each; `shared`: of the prompt, computed before."""
    own, decodes = prompts - shared, np.maximum(0, outputs - 1)
    return Means(
        prompt_tokens=float(own.mean()),
        prompt_pairs=float((own * shared + own * own / 2).mean()),
        output_tokens=float(outputs.mean()),
        decodes=float(decodes.mean()),
        context=float((decodes * (prompts + outputs / 2)).mean()),
        held=float((decodes * (own + outputs / 2)).mean()),
    )


def most_requests(
    hardware: VirtualHardware,
    num_slots: int,
    real_time: tuple[float, Means] | None,
    best_effort: Means,
    gap_s: float,
) -> float:
    """Return how many best-effort requests can end a second; see the module.

    Args:
        hardware: what steps take.
        num_slots: size of the pool.
        real_time: how many come a second, and their means; None: none come.
        best_effort: their means.
        gap_s: between two tokens of a real-time request, at most.
    """

    def is_feasible(x: float) -> bool:
        parts = [(x, best_effort), *([real_time] if real_time else [])]
        tokens = sum(rate * (of.prompt_tokens + of.decodes) for rate, of in parts)
        reading_s = sum(
            rate * hardware.per_decode_context_s * of.context
            + rate * hardware.per_chunk_context_s * of.prompt_pairs
            for rate, of in parts
        )
        num_steps = sum(rate * of.held for rate, of in parts) / num_slots
        if real_time:
            num_steps = max(num_steps, 1.0 / gap_s)
        linear_s = num_steps * hardware.constant_s + tokens * hardware.per_new_token_s
        return max(linear_s, num_steps * hardware.floor_s) + reading_s <= 1.0

    low, high = 0.0, 1.0
    while is_feasible(high):
        high *= 2.0
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if is_feasible(middle) else (low, middle)
    return low


def best_effort_bound(config: HybridConfig) -> float | None:
    """Return the best-effort output tokens a second that a run leaves room for; None: none come."""
    if config.be is None:
        return None
    hardware = config.hardware
    assert isinstance(hardware, VirtualHardware), "of others the parts of a step are not known"
    clients = HybridRun(config).clients
    real_time = None
    if RT in clients:
        real_time = _sent_between_margins(config, clients[RT])
    prompts, outputs, shared = _best_effort(config, clients[BE])
    gaps = [gap for gap in (config.targets.tpot_s, config.targets.mtpot_s) if gap is not None]
    window_s = config.duration_s - 2 * config.margin_s
    shortest, num_taken, found = np.argsort(prompts, kind="stable"), len(prompts), 0.0
    for _ in range(NUM_ROUNDS):
        taken = shortest[:num_taken]
        of_taken = means_of(prompts[taken], outputs[taken], shared[taken])
        num_ended = most_requests(
            hardware, config.capacity_tokens, real_time, of_taken, min(gaps, default=np.inf)
        )
        found = max(found, num_ended * of_taken.output_tokens)
        if config.be_lengths is not None:
            break
        num_taken = min(len(prompts), math.ceil(num_ended * window_s))
    return found


def _sent_between_margins(config: HybridConfig, clients: Clients) -> tuple[float, Means]:
    """Return how many requests come a second while it counts, and their means."""
    arrivals_s, stop_s = np.array(clients.arrivals_s), config.duration_s - config.margin_s
    counts = (arrivals_s >= config.margin_s) & (arrivals_s < stop_s)
    prompts = np.array(clients.num_prompt_tokens)[counts]
    outputs = np.array(clients.num_output_tokens)[counts]
    rate_rps = len(prompts) / (stop_s - config.margin_s)
    return rate_rps, means_of(prompts, outputs, np.zeros_like(prompts))


def _best_effort(config: HybridConfig, clients: Clients) -> tuple[IntArray, IntArray, IntArray]:
    """Return prompts, outputs and what is shared of prompts, int64 [n] each."""
    if config.be_lengths is not None:  # drawn without end
        jobs = [job for _, job in islice(clients.traffic.jobs(np.random.default_rng(0)), NUM_DRAWN)]
        prompts = np.array([len(job.prompt_token_ids) for job in jobs])
        outputs = np.array([job.num_output_tokens for job in jobs])
        return prompts, outputs, np.zeros_like(prompts)
    assert config.be is not None
    trace = read_trace(Path(config.be))
    shared = np.zeros_like(trace.prompt_tokens)
    if trace.block_ids is not None:
        shared = shared_tokens([parse_block_ids(ids) for ids in trace.block_ids])
    return trace.prompt_tokens, trace.output_tokens, shared


def shared_tokens(blocks: Sequence[Sequence[int]]) -> IntArray:
    """Return how many tokens of each prompt need not be computed, int64 [n], in the best order.

    A block is computed once, and its share falls on all that read it.
    """
    num_readers: dict[int, int] = {}
    for ids in blocks:
        for block in ids:
            num_readers[block] = num_readers.get(block, 0) + 1
    saved = [sum(1.0 - 1.0 / num_readers[block] for block in ids) for ids in blocks]
    return np.array([round(BLOCK_TOKENS * of_one) for of_one in saved], dtype=np.int64)


class Prompt(NamedTuple):
    """What an oracle plans."""

    arrival_s: float
    due_s: float
    work_s: float


def oracle_schedule(prompts: Sequence[Prompt]) -> set[int]:
    """Return the indices of prompts that are in time; the others are never begun."""
    kept = set(range(len(prompts)))
    while (busy := _first_late(prompts, kept)) is not None:
        kept.remove(max(busy, key=lambda index: prompts[index].work_s))
    return kept


def _first_late(prompts: Sequence[Prompt], kept: Collection[int]) -> list[int] | None:
    """Play the earliest deadline first; return what was worked on before the first late one.

    Since the machine was idle last, itself included; None: none is late.
    """
    order = sorted(kept, key=lambda index: prompts[index].arrival_s)
    waiting: list[tuple[float, int, float]] = []
    now_s, begun, next_one = 0.0, list[int](), 0
    while waiting or next_one < len(order):
        if not waiting:
            begun = []
            now_s = max(now_s, prompts[order[next_one]].arrival_s)
        while next_one < len(order) and prompts[order[next_one]].arrival_s <= now_s:
            index = order[next_one]
            heapq.heappush(waiting, (prompts[index].due_s, index, prompts[index].work_s))
            begun.append(index)
            next_one += 1
        due_s, index, left_s = heapq.heappop(waiting)
        until_s = prompts[order[next_one]].arrival_s if next_one < len(order) else np.inf
        if now_s + left_s <= until_s:
            now_s += left_s
            if now_s > due_s:
                return [other for other in begun if prompts[other].due_s <= due_s]
        else:
            heapq.heappush(waiting, (due_s, index, left_s - (until_s - now_s)))
            now_s = until_s
    return None


def oracle_goodput(config: HybridConfig) -> float:
    """Return the real-time requests a second that an oracle's schedule has in time.

    Of those that come between the margins, as reports count.
    """
    hardware = config.hardware
    assert isinstance(hardware, VirtualHardware), "of others the parts of a step are not known"
    clients = HybridRun(config).clients[RT]
    rate_rps, decodes = _sent_between_margins(config, clients)
    decoding_s = rate_rps * (
        decodes.decodes * hardware.per_new_token_s + decodes.context * hardware.per_decode_context_s
    )
    speed = max(0.05, 1.0 - decoding_s)
    prompts = []
    for at_s, count, targets in zip(
        clients.arrivals_s, clients.num_prompt_tokens, clients.targets, strict=True
    ):
        ttft_s = (targets or config.targets).ttft_s
        work_s = hardware.seconds(count, chunk_context=count * count / 2) / speed
        prompts.append(Prompt(at_s, np.inf if ttft_s is None else at_s + ttft_s, work_s))
    start_s, stop_s = config.margin_s, config.duration_s - config.margin_s
    kept = [i for i in oracle_schedule(prompts) if start_s <= prompts[i].arrival_s < stop_s]
    return len(kept) / (stop_s - start_s)
