"""Results as one table for a terminal: of a run by class, of a sweep or comparison by run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightserve.loadtest.result import ERROR_KINDS, ClassSummary, Run, Spread
from lightserve.types import MTPOT_FACTOR, largest_gap

TITLES = {"rt": "real time", "be": "best effort", "all": "together"}
LATENCIES = (
    ("TTFT", "ttft_ms", "ms"),
    ("TPOT", "tpot_ms", "ms"),
    ("ITL", "itl_ms", "ms"),
    ("ITL per token", "itl_per_token_ms", "ms"),
    ("MTPOT", "mtpot_ms", "ms"),
    ("E2EL", "e2el_ms", "ms"),
    ("normalized", "normalized_ms", "ms/token"),
)
_MAX_LAG_MS = 10.0
_MAX_CPU_SHARE = 0.8
_SEVERAL_TOKENS = 1.02

Value = Callable[[ClassSummary], float | None]


def number(value: float | None, digits: int = 1) -> str:
    """Format for a cell; - where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    """Format a share."""
    return "-" if share is None else f"{100 * share:.1f} %"


def _attribute(name: str, scale: float = 1.0) -> Value:
    def get(summary: ClassSummary) -> float | None:
        value: float | None = getattr(summary, name)
        return None if value is None else value * scale

    return get


def _of_spread(field: str, point: str) -> Value:
    def get(summary: ClassSummary) -> float | None:
        value: float | None = getattr(getattr(summary, field), point)
        return value

    return get


COUNTS: tuple[tuple[str, Value, int], ...] = (
    ("arrived", _attribute("num_arrivals"), 0),
    ("completed", _attribute("num_completed"), 0),
    ("failed", _attribute("num_failed"), 0),
    ("images", _attribute("num_images"), 0),
    ("attainment, %", _attribute("attainment", 100.0), 1),
    ("goodput, requests/s", _attribute("goodput_requests_per_s"), 2),
    ("goodput, tokens/s", _attribute("goodput_tokens_per_s"), 1),
    ("throughput, requests/s", _attribute("requests_per_s"), 2),
    ("throughput, output tokens/s", _attribute("output_tokens_per_s"), 1),
    ("throughput, prompt tokens/s", _attribute("prompt_tokens_per_s"), 1),
)
"""Title, value, digits."""
QUANTILES: tuple[tuple[str, Value, int], ...] = tuple(
    (f"{title} {point}, {unit}", _of_spread(field, point), 1)
    for title, field, unit in LATENCIES
    for point in ("p50", "p90", "p99")
)


def print_run(console: Console, run: Run) -> None:
    """Print one table: a column per class; below it what failed and whether to believe it."""
    table = Table(title=escape(run.label), title_justify="left", title_style="bold")
    table.add_column("")
    for name in run.classes:
        table.add_column(TITLES[name], justify="right", style="cyan" if name == "rt" else "")
    summaries = list(run.classes.values())
    for title, get, digits in COUNTS:
        if title == "images" and not any(map(get, summaries)):
            continue
        table.add_row(title, *(number(get(summary), digits) for summary in summaries))
    table.add_section()
    has_several = any((each.tokens_per_event or 1.0) > _SEVERAL_TOKENS for each in summaries)
    table.add_row("p50 / p90 / p99, and the target", style="dim")
    for title, field, unit in LATENCIES:
        if field != "itl_per_token_ms" or has_several:
            table.add_row(f"{title}, {unit}", *(_latency(each, field) for each in summaries))
    table.caption = "\n".join(_notes(run, has_several=has_several))
    table.caption_justify = "left"
    console.print()
    console.print(table)
    for name, summary in run.classes.items():
        if name != "all":
            _print_errors(console, name, summary)
    for warning in _warnings(run):
        console.print(f"[bold yellow]note:[/] {warning}", highlight=False)


def _latency(summary: ClassSummary, field: str) -> str:
    spread: Spread = getattr(summary, field)
    points = " / ".join(number(value) for value in (spread.p50, spread.p90, spread.p99))
    if field not in summary.attainment_by_target:
        return points
    limits = dict(summary.targets.items())
    target = f"≤ {number(limits[field], 0)}" if field in limits else "by class"
    return f"{points} ({target}: {percent(summary.attainment_by_target[field])})"


