"""The options of `lightserve bench`, by section; those of traffic are also names inside --be."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from lightserve.cli.options import FiniteRange
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
    _option(
        "--url",
        "With or without /v1.",
        default="http://127.0.0.1:8000",
    ),
    _option(
        "--model",
        "Default: the first of GET /v1/models.",
    ),
    _option(
        "--endpoint",
        "Both are streamed.",
        type=click.Choice(["chat", "completions"]),
        default="chat",
    ),
    _option(
        "--api-key-env",
        "Environment variable with the API key; never an argument, which others could read.",
        metavar="NAME",
        default="LOAD_TEST_API_KEY",
    ),
    _option(
        "--api-key-file",
        "File with the API key; stands before the variable.",
        type=click.Path(path_type=Path),
    ),
    _option(
        "--ca-file",
        "PEM file of the authority that signed the server's certificate.",
        type=click.Path(exists=True),
    ),
    _option(
        "--body",
        "Merged into all requests, such as '{\"temperature\": 0}'.",
        metavar="JSON",
        default="{}",
    ),
    _option(
        "--force-lengths",
        "Ask for exactly the wanted outputs by ignore_eos and min_tokens, which vLLM, "
        "SGLang and lightserve know. Otherwise answers may end earlier.",
        is_flag=True,
    ),
    _option(
        "--usage/--no-usage",
        "Ask for usage, by which tokens are counted, through stream_options.",
        default=True,
    ),
    _option(
        "--timeout-s",
        "From the intended arrival to the end of an answer.",
        type=_POSITIVE,
        default=600.0,
    ),
]

_WHAT = [
    _option(
        "--trace",
        "Lengths (and times, shared blocks) of a trace in bench/traces or of a file like them.",
        metavar="NAME|FILE",
    ),
    _option(
        "--first-row",
        "Row of the trace to start at.",
        type=click.IntRange(min=0),
        default=0,
    ),
    _option(
        "--length-scale",
        "Factor on all lengths, so that a trace fits a smaller model.",
        type=_POSITIVE,
        default=1.0,
    ),
    _option(
        "--max-prompt-tokens",
        "Longer prompts are cut to this.",
        type=_COUNT,
    ),
    _option(
        "--max-output-tokens",
        "Longer outputs are cut to this.",
        type=_COUNT,
    ),
    _option(
        "--prompt-tokens",
        "Without a trace. LENGTHS is 512, 128:512 (uniform), normal:MEAN,STD, "
        "lognormal:MEDIAN,SIGMA, loguniform:LOW,HIGH or exponential:MEAN.",
        metavar="LENGTHS",
        default="256",
    ),
    _option(
        "--output-tokens",
        "Sent as max_tokens; see --force-lengths.",
        metavar="LENGTHS",
        default="128",
    ),
    _option(
        "--documents",
        "Shared prefixes: this many documents, with --questions about each; a prompt is"
        " a document, then a question of --prompt-tokens.",
        type=_COUNT,
    ),
    _option(
        "--questions",
        "Questions per document.",
        type=_COUNT,
        default=10,
    ),
    _option(
        "--document-tokens",
        "Length of documents.",
        metavar="LENGTHS",
        default="1024",
    ),
    _option(
        "--question-order",
        "At random, or document by document.",
        type=click.Choice(["mixed", "grouped"]),
        default="mixed",
    ),
    _option(
        "--priorities",
        "Each request has one of these, drawn at random: the priority of lightserve and vLLM, of "
        "which lower ones go first. Default: nothing is said.",
        type=_Numbers(int, above=-1001, below=1001),
    ),
]

_WHEN = [
    _option(
        "--rate",
        "Open loop: mean arrivals per second. A trace that has times is stretched to it.",
        type=_POSITIVE,
        metavar="PER_S",
    ),
    _option(
        "--arrivals",
        "Default: closed with --concurrency, as in the trace if that has times, else poisson.",
        type=click.Choice([kind.value for kind in ArrivalKind]),
    ),
    _option(
        "--burstiness",
        "Coefficient of variation of gamma gaps: 1 is Poisson, 3 very bursty.",
        type=_AT_LEAST_0,
        default=1.0,
    ),
    _option(
        "--time-scale",
        "Seconds that a second of the trace takes: 0.1 is ten times as fast.",
        type=_POSITIVE,
    ),
    _option(
        "--concurrency",
        "Closed loop: this many clients, each of which waits for its answer.",
        type=_COUNT,
    ),
    _option(
        "--think-s",
        "Pause of such a client after an answer.",
        type=_AT_LEAST_0,
        default=0.0,
    ),
    _option(
        "--num-requests",
        "Requests in all. Default: 100, unless --duration-s is given or --documents say how many.",
        type=_COUNT,
    ),
    _option(
        "--duration-s",
        "Arrivals end after this time.",
        type=_POSITIVE,
    ),
]

TRAFFIC_OPTIONS = _WHAT + _WHEN
"""Options that describe one traffic; --be takes the same names."""

CLASS_OPTIONS = [
    _option(
        "--be-share",
        "Share of these requests, drawn at random, that is sent best effort; 1 is all.",
        type=FiniteRange(0, 1),
        default=0.0,
    ),
    _option(
        "--be",
        "Best-effort traffic of its own beside it: options of the two sections above "
        "without --, such as 'concurrency=8 prompt-tokens=512:1024'. A closed loop "
        "without an end goes on as long as the other traffic arrives.",
        metavar="'NAME=VALUE ...'",
    ),
    _option(
        "--targets",
        "What a good request keeps: ttft, tpot, mtpot (largest gap), e2el, normalized "
        "(e2el per output token), as in ttft=400ms,mtpot=1.5s. mtpot is four times tpot where it "
        "is not given, as in a server of lightserve.",
        metavar="NAME=TIME,...",
    ),
    _option(
        "--be-targets",
        "The same for best-effort requests. Without targets a request is good when it "
        "is completed.",
        metavar="NAME=TIME,...",
    ),
    _option(
        "--be-body",
        "Merged into best-effort requests: how the server is told.",
        metavar="JSON",
        default='{"service_tier": "flex"}',
    ),
    _option(
        "--send-targets",
        "Tell lightserve: ttft, tpot and mtpot of real-time requests as x-slo-*-ms headers; e2el "
        "as slo.completion_s of best-effort ones, and of real-time ones that have no other.",
        is_flag=True,
    ),
]

RUN_OPTIONS = [
    _option(
        "--rates",
        "Sweep: a run per rate.",
        type=_Numbers(float),
    ),
    _option(
        "--concurrencies",
        "Sweep: a run per number of clients.",
        type=_Numbers(int),
    ),
    _option(
        "--warmup",
        "Requests before the first run that are not counted.",
        type=click.IntRange(min=0),
        default=4,
    ),
    _option(
        "--skip-first-s",
        "Count arrivals and tokens from here on only.",
        type=_AT_LEAST_0,
        default=0.0,
    ),
    _option(
        "--skip-last-s",
        "Count until this long before arrivals end; 0 counts to the last answer's end.",
        type=_AT_LEAST_0,
        default=0.0,
    ),
    _option(
        "--drain-s",
        "Time for requests in flight once arrivals have ended; the rest is unfinished.",
        type=_AT_LEAST_0,
        default=120.0,
    ),
    _option(
        "--seed",
        "Of arrivals, lengths, classes.",
        type=click.IntRange(min=0),
        default=0,
    ),
    _option(
        "--text-seed",
        "Of texts. Default: another one in every run, so that none finds its prompts in"
        " a prefix cache.",
        type=click.IntRange(min=0),
    ),
]

OUTPUT_OPTIONS = [
    _option(
        "--label",
        "Name of the run in tables, plots and comparisons.",
    ),
    _option(
        "--output",
        "Write the result as JSON.",
        type=click.Path(path_type=Path, dir_okay=False),
    ),
    _option(
        "--save-requests",
        "With a row per request in it.",
        is_flag=True,
    ),
    _option(
        "--plots",
        "Write PNGs into this directory: timeline, CDFs and, of several runs, "
        "attainment over rate.",
        type=click.Path(path_type=Path, file_okay=False),
    ),
    _option(
        "--plot",
        "Draw TTFT, ITL and goodput over time, per class, into this file: .png, .svg or .pdf.",
        metavar="FILE",
        type=click.Path(path_type=Path, dir_okay=False),
    ),
    _option(
        "--json",
        "Print the result as one JSON document, no tables.",
        is_flag=True,
    ),
    _option(
        "--quiet",
        "One line per run (times are p50/p99), no tables, no progress bar.",
        is_flag=True,
    ),
    _option(
        "--compare",
        "Run nothing: compare the result files given.",
        is_flag=True,
    ),
    _option(
        "--schema",
        "Run nothing: print the JSON schema of results.",
        is_flag=True,
    ),
]

ALL_OPTIONS = [
    *SERVER_OPTIONS,
    *TRAFFIC_OPTIONS,
    *CLASS_OPTIONS,
    *RUN_OPTIONS,
    *OUTPUT_OPTIONS,
]
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
    _option("--rate", "Chats per second, by a Poisson process.", type=_POSITIVE, default=2.0),
    _option("--prompt-tokens", "Of chats.", metavar="LENGTHS", default="256"),
    _option("--output-tokens", "Of chats.", metavar="LENGTHS", default="64"),
    _option(
        "--duration-s",
        "Chats alone arrive for so long.",
        type=_POSITIVE,
        default=30.0,
    ),
    _option("--batch", "Requests of the batch.", type=_COUNT, default=64, metavar="N"),
    _option("--batch-prompt-tokens", "Of the batch.", metavar="LENGTHS", default="512"),
    _option("--batch-output-tokens", "Of the batch.", metavar="LENGTHS", default="128"),
    _option(
        "--caps",
        "Requests of the batch at once, a scene for each number.",
        type=_Numbers(int),
        default="2,8",
    ),
    _option(
        "--limit-s",
        "A scene with a batch sends nothing more after so long.",
        type=_POSITIVE,
        default=45.0,
    ),
]
_CHANGED_IN_MIXED = {"be_body": "The batch as the server's own class; {} leaves that scene out."}
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
            option.help = "No progress bar."
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
