"""Requests of one class for the hybrid simulation: when they come, how long they are, what of.

    poisson:RATE with lengths    these are drawn, from a range or a trace's rows
    closed:N     with lengths    likewise; each one that ends is replaced at once
    batch:N      with lengths    likewise; when all N have ended, the next N come (BROS, section VI)
    FILE                         a trace's own rows, at its own times (or all at once)

Rows of a trace may have targets of their own (columns ttft_ms, tpot_ms, mtpot_ms, completion_s; an
empty field sets none), which go with them. Prompts are random tokens, so that none begins like
another, except where a trace says by block ids which ones do (mooncake's `block_ids_512`).
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import itertools
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from lightserve.errors import ConfigError
from lightserve.messages.common import Int32Array, TokenSegment, pack_int32
from lightserve.messages.frontend_router import Submit
from lightserve.messages.images import Image
from lightserve.sim.images import draw_images, images_of_rows, parse_images
from lightserve.sim.worker import EOS_TOKEN_ID
from lightserve.types import NO_SLO, SLO, RequestClass, RequestId, SamplingParams, largest_gap

# Request lengths for the simulator: the papers' synthetic distributions and trace files.
#
# A trace is a CSV, perhaps gzipped, with a header; the columns used are `prompt_tokens`,
# `output_tokens` and, where present, `t` (seconds), `client`, `block_ids_512` (what prompts have in
# common) and targets.

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_GZIP = b"\x1f\x8b"
"""How such files begin, whatever they are called."""

DISTRIBUTIONS = {
    "dist1": ((32, 4096), (2048, 4096)),
    "dist2": ((3000, 5000), (3000, 5000)),
    "dist3": ((2048, 4096), (32, 4096)),
}
"""Past-Future's Distribution-1/2/3: uniform (prompt, output) lengths, both ends included."""

DISTRIBUTION_MAX_TOKENS = 4096


@dataclass(frozen=True)
class Workload:
    """Rows of requests, in order."""

    prompt_tokens: IntArray
    output_tokens: IntArray
    max_tokens: IntArray
    """Declared limit of the output, at which it is cut."""
    clients: tuple[str, ...]
    """Prediction keys; empty strings where a trace has none."""
    arrival_s: FloatArray
    """Ascending; all 0: they wait from the start."""

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def rows(self, start: int, stop: int) -> Workload:
        """Return a stretch of the rows."""
        return Workload(
            self.prompt_tokens[start:stop],
            self.output_tokens[start:stop],
            self.max_tokens[start:stop],
            self.clients[start:stop],
            self.arrival_s[start:stop],
        )

    def arriving(self, arrival_s: FloatArray) -> Workload:
        """Return the same rows with other times of arrival."""
        return dataclasses.replace(self, arrival_s=arrival_s)


def load_workload(
    spec: str,
    *,
    num_requests: int,
    rng: np.random.Generator,
    cut_outputs: bool = True,
    arrivals: str = "queued",
) -> Workload:
    """Return the rows of distributions and trace files, joined by + for a drift.

    Args:
        spec: `dist1`, `dist2`, `dist3`, `uniform:P1-P2:O1-O2` (prompts and outputs of P1 to P2 and
            O1 to O2 tokens) or a path; each contributes `num_requests` rows (a file at most all
            it has).
        num_requests: rows per part.
        rng: draws the distributions, then Poisson arrivals; files keep their order.
        cut_outputs: whether outputs end at `max_tokens` (the paper's artifact does not cut).
        arrivals: `queued` (all at 0), `trace` (the file's own times) or `poisson:RATE` (per
            second).

    Raises:
        ConfigError: an unknown name, or a file that is not such a trace.
    """
    parts = [_load_part(name, num_requests, rng) for name in spec.split("+")]
    times = _arrivals(
        arrivals, [part.arrival_s for part in parts], rng, sum(len(part.prompt) for part in parts)
    )
    workload = Workload(
        prompt_tokens=np.concatenate([part.prompt for part in parts]),
        output_tokens=np.concatenate([part.output for part in parts]),
        max_tokens=np.concatenate([part.limits for part in parts]),
        clients=tuple(client for part in parts for client in part.clients),
        arrival_s=times,
    )
    if not cut_outputs:
        return workload
    output = np.minimum(workload.output_tokens, workload.max_tokens)
    return dataclasses.replace(workload, output_tokens=output)