def _notes(run: Run, *, has_several: bool) -> list[str]:
    """Return what was run, and how exactly it is known."""
    notes = [
        f"{escape(run.server.model)} at {escape(run.server.url)} ({run.server.endpoint}), "
        f"{run.duration_s:.1f} s, counted from {run.window_s[0]:.1f} to {run.window_s[1]:.1f} s, "
        f"{run.offered_requests_per_s:.2f} arrivals/s, seed {run.seed}"
    ]
    for name, summary in run.classes.items():
        if name == "all":
            continue
        parts = []
        for title, lengths in (
            ("prompts", summary.prompt_lengths),
            ("outputs", summary.output_lengths),
        ):
            if lengths.mean is not None:
                parts.append(
                    f"{title} of {number(lengths.mean)} tokens (wanted "
                    f"{number(lengths.mean_wanted)}; off by {number(lengths.error_p50_pct)} % in "
                    "the median)"
                )
        if summary.cached_tokens_share is not None:
            parts.append(f"{percent(summary.cached_tokens_share)} of prompt tokens cached")
        parts.append(f"tokens counted by {summary.tokens_are_counted_by}")
        targets = summary.targets
        if targets.tpot_ms and targets.mtpot_ms == largest_gap(targets.tpot_ms, None):
            parts.append(f"largest gap due in {MTPOT_FACTOR:g} x tpot, as lightserve counts it")
        notes.append(f"{TITLES[name]}: " + ", ".join(parts))
    if has_several:
        per_event = max(summary.tokens_per_event or 1.0 for summary in run.classes.values())
        notes.append(f"{number(per_event, 2)} tokens per event; ITL is per event")
    client = run.client
    notes.append(
        f"client: {percent(client.cpu_share)} of a core, {number(client.cpu_us_per_event)} us per "
        f"event; arrivals sent late by {number(client.lag_ms.p50)} ms (p50), "
        f"{number(client.lag_ms.p99)} ms (p99)"
    )
    return notes


def _warnings(run: Run) -> list[str]:
    client, warnings = run.client, []
    if (client.lag_ms.p99 or 0.0) > _MAX_LAG_MS or client.cpu_share > _MAX_CPU_SHARE:
        warnings.append("the client itself was short of CPU: latencies contain its own delay")
    if not client.is_calibrated:
        warnings.append("the server reports no usage: prompt lengths are a guess")
    if run.was_interrupted:
        warnings.append("interrupted: requests in flight count as unfinished")
    return warnings


def _print_errors(console: Console, name: str, summary: ClassSummary) -> None:
    for kind, error in summary.errors.items():
        meaning = ERROR_KINDS.get(kind, ERROR_KINDS["http_<status>"])
        console.print(
            f"[bold red]{error.count:,} {TITLES[name]} {kind}[/]: {meaning}; the first one: "
            f"{escape(error.example[:120])}",
            highlight=False,
        )


def print_line(console: Console, run: Run) -> None:
    """Print a run as one line, whatever the terminal's width."""
    parts = []
    for name, summary in run.classes.items():
        if name == "all":
            continue
        met = "" if summary.attainment is None else f", {percent(summary.attainment)} in time"
        failed = f", {summary.num_failed:,} FAILED" if summary.num_failed else ""
        parts.append(
            f"{name} {summary.num_completed:,} of {summary.num_arrivals:,}{met}{failed},"
            f" {number(summary.output_tokens_per_s)} tok/s,"
            f" TTFT {number(summary.ttft_ms.p50)}/{number(summary.ttft_ms.p99)},"
            f" TPOT {number(summary.tpot_ms.p50)}/{number(summary.tpot_ms.p99)} ms"
        )
    line = f"{run.label}: {run.offered_requests_per_s:.2f} arrivals/s; {'; '.join(parts)}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)


_SWEEP = (
    ("attainment, %", _attribute("attainment", 100.0), 1),
    ("good req/s", _attribute("goodput_requests_per_s"), 2),
    ("good tok/s", _attribute("goodput_tokens_per_s"), 1),
    ("output tok/s", _attribute("output_tokens_per_s"), 1),
    ("TTFT p50", _of_spread("ttft_ms", "p50"), 1),
    ("TTFT p99", _of_spread("ttft_ms", "p99"), 1),
    ("TPOT p50", _of_spread("tpot_ms", "p50"), 1),
    ("MTPOT p99", _of_spread("mtpot_ms", "p99"), 1),
    ("failed", _attribute("num_failed"), 0),
)


def print_sweep(console: Console, runs: Sequence[Run]) -> None:
    """Print one table with a line per run and class."""
    table = Table(title="runs", title_justify="left", title_style="bold")
    for column in ("run", "class"):
        table.add_column(column)
    for column in ("arrivals/s", *(title for title, _, _ in _SWEEP)):
        table.add_column(column, justify="right")
    for run in runs:
        num_arrivals = max(summary.num_arrivals for summary in run.classes.values())
        for name, summary in run.classes.items():
            share = summary.num_arrivals / max(1, num_arrivals)
            table.add_row(
                escape(run.label),
                TITLES[name],
                number(run.offered_requests_per_s * share, 2),
                *(number(get(summary), digits) for _, get, digits in _SWEEP),
            )
    console.print()
    console.print(table)


def differences(runs: Sequence[Run]) -> list[str]:
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


def print_comparison(console: Console, runs: Sequence[Run]) -> None:
    """Print one table: a column per run, the others in relation to the first; - where no class."""
    table = Table(title="comparison", title_justify="left", title_style="bold")
    table.add_column("")
    for run in runs:
        table.add_column(escape(run.label), justify="right")
    for name in (name for name in TITLES if any(name in run.classes for run in runs)):
        summaries = [run.classes.get(name) for run in runs]
        table.add_section()
        table.add_row(TITLES[name], style="bold cyan")
        for title, get, digits in (*COUNTS, *QUANTILES):
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
