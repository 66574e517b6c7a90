"""`lightserve simulate`: a queue of requests, or real-time and best-effort ones together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from lightserve.cli.simulate_hybrid import hybrid_options, run_hybrid
from lightserve.cli.simulate_queue import QUEUE_OPTIONS, queue_options, run_queue
from lightserve.cli.simulate_rules import RULES, rule_options
from lightserve.config.fields import flag_name
from lightserve.errors import ConfigError

_SHARED = frozenset(
    {
        "capacity_tokens",
        "policy",
        "admission",
        "reserve",
        "samples",
        "watermark",
        "overcommit",
        "risk",
        "seed",
        "as_json",
    }
)
"""Options of both kinds of run."""


@click.command("simulate")
@queue_options
@hybrid_options
@click.option(
    "--capacity-tokens",
    type=click.IntRange(1),
    help="Size of the KV pool.  [default: 120000; with --rt, --be 60000]",
)
@click.option(
    "--policy",
    metavar="POLICY",
    help="A policy of the server.  [default: fcfs; with --rt, --be chunked]",
)
@click.option(
    "--admission",
    type=click.Choice(RULES),
    help="A rule of the server, or oracle, which knows every length.  [default: past-future; with"
    " --rt, --be risk]",
)
@rule_options
@click.option("--seed", default=0, type=click.IntRange(0), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def command(context: click.Context, /, **values: Any) -> int:
    """Run requests through the router core on virtual hardware.

    With --workload, a queue of requests of one class: decode steps, memory, evictions. With --rt
    and --be, real-time and best-effort requests as they come: attainment of targets, goodput,
    throughput. The same seed gives the same report, but for CPU times.
    """
    chosen = _of_this_run(context, values)
    run = run_queue if "workload" in chosen else run_hybrid
    chosen, sections = run(chosen)
    document = {"config": _printable(chosen)} | sections
    if values["as_json"]:
        click.echo(json.dumps(document))
    else:
        _print_table(sections)
    return 0


def _of_this_run(context: click.Context, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that the chosen kind of run has. Raises ConfigError for another's."""
    is_queue, is_hybrid = values["workload"] is not None, bool(values["rt"] or values["be"])
    if is_queue == is_hybrid:
        raise ConfigError(
            "either --workload (a queue of requests) or --rt and --be (two classes as they come)"
            f" is needed, got {'both' if is_queue else 'neither'}"
        )
    for name in values:
        is_given = context.get_parameter_source(name) is not ParameterSource.DEFAULT
        if is_given and name not in _SHARED and (name in QUEUE_OPTIONS) != is_queue:
            owner = "--rt and --be, not to --workload" if is_queue else "--workload, not to --rt"
            raise ConfigError(f"{flag_name(name)} belongs to {owner}")
    return {
        name: value
        for name, value in values.items()
        if name in _SHARED or (name in QUEUE_OPTIONS) == is_queue
    }


def _printable(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in values.items()
        if name != "as_json"
    }


def _print_table(sections: dict[str, dict[str, Any]]) -> None:
    for section, figures in sections.items():
        click.echo(section)
        for name, value in _flat(figures):
            click.echo(f"  {name:22} {_shown(value):>16}")


def _flat(figures: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and values, those of tables inside one with all their names."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from ((f"{name} {inner}", figure) for inner, figure in _flat(value))
        else:
            yield name, value


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