class _Part(NamedTuple):
    prompt: IntArray
    output: IntArray
    limits: IntArray
    clients: list[str]
    arrival_s: FloatArray | None


def _load_part(name: str, num_requests: int, rng: np.random.Generator) -> _Part:
    uniform = re.fullmatch(r"uniform:(\d+)-(\d+):(\d+)-(\d+)", name)
    if name in DISTRIBUTIONS or uniform:
        if uniform:
            p1, p2, o1, o2 = map(int, uniform.groups())
            if not (1 <= p1 <= p2 and 1 <= o1 <= o2):
                raise ConfigError(f"--workload: {name} needs ranges 1 <= low <= high")
            prompt_range, output_range, limit = (p1, p2), (o1, o2), o2
        else:
            (prompt_range, output_range), limit = DISTRIBUTIONS[name], DISTRIBUTION_MAX_TOKENS
        prompt = rng.integers(*prompt_range, size=num_requests, endpoint=True)
        output = rng.integers(*output_range, size=num_requests, endpoint=True)
        limits = np.full(num_requests, limit, dtype=np.int64)
        return _Part(prompt, output, limits, [""] * num_requests, None)
    trace = read_trace(Path(name))
    prompt, output, arrival_s = trace.prompt_tokens, trace.output_tokens, trace.arrival_s
    # The limit that a careful client of this service would set: it never cuts an answer.
    limits = np.full(len(prompt), next_power_of_two(int(output.max())))
    keep = slice(num_requests)
    times = None if arrival_s is None else arrival_s[keep] - arrival_s[0]
    return _Part(prompt[keep], output[keep], limits[keep], trace.clients[keep], times)


def next_power_of_two(number: int) -> int:
    """Return the least power of two that is not below."""
    return 1 << (number - 1).bit_length()


def _arrivals(
    spec: str, parts: Sequence[FloatArray | None], rng: np.random.Generator, num_rows: int
) -> FloatArray:
    """Return times of arrival, float64 [num_rows]. Raises ConfigError."""
    if spec == "queued":
        return np.zeros(num_rows)
    if spec == "trace":
        if len(parts) != 1 or parts[0] is None:
            raise ConfigError("--arrivals trace needs one --workload file with a column t")
        return parts[0]
    poisson = re.fullmatch(r"poisson:(\d+(\.\d+)?)", spec)
    if poisson is None or float(poisson[1]) == 0.0:
        raise ConfigError(
            "--arrivals must be queued, trace, poisson:RATE or closed:CLIENTS, above 0,"
            f" got {spec!r}"
        )
    return rng.exponential(1.0 / float(poisson[1]), num_rows).cumsum()


class Trace(NamedTuple):
    """The columns of a trace."""

    prompt_tokens: IntArray
    output_tokens: IntArray
    clients: list[str]
    """Empty strings where there are none."""
    arrival_s: FloatArray | None
    block_ids: list[str] | None
    """Ids of the prompts' blocks of 512 tokens: numbers and ranges a-b, separated by blanks."""
    slos: list[SLO] | None = None
    """Targets of each row; None: it has no such columns."""
    images: list[tuple[int, ...]] | None = None
    """Tokens of each image of the prompts; None: there is no such column."""


_SLO_COLUMNS = SLO.__struct_fields__


