"""Several runs side by side, the others in relation to the first."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .result import ClassSummary, Run
from .tables import LATENCIES, TITLES, number

Row = tuple[str, Callable[[ClassSummary], float | None], int]
"""Title, value, digits."""


def _attribute(name: str, scale: float = 1.0) -> Callable[[ClassSummary], float | None]:
    def get(summary: ClassSummary) -> float | None:
        value: float | None = getattr(summary, name)
        return None if value is None else value * scale

    return get


def _quantile(field: str, point: str) -> Callable[[ClassSummary], float | None]:
    def get(summary: ClassSummary) -> float | None:
        value: float | None = getattr(getattr(summary, field), point)
        return value

    return get


ROWS: tuple[Row, ...] = (
    ("arrivals", _attribute("num_arrivals"), 0),
    ("failed", _attribute("num_failed"), 0),
    ("attainment, %", _attribute("attainment", 100.0), 1),
    ("goodput, requests/s", _attribute("goodput_requests_per_s"), 2),
    ("goodput, tokens/s", _attribute("goodput_tokens_per_s"), 1),
    ("throughput, requests/s", _attribute("requests_per_s"), 2),
    ("throughput, output tokens/s", _attribute("output_tokens_per_s"), 1),
    *(
        (f"{title} {point}, {unit}", _quantile(field, point), 1)
        for title, field, unit in LATENCIES
        for point in ("p50", "p90", "p99")
    ),
)


def differences(runs: list[Run]) -> list[str]:
    """Return what the runs do not have in common, which a comparison should know."""
    first = runs[0]
    settings: tuple[tuple[str, Callable[[Run], object]], ...] = (
        ("traffic", lambda run: run.traffic),
        ("seed", lambda run: run.seed),
        ("model", lambda run: run.server.model),
        ("endpoint", lambda run: run.server.endpoint),
        ("forced lengths", lambda run: run.server.force_lengths),
    )
    return [title for title, get in settings if any(get(run) != get(first) for run in runs[1:])]


def relation(value: float | None, base: float | None) -> str:
    """Return the change in percent, or nothing where it has none."""
    if value is None or base is None or base in (0, value):
        return ""
    return f" ({100 * (value / base - 1):+.1f} %)"


def print_comparison(console: Console, runs: list[Run]) -> None:
    """Print a table per class; a class that only some runs have shows - elsewhere."""
    names = [name for name in TITLES if any(name in run.classes for run in runs)]
    for name in names:
        summaries = [run.classes.get(name) for run in runs]
        table = Table(title=TITLES[name], title_justify="left", title_style="bold cyan")
        table.add_column("")
        for run in runs:
            table.add_column(escape(run.label), justify="right")
        for title, get, digits in ROWS:
            values = [None if summary is None else get(summary) for summary in summaries]
            if all(value is None for value in values):
                continue
            base, *others = values
            table.add_row(
                title,
                number(base, digits),
                *(number(value, digits) + relation(value, base) for value in others),
            )
        console.print(table)
    if found := differences(runs):
        console.print(f"[bold yellow]note:[/] these runs differ in: {', '.join(found)}")
