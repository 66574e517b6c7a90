"""`lightserve simulate --workload`: a queue of requests of one class."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lightserve.cli.options import FunctionT
from lightserve.cli.simulate_rules import serve_fields
from lightserve.errors import ConfigError

if TYPE_CHECKING:
    from lightserve.sim import SimulationConfig

QUEUE_OPTIONS = frozenset(
    {
        "workload",
        "num_requests",
        "arrivals",
        "warm_up_requests",
        "best_effort",
        "paper_artifact",
        "timeline",
    }
)
_POLICIES = ("fcfs", "chunked")
"""Those whose decode steps may be advanced many at once."""
QUEUE_DEFAULTS = {"capacity_tokens": 120_000, "policy": "fcfs", "admission": "past-future"}
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


def queue_options(function: FunctionT) -> FunctionT:
    """Decorate a command with the options of this kind of run."""
    for option in (
        click.option(
            "--timeline",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Draw memory used and forecast, and evictions, into this file (.png, .svg, .pdf).",
        ),
        click.option(
            "--paper-artifact",
            is_flag=True,
            help="Timing and start of the Past-Future authors' own simulation.",
        ),
        click.option(
            "--best-effort", is_flag=True, help="Requests are best-effort: may be passed over."
        ),
        click.option(
            "--warm-up-requests",
            default=0,
            type=click.IntRange(0),
            show_default=True,
            help="Rows before those, of which only the lengths are learnt.",
        ),
        click.option(
            "--arrivals",
            default="queued",
            show_default=True,
            help="queued (all at the start), trace (the file's times), poisson:RATE (per second) or"
            " closed:CLIENTS.",
        ),
        click.option("--num-requests", default=3000, type=click.IntRange(1), show_default=True),
        click.option(
            "--workload",
            help="dist1, dist2, dist3, uniform:P1-P2:O1-O2 (prompt and output lengths), or a trace"
            " file, joined by + for a drift.",
        ),
    ):
        function = option(function)
    return function


def run_queue(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Run it; return all values, and the sections of the report.

    Raises:
        ConfigError: an option that cannot be.
    """
    # Imported late: `lightserve --help` needs none of it.
    from lightserve import sim  # noqa: PLC0415
    from lightserve.sim.pictures import draw_timeline  # noqa: PLC0415

    values = given | {name: given[name] or default for name, default in QUEUE_DEFAULTS.items()}
    if values["policy"] not in _POLICIES:
        raise ConfigError(
            f"--policy must be one of {', '.join(_POLICIES)} with --workload,"
            f" got {values['policy']!r}"
        )
    config = _config(values)
    with click.progressbar(range(config.num_requests), label="requests", file=sys.stderr) as bar:

        def advance(num_finished: int, num_requests: int) -> None:
            bar.length = num_requests
            bar.update(num_finished)

        report = sim.run(config, progress=advance)
    if values["timeline"] is not None:
        draw_timeline(report.timeline, config.capacity_tokens, values["timeline"])
    figures = dataclasses.asdict(dataclasses.replace(report, timeline=()))
    return values, {
        section: {name: figures[name] for name in names} for section, names in _SECTIONS.items()
    }


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
        admission_options=serve_fields(values),
        policy=values["policy"],
        request_class=RequestClass.BE if values["best_effort"] else RequestClass.RT,
        paper_artifact=values["paper_artifact"],
        keeps_timeline=values["timeline"] is not None,
        seed=values["seed"],
    )
