"""`lightserve bench`: load any OpenAI-compatible server and report what its users see."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from lightserve.cli.bench_options import (
    ALL_OPTIONS,
    MIXED_OPTIONS,
    MIXED_SECTIONS,
    SECTIONS,
    TRAFFIC_OPTIONS,
    bench_options,
    parse_nested,
)
from lightserve.cli.options import SectionCommand, read_api_key
from lightserve.errors import LoadTestError
from lightserve.extras import packages_of
from lightserve.loadtest import result
from lightserve.loadtest.options import BE, RT, ArrivalKind, ServerOptions, Targets, Traffic
from lightserve.loadtest.result import Run
from lightserve.loadtest.workload import LengthDistribution, load_trace, parse_images

if TYPE_CHECKING:
    from rich.console import Console

    from lightserve.loadtest.session import Point, SessionOptions

_WIDTH_WITHOUT_TERMINAL = 160
_DEFAULT_NUM_REQUESTS = 100
_OPEN_LOOPS = (ArrivalKind.POISSON, ArrivalKind.GAMMA, ArrivalKind.CONSTANT)

HELP = """Load an OpenAI-compatible server and report what its users would have seen.

\b
Examples
  lightserve bench --rate 4 --num-requests 200 --targets ttft=400ms,mtpot=1s
  lightserve bench --rate 4 --duration-s 60 --plot over_time.png --json > run.json
  lightserve bench --trace azure2023_conv --time-scale 0.1 --duration-s 60 --length-scale 0.25
  lightserve bench --rates 1,2,4,8 --targets ttft=1s --plots plots --output sweep.json
  lightserve bench --concurrency 16 --prompt-tokens lognormal:512,0.8 --output-tokens 64:256
  lightserve bench --rate 4 --targets ttft=400ms --be "concurrency=32 output-tokens=32:128"
  lightserve bench --documents 8 --questions 16 --document-tokens 2048 --rate 2
  lightserve bench --compare before.json after.json --plots plots
  lightserve bench mixed --rate 2 --batch 64 --caps 2,8 --plot mixed.svg

`lightserve bench mixed` measures chats beside a batch; see its own --help.

Without --concurrency arrivals form an open loop: their times are fixed and never wait for the
server. Latencies count from the intended arrival, and refused, failed and unfinished requests count
in every share. docs/bench.md has the definitions.

