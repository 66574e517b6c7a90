"""Settings of a run: traffic, targets and the server. Recorded in the result."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any

import msgspec

from lightserve.errors import ConfigError
from lightserve.types import SLO, largest_gap


class ArrivalKind(StrEnum):
    """How arrivals are spaced; all but `CLOSED` are open loops."""

    TRACE = "trace"
    POISSON = "poisson"
    GAMMA = "gamma"
    CONSTANT = "constant"
    CLOSED = "closed"


RT = "rt"
BE = "be"
CLASSES = (RT, BE)

_UNIT_MS = {"": 1.0, "ms": 1.0, "s": 1000.0}


class Targets(msgspec.Struct, frozen=True, omit_defaults=True):
    """Upper limits that a request has to keep, in ms; one that is None always holds."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    mtpot_ms: float | None = None
    e2el_ms: float | None = None
    normalized_ms: float | None = None
    """Normalized latency: ms per output token."""

    @classmethod
    def parse(cls, text: str) -> Targets:
        """Parse `ttft=400ms,mtpot=1.5s`; a number without a unit is in ms.

        The largest gap is `largest_gap`, as the server has it.

        Raises:
            ConfigError: an unknown name, or not a positive time.
        """
        limits: dict[str, float] = {}
        for part in filter(None, re.split(r"[,\s]+", text.strip())):
            match = re.fullmatch(r"(\w+)=([0-9.]+)(|ms|s)", part)
            name = "" if match is None else f"{match[1]}_ms"
            if match is None or name not in cls.__struct_fields__:
                names = ", ".join(field.removesuffix("_ms") for field in cls.__struct_fields__)
                raise ConfigError(f"not a target: {part!r}; targets are {names}, as in ttft=1.5s")
            limits[name] = float(match[2]) * _UNIT_MS[match[3]]
        if any(limit <= 0 for limit in limits.values()):
            raise ConfigError(f"targets are above 0: {text!r}")
        targets = cls(**limits)
        mtpot_ms = largest_gap(targets.tpot_ms, targets.mtpot_ms)
        return msgspec.structs.replace(targets, mtpot_ms=mtpot_ms)

    @classmethod
    def of(cls, slo: SLO) -> Targets:
        """Return what a row of a trace has."""
        e2el_ms = None if slo.completion_s is None else 1e3 * slo.completion_s
        mtpot_ms = largest_gap(slo.tpot_ms, slo.mtpot_ms)
        return cls(slo.ttft_ms, slo.tpot_ms, mtpot_ms, e2el_ms)

    def items(self) -> list[tuple[str, float]]:
        """Return the limits that are set, such as ("ttft_ms", 400.0)."""
        fields = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return [(name, limit) for name, limit in fields if limit is not None]


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """One source of requests: what they are, when they come, what is expected of them."""

    request_class: str = RT
    be_share: float = 0.0
    """Share of the requests, drawn at random, that is sent best effort."""
    trace: str | None = None
    first_row: int = 0
    length_scale: float = 1.0
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    prompt_tokens: str = "256"
    output_tokens: str = "128"
    documents: int | None = None
    questions: int = 10
    document_tokens: str = "1024"
    question_order: str = "mixed"
    images: str = "0"
    """A count and perhaps a size, see `workload.parse_images`."""
    arrivals: ArrivalKind
    rate: float | None = None
    time_scale: float | None = None
    burstiness: float = 1.0
    concurrency: int | None = None
    think_s: float = 0.0
    num_requests: int | None = None
    duration_s: float | None = None
    priorities: list[int] | None = None
    """Each request has one of them, drawn at random; None: nothing is said."""
    targets: Targets = Targets()
    be_targets: Targets = Targets()

    def targets_of(self, request_class: str) -> Targets:
        """Return the targets of one class of this traffic."""
        return self.be_targets if request_class == BE else self.targets


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go and what all of them have in common. The API key is not among it."""

    url: str
    model: str
    endpoint: str = "chat"
    """`chat` or `completions`."""
    body: dict[str, Any] = {}
    be_body: dict[str, Any] = {}
    """Merged into the bodies of best-effort requests."""
    force_lengths: bool = False
    includes_usage: bool = True
    sends_targets: bool = False
    timeout_s: float = 600.0
    """From the intended arrival to the end of the answer."""