def read_trace(path: Path, *, flag: str = "--workload") -> Trace:
    """Read a trace; `flag` is the option to be named where it is not one.

    Raises:
        ConfigError: no such file, or a column is missing or not a positive number, or a time is
            not finite.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data.startswith(_GZIP) else data).decode("ascii")
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
        prompt, output = (
            np.array([int(row[column]) for row in rows], dtype=np.int64)
            for column in ("prompt_tokens", "output_tokens")
        )
        arrival_s = np.array([float(row["t"]) for row in rows]) if "t" in rows[0] else None
        block_ids = [row["block_ids_512"] for row in rows] if "block_ids_512" in rows[0] else None
        images = images_of_rows(rows)
        slos = (
            [_slo_of(row) for row in rows] if not rows[0].keys().isdisjoint(_SLO_COLUMNS) else None
        )
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ConfigError(f"{flag}: {path} cannot be read: {error}") from error
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{flag}: {path} is not a trace: {error}") from error
    if prompt.min() < 1 or output.min() < 1:
        raise ConfigError(f"{flag}: {path} needs lengths >= 1")
    if arrival_s is not None:
        wrong = np.flatnonzero(~np.isfinite(arrival_s))
        if len(wrong):
            row = int(wrong[0])
            raise ConfigError(
                f"{flag}: {path}, row {row + 1}: column t must be a finite number of seconds,"
                f" got {rows[row]['t']!r}"
            )
        if (np.diff(arrival_s) < 0).any():
            raise ConfigError(f"{flag}: {path} needs times in order")
    clients = [row.get("client") or "" for row in rows]
    for slo in slos or ():
        if any(target is not None and not 0 < target < math.inf for target in _fields(slo)):
            raise ConfigError(f"{flag}: {path} needs targets above 0, or none")
        if slo.completion_s is not None and _fields(slo).count(None) < 3:
            raise ConfigError(f"{flag}: {path}: a row has completion_s and another target")
    return Trace(prompt, output, clients, arrival_s, block_ids, slos, images)


def _slo_of(row: Mapping[str, str]) -> SLO:
    slo = SLO(*(float(text) if (text := row.get(name)) else None for name in _SLO_COLUMNS))
    return msgspec.structs.replace(slo, mtpot_ms=largest_gap(slo.tpot_ms, slo.mtpot_ms))


def _fields(slo: SLO) -> list[float | None]:
    return [getattr(slo, name) for name in _SLO_COLUMNS]


BLOCK_TOKENS = 512
_TOKENS = (EOS_TOKEN_ID + 1, 32_000)
"""Token ids of prompts are drawn from this range."""


class Job(NamedTuple):
    """A request that a client will send."""

    prompt_token_ids: Int32Array
    num_output_tokens: int
    """Length of the output, EOS included; hidden from the router."""
    max_tokens: int
    """Declared limit of the output."""
    client: str = ""
    slo: SLO | None = None
    """Targets of its own; None: those of its class."""
    images: tuple[Image, ...] = ()

    def submit(self, number: int, request_class: RequestClass, slo: SLO = NO_SLO) -> Submit:
        """Return the message; its seed tells the simulated worker the true length.

        `slo` is what its class has.
        """
        return Submit(
            request_id=RequestId(number),
            prompt=[TokenSegment(token_ids=pack_int32(self.prompt_token_ids))],
            max_tokens=self.max_tokens,
            eos_token_ids=[EOS_TOKEN_ID],
            sampling=SamplingParams(seed=len(self.prompt_token_ids) + self.num_output_tokens),
            request_class=request_class,
            prediction_key=self.client,
            slo=slo if self.slo is None else self.slo,
            age_s=0.0,
            images=self.images,
        )


class Drawn(NamedTuple):
    """Lengths of a request, and its targets if it has any of its own."""

    num_prompt_tokens: int
    num_output_tokens: int
    slo: SLO | None = None
    images: tuple[int, ...] = ()
    """Tokens of each image of the prompt."""


class Lengths(Protocol):
    """Where the lengths of requests without a trace of their own are drawn from."""

    @property
    def max_prompt_tokens(self) -> int:
        """No prompt is longer."""

    @property
    def max_output_tokens(self) -> int:
        """No output is longer."""

    def draw(self, rng: np.random.Generator) -> Drawn:
        """Return those of a request."""


@dataclass(frozen=True)
class UniformLengths:
    """Ranges, both ends included."""

    prompt: tuple[int, int]
    output: tuple[int, int]

    @property
    def max_prompt_tokens(self) -> int:
        """See `Lengths`."""
        return self.prompt[1]

    @property
    def max_output_tokens(self) -> int:
        """See `Lengths`."""
        return self.output[1]

    def draw(self, rng: np.random.Generator) -> Drawn:
        """See `Lengths`."""
        prompt = rng.integers(*self.prompt, endpoint=True)
        return Drawn(int(prompt), int(rng.integers(*self.output, endpoint=True)))


class TraceLengths:
    """Rows of a trace, drawn with replacement."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.max_prompt_tokens = int(trace.prompt_tokens.max())
        self.max_output_tokens = int(trace.output_tokens.max())

    def draw(self, rng: np.random.Generator) -> Drawn:
        """See `Lengths`."""
        trace = self._trace
        row = int(rng.integers(len(trace.prompt_tokens)))
        slo = None if trace.slos is None else trace.slos[row]
        images = () if trace.images is None else trace.images[row]
        return Drawn(int(trace.prompt_tokens[row]), int(trace.output_tokens[row]), slo, images)


