"""The options of `lightserve bench`, by section; those of traffic are also names inside --be."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from lightserve.cli.options import KEY_FILE_HELP, KEY_HELP, URL_HELP, FiniteRange
from lightserve.loadtest.options import ArrivalKind

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_POSITIVE = FiniteRange(min=0, min_open=True)
_AT_LEAST_0 = FiniteRange(min=0)
_COUNT = click.IntRange(min=1)


class _Numbers(click.ParamType[list[float]]):
    """Numbers between two bounds, separated by commas."""

    def __init__(
        self, number: type[int] | type[float], *, above: float = 0.0, below: float = 1e9
    ) -> None:
        self.name = "n,n,..."
        self._number = number
        self._above, self._below = above, below

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse. Fails as click's types do."""
        try:
            numbers = [self._number(part) for part in str(value).split(",")]
        except ValueError:
            numbers = []
        if not numbers or not all(self._above < number < self._below for number in numbers):
            self.fail(f"{value!r} is not a list such as 1,2,4", param, ctx)
        return numbers


def _option(flag: str, text: str, **keywords: Any) -> click.Option:
    return click.Option([flag], help=text, show_default="default" in keywords, **keywords)


SERVER_OPTIONS = [
    _option("--url", URL_HELP, default="http://127.0.0.1:8000"),
    _option("--model", "Name of the model. Default: the server's first model."),
    _option(
        "--endpoint",
        "Route of the requests; answers are streamed.",
        type=click.Choice(["chat", "completions"]),
        default="chat",
    ),
    _option("--api-key-env", KEY_HELP, metavar="NAME", default="LOAD_TEST_API_KEY"),
    _option("--api-key-file", KEY_FILE_HELP, type=click.Path(path_type=Path)),
    _option(
        "--ca-file",
        "PEM file of the authority that signed the server's certificate.",
        type=click.Path(exists=True),
    ),
    _option(
        "--body",
        "JSON fields to add to every request, such as '{\"temperature\": 0}'.",
        metavar="JSON",
        default="{}",
    ),
    _option(
        "--force-lengths",
        "Have every answer reach its wanted length, by ignore_eos and min_tokens (lightserve, "
        "vLLM, SGLang). Otherwise answers may end earlier.",
        is_flag=True,
    ),
    _option(
        "--usage/--no-usage", "Ask the server for token counts (stream_options).", default=True
    ),
    _option(
        "--timeout-s",
        "Longest time from the intended arrival to the end of an answer.",
        type=_POSITIVE,
        default=600.0,
    ),
]

_WHAT = [
    _option(
        "--trace",
        "Trace of lengths, maybe with times and shared blocks: a name in bench/traces, or a file.",
        metavar="NAME|FILE",
    ),
    _option("--first-row", "First row of the trace to use.", type=click.IntRange(min=0), default=0),
    _option(
        "--length-scale",
        "Factor for all lengths, so that a trace fits a smaller model.",
        type=_POSITIVE,
        default=1.0,
    ),
    _option("--max-prompt-tokens", "Cut longer prompts to this length.", type=_COUNT),
    _option("--max-output-tokens", "Cut longer outputs to this length.", type=_COUNT),
    _option(
        "--prompt-tokens",
        "Lengths of prompts, without a trace: 512, 128:512 (uniform), normal:MEAN,STD, "
        "lognormal:MEDIAN,SIGMA, loguniform:LOW,HIGH or exponential:MEAN.",
        metavar="LENGTHS",
        default="256",
    ),
    _option(
        "--output-tokens",
        "Lengths of outputs, sent as max_tokens; see --force-lengths.",
        metavar="LENGTHS",
        default="128",
    ),
    _option(
        "--documents",
        "Number of documents that prompts share: each prompt is a document and one of --questions"
        " questions of --prompt-tokens about it.",
        type=_COUNT,
    ),
    _option("--questions", "Questions per document.", type=_COUNT, default=10),
    _option("--document-tokens", "Length of documents.", metavar="LENGTHS", default="1024"),
    _option(
        "--question-order",
        "Order of the questions: mixed at random, or grouped by document.",
        type=click.Choice(["mixed", "grouped"]),
        default="mixed",
    ),
    _option(
        "--images",
        "Random pictures of each request, and perhaps their size in pixels: 2 or 2:1024x768."
        " Only with --endpoint chat.",
        metavar="N[:WxH]",
        default="0",
    ),
    _option(
        "--priorities",
        "Priorities to draw from at random; lower ones go first (lightserve, vLLM). Default: none.",
        type=_Numbers(int, above=-1001, below=1001),
    ),
]

