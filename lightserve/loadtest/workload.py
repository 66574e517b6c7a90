"""Requests and their times: arrivals, lengths, traces; all is decided before the first request.

A `Traffic` becomes a `Plan`: arrival, class, prompt and output length of each request. Lengths in
tokens are written as

    512                  always 512
    128:512              uniform, both ends included
    normal:512,64        mean and standard deviation
    lognormal:512,0.8    median, and standard deviation of the logarithm
    loguniform:64,4096   uniform in the logarithm, between two ends
    exponential:512      mean
"""

from __future__ import annotations

import base64
import functools
import math
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightserve.errors import ConfigError
from lightserve.loadtest.options import BE, ArrivalKind, Targets, Traffic

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def arrival_offsets(
    kind: ArrivalKind, *, rate_per_s: float, burstiness: float, count: int, rng: np.random.Generator
) -> FloatArray:
    """Return ascending offsets in seconds, [count].

    Args:
        kind: `POISSON`, `GAMMA` or `CONSTANT`.
        rate_per_s: mean number of arrivals per second.
        burstiness: coefficient of variation of gamma gaps: 1 is Poisson, 0 constant, 3 bursty.
        count: number of arrivals.
        rng: draws the gaps.
    """
    gap_s = 1.0 / rate_per_s
    if kind is ArrivalKind.POISSON:
        gaps = rng.exponential(gap_s, count)
    elif kind is ArrivalKind.GAMMA and burstiness > 0:
        shape = burstiness**-2
        gaps = rng.gamma(shape, gap_s / shape, count)
    else:
        return np.multiply(np.arange(count), gap_s, dtype=np.float64)
    offsets: FloatArray = np.cumsum(gaps)
    return offsets


def count_for(kind: ArrivalKind, *, rate_per_s: float, duration_s: float) -> int:
    """Return how many arrivals to draw so that all of `duration_s` is (nearly surely) covered."""
    mean = rate_per_s * duration_s
    return int(mean) + 1 if kind is ArrivalKind.CONSTANT else int(mean + 10 * mean**0.5 + 100)


def trace_offsets(
    times: FloatArray, *, time_scale: float | None, rate_per_s: float | None
) -> FloatArray:
    """Return a trace's own arrival times, rebased to 0 and stretched.

    With a rate the stretch makes it the mean rate; otherwise one second of the trace takes
    `time_scale` seconds.
    """
    offsets: FloatArray = times - times[0]
    if rate_per_s is None:
        stretch = 1.0 if time_scale is None else time_scale
    else:
        span_s = float(offsets[-1])
        stretch = (len(times) - 1) / rate_per_s / span_s if span_s else 1.0
    return np.multiply(offsets, stretch, dtype=np.float64)


_NUM_PARAMETERS = {
    "constant": 1,
    "uniform": 2,
    "normal": 2,
    "lognormal": 2,
    "loguniform": 2,
    "exponential": 1,
}


@dataclass(frozen=True)
class LengthDistribution:
    """A named distribution; `parse` makes one."""

    kind: str
    parameters: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> LengthDistribution:
        """Parse what the module's docstring lists. Raises ConfigError."""
        kind, _, rest = text.strip().rpartition(":")
        if not kind:
            kind, values = "constant", [rest]
        elif kind in _NUM_PARAMETERS:
            values = rest.split(",")
        else:
            kind, values = "uniform", [kind, rest]
        try:
            parameters = tuple(float(value) for value in values)
        except ValueError as error:
            raise ConfigError(f"not a length distribution: {text!r}") from error
        if len(parameters) != _NUM_PARAMETERS[kind]:
            raise ConfigError(f"{kind} takes {_NUM_PARAMETERS[kind]} numbers: {text!r}")
        if not all(math.isfinite(value) for value in parameters) or parameters[0] < 1:
            raise ConfigError(f"lengths start at 1 token: {text!r}")
        if kind in ("uniform", "loguniform") and parameters[1] < parameters[0]:
            raise ConfigError(f"the second end is below the first: {text!r}")
        if kind in ("normal", "lognormal") and parameters[1] < 0:
            raise ConfigError(f"a deviation is not negative: {text!r}")
        return cls(kind, parameters)

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        """Draw lengths, [count] int64, each at least 1."""
        a, b = (*self.parameters, 0.0)[:2]
        match self.kind:
            case "uniform":
                return rng.integers(round(a), round(b), size=count, endpoint=True)
            case "normal":
                lengths = rng.normal(a, b, count)
            case "lognormal":
                lengths = rng.lognormal(math.log(a), b, count)
            case "loguniform":
                lengths = np.exp(rng.uniform(math.log(a), math.log(b), count))
            case "exponential":
                lengths = rng.exponential(a, count)
            case _:
                lengths = np.full(count, a)
        return np.maximum(1, np.rint(lengths)).astype(np.int64)


