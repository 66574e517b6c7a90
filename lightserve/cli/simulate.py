"""`lightserve simulate`."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import click

from lightserve.config import ADMISSION_OF_OPTION, flag_name
from lightserve.errors import ConfigError

RULES = ("past-future", "aggressive", "conservative", "ema", "risk", "oracle")
_RULE_OPTIONS = ("reserve", "samples", "watermark", "overcommit")


@click.command("simulate")
@click.option("--workload", required=True, help="dist1, dist2, dist3, a trace file, joined by +.")
@click.option("--num-requests", default=3000, type=click.IntRange(1), show_default=True)
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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(**values: Any) -> int:
    """Run a queue of requests through the router core on virtual hardware.

    All requests wait at the start; the report counts decode steps, memory and evictions. The
    same seed gives the same report.
    """
    # Imported late: `lightserve --help` needs none of it.
    import numpy as np  # noqa: PLC0415

    from lightserve.sim.offline import OfflineConfig, run_offline  # noqa: PLC0415
    from lightserve.sim.workload import load_workload  # noqa: PLC0415
    from lightserve.types import RequestClass  # noqa: PLC0415

    num_rows = values["num_requests"] + values["warm_up_requests"]
    workload = load_workload(
        values["workload"],
        num_requests=num_rows,
        rng=np.random.default_rng(values["seed"]),
        cut_outputs=not values["paper_artifact"],
    )
    if len(workload) <= values["warm_up_requests"]:
        raise ConfigError(
            f"--warm-up-requests must be below the {len(workload)} rows of --workload,"
            f" got {values['warm_up_requests']}"
        )
    config = OfflineConfig(
        capacity_tokens=values["capacity_tokens"],
        admission=values["admission"],
        admission_options=_rule_options(values),
        policy=values["policy"],
        request_class=RequestClass.BE if values["best_effort"] else RequestClass.RT,
        num_warm_up=values["warm_up_requests"],
        paper_artifact=values["paper_artifact"],
        seed=values["seed"],
    )
    total = len(workload) - values["warm_up_requests"]
    with click.progressbar(length=total, label="requests", file=sys.stderr) as bar:
        report = run_offline(workload, config, progress=bar.update)
    _print(values, dataclasses.asdict(report), as_json=values["as_json"])
    return 0


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


def _print(values: dict[str, Any], report: dict[str, Any], *, as_json: bool) -> None:
    router = {name: report.pop(name) for name in ("cpu_ms_p50", "cpu_ms_p99")}
    requests = {name: report.pop(name) for name in ("finished", "max_overtaken")}
    config = {name: value for name, value in values.items() if name != "as_json"}
    document = {"config": config, "kv": report, "requests": requests, "router": router}
    if as_json:
        click.echo(json.dumps(document))
        return
    for section in ("kv", "requests", "router"):
        for name, value in document[section].items():
            click.echo(
                f"{name:20} {value:>14,.2f}"
                if isinstance(value, float)
                else f"{name:20} {value:>14,}"
            )
