"""Options of `lightserve simulate` about admission, as fields of the server's configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import click

from lightserve.cli.options import FunctionT
from lightserve.config import ServeConfig
from lightserve.config.fields import flag_name
from lightserve.config.scheduling import ADMISSION_OF_OPTION
from lightserve.errors import ConfigError

_ADMISSION = next(spec for spec in dataclasses.fields(ServeConfig) if spec.name == "admission")
RULES = (*_ADMISSION.metadata["choices"], "oracle")
_RULE_OPTIONS = ("reserve", "samples", "watermark", "overcommit")


def rule_options(function: FunctionT) -> FunctionT:
    """Decorate a command with the options of the admission rules."""
    for option in (
        click.option("--risk", type=float, help="risk: accepted chance of running out."),
        click.option("--overcommit", type=float, help="conservative: times the pool is promised."),
        click.option("--watermark", type=float, help="aggressive: share of the pool to fill."),
        click.option("--samples", type=int, help="past-future: most futures drawn."),
        click.option("--reserve", type=float, help="past-future: share of the pool kept free."),
    ):
        function = option(function)
    return function


def serve_fields(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the rule's own options as fields of ServeConfig; those of other rules are refused."""
    given = {name: values[name] for name in _RULE_OPTIONS if values[name] is not None}
    if values["risk"] is not None:
        given |= {"rt_memory_risk": values["risk"], "be_memory_risk": values["risk"]}
    for name in given:
        if ADMISSION_OF_OPTION[name] != values["admission"]:
            flag = "--risk" if name.endswith("_risk") else flag_name(name)
            raise ConfigError(
                f"{flag} needs --admission {ADMISSION_OF_OPTION[name]}, got {values['admission']!r}"
            )
    return given
