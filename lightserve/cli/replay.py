"""`lightserve replay`."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import click

from lightserve.errors import ConfigError


@click.command("replay")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--request",
    metavar="ID",
    help="Print what became of one request instead: its answer's id (chatcmpl-...), its"
    " X-Request-Id, or FRONTEND/REQUEST.",
)
@click.option(
    "--all",
    "is_whole",
    is_flag=True,
    help="With --request: every stretch of steps, not only the longest of a long story.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(file: Path, request: str | None, is_whole: bool, as_json: bool) -> int:
    """Repeat every decision of a decision log, or tell the story of one request.

    FILE was written by lightserve serve --decision-log or lightserve simulate --decision-log. A
    router's core as that one gets the same inputs at the same times, and has to decide the same.

    Exit codes: 0 if it does, 1 with the first difference if it does not.
    """
    if request is not None:
        if as_json:
            raise ConfigError("--json does not go with --request")
        return _tell(file, request, is_whole=is_whole)
    if is_whole:
        raise ConfigError("--all goes with --request")
    # Imported late: `lightserve --help` needs none of it.
    from lightserve.decisions.replaying import DecisionLogReader, replay  # noqa: PLC0415

    reader = DecisionLogReader(file)
    result = replay(reader)
    if result.is_cut_off:
        print(f"lightserve: {file}: the last line is not whole and was left out", file=sys.stderr)
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
    from lightserve.decisions.replaying import (  # noqa: PLC0415
        MAX_LINES,
        DecisionLogReader,
        find_request,
        story_of,
    )

    reader = DecisionLogReader(file)
    found = find_request(reader, request)
    if len(found) > 1:
        names = ", ".join(f"{name.frontend_id}/{name.request_id}" for name in found[:20])
        rest = ", ..." if len(found) > 20 else ""
        print(f"lightserve: {len(found)} completions: {names}{rest}; the first:", file=sys.stderr)
    for line in story_of(reader, found[0], max_lines=None if is_whole else MAX_LINES):
        click.echo(line)
    return 0
