"""Every option, by section: flag, type, default and help."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from .arrivals import ArrivalKind
from .command import SectionOption

DEFAULT_KEY_VARIABLE = "LOAD_TEST_API_KEY"


class _FiniteRange(click.FloatRange):
    """Unlike click's own it takes neither NaN nor infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


_POSITIVE = _FiniteRange(min=0, min_open=True)
_AT_LEAST_0 = _FiniteRange(min=0)
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


class _Row:
    """An option to be: its flag, its help, and click's keywords for the rest."""

    def __init__(self, flag: str, text: str, **keywords: Any) -> None:
        self.flag = flag
        self.keywords = keywords | {"help": text, "show_default": "default" in keywords}


def _options(section: str, *rows: _Row) -> list[SectionOption]:
    return [SectionOption([row.flag], section=section, **row.keywords) for row in rows]


SERVER_OPTIONS = _options(
    "Server",
    _Row(
        "--url",
        "With or without /v1.",
        default="http://127.0.0.1:8000",
    ),
    _Row(
        "--model",
        "Default: the first of GET /v1/models.",
    ),
    _Row(
        "--endpoint",
        "Both are streamed.",
        type=click.Choice(["chat", "completions"]),
        default="chat",
    ),
    _Row(
        "--api-key-env",
        "Environment variable with the API key; never an argument, which others could read.",
        metavar="NAME",
        default=DEFAULT_KEY_VARIABLE,
    ),
    _Row(
        "--api-key-file",
        "File with the API key; stands before the variable.",
        type=click.Path(path_type=Path),
    ),
    _Row(
        "--ca-file",
        "PEM file of the authority that signed the server's certificate.",
        type=click.Path(exists=True),
    ),
    _Row(
        "--body",
        "Merged into all requests, such as '{\"temperature\": 0}'.",
        metavar="JSON",
        default="{}",
    ),
    _Row(
        "--force-lengths",
        "Ask for exactly the wanted outputs by ignore_eos and min_tokens, which vLLM, "
        "SGLang and lightserve know. Otherwise answers may end earlier.",
        is_flag=True,
    ),
    _Row(
        "--usage/--no-usage",
        "Ask for usage, by which tokens are counted, through stream_options.",
        default=True,
    ),
    _Row(
        "--timeout-s",
        "From the intended arrival to the end of an answer.",
        type=_POSITIVE,
        default=600.0,
    ),
)

_WHAT = _options(
    "What is sent",
    _Row(
        "--trace",
        "Lengths (and times, shared blocks) of a trace in bench/traces or of a file like them.",
        metavar="NAME|FILE",
    ),
    _Row(
        "--first-row",
        "Row of the trace to start at.",
        type=click.IntRange(min=0),
        default=0,
    ),
    _Row(
        "--length-scale",
        "Factor on all lengths, so that a trace fits a smaller model.",
        type=_POSITIVE,
        default=1.0,
    ),
    _Row(
        "--max-prompt-tokens",
        "Longer prompts are cut to this.",
        type=_COUNT,
    ),
    _Row(
        "--max-output-tokens",
        "Longer outputs are cut to this.",
        type=_COUNT,
    ),
    _Row(
        "--prompt-tokens",
        "Without a trace. LENGTHS is 512, 128:512 (uniform), normal:MEAN,STD, "
        "lognormal:MEDIAN,SIGMA, loguniform:LOW,HIGH or exponential:MEAN.",
        metavar="LENGTHS",
        default="256",
    ),
    _Row(
        "--output-tokens",
        "Sent as max_tokens; see --force-lengths.",
        metavar="LENGTHS",
        default="128",
    ),
    _Row(
        "--documents",
        "Shared prefixes: this many documents, with --questions about each; a prompt is"
        " a document, then a question of --prompt-tokens.",
        type=_COUNT,
    ),
    _Row(
        "--questions",
        "Questions per document.",
        type=_COUNT,
        default=10,
    ),
    _Row(
        "--document-tokens",
        "Length of documents.",
        metavar="LENGTHS",
        default="1024",
    ),
    _Row(
        "--question-order",
        "At random, or document by document.",
        type=click.Choice(["mixed", "grouped"]),
        default="mixed",
    ),
    _Row(
        "--priorities",
        "Each request has one of these, drawn at random: the priority of lightserve and vLLM, of "
        "which lower ones go first. Default: nothing is said.",
        type=_Numbers(int, above=-1001, below=1001),
    ),
)

