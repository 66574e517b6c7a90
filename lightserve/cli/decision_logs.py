"""`lightserve replay`, `why` and `whatif`: commands that read a decision log."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from lightserve.errors import ConfigError

if TYPE_CHECKING:
    from lightserve.sim.whatif import Outcome


@click.command("replay")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--request",
    metavar="ID",
    help="Print the story of one request instead: its answer's id (chatcmpl-...), its"
    " X-Request-Id, or FRONTEND/REQUEST.",
)
@click.option(
    "--all",
    "is_whole",
    is_flag=True,
    help="With --request: print all of a long story, not only its longest parts.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def replay(file: Path, request: str | None, is_whole: bool, as_json: bool) -> int:
    """Repeat every decision of a decision log, or tell the story of one request.

    FILE comes from --decision-log of lightserve serve or lightserve simulate. A router's core gets
    the inputs of the log at the same times, and has to make the same decisions.

    Exit codes: 0 if all decisions are the same, 1 otherwise (the first difference is printed).
    """
    if request is not None:
        if as_json:
            raise ConfigError("--json cannot be combined with --request")
        return _tell(file, request, is_whole=is_whole)
    if is_whole:
        raise ConfigError("--all needs --request")
    # Imported late: `lightserve --help` needs none of it.
    from lightserve.decisions import replaying  # noqa: PLC0415

    reader = replaying.DecisionLogReader(file)
    result = replaying.replay(reader)
    if result.is_cut_off:
        print(f"lightserve: {file}: the last line is incomplete and is left out", file=sys.stderr)
    if as_json:
        document = dataclasses.asdict(result) | {"is_equal": result.difference is None}
        click.echo(json.dumps(document))
    else:
        click.echo(f"decisions {result.num_decisions}, inputs {result.num_inputs}")
        click.echo(f"decision hash {result.decision_hash}")
        if (found := result.difference) is not None:
            click.echo(f"line {found.line}, step {found.step_id} differs:")
            click.echo(f"  recorded {json.dumps(found.recorded)}")
            replayed = "no step now" if found.replayed is None else json.dumps(found.replayed)
            click.echo(f"  replayed {replayed}")
    return 0 if result.difference is None else 1


def _tell(file: Path, request: str, *, is_whole: bool) -> int:
    from lightserve.decisions.replaying import MAX_LINES, DecisionLogReader, find_request, story_of  # noqa: PLC0415

    reader = DecisionLogReader(file)
    found = find_request(reader, request)
    if len(found) > 1:
        names = ", ".join(f"{name.frontend_id}/{name.request_id}" for name in found[:20])
        rest = ", ..." if len(found) > 20 else ""
        print(f"lightserve: {len(found)} completions: {names}{rest}; the first:", file=sys.stderr)
    for line in story_of(reader, found[0], max_lines=None if is_whole else MAX_LINES):
        click.echo(line)
    return 0


@click.command("why")
@click.argument("request_id")
@click.option(
    "--log",
    "path",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Decision log of the server (serve --decision-log) or of a simulation.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def why(request_id: str, path: Path, as_json: bool) -> int:
    """Explain why a request was late: which constraint held it up, and which work ran instead.

    REQUEST_ID is the id of the answer (chatcmpl-...), the X-Request-Id, or FRONTEND/REQUEST. The
    log is replayed to find out; lightserve replay --request tells the whole story.
    """
    # Imported late: `lightserve --help` needs none of it.
    from lightserve.decisions.replaying import DecisionLogReader, find_request  # noqa: PLC0415
    from lightserve.decisions.why import explain  # noqa: PLC0415

    reader = DecisionLogReader(path)
    found = find_request(reader, request_id)
    if len(found) > 1:
        print(f"lightserve: {len(found)} completions; the first:", file=sys.stderr)
    answer = explain(reader, found[0])
    if as_json:
        click.echo(msgspec.json.encode(answer).decode())
    else:
        for line in answer.text():
            click.echo(line)
    return 0


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
    help="Another size of the KV pool, in tokens (a log does not know bytes).",
)
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True, max=1000),
    default=1.0,
    show_default=True,
    help="Factor for the rate of requests.",
)
@click.option(
    "--speed",
    type=click.FloatRange(min=0, min_open=True, max=1000),
    default=1.0,
    show_default=True,
    help="Factor for the speed of the machine's steps.",
)
@click.option(
    "--hardware", help="Another machine: a profile or virtual GPUs, as in simulate --hardware."
)
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="NAME=VALUE",
    help="Another option of scheduling or memory, such as max-num-seqs=64; can be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def whatif(log: Path, *, as_json: bool, **asked: Any) -> int:
    """Run the traffic of a decision log again, with other settings.

    LOG comes from lightserve serve --decision-log. The table has three columns: the recorded run,
    a simulation with the same settings (step times fitted to the log), and one with yours.
    """
    # Imported late: `lightserve --help` needs none of it.
    from lightserve.decisions.replaying import DecisionLogReader  # noqa: PLC0415
    from lightserve.sim.virtual_gpus import read_hardware  # noqa: PLC0415
    from lightserve.sim.whatif import Settings, parse_options, read_recording  # noqa: PLC0415

    options = parse_options(asked["sets"])
    for name in ("policy", "admission"):
        if asked[name] is not None:
            if name in options:
                raise ConfigError(f"--set {name} cannot be combined with --{name}")
            options[name] = asked[name]
    if asked["hardware"] is not None and asked["speed"] != 1.0:
        raise ConfigError("--speed cannot be combined with --hardware")
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