TRACE_DIR = Path(__file__).resolve().parents[2] / "bench" / "traces"
"""In a checkout: its README says what they are."""
BLOCK_TOKENS = 512
_SUFFIX = ".csv.gz"


@dataclass(frozen=True)
class Trace:
    """Rows of a trace, in order."""

    prompt_tokens: IntArray
    output_tokens: IntArray
    times_s: FloatArray | None
    blocks: tuple[tuple[int, ...], ...] | None
    """Ids of each prompt's blocks of `BLOCK_TOKENS` tokens."""
    targets: tuple[Targets, ...] | None = None
    """Targets of each row; None: the trace has no columns of them."""

    def __len__(self) -> int:
        return len(self.prompt_tokens)


def trace_names() -> list[str]:
    """Return the traces that can be named without a path."""
    return sorted(path.name.removesuffix(_SUFFIX) for path in TRACE_DIR.glob("*" + _SUFFIX))


def load_trace(name_or_path: str, *, first_row: int = 0, num_rows: int | None = None) -> Trace:
    """Read rows of a trace. Raises ConfigError: no such file, or not a trace."""
    from lightserve.sim.traffic import read_trace  # noqa: PLC0415 - most runs need none of it

    path = Path(name_or_path)
    if not path.exists():
        path = TRACE_DIR / f"{name_or_path}{_SUFFIX}"
    if not path.exists():
        known = ", ".join(trace_names()) or "none"
        raise ConfigError(f"--trace {name_or_path}: no such file; traces here: {known}")
    rows = slice(first_row, None if num_rows is None else first_row + num_rows)
    trace = read_trace(path, flag="--trace")
    if not len(trace.prompt_tokens[rows]):
        raise ConfigError(f"--first-row {first_row}: {path} has {len(trace.prompt_tokens)} rows")
    ids = trace.block_ids
    return Trace(
        trace.prompt_tokens[rows],
        trace.output_tokens[rows],
        None if trace.arrival_s is None else trace.arrival_s[rows],
        None if ids is None else tuple(_block_ids(text) for text in ids[rows]),
        None if trace.slos is None else tuple(Targets.of(slo) for slo in trace.slos[rows]),
    )


def _block_ids(text: str) -> tuple[int, ...]:
    ids: list[int] = []
    for run in text.split():
        first, _, last = run.partition("-")
        ids.extend(range(int(first), int(last or first) + 1))
    return tuple(ids)


_CLOSED_DRAW = 20_000
"""Requests that an unbounded closed loop has before it starts over with other texts."""
_DOCUMENT_KEY = 1 << 40
"""Added to document numbers, so that they are not taken for block ids."""


def ends_by_itself(traffic: Traffic) -> bool:
    """Whether it needs no end from outside."""
    return traffic.num_requests is not None or traffic.duration_s is not None


_IMAGES = re.compile(r"(\d{1,2})(?::(\d{1,4})x(\d{1,4}))?")
_IMAGE_SIZE = (640, 480)


class ImagesPerRequest(NamedTuple):
    """Pictures of each request."""

    num: int
    width: int
    height: int


