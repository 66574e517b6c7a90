"""`lightserve simulate`: a queue of requests, or real-time and best-effort ones together."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from lightserve.cli.options import FiniteRange, FunctionT, config_options, option, preset_option
from lightserve.config import ServeConfig
from lightserve.config.fields import Scope, check_limits, flag_name, names_of, unmet_need
from lightserve.config.options import split_names
from lightserve.config.scheduling import PRESETS, preset_values
from lightserve.errors import ConfigError

if TYPE_CHECKING:
    from lightserve.sim import SimulationConfig


# Options of `lightserve simulate` about admission, as fields of the server's configuration.

_SPECS = {spec.name: spec for spec in dataclasses.fields(ServeConfig)}
RULES = (*_SPECS["admission"].metadata["choices"], "oracle")
_RULE_OPTIONS = ("reserve", "samples", "watermark", "overcommit")


def rule_options(function: FunctionT) -> FunctionT:
    """Decorate a command with the options of the admission rules."""
    for decorate in (
        option("--risk", help="risk: accepted chance of running out of memory.", type=float),
        option("--overcommit", help="conservative: times that the pool is promised.", type=float),
        option("--watermark", help="aggressive: share of the pool to fill.", type=float),
        option("--samples", help="past-future: most futures to draw.", type=int),
        option("--reserve", help="past-future: share of the pool kept free.", type=float),
    ):
        function = decorate(function)
    return function


def serve_fields(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the rule's own options as fields of ServeConfig; those of other rules are refused."""
    given = {name: values[name] for name in _RULE_OPTIONS if values[name] is not None}
    if values["risk"] is not None:
        given |= {"rt_memory_risk": values["risk"], "be_memory_risk": values["risk"]}
    for name in given:
        if (need := unmet_need(_SPECS[name], values)) is not None:
            flag = "--risk" if name.endswith("_risk") else flag_name(name)
            raise ConfigError(f"{flag} needs {need.complaint(values['admission'])}")
    return given


# `lightserve simulate --rt … --be …`: real-time and best-effort requests on one engine.

_SERVE_FIELDS = names_of(ServeConfig, Scope.SIMULATE)
HYBRID_DEFAULTS = {"capacity_tokens": 60_000, "policy": "unified", "admission": "risk"}