_WHEN = [
    _option(
        "--rate",
        "Mean arrivals per second, as an open loop. A trace's times are stretched to this rate.",
        type=_POSITIVE,
        metavar="PER_S",
    ),
    _option(
        "--arrivals",
        "Spacing of arrivals. Default: closed with --concurrency, the trace's times, or poisson.",
        type=click.Choice([kind.value for kind in ArrivalKind]),
    ),
    _option(
        "--burstiness",
        "Coefficient of variation of the gaps (gamma): 1 is Poisson, 3 very bursty.",
        type=_AT_LEAST_0,
        default=1.0,
    ),
    _option(
        "--time-scale",
        "Length of a second of the trace in seconds: 0.1 is ten times as fast.",
        type=_POSITIVE,
    ),
    _option(
        "--concurrency",
        "Number of clients in a closed loop; each sends its next request after an answer.",
        type=_COUNT,
    ),
    _option(
        "--think-s", "Pause of such a client after each answer.", type=_AT_LEAST_0, default=0.0
    ),
    _option(
        "--num-requests",
        "Number of requests. Default: 100, or as --duration-s or --documents decide.",
        type=_COUNT,
    ),
    _option("--duration-s", "Time after which no request is sent any more.", type=_POSITIVE),
]

TRAFFIC_OPTIONS = _WHAT + _WHEN
"""Options that describe one traffic; --be takes the same names."""

CLASS_OPTIONS = [
    _option(
        "--be-share",
        "Share of the requests, drawn at random, to send as best effort.",
        type=FiniteRange(0, 1),
        default=0.0,
    ),
    _option(
        "--be",
        "A second, best-effort traffic: options of the two sections above without --, such as "
        "'concurrency=8 prompt-tokens=512:1024'. A closed loop without an end lasts as long as "
        "the first traffic.",
        metavar="'NAME=VALUE ...'",
    ),
    _option(
        "--targets",
        "Targets of a good request: ttft, tpot, mtpot (largest gap), e2el, normalized (e2el per "
        "output token), such as ttft=400ms,mtpot=1.5s. Default of mtpot: four times tpot.",
        metavar="NAME=TIME,...",
    ),
    _option(
        "--be-targets",
        "Targets of a good best-effort request. Without targets every completed request is good.",
        metavar="NAME=TIME,...",
    ),
    _option(
        "--be-body",
        "JSON fields to add to best-effort requests, which tell the server their class.",
        metavar="JSON",
        default='{"service_tier": "flex"}',
    ),
    _option(
        "--send-targets",
        "Send the targets to the server (lightserve): ttft, tpot and mtpot as x-slo-*-ms headers; "
        "e2el as slo.completion_s of best-effort requests, and of real-time ones without others.",
        is_flag=True,
    ),
]

RUN_OPTIONS = [
    _option("--rates", "Make a run for each of these rates.", type=_Numbers(float)),
    _option(
        "--concurrencies", "Make a run for each of these numbers of clients.", type=_Numbers(int)
    ),
    _option(
        "--warmup",
        "Number of requests before the first run; they are not counted.",
        type=click.IntRange(min=0),
        default=4,
    ),
    _option(
        "--skip-first-s",
        "Leave out arrivals and tokens before this time.",
        type=_AT_LEAST_0,
        default=0.0,
    ),
    _option(
        "--skip-last-s",
        "Leave out this time before the last arrival; 0 counts everything.",
        type=_AT_LEAST_0,
        default=0.0,
    ),
    _option(
        "--drain-s",
        "Time to wait for requests in flight after the last arrival; others count as unfinished.",
        type=_AT_LEAST_0,
        default=120.0,
    ),
    _option(
        "--seed", "Seed of arrivals, lengths and classes.", type=click.IntRange(min=0), default=0
    ),
    _option(
        "--text-seed",
        "Seed of the texts. Default: a new one for each run, so that no prompt is cached before.",
        type=click.IntRange(min=0),
    ),
]

OUTPUT_OPTIONS = [
    _option("--label", "Name of the run in tables, plots and comparisons."),
    _option(
        "--output", "Write the result as JSON.", type=click.Path(path_type=Path, dir_okay=False)
    ),
    _option("--save-requests", "Write a row for each request into --output.", is_flag=True),
    _option(
        "--plots",
        "Draw PNGs into this directory: timeline, distributions and, for several runs, "
        "attainment over rate.",
        type=click.Path(path_type=Path, file_okay=False),
    ),
    _option(
        "--plot",
        "Draw TTFT, ITL and goodput over time, per class, into this file: .png, .svg or .pdf.",
        metavar="FILE",
        type=click.Path(path_type=Path, dir_okay=False),
    ),
    _option("--json", "Print the result as one JSON document instead of tables.", is_flag=True),
    _option(
        "--quiet",
        "Print one line per run (times are p50/p99) instead of tables, and no progress bar.",
        is_flag=True,
    ),
    _option("--compare", "Compare the given result files instead of running.", is_flag=True),
    _option("--schema", "Print the JSON schema of results instead of running.", is_flag=True),
]