def parse_images(text: str) -> ImagesPerRequest:
    """Parse `2` or `2:1024x768`, a count and a size in pixels. Raises ConfigError."""
    if (match := _IMAGES.fullmatch(text.strip())) is None or 0 in map(int, match.groups("1")[1:]):
        raise ConfigError(f"--images must be a count and perhaps a size, as in 2:640x480: {text!r}")
    width, height = (int(match[2]), int(match[3])) if match[2] else _IMAGE_SIZE
    return ImagesPerRequest(int(match[1]), width, height)


@dataclass(frozen=True)
class Plan:
    """All requests of a run, known before the first one is sent."""

    traffic: Traffic
    offsets_s: FloatArray | None
    """Intended arrivals, ascending; None in a closed loop."""
    segments: tuple[tuple[Segment, ...], ...]
    """Each prompt, as runs of tokens that are its own or shared."""
    output_tokens: IntArray
    is_be: npt.NDArray[np.bool_]
    priorities: IntArray | None = None
    """None: requests say nothing of theirs."""
    targets: tuple[Targets, ...] | None = None
    """Targets of each request; None: those of its class."""

    @functools.cached_property
    def images(self) -> ImagesPerRequest:
        """Pictures of each request."""
        return parse_images(self.traffic.images)

    def __len__(self) -> int:
        return len(self.segments)


def make_plan(traffic: Traffic, rng: np.random.Generator) -> Plan:
    """Draw one. Raises ConfigError: an unreadable trace, or options that contradict it."""
    if traffic.trace is not None and traffic.documents is not None:
        raise ConfigError("--documents cannot be combined with --trace")
    if traffic.documents is not None:
        segments, outputs = _documents(traffic, traffic.documents, rng)
        trace = None
    elif traffic.trace is not None:
        trace = load_trace(
            traffic.trace, first_row=traffic.first_row, num_rows=traffic.num_requests
        )
        segments, outputs = _from_trace(traffic, trace)
    else:
        segments, outputs = _drawn(traffic, _wanted(traffic), rng)
        trace = None
    offsets = _offsets(traffic, trace, len(segments), rng)
    if offsets is not None and traffic.duration_s is not None:
        count = int(np.searchsorted(offsets, traffic.duration_s))
        if count == 0:
            raise ConfigError(f"no arrival within {traffic.duration_s:g} s")
        offsets, segments, outputs = offsets[:count], segments[:count], outputs[:count]
    is_be = rng.random(len(segments)) < traffic.be_share
    if traffic.request_class == BE:
        is_be[:] = True
    priorities = rng.choice(traffic.priorities, len(segments)) if traffic.priorities else None
    own_targets = None if trace is None else trace.targets
    return Plan(traffic, offsets, tuple(segments), outputs, is_be, priorities, own_targets)


def _wanted(traffic: Traffic) -> int:
    if traffic.num_requests is not None:
        return traffic.num_requests
    if traffic.arrivals is ArrivalKind.CLOSED:
        return _CLOSED_DRAW
    assert traffic.rate is not None and traffic.duration_s is not None, "checked by the cli"
    return count_for(traffic.arrivals, rate_per_s=traffic.rate, duration_s=traffic.duration_s)


def _offsets(
    traffic: Traffic, trace: Trace | None, count: int, rng: np.random.Generator
) -> FloatArray | None:
    if traffic.arrivals is ArrivalKind.CLOSED:
        return None
    if traffic.arrivals is ArrivalKind.TRACE:
        if trace is None or trace.times_s is None:
            raise ConfigError("--arrivals trace needs a --trace with times")
        return trace_offsets(trace.times_s, time_scale=traffic.time_scale, rate_per_s=traffic.rate)
    assert traffic.rate is not None, "checked by the cli"
    return arrival_offsets(
        traffic.arrivals,
        rate_per_s=traffic.rate,
        burstiness=traffic.burstiness,
        count=count,
        rng=rng,
    )


def _fit(traffic: Traffic, lengths: IntArray, limit: int | None) -> IntArray:
    scaled: IntArray = np.maximum(1, np.rint(lengths * traffic.length_scale)).astype(np.int64)
    return scaled if limit is None else np.minimum(scaled, limit, dtype=np.int64)


