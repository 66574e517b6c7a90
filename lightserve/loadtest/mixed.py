"""Chats beside a batch: the scenes of `lightserve bench mixed`, and their table.

Chats arrive by the same open loop in every scene: same moments, same lengths. In the first scene
they are alone. In the others they arrive until a batch has ended, whose requests a client sends all
at once, or no more than a cap at a time, or all at once as the server's own best-effort class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightserve.errors import LoadTestError
from lightserve.loadtest.options import BE, RT, ArrivalKind, Traffic
from lightserve.loadtest.result import Run, Spread
from lightserve.loadtest.session import Point
from lightserve.loadtest.tables import number, percent

TTFT_LIMIT, ITL_LIMIT = 1.5, 1.7
"""Chats are left in peace by a scene whose p99 is within these ratios to the first scene's."""
POINTS = ("p50", "p90", "p99")
_FEW_CHATS = 50


@dataclass(frozen=True)
class Mix:
    """Requests of the scenes."""

    chats: Traffic
    """An open loop with a duration, which is that of the first scene."""
    batch: Traffic
    """Best-effort requests; how many go at once is said by each scene."""
    caps: Sequence[int]
    class_body: dict[str, Any]
    """How the server is told of its own class; empty: it has none, and there is no such scene."""
    limit_s: float
    """A scene with a batch sends nothing more after so long."""


def scenes(mix: Mix) -> list[Point]:
    """Return the runs to make: alone, unguarded, each cap, the server's own class."""
    count = mix.batch.num_requests
    assert count is not None, "checked by the cli"
    beside = msgspec.structs.replace(mix.chats, duration_s=mix.limit_s)

    def scene(label: str, num_at_once: int, body: dict[str, Any]) -> Point:
        batch = msgspec.structs.replace(
            mix.batch,
            request_class=BE,
            arrivals=ArrivalKind.CLOSED,
            concurrency=min(num_at_once, count),
            duration_s=mix.limit_s,
        )
        return Point(label, (beside, batch), body, ends_with_last=True)

    points = [Point("alone", (mix.chats,)), scene("unguarded", count, {})]
    points += [scene(f"cap {cap}", cap, {}) for cap in mix.caps]
    if mix.class_body:
        points.append(scene("own class", count, mix.class_body))
    return points


def check_scenes(runs: Sequence[Run]) -> None:
    """Raise LoadTestError where there is nothing to compare: no chat beside the batch."""
    for run in runs:
        if RT not in run.classes:
            raise LoadTestError(
                f"scene {run.label}: the batch ended before a chat arrived; raise --rate or --batch"
            )


def ratio(value: float | None, base: float | None) -> float | None:
    """Return value / base; None where one of them is missing or the base is 0."""
    return value / base if value is not None and base else None


def keeps_pace(run: Run, alone: Run) -> bool:
    """Whether the p99 of both latencies of chats is within the limits, and no chat failed."""
    own, base = run.classes[RT], alone.classes[RT]
    ttft = ratio(own.ttft_ms.p99, base.ttft_ms.p99)
    itl = ratio(own.itl_ms.p99, base.itl_ms.p99)
    return (
        own.num_failed == 0
        and ttft is not None
        and ttft <= TTFT_LIMIT
        and (itl <= ITL_LIMIT if itl is not None else base.itl_ms.num == 0)
    )


def makespan_s(run: Run) -> float | None:
    """Return how long the batch took; None where it did not end, or there was none."""
    batch = run.classes.get(BE)
    if batch is None or batch.num_completed < (run.traffic[-1].num_requests or 0):
        return None
    return batch.makespan_s


def batch_tokens_per_s(run: Run) -> float | None:
    """Return the batch's output tokens per second of its own time."""
    batch = run.classes.get(BE)
    if batch is None or not batch.makespan_s:
        return None
    start_s, end_s = run.window_s
    return batch.output_tokens_per_s * (end_s - start_s) / batch.makespan_s


def verdict(runs: Sequence[Run]) -> str:
    """Return one sentence: the best cap that leaves chats in peace, beside the own class."""
    alone = runs[0]
    capped = [run for run in runs if run.label.startswith("cap ") and keeps_pace(run, alone)]
    best = max(capped, key=lambda run: run.traffic[-1].concurrency or 0, default=None)
    limits = f"TTFT p99 within {TTFT_LIMIT:g} x and ITL p99 within {ITL_LIMIT:g} x of alone"
    parts = [
        f"no cap keeps {limits}"
        if best is None
        else f"the largest cap that keeps {limits} is {best.traffic[-1].concurrency}: "
        f"the batch took {_duration(best)}"
    ]
    own = next((run for run in runs if run.label == "own class"), None)
    if own is not None:
        kept = "keeps it" if keeps_pace(own, alone) else "does not keep it"
        parts.append(f"the server's own class {kept}: the batch took {_duration(own)}")
    return "; ".join(parts)


def _duration(run: Run) -> str:
    took_s = makespan_s(run)
    if took_s is not None:
        return f"{number(took_s)} s"
    batch = run.classes.get(BE)
    done = 0 if batch is None else batch.num_completed
    return f"longer than the scene ({done} of {run.traffic[-1].num_requests} completed)"


def print_scenes(console: Console, runs: Sequence[Run]) -> None:
    """Print a row per scene, the verdict, and what to beware of."""
    title = f"{escape(runs[0].server.model)} at {escape(runs[0].server.url)}"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("scene")
    heads = ("chats", "TTFT p50 / p90 / p99, ms", "of alone", "ITL p50 / p90 / p99, ms")
    for head in (*heads, "of alone", "attainment", "batch, s", "tokens/s"):
        table.add_column(head, justify="right")
    base = runs[0].classes[RT]
    for run in runs:
        own, batch = run.classes[RT], run.classes.get(BE)
        took_s = makespan_s(run)
        unfinished = (
            "" if batch is None else f"{batch.num_completed}/{run.traffic[-1].num_requests}"
        )
        table.add_row(
            run.label,
            f"{own.num_completed}/{own.num_arrivals}",
            _three(own.ttft_ms),
            _ratios(own.ttft_ms, base.ttft_ms),
            _three(own.itl_ms),
            _ratios(own.itl_ms, base.itl_ms),
            percent(own.attainment),
            unfinished if took_s is None else number(took_s),
            "" if batch is None else number(batch_tokens_per_s(run)),
        )
    console.print()
    console.print(table)
    console.print(verdict(runs), markup=False, highlight=False)
    for text in _notes(runs):
        console.print(f"note: {text}", markup=False, highlight=False)


def _three(spread: Spread) -> str:
    return " / ".join(number(getattr(spread, point)) for point in POINTS)


def _ratios(spread: Spread, base: Spread) -> str:
    pairs = ((getattr(spread, point), getattr(base, point)) for point in POINTS)
    return " / ".join(number(ratio(*pair), 2) for pair in pairs)


def _notes(runs: Sequence[Run]) -> list[str]:
    notes = []
    own = next((run for run in runs if run.label == "own class"), None)
    if own is not None:
        body = msgspec.json.encode(own.server.be_body).decode()
        notes.append(f"own class: batch requests had {body}; a server that ignores it is unguarded")
    few = [run.label for run in runs if run.classes[RT].num_arrivals < _FEW_CHATS]
    if few:
        notes.append(
            f"fewer than {_FEW_CHATS} chats in: {', '.join(few)}; a p99 of so few is the slowest "
            "one: raise --rate, --batch or --duration-s"
        )
    if any(not run.client.is_calibrated for run in runs):
        notes.append("the server reports no usage: prompt lengths are a guess")
    return notes
