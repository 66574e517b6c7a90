"""The command line of bench/load_test.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from . import result
from .command import SectionCommand, add_options, parse_nested
from .compare import print_comparison
from .declarations import ALL_OPTIONS, TRAFFIC_OPTIONS
from .errors import LoadTestError
from .options import BE, ServerOptions, Traffic
from .result import Run
from .session import Point, SessionOptions, run_to_end
from .tables import print_line, print_run, print_sweep
from .traffic import make_traffic

_WIDTH_WITHOUT_TERMINAL = 160

HELP = """Load an OpenAI-compatible server and report what its users would have seen.

\b
Examples
  load_test.py --rate 4 --num-requests 200 --targets ttft=400ms,mtpot=1s
  load_test.py --trace azure2023_conv --time-scale 0.1 --duration-s 60 --length-scale 0.25
  load_test.py --rates 1,2,4,8 --targets ttft=1s --plots plots --output sweep.json
  load_test.py --concurrency 16 --prompt-tokens lognormal:512,0.8 --output-tokens 64:256
  load_test.py --rate 4 --targets ttft=400ms --be "concurrency=32 output-tokens=32:128"
  load_test.py --documents 8 --questions 16 --document-tokens 2048 --rate 2
  load_test.py --compare before.json after.json --plots plots

Without --concurrency it is an open loop: arrivals are fixed beforehand and never wait for the
server, latencies count from the intended arrival, and every arrival (refused, failed, unfinished)
is in every denominator. bench/README.md has the definitions.

Exit codes: 0 when a request was completed in every run, 1 otherwise, 2 for wrong arguments.
"""


@click.command(cls=SectionCommand, help=HELP, context_settings={"max_content_width": 100})
@add_options(ALL_OPTIONS)
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
def main(files: tuple[Path, ...], **values: Any) -> None:
    """Run, compare or print the schema."""
    console = _console()
    try:
        if values["schema"]:
            click.echo(result.schema().decode())
        elif values["compare"]:
            _compare(console, files, values["plots"])
        elif files:
            raise click.UsageError("files are for --compare")
        else:
            sys.exit(_run(console, values))
    except LoadTestError as error:
        raise click.ClickException(str(error)) from error


def _console() -> Console:
    is_terminal = sys.stdout.isatty()
    return Console(width=None if is_terminal else _WIDTH_WITHOUT_TERMINAL)


def _compare(console: Console, files: Sequence[Path], plots: Path | None) -> None:
    if not files:
        raise click.UsageError("--compare needs result files")
    runs: list[Run] = []
    for path in files:
        loaded = result.load(path)
        runs.extend(
            msgspec.structs.replace(run, label=_file_label(path, run, len(files), len(loaded)))
            for run in loaded
        )
    if len(runs) < 2:
        raise click.UsageError("--compare needs at least two runs")
    print_comparison(console, runs)
    _plot(console, plots, runs)


def _file_label(path: Path, run: Run, num_files: int, num_runs: int) -> str:
    if num_files == 1:
        return run.label
    return path.stem if num_runs == 1 else f"{path.stem}: {run.label}"


def _plot(console: Console, directory: Path | None, runs: list[Run]) -> None:
    if directory is None:
        return
    from .plots import write_plots  # noqa: PLC0415 - matplotlib takes a second to import

    try:
        written = write_plots(directory, runs)
    except OSError as error:
        raise LoadTestError(f"cannot write plots: {error}") from error
    console.print(f"plots: {', '.join(str(path) for path in written)}", highlight=False)


def _run(console: Console, values: dict[str, Any]) -> int:
    options = _session_options(values)
    points = _points(values)

    print_one = print_line if values["quiet"] else print_run
    runs = run_to_end(options, points, lambda run: print_one(console, run))
    if len(points) > 1 and not values["quiet"]:
        print_sweep(console, runs)
    if values["output"] is not None:
        result.save(values["output"], runs)
        console.print(f"result: {values['output']}", highlight=False)
    _plot(console, values["plots"], runs)
    is_whole = len(runs) == len(points) and all(
        any(summary.num_completed for summary in run.classes.values()) for run in runs
    )
    return 0 if is_whole else 1


def _session_options(values: dict[str, Any]) -> SessionOptions:
    server = ServerOptions(
        url=values["url"].rstrip("/"),
        model=values["model"] or "",
        endpoint=values["endpoint"],
        body=_json_object(values["body"], "--body"),
        be_body=_json_object(values["be_body"], "--be-body"),
        force_lengths=values["force_lengths"],
        includes_usage=values["usage"],
        sends_targets=values["send_targets"],
        timeout_s=values["timeout_s"],
    )
    return SessionOptions(
        server=server,
        api_key=_api_key(values["api_key_env"], values["api_key_file"]),
        ca_file=values["ca_file"],
        seed=values["seed"],
        text_seed=values["text_seed"],
        num_warmup=values["warmup"],
        skip_first_s=values["skip_first_s"],
        skip_last_s=values["skip_last_s"],
        drain_s=values["drain_s"],
        saves_requests=values["save_requests"],
        shows_progress=not values["quiet"],
    )


def _api_key(variable: str, path: Path | None) -> str | None:
    if path is None:
        return os.environ.get(variable) or None
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--api-key-file: {error}") from error
    if not key or len(key.split()) != 1:
        raise click.UsageError(f"--api-key-file: {path} has to hold one key and nothing else")
    return key


def _json_object(text: str, flag: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise click.UsageError(f"{flag}: not a JSON object: {error}") from error


def _points(values: dict[str, Any]) -> list[Point]:
    """Return the runs to make: one, or one per rate or concurrency of a sweep."""
    label = values["label"]
    sweeps = [(name, values[name]) for name in ("rates", "concurrencies") if values[name]]
    if len(sweeps) > 1:
        raise click.UsageError("--rates and --concurrencies are two sweeps: give one")
    if not sweeps:
        return [Point(label or "run", _all_traffic(values))]
    ((sweep, loads),) = sweeps
    field = "rate" if sweep == "rates" else "concurrency"
    if values[field] is not None:
        raise click.UsageError(f"--{sweep} stands for --{field}: give one")
    prefix = f"{label} " if label else ""
    return [
        Point(f"{prefix}{field}={load:g}", _all_traffic(values | {field: load})) for load in loads
    ]


def _all_traffic(values: dict[str, Any]) -> tuple[Traffic, ...]:
    own = make_traffic(values)
    if values["be"] is None:
        return (own,)
    nested = parse_nested(values["be"], TRAFFIC_OPTIONS, param_hint="--be")
    nested |= {"be_targets": values["be_targets"], "request_class": BE}
    return own, make_traffic(nested)
