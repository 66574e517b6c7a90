"""Definitions of the figures of a run. Pure: records in, numbers out.

Every time counts from the *intended* arrival. An *event* is a chunk with text.

TTFT        first event - arrival (the finish event where an answer has no text)
ITL         gap between two consecutive events, never divided: what a reader waits, even where an
            event carries several tokens
ITL/token   each gap divided by the tokens of the event that ends it, counted once per token. An
            event has one token; those that usage counts beyond the number of events are shared out
            in proportion to characters
MTPOT       largest ITL of a request
TPOT        (last event - first event) / (output tokens - 1), per request
E2EL        finish event - arrival
normalized  E2EL / output tokens, per request
met         completed, and within every target of its class; a quantity that a request does not
            have (the TPOT of one token) meets its target
attainment  met / arrivals. Refused, failed, timed out and unfinished requests are arrivals and
            are misses of every target
goodput     met requests, and their output tokens, per second of the window
throughput  completed requests, and all tokens that arrived, per second of the window

Latencies are those of requests that got that far: TTFT of all that had a first event, ITL of all
gaps, the others of completed requests. Tokens are the server's usage, else the number of events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lightserve.loadtest.options import Targets
from lightserve.loadtest.result import ClassSummary, ErrorCount, Lengths, Record, Spread

FloatArray = npt.NDArray[np.float64]

QUANTILES = np.linspace(0.0, 1.0, 201)


class Measures:
    """Figures of one record."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.times_s: FloatArray = np.asarray(record.event_times_s, dtype=np.float64)
        self.gaps_ms: FloatArray = np.diff(self.times_s) * 1e3

    @cached_property
    def num_tokens(self) -> int:
        """Output tokens: by usage, else one per event."""
        by_usage = self.record.output_tokens
        return len(self.times_s) if by_usage is None else by_usage

    @cached_property
    def event_tokens(self) -> FloatArray:
        """Tokens of each event, [num_events]: one each, and the rest by characters."""
        num_events = len(self.times_s)
        tokens = np.ones(num_events)
        if (extra := self.num_tokens - num_events) > 0 and num_events:
            chars = np.asarray(self.record.event_chars, dtype=np.float64)
            tokens += extra * chars / chars.sum()
        return tokens

    @property
    def ttft_ms(self) -> float | None:
        """Return TTFT; None where nothing came."""
        if len(self.times_s):
            return float(self.times_s[0] - self.record.intended_s) * 1e3
        return self.e2el_ms

    @property
    def e2el_ms(self) -> float | None:
        """Return E2EL of a completed request."""
        if not self.record.is_completed or self.record.end_s is None:
            return None
        return (self.record.end_s - self.record.intended_s) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Return TPOT of a completed request of several tokens."""
        if not self.record.is_completed or self.num_tokens < 2 or len(self.times_s) < 2:
            return None
        return float(self.times_s[-1] - self.times_s[0]) * 1e3 / (self.num_tokens - 1)

    @property
    def mtpot_ms(self) -> float | None:
        """Return the largest gap of a completed request."""
        if not self.record.is_completed or not len(self.gaps_ms):
            return None
        return float(self.gaps_ms.max())

    @property
    def normalized_ms(self) -> float | None:
        """Return E2EL by output token."""
        if (e2el_ms := self.e2el_ms) is None or not self.num_tokens:
            return None
        return e2el_ms / self.num_tokens

    def meets(self, target: str, limit_ms: float) -> bool:
        """Whether one target, such as "ttft_ms", was met."""
        if not self.record.is_completed:
            return False
        value: float | None = getattr(self, target)
        return value is None or value <= limit_ms

    def is_met(self, targets: Targets) -> bool:
        """Whether all were."""
        return self.record.is_completed and all(self.meets(*item) for item in targets.items())


@dataclass(frozen=True)
class Window:
    """The stretch of the run that counts, in seconds after its start."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """Return its length, above 0."""
        return max(1e-9, self.end_s - self.start_s)

    def holds(self, moment_s: float) -> bool:
        """Whether a moment is in it."""
        return self.start_s <= moment_s <= self.end_s


def summarize(
    measures: Sequence[Measures], window: Window, targets_of: Callable[[Record], Targets]
) -> ClassSummary:
    """Summarize the arrivals in a window.

    Args:
        measures: of all requests, also those that arrived outside the window: tokens that
            arrived inside are counted.
        window: what counts.
        targets_of: the targets of a request.
    """
    chosen = [each for each in measures if window.holds(each.record.intended_s)]
    done = [each for each in chosen if each.record.is_completed]
    met = [each for each in chosen if each.is_met(targets_of(each.record))]
    tokens_inside = sum(_tokens_inside(each, window) for each in measures)
    num_events = sum(len(each.times_s) for each in done)
    num_tokens = sum(each.num_tokens for each in done if len(each.times_s))
    counted = {each.record.output_tokens is not None for each in done}
    return ClassSummary(
        num_arrivals=len(chosen),
        num_completed=len(done),
        num_met=len(met),
        num_failed=sum(each.record.error is not None for each in chosen),
        errors=_errors(chosen),
        attainment=len(met) / len(chosen) if chosen else None,
        attainment_by_target=_by_target(chosen, targets_of),
        targets=_common_targets(targets_of(each.record) for each in chosen),
        ttft_ms=spread(_present(each.ttft_ms for each in chosen)),
        tpot_ms=spread(_present(each.tpot_ms for each in chosen)),
        itl_ms=spread(_joined([each.gaps_ms for each in chosen])),
        itl_per_token_ms=_per_token(chosen),
        mtpot_ms=spread(_present(each.mtpot_ms for each in chosen)),
        e2el_ms=spread(_present(each.e2el_ms for each in chosen)),
        normalized_ms=spread(_present(each.normalized_ms for each in chosen)),
        requests_per_s=len(done) / window.length_s,
        output_tokens_per_s=tokens_inside / window.length_s,
        prompt_tokens_per_s=sum(each.record.prompt_tokens or 0 for each in done) / window.length_s,
        goodput_requests_per_s=len(met) / window.length_s,
        goodput_tokens_per_s=sum(each.num_tokens for each in met) / window.length_s,
        tokens_per_event=num_tokens / num_events if num_events else None,
        tokens_are_counted_by="usage" if counted == {True} else "events" if counted else "nothing",
        prompt_lengths=_lengths(
            (each.record.wanted_prompt_tokens, each.record.prompt_tokens)
            for each in done
            if not each.record.num_images  # their tokens are the model's affair
        ),
        output_lengths=_lengths(
            (each.record.wanted_output_tokens, each.record.output_tokens) for each in done
        ),
        cached_tokens_share=_cached_share(done),
        makespan_s=_makespan_s([each.record for each in chosen]),
        num_images=sum(each.record.num_images for each in done),
    )


def spread(values: FloatArray, weights: FloatArray | None = None) -> Spread:
    """Summarize samples, [num]; weights count a sample several times (fractions too)."""
    if not len(values):
        return Spread(num=0)
    if weights is None:
        points = np.quantile(values, [*QUANTILES, 0.5, 0.9, 0.99])
        mean = values.mean()
    else:
        points = weighted_quantile(values, weights, np.array([*QUANTILES, 0.5, 0.9, 0.99]))
        mean = np.average(values, weights=weights)
    return Spread(
        num=len(values),
        mean=_rounded(mean),
        p50=_rounded(points[-3]),
        p90=_rounded(points[-2]),
        p99=_rounded(points[-1]),
        max=_rounded(values.max()),
        quantiles=[_rounded(point) for point in points[:-3]],
    )


def weighted_quantile(values: FloatArray, weights: FloatArray, at: FloatArray) -> FloatArray:
    """Return the smallest values below or at which a share of at least `at` of the weight lies."""
    return np.quantile(values, at, weights=weights, method="inverted_cdf")


def _rounded(value: float) -> float:
    return round(float(value), 4)


def _present(values: Iterable[float | None]) -> FloatArray:
    return np.array([value for value in values if value is not None], dtype=np.float64)


def _joined(arrays: Sequence[FloatArray]) -> FloatArray:
    return np.concatenate(arrays) if arrays else np.empty(0)


def _per_token(measures: Sequence[Measures]) -> Spread:
    tokens = _joined([each.event_tokens[1:] for each in measures])
    return spread(_joined([each.gaps_ms for each in measures]) / tokens, tokens)


def _tokens_inside(measures: Measures, window: Window) -> float:
    inside = (measures.times_s >= window.start_s) & (measures.times_s <= window.end_s)
    return float(measures.event_tokens[inside].sum())


def _errors(measures: Sequence[Measures]) -> dict[str, ErrorCount]:
    failed = [each.record for each in measures if each.record.error is not None]
    kinds = sorted({str(record.error) for record in failed})
    alike = {kind: [record for record in failed if record.error == kind] for kind in kinds}
    return {
        kind: ErrorCount(len(records), records[0].error_detail) for kind, records in alike.items()
    }


def _by_target(
    measures: Sequence[Measures], targets_of: Callable[[Record], Targets]
) -> dict[str, float]:
    """Return the share of arrivals with a target that met it, per target."""
    verdicts: dict[str, list[bool]] = {}
    for each in measures:
        for name, limit in targets_of(each.record).items():
            verdicts.setdefault(name, []).append(each.meets(name, limit))
    return {name: sum(values) / len(values) for name, values in verdicts.items()}


def _common_targets(targets: Iterable[Targets]) -> Targets:
    distinct = set(targets)
    return distinct.pop() if len(distinct) == 1 else Targets()


def _lengths(pairs: Iterable[tuple[int, int | None]]) -> Lengths:
    known = [(wanted, actual) for wanted, actual in pairs if actual is not None]
    if not known:
        return Lengths(None, None, None, None)
    wanted, actual = np.array(known, dtype=np.float64).T
    p50, p99 = np.quantile(np.abs(actual - wanted) / wanted * 100, [0.5, 0.99])
    return Lengths(_rounded(wanted.mean()), _rounded(actual.mean()), _rounded(p50), _rounded(p99))


def _makespan_s(records: Sequence[Record]) -> float | None:
    if not records:
        return None
    end_s = max(record.end_s or record.intended_s for record in records)
    return _rounded(end_s - min(record.intended_s for record in records))


def _cached_share(measures: Sequence[Measures]) -> float | None:
    known = [each.record for each in measures if each.record.cached_tokens is not None]
    total = sum(record.prompt_tokens or 0 for record in known)
    return sum(record.cached_tokens or 0 for record in known) / total if total else None