def _drawn(
    traffic: Traffic, count: int, rng: np.random.Generator
) -> tuple[list[tuple[Segment, ...]], IntArray]:
    prompt, output = (
        _fit(traffic, LengthDistribution.parse(text).draw(rng, count), limit)
        for text, limit in (
            (traffic.prompt_tokens, traffic.max_prompt_tokens),
            (traffic.output_tokens, traffic.max_output_tokens),
        )
    )
    return [(Segment(UNIQUE, int(tokens)),) for tokens in prompt], output


def _documents(
    traffic: Traffic, num_documents: int, rng: np.random.Generator
) -> tuple[list[tuple[Segment, ...]], IntArray]:
    """Every question about every document: `document + question`, the document shared."""
    questions, outputs = _drawn(traffic, num_documents * traffic.questions, rng)
    lengths = _fit(
        traffic, LengthDistribution.parse(traffic.document_tokens).draw(rng, num_documents), None
    )
    order = np.repeat(np.arange(num_documents), traffic.questions)
    if traffic.question_order == "mixed":
        rng.shuffle(order)
    rows = [
        (Segment(_DOCUMENT_KEY + int(number), int(lengths[number])), *question)
        for number, question in zip(order, questions, strict=True)
    ]
    return rows[: traffic.num_requests], outputs[: traffic.num_requests]


def _from_trace(traffic: Traffic, trace: Trace) -> tuple[list[tuple[Segment, ...]], IntArray]:
    prompt = _fit(traffic, trace.prompt_tokens, traffic.max_prompt_tokens)
    output = _fit(traffic, trace.output_tokens, traffic.max_output_tokens)
    if trace.blocks is None:
        return [(Segment(UNIQUE, int(tokens)),) for tokens in prompt], output
    block_tokens = max(1, round(BLOCK_TOKENS * traffic.length_scale))
    return [
        _blocks(ids, int(tokens), block_tokens)
        for ids, tokens in zip(trace.blocks, prompt, strict=True)
    ], output


def _blocks(ids: tuple[int, ...], num_tokens: int, block_tokens: int) -> tuple[Segment, ...]:
    """Return the blocks that a prompt of `num_tokens` has; the last takes what is left."""
    segments: list[Segment] = []
    for place, block_id in enumerate(ids):
        left = num_tokens - place * block_tokens
        if left <= 0:
            break
        is_last = place == len(ids) - 1
        segments.append(Segment(block_id, left if is_last else min(left, block_tokens)))
    return tuple(segments)


# ----------------------------------------------------------------------
# Texts of a wanted number of tokens, without knowing the tokenizer.
#
# How many tokens words cost is measured through `usage.prompt_tokens`: one short request per word
# (the word repeated, one token of output), and one more for what chat template and BOS add. A
# tokenizer that splits at spaces before it merges, as nearly all do, then gives a text of these
# words the sum of their costs; the result reports how far prompts were off.
#
# All texts are cut from one long tape of random words. A prompt of its own starts at a place of the
# tape that no other has; what is shared, a document or a block of a trace, starts at the place that
# its key is mapped to.


_WORDS = (
    "the of and to in is that it was for on are as with his they "
    "at be this have from or one had by word but not what all were we"
)
WORDS = tuple(_WORDS.split())
"""Common and short: one token each for most tokenizers."""

_SHORT, _LONG = 8, 40
_GUESS_TOKENS_PER_WORD = 1.0


@dataclass(frozen=True)
class Calibration:
    """Costs in tokens."""

    word_tokens: tuple[float, ...]
    """Tokens of each of `WORDS`, with the space before it."""
    overhead_tokens: float
    """Tokens of every prompt besides its words."""
    is_measured: bool


UNCALIBRATED = Calibration((_GUESS_TOKENS_PER_WORD,) * len(WORDS), 0.0, is_measured=False)
"""One token per word: what is left where a server reports no usage."""