ALL_OPTIONS = [*SERVER_OPTIONS, *TRAFFIC_OPTIONS, *CLASS_OPTIONS, *RUN_OPTIONS, *OUTPUT_OPTIONS]
SECTIONS = {
    "url": "Server",
    "trace": "What is sent",
    "rate": "When it arrives",
    "be_share": "Classes and targets",
    "rates": "Runs",
    "label": "Output",
    "help": "Help",
}
"""Titles of --help, by the first option of each."""


_OWN_OF_MIXED = [
    _option("--rate", "Mean arrivals of chats per second (Poisson).", type=_POSITIVE, default=2.0),
    _option("--prompt-tokens", "Lengths of the chats' prompts.", metavar="LENGTHS", default="256"),
    _option("--output-tokens", "Lengths of the chats' answers.", metavar="LENGTHS", default="64"),
    _option("--duration-s", "Length of the scene with chats alone.", type=_POSITIVE, default=30.0),
    _option("--images", "Random pictures of each chat.", metavar="N[:WxH]", default="0"),
    _option("--batch", "Number of requests in the batch.", type=_COUNT, default=64, metavar="N"),
    _option("--batch-prompt-tokens", "Lengths of its prompts.", metavar="LENGTHS", default="512"),
    _option("--batch-output-tokens", "Lengths of its answers.", metavar="LENGTHS", default="128"),
    _option("--batch-images", "Pictures of each of its requests.", metavar="N[:WxH]", default="0"),
    _option(
        "--caps",
        "Caps on the batch's requests in flight; each makes a scene.",
        type=_Numbers(int),
        default="2,8",
    ),
    _option(
        "--limit-s",
        "Longest time to send requests in a scene with a batch.",
        type=_POSITIVE,
        default=45.0,
    ),
]
_CHANGED_IN_MIXED = {
    "be_body": "JSON fields for the scene with the server's own class; {} leaves that scene out."
}
_TAKEN_BY_MIXED = (
    *("be_body", "targets", "send_targets", "warmup", "drain_s", "seed"),
    *("output", "json", "quiet"),
)


def _mixed_options() -> list[click.Option]:
    """Return the options of `bench mixed`: its own, and those it shares."""
    by_name = {option.name: option for option in ALL_OPTIONS}
    shared = [copy.copy(by_name[name]) for name in _TAKEN_BY_MIXED]
    for option in shared:
        option.help = _CHANGED_IN_MIXED.get(option.name or "", option.help)
        if option.name == "drain_s":
            option.default = 10.0
        if option.name == "quiet":
            option.help = "Show no progress bar."
    plot = _option(
        "--plot",
        "Draw the scenes into this file: .png, .svg or .pdf.",
        metavar="FILE",
        type=click.Path(path_type=Path, dir_okay=False),
    )
    return [*SERVER_OPTIONS, *_OWN_OF_MIXED, *shared, plot]


MIXED_OPTIONS = _mixed_options()
MIXED_SECTIONS = {
    "url": "Server",
    "rate": "Chats and batch",
    "be_body": "Class and targets",
    "warmup": "Runs",
    "output": "Output",
    "help": "Help",
}
"""Titles of `bench mixed --help`."""


def bench_options(options: Sequence[click.Option]) -> Callable[[FunctionT], FunctionT]:
    """Return a decorator that gives a command these options, in their order."""

    def decorate(function: FunctionT) -> FunctionT:
        params: list[click.Parameter] = function.__dict__.setdefault("__click_params__", [])
        params.extend(reversed(options))  # click reverses them again
        return function

    return decorate


def parse_nested(text: str, options: Sequence[click.Option], *, param_hint: str) -> dict[str, Any]:
    """Parse "rate=4 prompt-tokens=64:256" into values by name, as a command line would be.

    Raises:
        click.BadParameter: an unknown name or a value that its option refuses.
    """
    command = click.Command(param_hint, params=list(options), add_help_option=False)
    try:
        args = [f"--{part}" for part in shlex.split(text)]
        return command.make_context(param_hint, args).params
    except click.UsageError as error:
        raise click.BadParameter(error.format_message(), param_hint=param_hint) from error
    except ValueError as error:  # quotes that do not close
        raise click.BadParameter(str(error), param_hint=param_hint) from error
