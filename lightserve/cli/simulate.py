"""`lightserve simulate`: a queue of requests, or real-time and best-effort ones together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from lightserve.cli.simulate_hybrid import (
    HYBRID_DEFAULTS,
    hybrid_options,
    run_comparison,
    run_hybrid,
)
from lightserve.cli.simulate_queue import (
    QUEUE_DEFAULTS,
    QUEUE_OPTIONS,
    queue_options,
    run_queue,
)
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


def _default(name: str) -> str:
    """Return the defaults of both kinds of run, as help shows them."""
    return f"[default: {QUEUE_DEFAULTS[name]}; with --rt, --be {HYBRID_DEFAULTS[name]}]"


@click.command("simulate")
@queue_options
@hybrid_options
@click.option(
    "--capacity-tokens",
    type=click.IntRange(1),
    help=f"Size of the KV pool.  {_default('capacity_tokens')}",
)
@click.option(
    "--policy",
    metavar="POLICY",
    help=f"A policy of the server.  {_default('policy')}",
)
@click.option(
    "--admission",
    type=click.Choice(RULES),
    help=f"A rule of the server, or oracle, which knows every length.  {_default('admission')}",
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
    if chosen.get("plot") and not chosen.get("compare"):
        raise ConfigError("--plot needs --compare")
    _check_pictures(chosen)
    if chosen.get("compare"):
        return _compare(context, chosen)
    run = run_queue if "workload" in chosen else run_hybrid
    chosen, sections = run(chosen)
    document = {"config": _printable(chosen)} | sections
    if values["as_json"]:
        click.echo(json.dumps(document))
    else:
        _print_table({"": sections})
    return 0


def _check_pictures(values: dict[str, Any]) -> None:
    for name in ("timeline", "plot"):
        if values.get(name) is not None:
            from lightserve.sim.pictures import check_picture  # noqa: PLC0415 - an extra

            check_picture(values[name], f"--{name}")


def _compare(context: click.Context, values: dict[str, Any]) -> int:
    if context.get_parameter_source("policy") is not ParameterSource.DEFAULT:
        raise ConfigError("--compare cannot be combined with --policy")
    if values["decision_log"]:
        raise ConfigError("--compare cannot be combined with --decision-log: one core writes it")
    chosen, reports = run_comparison(values)
    if values["plot"] is not None:
        from lightserve.sim.pictures import draw_comparison  # noqa: PLC0415 - an extra

        draw_comparison(reports, values["plot"])
    if values["as_json"]:
        click.echo(json.dumps({"config": _printable(chosen), "policies": reports}))
    else:
        _print_table(
            {
                policy: {name: figures for name, figures in sections.items() if name != "router"}
                for policy, sections in reports.items()
            }
        )
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


def _print_table(columns: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Print sections of figures, a column per run; what says nothing of any of them is left out."""
    if len(columns) > 1:
        click.echo(" " * 28 + "".join(f"{title:>16}" for title in columns))
    num_left_out = 0
    for section in next(iter(columns.values())):
        click.echo(section)
        tables = [dict(_flat(sections[section])) for sections in columns.values()]
        if all(table.get("arrivals") == 0 for table in tables):
            click.echo("  no requests")
            continue
        for name in tables[0]:
            values = [table[name] for table in tables]
            # Of tables inside (reasons by class), most have nothing to count.
            if all(value is None or (value == 0 and " " in name) for value in values):
                num_left_out += 1
            else:
                click.echo(f"  {name:26}" + "".join(f"{_shown(value):>16}" for value in values))
    if num_left_out:
        click.echo(
            f"({num_left_out} reasons without a count or figures without a value are left out)"
        )


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