async def calibrate(count_tokens: Callable[[str], Awaitable[int | None]]) -> Calibration:
    """Measure; `count_tokens` returns the prompt tokens of a text, or None where unknown."""
    short, *longs = [
        await count_tokens(" ".join([word] * count))
        for word, count in [(WORDS[0], _SHORT), *((word, _LONG) for word in WORDS)]
    ]
    if short is None or any(count is None for count in longs):
        return UNCALIBRATED
    counts = [count for count in longs if count is not None]
    first = (counts[0] - short) / (_LONG - _SHORT)
    overhead = max(0.0, short - first * _SHORT)
    # A word that a tokenizer drops would make texts endless.
    costs = tuple(max(0.05, (count - overhead) / _LONG) for count in counts)
    return Calibration(costs, overhead, is_measured=True)


UNIQUE = -1
"""The key of a segment that no other prompt has."""
_TAPE_WORDS = 1 << 18
_KEY_STEP = 0x9E3779B1
"""Odd, so that keys below the length of the tape start at different places."""


class Segment(NamedTuple):
    """A run of tokens of a prompt."""

    key: int
    """Equal keys are equal texts (up to the shorter one's length); or `UNIQUE`."""
    num_tokens: int


class PromptMaker:
    """Makes texts; two with one seed and calibration make the same ones."""

    def __init__(self, calibration: Calibration, seed: int) -> None:
        rng = np.random.default_rng(seed)
        order = rng.integers(len(WORDS), size=_TAPE_WORDS)
        word_chars = np.array([len(word) + 1 for word in WORDS])
        self._calibration = calibration
        # Twice the same words: a text may start near the end.
        order = np.concatenate((order, order))
        self._text = " ".join(WORDS[number] for number in order) + " "
        self._char_ends = np.cumsum(word_chars[order])
        self._token_ends = np.cumsum(np.asarray(calibration.word_tokens)[order])
        self._starts = rng.permutation(_TAPE_WORDS)
        self._num_unique = 0
        self._shift = int(rng.integers(_TAPE_WORDS))
        self._rng = rng

    @property
    def max_tokens(self) -> int:
        """Tokens of the whole tape: the longest text cut in one piece."""
        return int(self._token_ends[_TAPE_WORDS - 1])

    def text(self, segments: Iterable[Segment]) -> str:
        """Return a prompt; the calibrated overhead (template, BOS) counts towards its length."""
        overhead = self._calibration.overhead_tokens
        parts = []
        for segment in segments:
            wanted = segment.num_tokens - overhead
            overhead = max(0.0, -wanted)
            start = self._start(segment.key)
            while wanted > self.max_tokens:  # round the tape
                parts.append(self._cut(start, self.max_tokens))
                wanted -= self.max_tokens
            parts.append(self._cut(start, wanted))
        return " ".join(part for part in parts if part) or WORDS[0]

    def picture(self, width: int, height: int) -> str:
        """Return a new picture of random coloured spots, a PNG, as a data URL."""
        from PIL import Image  # noqa: PLC0415 - most runs need none of it

        spots = Image.fromarray(self._rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        file = BytesIO()
        whole = spots.resize((width, height), Image.Resampling.BILINEAR)
        whole.save(file, "PNG", compress_level=1)
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"

    def _start(self, key: int) -> int:
        if key != UNIQUE:
            return (key * _KEY_STEP + self._shift) % _TAPE_WORDS
        self._num_unique += 1
        return int(self._starts[self._num_unique % _TAPE_WORDS])

    def _cut(self, start: int, num_tokens: float) -> str:
        before_tokens, before_chars = (
            (0.0, 0)
            if start == 0
            else (float(self._token_ends[start - 1]), int(self._char_ends[start - 1]))
        )
        wanted = before_tokens + num_tokens
        end = int(np.searchsorted(self._token_ends, wanted, side="right"))
        # `end` words stay below; one more may be nearer.
        if end < len(self._token_ends) and self._token_ends[end] - wanted < wanted - (
            float(self._token_ends[end - 1]) if end else 0.0
        ):
            end += 1
        return self._text[before_chars : int(self._char_ends[end - 1])].rstrip() if end else ""