_TOKEN_TARGETS = ("ttft_slo_ms", "tpot_slo_ms", "mtpot_slo_ms")
_SLO_MS = FiniteRange(0.0)
_OPTIONS = (
    config_options(ServeConfig, _SERVE_FIELDS),
    preset_option,
    option(
        "--decision-log",
        help="Write the router's inputs and decisions to this file, for lightserve replay.",
        metavar="FILE",
    ),
    option(
        "--plot",
        help="With --compare: draw the policies into this file (.png, .svg, .pdf).",
        type=click.Path(dir_okay=False, path_type=Path),
    ),
    option(
        "--compare",
        help="Run each of these policies on the same requests, and print one table.",
        metavar="POLICY,...",
    ),
    option(
        "--budget-tokens",
        help="Most new tokens in one step; the server's --max-num-batched-tokens.",
        default=512,
        type=click.IntRange(1),
    ),
    option(
        "--max-num-seqs",
        help="Most sequences that run at once.  [default: 512, or --budget-tokens if that is less]",
        type=click.IntRange(1),
    ),
    option(
        "--hardware",
        help="Hardware to simulate: a file of lightserve profile, h200-llama-8b, or MODEL@GPUxN"
        " (docs/simulate.md).  [default: an A100 with Llama-2-7B]",
    ),
    option(
        "--step-noise",
        "noise",
        help="Noise of step times: standard deviation of their logarithm.  [default: the error of"
        " the profile of --hardware, or 0.05]",
        type=FiniteRange(0.0, 1.0),
    ),
    option(
        "--draft-acceptance",
        help="With --speculation: chance that a guess is right if those before it are.",
        default=0.6,
        type=FiniteRange(0.0, 1.0),
    ),
    option(
        "--router-time-factor",
        help="Factor for the virtual time of the router: 0.5 ms for a step, 1.6 us for each decode"
        " and 0.4 ms for each chunk of a prompt in it.",
        default=1.0,
        type=FiniteRange(0.0),
    ),
    option(
        "--router-times",
        help="CSV of a router's measured times (columns rows, ms), in place of that formula.",
        type=click.Path(dir_okay=False, path_type=Path),
    ),
    option(
        "--host-kv-tokens",
        help="Size of the host pool in tokens; -1 takes half of --capacity-tokens.",
        default=-1,
        type=click.IntRange(-1),
    ),
    option(
        "--prefix-host-tokens",
        help="Tokens of prefixes that the host holds besides; the server's --prefix-host-memory.",
        default=0,
        type=click.IntRange(0),
    ),
    option(
        "--mtpot-slo-ms",
        help="Target of real-time requests: largest gap between tokens; 0 takes four times"
        " --tpot-slo-ms, as a server does.",
        default=200.0,
        type=_SLO_MS,
    ),
    option(
        "--tpot-slo-ms",
        help="Target of real-time requests: mean gap between tokens; 0 sets none.",
        default=200.0,
        type=_SLO_MS,
    ),
    option(
        "--completion-slo-s",
        help="Target of real-time requests: time to the last token, in place of the other targets.",
        type=FiniteRange(0.0, min_open=True),
    ),
    option(
        "--ttft-slo-ms",
        help="Target of real-time requests: time to the first token; 0 sets none.",
        default=400.0,
        type=_SLO_MS,
    ),
    option(
        "--margin-s",
        help="Time at the start and at the end that the statistics leave out.",
        default=30.0,
        type=FiniteRange(0.0),
    ),
    option(
        "--duration-s",
        help="Length of the run in virtual seconds.",
        default=90.0,
        type=FiniteRange(0.0, min_open=True),
    ),
    option("--be-images", help="Images of best-effort requests, as in --rt-images.", default="0"),
    option("--be-lengths", help="Lengths of best-effort requests, as in --rt-lengths."),
    option(
        "--be",
        help="Best-effort requests: closed:N, batch:N, poisson:RATE or a trace file, as in --rt.",
    ),
    option(
        "--rt-max-tokens",
        help="Limit of outputs that real-time requests declare; longer outputs end there.",
        default=2048,
        type=click.IntRange(1),
    ),
    option(
        "--rt-images",
        help="Images of each request without a trace, beside its prompt of --rt-lengths: N:TOKENS,"
        " so many of TOKENS each, for --hardware that has an encoder.",
        default="0",
    ),
    option(
        "--rt-lengths",
        help="Lengths without a trace: uniform:P1-P2,O1-O2, or the rows of a trace file.",
    ),
    option(
        "--rt",
        help="Real-time requests: poisson:RATE (per second), closed:N (N clients without pauses),"
        " batch:N (N requests at once, again and again), or a trace file with times and targets.",
    ),
)


def hybrid_options(function: FunctionT) -> FunctionT:
    """Decorate a command with the options of this kind of run."""
    for decorate in _OPTIONS:
        function = decorate(function)
    return function


