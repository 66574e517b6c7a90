"""Makes a `Run` of the result format of what a runner saw."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .options import CLASSES, ServerOptions, Targets, Traffic
from .records import Record
from .result import ClientReport, RequestRow, Run, Timeline
from .runner import RunOutcome
from .statistics import Measures, Window, spread, summarize

_MAX_BINS = 300


def counting_window(outcome: RunOutcome, *, skip_first_s: float, skip_last_s: float) -> Window:
    """Return what counts: all of the run, unless its ends are cut off.

    `skip_last_s` cuts before the end of *arrivals*, so that the window has a steady load.
    """
    end_s = max((record.end_s or 0.0 for record in outcome.records), default=outcome.end_s)
    if skip_last_s > 0:
        end_s = outcome.arrivals_end_s - skip_last_s
    return Window(skip_first_s, max(end_s, skip_first_s))


def make_run(
    outcome: RunOutcome,
    *,
    label: str,
    started_at: str,
    server: ServerOptions,
    traffic: Sequence[Traffic],
    seed: int,
    text_seed: int,
    window: Window,
    is_calibrated: bool,
    saves_requests: bool,
) -> Run:
    """Summarize everything, per class and, where there are two, together."""
    measures = [Measures(record) for record in outcome.records]

    def targets_of(record: Record) -> Targets:
        return traffic[record.source].targets_of(record.request_class)

    by_class = {
        name: [each for each in measures if each.record.request_class == name] for name in CLASSES
    }
    groups = {name: group for name, group in by_class.items() if group}
    if len(groups) != 1:
        groups["all"] = measures
    counted = [each for each in outcome.records if window.holds(each.intended_s)]
    return Run(
        label=label,
        started_at=started_at,
        server=server,
        traffic=list(traffic),
        seed=seed,
        text_seed=text_seed,
        window_s=(round(window.start_s, 3), round(window.end_s, 3)),
        duration_s=round(outcome.end_s, 3),
        was_interrupted=outcome.was_interrupted,
        offered_requests_per_s=len(counted)
        / max(1e-9, min(window.end_s, outcome.arrivals_end_s) - window.start_s),
        client=_client(outcome, measures, is_calibrated),
        classes={name: summarize(group, window, targets_of) for name, group in groups.items()},
        timeline=make_timeline(outcome, by_class),
        requests=[_row(each, targets_of(each.record)) for each in measures]
        if saves_requests
        else [],
    )


def _client(outcome: RunOutcome, measures: Sequence[Measures], is_calibrated: bool) -> ClientReport:
    num_events = sum(len(each.times_s) for each in measures)
    lags = [(r.sent_s - r.intended_s) * 1e3 for r in outcome.records if r.sent_s is not None]
    return ClientReport(
        cpu_share=round(outcome.cpu_s / max(1e-9, outcome.end_s), 4),
        cpu_us_per_event=round(outcome.cpu_s * 1e6 / num_events, 1) if num_events else None,
        num_events=num_events,
        lag_ms=spread(np.array(lags)),
        is_calibrated=is_calibrated,
    )


def _row(measures: Measures, targets: Targets) -> RequestRow:
    record = measures.record
    return RequestRow(
        request_class=record.request_class,
        intended_s=round(record.intended_s, 6),
        sent_s=None if record.sent_s is None else round(record.sent_s, 6),
        first_s=round(float(measures.times_s[0]), 6) if len(measures.times_s) else None,
        end_s=None if record.end_s is None else round(record.end_s, 6),
        prompt_tokens=record.prompt_tokens,
        output_tokens=measures.num_tokens if record.is_completed else None,
        mtpot_ms=measures.mtpot_ms,
        is_met=measures.is_met(targets),
        error=record.error,
        priority=record.priority,
    )


def make_timeline(outcome: RunOutcome, by_class: dict[str, list[Measures]]) -> Timeline:
    """Count per bin of a second, or of several in runs over five minutes."""
    bin_s = float(max(1, math.ceil(outcome.end_s / _MAX_BINS)))
    num_bins = max(1, math.ceil(outcome.end_s / bin_s))
    edges = np.arange(num_bins + 1) * bin_s

    def counts(moments_s: Sequence[float]) -> list[int]:
        return [int(count) for count in np.histogram(moments_s, edges)[0]]

    arrivals, failures, tokens, in_flight = {}, {}, {}, {}
    for name, group in by_class.items():
        if not group:
            continue
        records = [each.record for each in group]
        arrivals[name] = counts([record.intended_s for record in records])
        failures[name] = counts([r.end_s or 0.0 for r in records if r.error is not None])
        ends = counts([r.end_s for r in records if r.end_s is not None])
        in_flight[name] = (np.cumsum(arrivals[name]) - np.cumsum(ends)).tolist()
        times = np.concatenate([each.times_s for each in group])
        weights = np.concatenate([each.event_tokens for each in group])
        tokens[name] = np.round(np.histogram(times, edges, weights=weights)[0], 2).tolist()
    return Timeline(bin_s, arrivals, failures, tokens, in_flight)
