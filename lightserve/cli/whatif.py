"""`lightserve whatif`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lightserve.errors import ConfigError

if TYPE_CHECKING:
    from lightserve.sim.whatif import Outcome

_ROWS = (
    ("requests", "arrivals", "{:.0f}"),
    ("answered in time, %", "attainment_pct", "{:.1f}"),
    ("in time, per second", "goodput_rps", "{:.2f}"),
    ("tokens per second", "throughput_tps", "{:.0f}"),
    ("first token p50, ms", "ttft_ms_p50", "{:.0f}"),
    ("first token p99, ms", "ttft_ms_p99", "{:.0f}"),
    ("largest gap p99, ms", "mtpot_ms_p99", "{:.0f}"),
)


@click.command("whatif")
@click.argument("log", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--policy", help="Another policy (see serve --help).")
@click.option("--admission", help="Another admission rule.")
@click.option(
    "--max-kv-tokens",
    type=click.IntRange(min=1),
    help="Another KV pool, in tokens: a log does not know their bytes.",
)
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True, max=1000),
    default=1.0,
    show_default=True,
    help="Times as fast do requests come.",
)
@click.option(
    "--speed",
    type=click.FloatRange(min=0, min_open=True, max=1000),
    default=1.0,
    show_default=True,
    help="Times as fast are the machine's steps.",
)
@click.option(
    "--hardware",
    help="Another machine: a profile, or virtual GPUs, as simulate's --hardware.",
)
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="NAME=VALUE",
    help="Another option of scheduling or memory, such as max-num-seqs=64; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(log: Path, *, as_json: bool, **asked: Any) -> int:
    """Run the traffic of a decision log again, with other settings.

    LOG was written by lightserve serve --decision-log. What clients saw stands beside what the
    same settings give on simulated workers, fitted to the log's steps, and beside what is asked.
    """
    # Imported late: `lightserve --help` needs none of it.
    from lightserve.decisions.replaying import DecisionLogReader  # noqa: PLC0415
    from lightserve.sim.virtual_gpus import read_hardware  # noqa: PLC0415
    from lightserve.sim.whatif import (  # noqa: PLC0415
        Settings,
        parse_options,
        read_recording,
    )

    options = parse_options(asked["sets"])
    for name in ("policy", "admission"):
        if asked[name] is not None:
            if name in options:
                raise ConfigError(f"--set {name} does not go with --{name}")
            options[name] = asked[name]
    if asked["hardware"] is not None and asked["speed"] != 1.0:
        raise ConfigError("--speed is of the log's machine, and does not go with --hardware")
    hardware = None if asked["hardware"] is None else read_hardware(asked["hardware"])
    settings = Settings(options, asked["max_kv_tokens"], asked["rate"], asked["speed"], hardware)
    recording = read_recording(DecisionLogReader(log))
    columns = {"recorded": _figures(recording.report())}
    columns["same settings"] = _figures(recording.run(Settings()))
    if settings != Settings():
        columns["as asked"] = _figures(recording.run(settings))
    if as_json:
        document = {"num_steps": len(recording.steps), **columns}
        click.echo(json.dumps(document))
        return 0
    click.echo(
        f"{len(recording.requests)} requests in {recording.end_s - recording.start_s:.1f} s,"
        f" {len(recording.steps)} steps"
    )
    for line in _table(columns):
        click.echo(line)
    return 0


def _figures(outcome: Outcome) -> dict[str, dict[str, Any]]:
    return {
        request_class.value: {
            **dataclasses.asdict(report),
            "attainment_pct": outcome.attainment_pct(request_class),
        }
        for request_class, report in outcome.classes.items()
    }


def _table(columns: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    lines = [" " * 26 + "".join(f"{name:>16}" for name in columns)]
    for label in ("rt", "be"):
        if not any(figures[label]["arrivals"] for figures in columns.values()):
            continue
        for title, name, form in _ROWS:
            values = [figures[label][name] for figures in columns.values()]
            cells = ["-" if value is None else form.format(value) for value in values]
            lines.append(f"{label} {title:<23}" + "".join(f"{cell:>16}" for cell in cells))
    return lines