Exit codes: 0 when a request was completed in every run, 1 otherwise, 2 for wrong arguments.
"""


class _BenchCommand(SectionCommand):
    """The command, and `mixed`, which stands in place of options."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Return the context of the command that the first argument asks for."""
        if args[:1] == ["mixed"]:
            return mixed.make_context("bench mixed", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(
    "bench",
    cls=_BenchCommand,
    sections=SECTIONS,
    help=HELP,
    context_settings={"max_content_width": 100},
)
@bench_options(ALL_OPTIONS)
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
def command(files: tuple[Path, ...], **values: Any) -> int:
    """Run, compare or print the schema."""
    if values["schema"]:
        click.echo(result.schema().decode())
        return 0
    _check_pictures(values)
    with packages_of("bench"):
        from rich.console import Console  # noqa: PLC0415 - an extra

        # The document alone is on standard output with --json.
        console = Console(
            width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL, stderr=values["json"]
        )
        if values["compare"]:
            return _compare(console, files, values)
        if files:
            raise click.UsageError("result files need --compare")
        return _run(console, values)


def _check_pictures(values: dict[str, Any]) -> None:
    """Find out before a run whether its pictures can be drawn after it. Raises ConfigError."""
    if values["plot"] is not None or values.get("plots") is not None:
        from lightserve.sim.pictures import check_picture  # noqa: PLC0415 - an extra

        check_picture(values["plot"] or Path("timeline.png"), "--plot")


def _compare(console: Console, files: Sequence[Path], values: dict[str, Any]) -> int:
    if not files:
        raise click.UsageError("--compare needs result files")
    from lightserve.loadtest.tables import print_comparison  # noqa: PLC0415 - an extra

    runs: list[Run] = []
    for path in files:
        loaded = result.load(path)
        runs.extend(
            msgspec.structs.replace(run, label=_file_label(path, run, len(files), len(loaded)))
            for run in loaded
        )
    if len(runs) < 2:
        raise click.UsageError("--compare needs at least two runs")
    if values["json"]:
        click.echo(result.document(runs), nl=False)
    else:
        print_comparison(console, runs)
    _draw(console, values, runs)
    return 0


def _file_label(path: Path, run: Run, num_files: int, num_runs: int) -> str:
    if num_files == 1:
        return run.label
    return path.stem if num_runs == 1 else f"{path.stem}: {run.label}"


def _draw(console: Console, values: dict[str, Any], runs: list[Run]) -> None:
    written: list[Path] = []
    try:
        if values["plot"] is not None:
            from lightserve.loadtest.plots import plot_over_time  # noqa: PLC0415 - an extra

            plot_over_time(values["plot"], runs)
            written.append(values["plot"])
        if values["plots"] is not None:
            from lightserve.loadtest.plots import write_plots  # noqa: PLC0415 - an extra

            written += write_plots(values["plots"], runs)
    except OSError as error:
        raise LoadTestError(f"cannot write plots: {error}") from error
    if written:
        names = ", ".join(map(str, written))
        console.print(f"plots: {names}", highlight=False, soft_wrap=True)


def _run(console: Console, values: dict[str, Any]) -> int:
    from lightserve.loadtest import tables  # noqa: PLC0415 - an extra
    from lightserve.loadtest.session import run_to_end  # noqa: PLC0415 - an extra

    options, points = _session_options(values), _points(values)
    _check_endpoint(options, points[0].traffic)

    def show(run: Run) -> None:
        if values["quiet"] and not values["json"]:
            tables.print_line(console, run)
        elif len(points) == 1 and not values["json"]:
            tables.print_run(console, run)

    runs = run_to_end(options, points, show)
    if values["json"]:
        click.echo(result.document(runs), nl=False)
    elif len(points) > 1 and not values["quiet"]:
        tables.print_sweep(console, runs)
    if values["output"] is not None:
        result.save(values["output"], runs)
        console.print(f"result: {values['output']}", highlight=False, soft_wrap=True)
    if runs:
        _draw(console, values, runs)
    is_whole = len(runs) == len(points) and all(
        any(summary.num_completed for summary in run.classes.values()) for run in runs
    )
    return 0 if is_whole else 1


def _session_options(values: dict[str, Any]) -> SessionOptions:
    from lightserve.loadtest.session import SessionOptions  # noqa: PLC0415 - an extra

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
    key = read_api_key(api_key_env=values["api_key_env"], api_key_file=values["api_key_file"])
    return SessionOptions(
        server=server,
        api_key=key or None,
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


def _check_endpoint(options: SessionOptions, traffic: Sequence[Traffic]) -> None:
    has_images = any(parse_images(each.images).num for each in traffic)
    if has_images and options.server.endpoint != "chat":
        raise click.UsageError("--images needs --endpoint chat")


def _json_object(text: str, flag: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise click.UsageError(f"{flag}: not a JSON object: {error}") from error


def _points(values: dict[str, Any]) -> list[Point]:
    """Return the runs to make: one, or one per rate or concurrency of a sweep."""
    from lightserve.loadtest.session import Point  # noqa: PLC0415 - an extra

    label = values["label"]
    sweeps = [(name, values[name]) for name in ("rates", "concurrencies") if values[name]]
    if len(sweeps) > 1:
        raise click.UsageError("--rates cannot be combined with --concurrencies")
    if not sweeps:
        return [Point(label or "run", _all_traffic(values))]
    ((sweep, loads),) = sweeps
    field = "rate" if sweep == "rates" else "concurrency"
    if values[field] is not None:
        raise click.UsageError(f"--{sweep} cannot be combined with --{field}")
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


def make_traffic(values: dict[str, Any]) -> Traffic:
    """Make a `Traffic` of option values: what follows from what, and what contradicts what.

    Raises:
        click.UsageError: it does not say when requests arrive, or says it twice.
        ConfigError: an unreadable trace, distribution or target.
    """
    request_class = values.get("request_class", RT)
    arrivals = _arrivals(values)
    for name in ("prompt_tokens", "output_tokens", "document_tokens"):
        LengthDistribution.parse(values[name])
    parse_images(values["images"])
    num_requests = values["num_requests"]
    is_background = request_class == BE
    if num_requests is None and values["duration_s"] is None and not is_background:
        num_requests = _DEFAULT_NUM_REQUESTS
        if values["documents"] is not None:
            num_requests = values["documents"] * values["questions"]
    names = set(Traffic.__struct_fields__) & set(values)
    return Traffic(
        **{name: values[name] for name in names - {"arrivals", "num_requests"}}
        | {
            "arrivals": arrivals,
            "num_requests": num_requests,
            "targets": Targets.parse(values.get("targets") or ""),
            "be_targets": Targets.parse(values.get("be_targets") or ""),
        }
    )


def _arrivals(values: dict[str, Any]) -> ArrivalKind:
    """Return the kind that the values ask for."""
    asked = values["arrivals"]
    has_times = (
        values["trace"] is not None and load_trace(values["trace"], num_rows=1).times_s is not None
    )
    if asked is not None:
        kind = ArrivalKind(asked)
    elif values["concurrency"] is not None:
        kind = ArrivalKind.CLOSED
    elif has_times:
        kind = ArrivalKind.TRACE
    else:
        kind = ArrivalKind.POISSON
    _check(kind, values, has_times=has_times)
    return kind


def _check(kind: ArrivalKind, values: dict[str, Any], *, has_times: bool) -> None:
    is_closed = kind is ArrivalKind.CLOSED
    if is_closed != (values["concurrency"] is not None):
        raise click.UsageError("--concurrency needs --arrivals closed, and the other way round")
    if is_closed and values["rate"] is not None:
        raise click.UsageError("--rate cannot be combined with --concurrency, a closed loop")
    if kind is ArrivalKind.TRACE and not has_times:
        raise click.UsageError("--arrivals trace needs a --trace that has times")
    if kind in _OPEN_LOOPS and values["rate"] is None:
        raise click.UsageError(
            "--rate, --concurrency or a --trace with times is needed: when do requests arrive?"
        )
    if values["time_scale"] is not None and (
        kind is not ArrivalKind.TRACE or values["rate"] is not None
    ):
        raise click.UsageError("--time-scale needs a trace's own arrivals, without --rate")
    if values["think_s"] and not is_closed:
        raise click.UsageError("--think-s needs --concurrency (a closed loop)")
    if values["burstiness"] != 1.0 and kind is not ArrivalKind.GAMMA:
        raise click.UsageError("--burstiness needs --arrivals gamma")


MIXED_HELP = """Measure what a batch does to chats, on any OpenAI-compatible server.

The same chats are sent in several scenes: alone; beside a batch whose requests are all sent at
once; beside the batch with a cap on its requests in flight, for each of --caps; and beside the
batch sent as the server's own best-effort class (--be-body). The table has the latencies of the
chats, their ratios to chats alone, and the time of the batch. A scene ends with the batch, or after
--limit-s. The defaults take five minutes at most.

\b
Examples
  lightserve bench mixed --targets ttft=400ms,mtpot=200ms --plot mixed.svg
  lightserve bench mixed --url http://127.0.0.1:8001 --be-body '{"priority": 1}'
  lightserve bench mixed --url http://127.0.0.1:8080 --be-body '{}' --caps 1,2,4

The first example is for lightserve, the second for vLLM with --scheduling-policy priority, the
third for llama.cpp, which has no classes. With --output the result is a file that
`lightserve bench --compare` reads.
"""


@click.command(
    "mixed",
    cls=SectionCommand,
    sections=MIXED_SECTIONS,
    help=MIXED_HELP,
    context_settings={"max_content_width": 100},
)
@bench_options(MIXED_OPTIONS)
def mixed(**values: Any) -> int:
    """Run the scenes."""
    _check_pictures(values)
    with packages_of("bench"):
        return _run_mixed(values)


def _run_mixed(values: dict[str, Any]) -> int:
    from rich.console import Console  # noqa: PLC0415 - an extra

    from lightserve.loadtest.mixed import Mix, check_scenes, print_scenes, scenes  # noqa: PLC0415 - an extra
    from lightserve.loadtest.session import run_to_end  # noqa: PLC0415 - an extra

    console = Console(
        width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL, stderr=values["json"]
    )
    for name in ("prompt_tokens", "output_tokens"):
        LengthDistribution.parse(values[name])
        LengthDistribution.parse(values[f"batch_{name}"])
    for name in ("images", "batch_images"):
        parse_images(values[name])
    if not values["duration_s"] <= values["limit_s"]:
        raise click.UsageError(
            f"--limit-s: at least --duration-s ({values['duration_s']:g}), not "
            f"{values['limit_s']:g}"
        )
    options = _session_options(
        values
        | {"text_seed": None, "skip_first_s": 0.0, "skip_last_s": 0.0, "save_requests": False}
    )
    mix = Mix(
        chats=Traffic(
            prompt_tokens=values["prompt_tokens"],
            output_tokens=values["output_tokens"],
            images=values["images"],
            arrivals=ArrivalKind.POISSON,
            rate=values["rate"],
            duration_s=values["duration_s"],
            targets=Targets.parse(values["targets"] or ""),
        ),
        batch=Traffic(
            request_class=BE,
            prompt_tokens=values["batch_prompt_tokens"],
            output_tokens=values["batch_output_tokens"],
            images=values["batch_images"],
            arrivals=ArrivalKind.CLOSED,
            num_requests=values["batch"],
        ),
        caps=sorted(set(values["caps"])),
        class_body=options.server.be_body,
        limit_s=values["limit_s"],
    )
    _check_endpoint(options, (mix.chats, mix.batch))
    points = scenes(mix)
    runs = run_to_end(options, points, lambda _: None)
    check_scenes(runs)
    if values["json"]:
        click.echo(result.document(runs), nl=False)
    elif runs:
        print_scenes(console, runs)
    if values["output"] is not None and runs:
        result.save(values["output"], runs)
        console.print(f"result: {values['output']}", highlight=False, soft_wrap=True)
    if runs and values["plot"] is not None:
        _draw_scenes(console, values["plot"], runs)
    is_whole = len(runs) == len(points) and all(run.classes[RT].num_completed for run in runs)
    return 0 if is_whole else 1


def _draw_scenes(console: Console, path: Path, runs: list[Run]) -> None:
    from lightserve.loadtest.plots import plot_scenes  # noqa: PLC0415 - an extra

    try:
        plot_scenes(path, runs)
    except OSError as error:
        raise LoadTestError(f"cannot write {path}: {error}") from error
    console.print(f"plot: {path}", highlight=False, soft_wrap=True)
