"""Results as tables for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .records import ERROR_KINDS
from .result import ClassSummary, Run, Spread

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


def number(value: float | None, digits: int = 1) -> str:
    """Format for a cell; - where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    """Format a share."""
    return "-" if share is None else f"{100 * share:.1f} %"


def print_run(console: Console, run: Run) -> None:
    """Print everything about one run."""
    console.print()
    console.rule(f"[bold]{escape(run.label)}[/bold]", align="left")
    console.print(
        f"{escape(run.server.model)} at {escape(run.server.url)} ({run.server.endpoint}), "
        f"{run.duration_s:.1f} s, counted from {run.window_s[0]:.1f} to {run.window_s[1]:.1f} s, "
        f"{run.offered_requests_per_s:.2f} arrivals/s, seed {run.seed}",
        highlight=False,
    )
    for name, summary in run.classes.items():
        console.print()
        console.print(_counts(name, summary), _latencies(summary), sep="\n")
        _print_errors(console, summary)
    _print_client(console, run)


def _counts(name: str, summary: ClassSummary) -> Table:
    table = Table(title=TITLES[name], title_justify="left", title_style="bold cyan")
    for column in ("", "arrived", "completed", "failed", "met targets", "attainment"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row(
        "requests",
        f"{summary.num_arrivals:,}",
        f"{summary.num_completed:,}",
        f"{summary.num_failed:,}",
        f"{summary.num_met:,}",
        percent(summary.attainment),
    )
    table.add_section()
    table.add_row("per second", "requests", "output tok", "prompt tok", "good requests", "good tok")
    table.add_row(
        "",
        number(summary.requests_per_s, 2),
        number(summary.output_tokens_per_s),
        number(summary.prompt_tokens_per_s),
        number(summary.goodput_requests_per_s, 2),
        number(summary.goodput_tokens_per_s),
    )
    return table


def _latencies(summary: ClassSummary) -> Table:
    limits = dict(summary.targets.items())
    table = Table()
    for column in ("latency", "unit", "mean", "p50", "p90", "p99", "max", "target", "attained"):
        table.add_column(column, justify="left" if column in ("latency", "unit") else "right")
    has_several = (summary.tokens_per_event or 1.0) > _SEVERAL_TOKENS
    for title, field, unit in LATENCIES:
        if field == "itl_per_token_ms" and not has_several:
            continue
        spread: Spread = getattr(summary, field)
        if field not in summary.attainment_by_target:
            target = attained = ""
        else:
            target = number(limits[field], 0) if field in limits else "by class"
            attained = percent(summary.attainment_by_target[field])
        values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
        table.add_row(title, unit, *(number(value) for value in values), target, attained)
    notes = []
    for title, lengths in (("prompt", summary.prompt_lengths), ("output", summary.output_lengths)):
        if lengths.mean is not None:
            notes.append(
                f"{title} {number(lengths.mean)} tokens on average (wanted "
                f"{number(lengths.mean_wanted)}; off by {number(lengths.error_p50_pct)} % in the "
                f"median)"
            )
    if summary.cached_tokens_share is not None:
        notes.append(f"{percent(summary.cached_tokens_share)} of prompt tokens cached")
    if has_several:
        notes.append(f"{number(summary.tokens_per_event, 2)} tokens per event; ITL is per event")
    notes.append(f"tokens counted by {summary.tokens_are_counted_by}")
    table.caption = "\n".join(notes)
    table.caption_justify = "left"
    return table


def _print_errors(console: Console, summary: ClassSummary) -> None:
    if not summary.errors:
        return
    table = Table(title="failures", title_justify="left", title_style="bold red")
    for column in ("kind", "count", "meaning", "first one"):
        table.add_column(column, justify="right" if column == "count" else "left")
    for kind, error in summary.errors.items():
        meaning = ERROR_KINDS.get(kind, ERROR_KINDS["http_<status>"])
        table.add_row(kind, f"{error.count:,}", meaning, escape(error.example[:120]))
    console.print(table)


def _print_client(console: Console, run: Run) -> None:
    client = run.client
    console.print(
        f"client: {percent(client.cpu_share)} of a core, {number(client.cpu_us_per_event)} us per "
        f"event; arrivals sent late by {number(client.lag_ms.p50)} ms (p50), "
        f"{number(client.lag_ms.p99)} ms (p99)",
        highlight=False,
    )
    warnings = []
    if (client.lag_ms.p99 or 0.0) > _MAX_LAG_MS or client.cpu_share > _MAX_CPU_SHARE:
        warnings.append("the client itself was short of CPU: latencies contain its own delay")
    if not client.is_calibrated:
        warnings.append("the server reports no usage: prompt lengths are a guess")
    if run.was_interrupted:
        warnings.append("interrupted: what was in flight counts as unfinished")
    for warning in warnings:
        console.print(f"[bold yellow]note:[/] {warning}", highlight=False)


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


def print_sweep(console: Console, runs: list[Run]) -> None:
    """Print a line per run and class."""
    table = Table(title="runs", title_justify="left", title_style="bold")
    for column in (
        "run",
        "class",
        "arrivals/s",
        "attainment",
        "good req/s",
        "good tok/s",
        "output tok/s",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "MTPOT p99",
        "failed",
    ):
        table.add_column(column, justify="left" if column in ("run", "class") else "right")
    for run in runs:
        num_arrivals = max(summary.num_arrivals for summary in run.classes.values())
        for name, summary in run.classes.items():
            share = summary.num_arrivals / max(1, num_arrivals)
            table.add_row(
                escape(run.label),
                name,
                number(run.offered_requests_per_s * share, 2),
                percent(summary.attainment),
                number(summary.goodput_requests_per_s, 2),
                number(summary.goodput_tokens_per_s),
                number(summary.output_tokens_per_s),
                number(summary.ttft_ms.p50),
                number(summary.ttft_ms.p99),
                number(summary.tpot_ms.p50),
                number(summary.mtpot_ms.p99),
                f"{summary.num_failed:,}",
            )
    console.print()
    console.print(table)
