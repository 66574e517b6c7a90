"""`lightserve simulate`."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lightserve.config import ADMISSION_OF_OPTION
from lightserve.config_fields import flag_name
from lightserve.errors import ConfigError

if TYPE_CHECKING:
    from lightserve.sim import Report, SimulationConfig

RULES = ("past-future", "aggressive", "conservative", "ema", "risk", "oracle")
_RULE_OPTIONS = ("reserve", "samples", "watermark", "overcommit")
_SECTIONS = {
    "kv": (
        "decode_steps",
        "consumed_pct",
        "future_pct",
        "evicted_pct",
        "recomputed_tokens",
        "total_work_s",
    ),
    "requests": ("finished", "max_overtaken", "duration_s", "ttft_s_p50", "ttft_s_p99"),
    "router": ("cpu_ms_p50", "cpu_ms_p99"),
}
"""Fields of the report by section of what is printed; scripts read them."""


@click.command("simulate")
@click.option(
    "--workload",
    required=True,
    help="dist1, dist2, dist3, uniform:P1-P2:O1-O2 (prompt and output lengths), or a trace file,"
    " joined by + for a drift.",
)
@click.option("--num-requests", default=3000, type=click.IntRange(1), show_default=True)
@click.option(
    "--arrivals",
    default="queued",
    show_default=True,
    help="queued (all at the start), trace (the file's times), poisson:RATE (per second) or"
    " closed:CLIENTS.",
)
@click.option(
    "--warm-up-requests",
    default=0,
    type=click.IntRange(0),
    show_default=True,
    help="Rows before those, of which only the lengths are learnt.",
)
@click.option(
    "--capacity-tokens",
    default=120_000,
    type=click.IntRange(1),
    show_default=True,
    help="Size of the KV pool.",
)
@click.option("--policy", default="fcfs", type=click.Choice(["fcfs", "chunked"]), show_default=True)
@click.option("--admission", default="past-future", type=click.Choice(RULES), show_default=True)
@click.option("--reserve", type=float, help="past-future: share of the pool kept free.")
@click.option("--samples", type=int, help="past-future: most futures drawn.")
@click.option("--watermark", type=float, help="aggressive: share of the pool to fill.")
@click.option("--overcommit", type=float, help="conservative: times the pool is promised.")
@click.option("--risk", type=float, help="risk: accepted chance of running out.")
@click.option("--best-effort", is_flag=True, help="Requests are best-effort: may be passed over.")
@click.option(
    "--paper-artifact",
    is_flag=True,
    help="Timing and start of the Past-Future authors' own simulation.",
)
@click.option("--seed", default=0, type=int, show_default=True)
@click.option(
    "--timeline",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw memory used and forecast, and evictions, into this file (.png, .svg, .pdf).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(**values: Any) -> int:
    """Run requests through the router core on virtual hardware.

    The report counts decode steps, memory and evictions. The same seed gives the same report.
    """
    # Imported late: `lightserve --help` needs none of it.
    from lightserve import sim  # noqa: PLC0415
    from lightserve.sim.timeline import draw_timeline  # noqa: PLC0415

    config = _config(values)
    with click.progressbar(range(config.num_requests), label="requests", file=sys.stderr) as bar:

        def advance(num_finished: int, num_requests: int) -> None:
            bar.length = num_requests
            bar.update(num_finished)

        report = sim.run(config, progress=advance)
    if values["timeline"] is not None:
        draw_timeline(report.timeline, config.capacity_tokens, values["timeline"])
    _print(values, report, as_json=values["as_json"])
    return 0


def _config(values: dict[str, Any]) -> SimulationConfig:
    from lightserve.sim import SimulationConfig  # noqa: PLC0415
    from lightserve.types import RequestClass  # noqa: PLC0415

    return SimulationConfig(
        workload=values["workload"],
        num_requests=values["num_requests"],
        arrivals=values["arrivals"],
        num_warm_up=values["warm_up_requests"],
        capacity_tokens=values["capacity_tokens"],
        admission=values["admission"],
        admission_options=_rule_options(values),
        policy=values["policy"],
        request_class=RequestClass.BE if values["best_effort"] else RequestClass.RT,
        paper_artifact=values["paper_artifact"],
        keeps_timeline=values["timeline"] is not None,
        seed=values["seed"],
    )


def _rule_options(values: dict[str, Any]) -> dict[str, float]:
    """Return the rule's own options as fields of ServeConfig; those of other rules are refused."""
    given = {name: values[name] for name in _RULE_OPTIONS if values[name] is not None}
    if values["risk"] is not None:
        given |= {"rt_memory_risk": values["risk"], "be_memory_risk": values["risk"]}
    for name in given:
        if ADMISSION_OF_OPTION[name] != values["admission"]:
            flag = "--risk" if name.endswith("_risk") else flag_name(name)
            raise ConfigError(
                f"{flag} needs --admission {ADMISSION_OF_OPTION[name]}, got {values['admission']!r}"
            )
    return given


def _print(values: dict[str, Any], report: Report, *, as_json: bool) -> None:
    figures = dataclasses.asdict(dataclasses.replace(report, timeline=()))
    document: dict[str, dict[str, Any]] = {
        "config": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in values.items()
            if name != "as_json"
        }
    }
    for section, names in _SECTIONS.items():
        document[section] = {name: figures[name] for name in names}
    if as_json:
        click.echo(json.dumps(document))
        return
    for section in _SECTIONS:
        for name, value in document[section].items():
            shown = f"{value:>14,.2f}" if isinstance(value, float) else f"{value:>14,}"
            click.echo(f"{name:20} {shown}")
