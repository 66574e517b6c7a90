"""`lightserve why`."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec


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
def command(request_id: str, path: Path, as_json: bool) -> int:
    """Say why a request was late: which constraint held it up, and what was served instead.

    REQUEST_ID is the id of its answer (chatcmpl-...), its X-Request-Id, or FRONTEND/REQUEST. The
    log is replayed for that; lightserve replay --request tells the whole story.
    """
    # Imported late: `lightserve --help` needs none of it.
    from lightserve.decisions.replaying import DecisionLogReader, find_request  # noqa: PLC0415
    from lightserve.decisions.why import explain  # noqa: PLC0415

    reader = DecisionLogReader(path)
    found = find_request(reader, request_id)
    if len(found) > 1:
        print(f"lightserve: {len(found)} completions; the first:", file=sys.stderr)
    why = explain(reader, found[0])
    if as_json:
        click.echo(msgspec.json.encode(why).decode())
    else:
        for line in why.text():
            click.echo(line)
    return 0
