"""What a hybrid run came to: both classes, the KV pool, the router."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightserve.router.reasons import Reason
from lightserve.sim.class_report import ClassReport, Seen, Targets, Window, class_report
from lightserve.sim.timed_core import TimedCore
from lightserve.sim.virtual_worker import RunLengths, WorkSums
from lightserve.types import RequestClass


@dataclass(frozen=True)
class KVReport:
    """Of the whole run, both classes."""

    steps: int
    total_work_s: float
    """Execution time of all steps on the virtual hardware."""
    max_step_ms: float
    consumed_pct: float
    """Slots that requests held, of the pool: mean over steps."""
    evicted_pct: float
    """Evictions per request sent, in percent."""
    pauses: int
    evictions: int
    rt_evictions_beside_be: int
    """Of real-time requests, in steps after which a best-effort one still had KV of its own."""
    recomputed_tokens: int
    saved_tokens: int
    """Copied to the host in the step that took their slots."""
    ahead_tokens: int
    """Copied to the host before."""
    loaded_tokens: int
    copied_tokens: int
    """All of these copies."""
    copied_bytes: int
    copy_wait_s: float
    """For which steps waited for copies."""
    ahead_wait_s: float
    """For which they could not begin, as copies that no step waits for were not finished."""
    mean_run_tokens: float | None
    """Neighbouring slots in a row, over the sequences of sampled steps; None: not measured."""


@dataclass(frozen=True)
class RouterReport:
    """What the router costs, in real CPU time, and what it sends."""

    cpu_ms_p50: float
    """Of all calls of the core for a step, in every eighth of them."""
    cpu_ms_p99: float
    plan_bytes_mean: float
    reasons: dict[str, dict[str, int]]
    """By class and reason: times that a request was considered for a step and left out."""
    unseen: dict[str, dict[str, int]]
    """By class and what stopped the search: times that one was not considered."""


@dataclass(frozen=True)
class HybridReport:
    """See the module's docstring; a class without traffic has no arrivals."""

    rt: ClassReport
    be: ClassReport
    kv: KVReport
    router: RouterReport


def hybrid_report(
    seen: Mapping[RequestClass, Sequence[Seen]],
    targets: Mapping[RequestClass, Targets],
    window: Window,
    *,
    core: TimedCore,
    sums: WorkSums,
    run_lengths: RunLengths,
    num_slots: int,
    kv_bytes_per_token: int,
) -> HybridReport:
    """Return what these requests and this core came to."""
    classes = {
        request_class: class_report(
            seen[request_class],
            targets[request_class],
            window,
            evictions=core.counters[request_class].num_evictions,
            recomputed_tokens=core.counters[request_class].lost_tokens,
        )
        for request_class in RequestClass
    }
    num_steps = max(1, sums.num_steps)
    num_copied = sums.saved_tokens + sums.ahead_tokens + sums.loaded_tokens
    kv = KVReport(
        steps=sums.num_steps,
        total_work_s=sums.busy_s,
        max_step_ms=1e3 * sums.max_step_s,
        consumed_pct=100.0 * core.used_slots / (num_steps * num_slots),
        evicted_pct=100.0 * core.num_preemptions / max(1, sum(map(len, seen.values()))),
        pauses=sum(counters.num_pauses for counters in core.counters.values()),
        evictions=core.num_preemptions,
        rt_evictions_beside_be=core.num_rt_evictions_beside_be,
        recomputed_tokens=core.num_preempted_tokens,
        saved_tokens=sums.saved_tokens,
        ahead_tokens=sums.ahead_tokens,
        loaded_tokens=sums.loaded_tokens,
        copied_tokens=num_copied,
        copied_bytes=num_copied * kv_bytes_per_token,
        copy_wait_s=sums.copy_wait_s,
        ahead_wait_s=sums.ahead_wait_s,
        mean_run_tokens=run_lengths.num_tokens / run_lengths.num_runs
        if run_lengths.num_runs
        else None,
    )
    p50, p99 = np.percentile(core.step_cpu_s or [0.0], [50, 99]) * 1e3
    router = RouterReport(
        float(p50),
        float(p99),
        sums.plan_bytes / num_steps,
        reasons=_by_class(core.skip_counters.skipped),
        unseen=_by_class(core.skip_counters.unseen),
    )
    return HybridReport(classes[RequestClass.RT], classes[RequestClass.BE], kv, router)


def _by_class(counts: Mapping[RequestClass, Counter[Reason]]) -> dict[str, dict[str, int]]:
    return {
        request_class.value: {reason.value: of_class[reason] for reason in Reason}
        for request_class, of_class in counts.items()
    }