def parse_lengths(spec: str, *, flag: str) -> Lengths:
    """Return the lengths of `uniform:P1-P2,O1-O2` or of a trace file. Raises ConfigError."""
    if not spec.startswith("uniform:"):
        return TraceLengths(read_trace(Path(spec), flag=flag))
    uniform = re.fullmatch(r"uniform:(\d+)-(\d+),(\d+)-(\d+)", spec)
    if uniform is not None:
        p1, p2, o1, o2 = map(int, uniform.groups())
        if 1 <= p1 <= p2 and 1 <= o1 <= o2:
            return UniformLengths((p1, p2), (o1, o2))
    raise ConfigError(
        f"{flag} must be uniform:P1-P2,O1-O2 with 1 <= low <= high, or a trace file, got {spec!r}"
    )


class Traffic(Protocol):
    """The requests of one class, one after the other."""

    @property
    def max_prompt_tokens(self) -> int:
        """No prompt is longer."""

    @property
    def max_tokens(self) -> int:
        """No request declares more."""

    @property
    def num_clients(self) -> int | None:
        """Clients of a closed loop or a batch; None: requests come at times of their own."""

    @property
    def is_batch(self) -> bool:
        """Whether clients send again when all of them have their answers, not each for itself."""

    def jobs(self, rng: np.random.Generator) -> Iterator[tuple[float, Job]]:
        """Yield times (ascending; 0 in a closed loop) and requests, perhaps without end."""


class DrawnTraffic:
    """Lengths are drawn; requests come at random times, in a closed loop, or batch after batch."""

    def __init__(
        self,
        lengths: Lengths,
        *,
        max_tokens: int | None,
        rate_rps: float | None = None,
        num_clients: int | None = None,
        is_batch: bool = False,
        images: tuple[int, ...] = (),
    ) -> None:
        """Exactly one of `rate_rps` (Poisson) and `num_clients` is given.

        `max_tokens` is declared by all; None: a limit that cuts nothing. Outputs end there. Images
        of `images` tokens each join every prompt.
        """
        assert (rate_rps is None) != (num_clients is None)
        self.num_clients = num_clients
        self.is_batch = is_batch
        self.max_prompt_tokens = lengths.max_prompt_tokens + sum(images)
        self._images = images
        self.max_tokens = max_tokens or next_power_of_two(lengths.max_output_tokens)
        self._lengths = lengths
        self._rate_rps = rate_rps

    def jobs(self, rng: np.random.Generator) -> Iterator[tuple[float, Job]]:
        """See `Traffic`."""
        time_s = 0.0
        while True:
            if self._rate_rps is not None:
                time_s += rng.exponential(1.0 / self._rate_rps)
            num_prompt, num_output, slo, images = self._lengths.draw(rng)
            num_prompt += sum(self._images)
            prompt = rng.integers(*_TOKENS, size=num_prompt, dtype=np.int32)
            num_output = min(num_output, self.max_tokens)
            drawn = draw_images((*self._images, *images), rng)
            yield time_s, Job(prompt, num_output, self.max_tokens, slo=slo, images=drawn)


