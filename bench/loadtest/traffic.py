"""Makes `Traffic` of option values: what follows from what, and what contradicts what."""

from __future__ import annotations

from typing import Any

import click

from .arrivals import ArrivalKind
from .lengths import LengthDistribution
from .options import BE, RT, Targets, Traffic
from .traces import read_trace

_DEFAULT_NUM_REQUESTS = 100


def make_traffic(values: dict[str, Any]) -> Traffic:
    """Make it of the values of TRAFFIC_OPTIONS (and `be_share`, `targets`, ..., where given).

    Raises:
        click.UsageError: it does not say when requests arrive, or says it twice.
        LoadTestError: an unreadable trace, distribution or target.
    """
    request_class = values.get("request_class", RT)
    arrivals = _arrivals(values)
    for name in ("prompt_tokens", "output_tokens", "document_tokens"):
        LengthDistribution.parse(values[name])
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
        values["trace"] is not None and read_trace(values["trace"], num_rows=1).times_s is not None
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
        raise click.UsageError("--concurrency and closed arrivals belong together")
    if is_closed and values["rate"] is not None:
        raise click.UsageError("--rate is for open loops, --concurrency for closed ones: give one")
    if kind is ArrivalKind.TRACE and not has_times:
        raise click.UsageError("--arrivals trace needs a --trace that has times")
    if kind in (ArrivalKind.POISSON, ArrivalKind.GAMMA, ArrivalKind.CONSTANT) and (
        values["rate"] is None
    ):
        raise click.UsageError(
            "say when requests arrive: --rate, --concurrency or a --trace that has times"
        )
    if values["time_scale"] is not None and (
        kind is not ArrivalKind.TRACE or values["rate"] is not None
    ):
        raise click.UsageError("--time-scale is for a trace's own arrivals, without --rate")
    if values["think_s"] and not is_closed:
        raise click.UsageError("--think-s is for closed loops")
    if values["burstiness"] != 1.0 and kind is not ArrivalKind.GAMMA:
        raise click.UsageError("--burstiness is for --arrivals gamma")
