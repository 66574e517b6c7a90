"""`lightserve simulate --rt … --be …`: real-time and best-effort requests on one engine."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from lightserve.cli.options import FiniteRange, FunctionT, config_options
from lightserve.cli.simulate_rules import serve_fields
from lightserve.config import ServeConfig
from lightserve.config.fields import check_limits, flag_name
from lightserve.config.frontend import split_names
from lightserve.errors import ConfigError

_SERVE_FIELDS = (
    "preemption",
    "block_owner",
    "block_size",
    "clean_ahead_tokens",
    "cache_policy",
    "rt_cache_min_tokens",
    "burst_headroom_s",
    "max_be_seqs",
    "be_order",
    "slo_clock",
    "late_min_share",
    "be_min_share",
    "long_prompt_tokens",
)
"""Options that are those of the server."""
HYBRID_DEFAULTS = {"capacity_tokens": 60_000, "policy": "unified", "admission": "risk"}


_POLICY = next(spec for spec in dataclasses.fields(ServeConfig) if spec.name == "policy")
_TOKEN_TARGETS = ("ttft_slo_ms", "tpot_slo_ms", "mtpot_slo_ms")
_SLO_MS = FiniteRange(0.0)
_OPTIONS = (
    config_options(ServeConfig, _SERVE_FIELDS),
    click.option(
        "--decision-log",
        metavar="FILE",
        help="Record the router's inputs and decisions, for lightserve replay.",
    ),
    click.option(
        "--plot",
        type=click.Path(dir_okay=False, path_type=Path),
        help="With --compare: picture of the policies side by side, .png, .svg or .pdf.",
    ),
    click.option(
        "--compare",
        metavar="POLICY,...",
        help="Run each of these policies, in place of --policy, on the same requests; one table.",
    ),
    click.option(
        "--budget-tokens",
        default=512,
        type=click.IntRange(1),
        show_default=True,
        help="Most new tokens in one step; the server's --max-num-batched-tokens.",
    ),
    click.option(
        "--hardware",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Profile of a worker, as lightserve profile writes it: step times are those, and"
        " the router knows it.  [default: an A100 with Llama-2-7B]",
    ),
    click.option(
        "--host-kv-tokens",
        default=-1,
        type=click.IntRange(-1),
        show_default=True,
        help="Size of the host pool; -1: half of --capacity-tokens.",
    ),
    click.option(
        "--mtpot-slo-ms",
        default=200.0,
        type=_SLO_MS,
        show_default=True,
        help="Target of real-time requests: largest gap between tokens; 0 sets none.",
    ),
    click.option(
        "--tpot-slo-ms",
        default=200.0,
        type=_SLO_MS,
        show_default=True,
        help="Target of real-time requests: mean gap between tokens; 0 sets none.",
    ),
    click.option(
        "--completion-slo-s",
        type=FiniteRange(0.0, min_open=True),
        help="Target of real-time requests in place of those of tokens: time to the last one.",
    ),
    click.option(
        "--ttft-slo-ms",
        default=400.0,
        type=_SLO_MS,
        show_default=True,
        help="Target of real-time requests: time to the first token; 0 sets none.",
    ),
    click.option(
        "--margin-s",
        default=30.0,
        type=FiniteRange(0.0),
        show_default=True,
        help="At the start and at the end of the run: not in the statistics.",
    ),
    click.option(
        "--duration-s",
        default=90.0,
        type=FiniteRange(0.0, min_open=True),
        show_default=True,
        help="Virtual seconds.",
    ),
    click.option(
        "--be-lengths", help="With closed:N: uniform:P1-P2,O1-O2 or the rows of a trace file."
    ),
    click.option(
        "--be",
        help="Best-effort requests: closed:N (each that ends is replaced at once), or a trace"
        " file, at its times if it has any.",
    ),
    click.option(
        "--rt-max-tokens",
        default=2048,
        type=click.IntRange(1),
        show_default=True,
        help="Output tokens that real-time requests declare; longer outputs end there.",
    ),
    click.option(
        "--rt-lengths",
        help="With poisson:RATE: uniform:P1-P2,O1-O2 or the rows of a trace file.",
    ),
    click.option(
        "--rt",
        help="Real-time requests: poisson:RATE (per second), or a trace file with its times.",
    ),
)


def hybrid_options(function: FunctionT) -> FunctionT:
    """Decorate a command with the options of this kind of run."""
    for option in _OPTIONS:
        function = option(function)
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
    chosen = {name: values[name] for name in names - {"hardware"}}
    if values["hardware"] is not None:
        chosen["hardware"] = sim.ProfiledHardware.read(values["hardware"])
    config = sim.HybridConfig(
        **chosen,
        targets=sim.Targets(*_targets_of(values)),
        serve_options=serve_fields(values) | {name: values[name] for name in _SERVE_FIELDS},
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
        check_limits(_POLICY, policy)
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