class TraceTraffic:
    """The rows of a trace, once."""

    num_clients = None
    is_batch = False

    def __init__(self, trace: Trace, *, max_tokens: int | None) -> None:
        """See `DrawnTraffic`; `max_tokens` None: a limit that cuts nothing."""
        self._trace = trace
        self.max_prompt_tokens = int(trace.prompt_tokens.max())
        self.max_tokens = max_tokens or next_power_of_two(int(trace.output_tokens.max()))

    def jobs(self, rng: np.random.Generator) -> Iterator[tuple[float, Job]]:
        """See `Traffic`."""
        trace = self._trace
        blocks: dict[int, Int32Array] = {}
        times = np.zeros(len(trace.clients)) if trace.arrival_s is None else trace.arrival_s
        for row, time_s in enumerate((times - times[0]).tolist()):
            num_prompt = int(trace.prompt_tokens[row])
            prompt = rng.integers(*_TOKENS, size=num_prompt, dtype=np.int32)
            if trace.block_ids is not None:
                for number, block_id in enumerate(parse_block_ids(trace.block_ids[row])):
                    if block_id not in blocks:
                        blocks[block_id] = rng.integers(*_TOKENS, size=BLOCK_TOKENS, dtype=np.int32)
                    place = prompt[number * BLOCK_TOKENS :][:BLOCK_TOKENS]
                    place[:] = blocks[block_id][: len(place)]
            output = min(int(trace.output_tokens[row]), self.max_tokens)
            slo = None if trace.slos is None else trace.slos[row]
            images = draw_images(() if trace.images is None else trace.images[row], rng)
            yield time_s, Job(prompt, output, self.max_tokens, trace.clients[row], slo, images)


def parse_block_ids(text: str) -> list[int]:
    """Return the ids of numbers and ranges a-b, separated by blanks."""
    bounds = ([int(bound) for bound in part.split("-")] for part in text.split())
    return list(itertools.chain.from_iterable(range(b[0], b[-1] + 1) for b in bounds))


def parse_traffic(
    spec: str,
    lengths: str | None,
    *,
    request_class: RequestClass,
    max_tokens: int | None,
    images: str = "0",
) -> Traffic:
    """Return the traffic of `--rt SPEC --rt-lengths LENGTHS`, or of the same options of `--be`.

    `images`: of each request, as in `parse_images`.

    Raises:
        ConfigError: a wrong or a missing option, an unreadable file.
    """
    flag, what = f"--{request_class}", "poisson:RATE (per second), closed:N or batch:N"
    sizes = parse_images(images, flag=f"{flag}-images")
    match = re.fullmatch(r"(poisson):(\d+(?:\.\d+)?)|(closed|batch):(\d+)", spec)
    if match is None and not re.match(r"(poisson|closed|batch):", spec):
        if lengths is not None:
            raise ConfigError(f"{flag}-lengths needs {flag} {what}: a trace has its own")
        if sizes:
            raise ConfigError(f"{flag}-images needs {flag} {what}: a trace has its own column")
        trace = read_trace(Path(spec), flag=flag)
        return TraceTraffic(trace, max_tokens=max_tokens)
    rate = float(match[2] or 0) if match else 0.0
    num_clients = int(match[4] or 0) if match else 0
    if not (rate or num_clients):
        raise ConfigError(f"{flag} must be {what}, above 0, or a trace file, got {spec!r}")
    if lengths is None:
        raise ConfigError(f"{flag} {spec} needs {flag}-lengths")
    drawn = parse_lengths(lengths, flag=f"{flag}-lengths")
    if (
        max_tokens is None
        and isinstance(drawn, UniformLengths)
        and request_class is RequestClass.BE
    ):
        max_tokens = drawn.max_output_tokens
    return DrawnTraffic(
        drawn,
        max_tokens=max_tokens,
        rate_rps=rate or None,
        num_clients=num_clients or None,
        is_batch=spec.startswith("batch:"),
        images=sizes,
    )