_WHEN = _options(
    "When it arrives",
    _Row(
        "--rate",
        "Open loop: mean arrivals per second. A trace that has times is stretched to it.",
        type=_POSITIVE,
        metavar="PER_S",
    ),
    _Row(
        "--arrivals",
        "Default: closed with --concurrency, as in the trace if that has times, else poisson.",
        type=click.Choice([kind.value for kind in ArrivalKind]),
    ),
    _Row(
        "--burstiness",
        "Coefficient of variation of gamma gaps: 1 is Poisson, 3 very bursty.",
        type=_AT_LEAST_0,
        default=1.0,
    ),
    _Row(
        "--time-scale",
        "Seconds that a second of the trace takes: 0.1 is ten times as fast.",
        type=_POSITIVE,
    ),
    _Row(
        "--concurrency",
        "Closed loop: this many clients, each of which waits for its answer.",
        type=_COUNT,
    ),
    _Row(
        "--think-s",
        "Pause of such a client after an answer.",
        type=_AT_LEAST_0,
        default=0.0,
    ),
    _Row(
        "--num-requests",
        "Requests in all. Default: 100, unless --duration-s is given or --documents say how many.",
        type=_COUNT,
    ),
    _Row(
        "--duration-s",
        "Arrivals end after this time.",
        type=_POSITIVE,
    ),
)

TRAFFIC_OPTIONS = _WHAT + _WHEN
"""What describes one traffic; --be takes the same names."""

CLASS_OPTIONS = _options(
    "Classes and targets",
    _Row(
        "--be-share",
        "Share of these requests, drawn at random, that is sent best effort; 1 is all.",
        type=_FiniteRange(0, 1),
        default=0.0,
    ),
    _Row(
        "--be",
        "Best-effort traffic of its own beside it: options of the two sections above "
        "without --, such as 'concurrency=8 prompt-tokens=512:1024'. A closed loop "
        "without an end goes on as long as the other traffic arrives.",
        metavar="'NAME=VALUE ...'",
    ),
    _Row(
        "--targets",
        "What a good request keeps: ttft, tpot, mtpot (largest gap), e2el, normalized "
        "(e2el per output token), as in ttft=400ms,mtpot=1.5s.",
        metavar="NAME=TIME,...",
    ),
    _Row(
        "--be-targets",
        "The same for best-effort requests. Without targets a request is good when it "
        "is completed.",
        metavar="NAME=TIME,...",
    ),
    _Row(
        "--be-body",
        "Merged into best-effort requests: how the server is told.",
        metavar="JSON",
        default='{"service_tier": "flex"}',
    ),
    _Row(
        "--send-targets",
        "Tell lightserve: ttft, tpot and mtpot of real-time requests as x-slo-*-ms headers; e2el "
        "as slo.completion_s of best-effort ones, and of real-time ones that have no other.",
        is_flag=True,
    ),
)

RUN_OPTIONS = _options(
    "Runs",
    _Row(
        "--rates",
        "Sweep: a run per rate.",
        type=_Numbers(float),
    ),
    _Row(
        "--concurrencies",
        "Sweep: a run per number of clients.",
        type=_Numbers(int),
    ),
    _Row(
        "--warmup",
        "Requests before the first run that are not counted.",
        type=click.IntRange(min=0),
        default=4,
    ),
    _Row(
        "--skip-first-s",
        "Count arrivals and tokens from here on only.",
        type=_AT_LEAST_0,
        default=0.0,
    ),
    _Row(
        "--skip-last-s",
        "Count until this long before arrivals end; 0 counts to the last answer's end.",
        type=_AT_LEAST_0,
        default=0.0,
    ),
    _Row(
        "--drain-s",
        "Time for requests in flight once arrivals have ended; what is left is unfinished.",
        type=_AT_LEAST_0,
        default=120.0,
    ),
    _Row(
        "--seed",
        "Of arrivals, lengths, classes.",
        type=click.IntRange(min=0),
        default=0,
    ),
    _Row(
        "--text-seed",
        "Of texts. Default: another one in every run, so that none finds its prompts in"
        " a prefix cache.",
        type=click.IntRange(min=0),
    ),
)

OUTPUT_OPTIONS = _options(
    "Output",
    _Row(
        "--label",
        "Name of the run in tables, plots and comparisons.",
    ),
    _Row(
        "--output",
        "Write the result as JSON.",
        type=click.Path(path_type=Path, dir_okay=False),
    ),
    _Row(
        "--save-requests",
        "With a row per request in it.",
        is_flag=True,
    ),
    _Row(
        "--plots",
        "Write PNGs into this directory: timeline, CDFs and, of several runs, "
        "attainment over rate.",
        type=click.Path(path_type=Path, file_okay=False),
    ),
    _Row(
        "--quiet",
        "One line per run (times are p50/p99), no tables, no progress bar.",
        is_flag=True,
    ),
    _Row(
        "--compare",
        "Run nothing: compare the result files given.",
        is_flag=True,
    ),
    _Row(
        "--schema",
        "Run nothing: print the JSON schema of results.",
        is_flag=True,
    ),
)

ALL_OPTIONS = [
    *SERVER_OPTIONS,
    *TRAFFIC_OPTIONS,
    *CLASS_OPTIONS,
    *RUN_OPTIONS,
    *OUTPUT_OPTIONS,
]
