"""`lightserve plan`."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import click

from lightserve.cli.options import FiniteRange
from lightserve.errors import ConfigError

_TARGETS = ("ttft_slo_ms", "tpot_slo_ms", "mtpot_slo_ms")


@click.command("plan")
@click.option(
    "--trace",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Real-time requests: a CSV (t, prompt_tokens, output_tokens), Mooncake's JSON lines, or a"
    " decision log, which also says the step times of the hardware.",
)
@click.option(
    "--attainment",
    type=FiniteRange(0, 100, min_open=True),
    default=99.0,
    show_default=True,
    help="Percentage of real-time requests that have to meet all targets.",
)
@click.option(
    "--ttft-slo-ms", type=FiniteRange(0, min_open=True), help="Target: time to the first token."
)
@click.option(
    "--tpot-slo-ms", type=FiniteRange(0, min_open=True), help="Target: mean gap between tokens."
)
@click.option("--mtpot-slo-ms", type=FiniteRange(0, min_open=True), help="Target of largest gaps.")
@click.option(
    "--max-kv-tokens",
    type=click.IntRange(1),
    default=60_000,
    show_default=True,
    help="Largest KV pool that a replica can have.",
)
@click.option(
    "--max-replicas",
    type=click.IntRange(1, 1024),
    default=64,
    show_default=True,
    help="Most replicas to try.",
)
@click.option(
    "--window-s",
    type=FiniteRange(10, 3600),
    default=300.0,
    show_default=True,
    help="Length of the busiest part of the trace, which is simulated.",
)
@click.option("--policy", default="unified", show_default=True, help="See serve --help.")
@click.option(
    "--max-num-batched-tokens",
    type=click.IntRange(0, 1_048_576),
    default=0,
    show_default=True,
    help="Most new tokens in one step; 0 takes a server's default on that hardware.",
)
@click.option(
    "--be-lengths",
    default="uniform:512-1024,32-128",
    show_default=True,
    help="Lengths of best-effort requests, as in lightserve simulate.",
)
@click.option(
    "--hardware",
    help="Profile of a worker, as lightserve profile writes it, or MODEL@GPUxN: docs/simulate.md."
    "  [default: an A100 with Llama-2-7B]",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw all tries into this file (.png, .svg or .pdf).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(trace: Path, *, plot: Path | None, as_json: bool, **asked: Any) -> int:
    """Find the replicas and the KV pool that a trace needs, and the best-effort work that fits.

    The busiest minutes of the trace are simulated with more and more replicas until the targets
    are met, then with smaller and smaller pools.
    """
    # Imported late: `lightserve --help` needs none of it.
    from lightserve import sim  # noqa: PLC0415
    from lightserve.sim.capacity import PlanConfig, make_plan, read_rows  # noqa: PLC0415
    from lightserve.sim.pictures import check_picture, draw_plan  # noqa: PLC0415
    from lightserve.sim.virtual_gpus import A100_LLAMA2_7B  # noqa: PLC0415

    targets = [asked[name] for name in _TARGETS]
    if targets == [None, None, None]:
        raise ConfigError("--ttft-slo-ms, --tpot-slo-ms or --mtpot-slo-ms is needed")
    if plot is not None:
        check_picture(plot, "--plot")
    rows, hardware = read_rows(trace)
    if asked["hardware"] is not None:
        hardware = sim.read_hardware(asked["hardware"])
    config = PlanConfig(
        rows=rows,
        attainment=asked["attainment"] / 100,
        targets=sim.Targets(*(None if ms is None else ms / 1e3 for ms in targets)),
        max_kv_tokens=asked["max_kv_tokens"],
        max_replicas=asked["max_replicas"],
        window_s=asked["window_s"],
        policy=asked["policy"],
        max_num_batched_tokens=asked["max_num_batched_tokens"],
        be_lengths=asked["be_lengths"],
        hardware=A100_LLAMA2_7B if hardware is None else hardware,
    )
    plan = make_plan(config, progress=lambda text: print(text, file=sys.stderr, flush=True))
    if plot is not None:
        draw_plan(plan.trials, config.attainment, plot)
    if as_json:
        document = dataclasses.asdict(plan)
        document["trials"] = [trial._asdict() for trial in plan.trials]
        click.echo(json.dumps(document))
        return 0
    click.echo(
        f"busiest {config.window_s:g} s: from {plan.busiest_s:.0f} s, {plan.num_requests} requests"
    )
    click.echo(f"replicas: {plan.num_replicas}, with {plan.kv_tokens} tokens of KV each")
    click.echo(
        f"answered in time: {100 * plan.attainment:.1f} % (wanted {asked['attainment']:g} %)"
    )
    click.echo(f"best-effort output in a day: {plan.be_tokens_per_day / 1e6:.1f} million tokens")
    return 0