def run_hybrid(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Run it; return all values, and the sections of the report.

    Raises:
        ConfigError: an option that cannot be.
    """
    # Imported late: `lightserve --help` needs none of it.
    from lightserve import sim  # noqa: PLC0415

    values = given | {name: given[name] or default for name, default in HYBRID_DEFAULTS.items()}
    names = {spec.name for spec in dataclasses.fields(sim.HybridConfig)} & set(values)
    chosen = {name: values[name] for name in names - {"hardware", "router_times"}}
    if values["router_times"] is not None:
        chosen["router_times"] = sim.RouterTimes.read(values["router_times"])
    if values["hardware"] is not None:
        chosen["hardware"] = sim.read_hardware(values["hardware"])
    config = sim.HybridConfig(
        **chosen,
        targets=sim.Targets(*_targets_of(values)),
        serve_options=serve_fields(values)
        | {name: values[name] for name in _SERVE_FIELDS}
        | ({"max_num_seqs": values["max_num_seqs"]} if values["max_num_seqs"] else {}),
    )
    with click.progressbar(
        length=int(config.duration_s), label=f"virtual seconds, {config.policy}", file=sys.stderr
    ) as bar:
        report = sim.run_hybrid(config, progress=lambda seconds: bar.update(round(seconds)))
    return values, dataclasses.asdict(report)


def run_comparison(
    given: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, dict[str, dict[str, Any]]]]:
    """Run every policy of --compare on the same requests; return all values, reports by policy.

    Raises:
        ConfigError: an option that cannot be.
    """
    policies = split_names(given["compare"])
    for policy in policies:  # before the first of them runs
        check_limits(_SPECS["policy"], policy)
    if len(policies) < 2:
        raise ConfigError(f"--compare needs two policies or more, got {given['compare']!r}")
    reports: dict[str, dict[str, dict[str, Any]]] = {}
    values = given
    for policy in policies:
        values, reports[policy] = run_hybrid(given | {"policy": policy})
    values["policy"] = None
    return values, reports


def _targets_of(values: dict[str, Any]) -> list[float | None]:
    """Return the fields of `Targets`. Raises ConfigError for two kinds of them together."""
    if values["completion_slo_s"] is None:
        return [values[name] / 1e3 if values[name] else None for name in _TOKEN_TARGETS]
    context = click.get_current_context()
    for name in _TOKEN_TARGETS:
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise ConfigError(
                f"--completion-slo-s cannot be combined with {flag_name(name)}: it is shared out"
                " over the tokens"
            )
    return [None, None, None, values["completion_slo_s"]]


# `lightserve simulate --workload`: a queue of requests of one class.

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
"""Policies whose decode steps may be advanced many at once."""
QUEUE_DEFAULTS = {"capacity_tokens": 120_000, "policy": "fcfs", "admission": "past-future"}
_SECTIONS = {
    "kv": (
        *("decode_steps", "consumed_pct", "future_pct", "evicted_pct", "evicted_requests_pct"),
        *("recomputed_tokens", "total_work_s"),
    ),
    "requests": ("finished", "max_overtaken", "duration_s", "ttft_s_p50", "ttft_s_p99"),
    "router": ("cpu_ms_p50", "cpu_ms_p99"),
}
"""Fields of the report by section of what is printed; scripts read them."""


def queue_options(function: FunctionT) -> FunctionT:
    """Decorate a command with the options of this kind of run."""
    for decorate in (
        option(
            "--timeline",
            help="Draw memory used and forecast, and evictions, into this file (.png, .svg, .pdf).",
            type=click.Path(dir_okay=False, path_type=Path),
        ),
        option(
            "--paper-artifact",
            help="Use the timing and the start of the Past-Future authors' own simulation.",
            is_flag=True,
        ),
        option(
            "--best-effort",
            help="Make the requests best-effort, so that others may pass them.",
            is_flag=True,
        ),
        option(
            "--warm-up-requests",
            help="Number of earlier rows whose lengths are learnt first.",
            default=0,
            type=click.IntRange(0),
        ),
        option(
            "--arrivals",
            help="Arrivals: queued (all at the start), trace (the file's times), poisson:RATE (per"
            " second) or closed:CLIENTS.",
            default="queued",
        ),
        click.option("--num-requests", default=3000, type=click.IntRange(1), show_default=True),
        option(
            "--workload",
            help="Lengths of the requests: dist1, dist2, dist3, uniform:P1-P2:O1-O2 (prompts and"
            " outputs) or a trace file; join several with + for a drift.",
        ),
    ):
        function = decorate(function)
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


_SHARED = frozenset(
    {
        "capacity_tokens",
        "policy",
        "admission",
        "reserve",
        "samples",
        "watermark",
        "overcommit",
        "risk",
        "seed",
        "as_json",
    }
)
"""Options of both kinds of run."""


def _default(name: str) -> str:
    """Return the defaults of both kinds of run, as help shows them."""
    return f"[default: {QUEUE_DEFAULTS[name]}; with --rt, --be {HYBRID_DEFAULTS[name]}]"


@click.command("simulate")
@queue_options
@hybrid_options
@option(
    "--capacity-tokens",
    help=f"Size of the KV pool.  {_default('capacity_tokens')}",
    type=click.IntRange(1),
)
@option("--policy", help=f"A policy of the server.  {_default('policy')}", metavar="POLICY")
@option(
    "--admission",
    help=f"A rule of the server, or oracle, which knows all lengths.  {_default('admission')}",
    type=click.Choice(RULES),
)
@rule_options
@click.option("--seed", default=0, type=click.IntRange(0), show_default=True)
@option("--json", "as_json", help="Print one JSON document.", is_flag=True)
@click.pass_context
def command(context: click.Context, /, **values: Any) -> int:
    """Run requests through the router core on virtual hardware.

    With --workload, you get decode steps, memory and evictions of a queue of requests of one class.
    With --rt and --be, you get attainment of targets, goodput and throughput of real-time and
    best-effort requests that arrive over time. The same seed gives the same report, except for CPU
    times.
    """
    chosen = _with_preset(context, _of_this_run(context, values))
    if chosen.get("plot") and not chosen.get("compare"):
        raise ConfigError("--plot needs --compare")
    _check_pictures(chosen)
    if chosen.get("compare"):
        return _compare(context, chosen)
    run = run_queue if "workload" in chosen else run_hybrid
    chosen, sections = run(chosen)
    document = {"config": _printable(chosen)} | sections
    if values["as_json"]:
        click.echo(json.dumps(document))
    else:
        _print_table({"": sections})
    return 0


def _check_pictures(values: dict[str, Any]) -> None:
    for name in ("timeline", "plot"):
        if values.get(name) is not None:
            from lightserve.sim.pictures import check_picture  # noqa: PLC0415 - an extra

            check_picture(values[name], f"--{name}")


def _compare(context: click.Context, values: dict[str, Any]) -> int:
    if context.get_parameter_source("policy") is not ParameterSource.DEFAULT:
        raise ConfigError("--compare cannot be combined with --policy")
    if values["decision_log"]:
        raise ConfigError("--compare cannot be combined with --decision-log: one core writes it")
    chosen, reports = run_comparison(values)
    if values["plot"] is not None:
        from lightserve.sim.pictures import draw_comparison  # noqa: PLC0415 - an extra

        draw_comparison(reports, values["plot"])
    if values["as_json"]:
        click.echo(json.dumps({"config": _printable(chosen), "policies": reports}))
    else:
        _print_table(
            {
                policy: {name: figures for name, figures in sections.items() if name != "router"}
                for policy, sections in reports.items()
            }
        )
    return 0


def _of_this_run(context: click.Context, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that the chosen kind of run has. Raises ConfigError for another's."""
    is_queue, is_hybrid = values["workload"] is not None, bool(values["rt"] or values["be"])
    if is_queue == is_hybrid:
        raise ConfigError(
            "either --workload (a queue of requests) or --rt and --be (two classes as they come)"
            f" is needed, got {'both' if is_queue else 'neither'}"
        )
    for name in values:
        is_given = context.get_parameter_source(name) is not ParameterSource.DEFAULT
        if is_given and name not in _SHARED and (name in QUEUE_OPTIONS) != is_queue:
            owner = "--rt and --be, not to --workload" if is_queue else "--workload, not to --rt"
            raise ConfigError(f"{flag_name(name)} belongs to {owner}")
    return {
        name: value
        for name, value in values.items()
        if name in _SHARED or (name in QUEUE_OPTIONS) == is_queue
    }


def _with_preset(context: click.Context, values: dict[str, Any]) -> dict[str, Any]:
    """Return values with those of --preset, but what was given; says on stderr which these are.

    Raises:
        ConfigError: --compare is given as well, which is to choose the policy.
    """
    if (preset := values.get("preset")) is None:
        return values
    if values["compare"]:
        raise ConfigError("--compare cannot be combined with --preset, which has a policy")
    flags = {"max_num_batched_tokens": "budget_tokens"}
    given = {
        name
        for name in PRESETS[preset]
        if context.get_parameter_source(flags.get(name, name)) is not ParameterSource.DEFAULT
    }
    options = {
        flags.get(name, name): value
        for name, value in preset_values(preset, given=given, values=values).items()
    }
    words = " ".join(f"{name}={value!r}" for name, value in options.items())
    click.echo(f"preset {preset}: {words}", err=True)
    return values | options


def _printable(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in values.items()
        if name != "as_json"
    }


def _print_table(columns: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Print sections of figures, a column per run; what says nothing of any of them is left out."""
    width = max(16, *(2 + len(title) for title in columns))
    if len(columns) > 1:
        click.echo(" " * 28 + "".join(title.rjust(width) for title in columns))
    num_left_out = 0
    for section in next(iter(columns.values())):
        tables = [dict(_flat(sections[section])) for sections in columns.values()]
        if section == "warm_up" and not any(table["seconds"] for table in tables):
            continue
        click.echo(section)
        if all(table.get("arrivals") == 0 for table in tables):
            click.echo("  no requests")
            continue
        for name in tables[0]:
            values = [table[name] for table in tables]
            # Of tables inside (reasons by class), most have nothing to count.
            if all(value is None or (value == 0 and " " in name) for value in values):
                num_left_out += 1
            else:
                click.echo(f"  {name:26}" + "".join(_shown(value).rjust(width) for value in values))
    if num_left_out:
        click.echo(f"({num_left_out} reasons or figures that count nothing are left out)")


def _flat(figures: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and values, those of tables inside one with all their names."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from ((f"{name} {inner}", figure) for inner, figure in _flat(value))
        else:
            yield name, value


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
