"""Servers beside each other, over HTTP: rounds in turns, other prompts in each.

    python -m bench.engine.compare lightserve=http://127.0.0.1:8000 vllm=http://127.0.0.1:8001
        [--rounds 5] [--rate 2.4] [--only single,prompt,offline,poisson] [-- --model NAME ...]

Whatever is OpenAI-compatible and runs already is measured by `lightserve bench`, one server at a
time, the others idle, each round in another order. No prompt comes twice, so that no prefix cache
helps. What follows `--` goes to `lightserve bench` (a model's name, a key). Ratios to the first
server are taken within each round: their median and both ends are printed, and how many cores were
busy just before each measurement, when no server had anything to do. Exit code 1 if any request
failed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from lightserve.loadtest import result
from lightserve.loadtest.result import ClassSummary

QUIET_S = 0.5
"""Before each measurement the machine is watched for so long."""


class Load(NamedTuple):
    """One kind of traffic, and what is read off it."""

    flags: tuple[str, ...]
    read: dict[str, Callable[[ClassSummary], float | None]]


def quantile(field: str, name: str) -> Callable[[ClassSummary], float | None]:
    """Return what reads `name` (p50, p99) of a spread."""
    return lambda summary: getattr(getattr(summary, field), name)


def loads(rate: float, num_requests: int) -> dict[str, Load]:
    """Return all loads by name."""
    lengths = ("--prompt-tokens", "32:512", "--output-tokens", "16:128")
    many = ("--num-requests", str(num_requests), *lengths)
    alone = ("--concurrency", "1", "--num-requests")
    first = {"TTFT p50, ms": quantile("ttft_ms", "p50")}
    speed = {"output tokens/s": lambda summary: summary.output_tokens_per_s}
    return {
        "single": Load(
            (*alone, "3", "--prompt-tokens", "32", "--output-tokens", "128"),
            {"ms per token": quantile("tpot_ms", "p50")},
        ),
        **{
            f"prompt of {size}": Load(
                (*alone, "3", "--prompt-tokens", str(size), "--output-tokens", "2"), first
            )
            for size in (128, 512, 2048)
        },
        "offline": Load(("--concurrency", str(num_requests), *many), speed),
        "poisson": Load(
            ("--rate", str(rate), *many),
            {
                **first,
                "TTFT p99, ms": quantile("ttft_ms", "p99"),
                "TPOT p50, ms": quantile("tpot_ms", "p50"),
                "TPOT p99, ms": quantile("tpot_ms", "p99"),
            },
        ),
    }


def measure(url: str, load: Load, extra: Sequence[str]) -> tuple[dict[str, float], int]:
    """Return the figures of one run, and how many of its requests failed."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run.json"
        command = [sys.executable, "-m", "lightserve", "bench", "--url", url, "--force-lengths"]
        options = ["--warmup", "0", "--output", str(path)]
        done = subprocess.run(
            [*command, *options, *load.flags, *extra], check=False, capture_output=True, text=True
        )
        if not path.exists():
            raise SystemExit(f"lightserve bench failed at {url}: {done.stderr.strip()[-500:]}")
        (run,) = result.load(path)
    summary = run.classes["rt"]
    figures = {name: value for name, read in load.read.items() if (value := read(summary))}
    return figures, summary.num_failed


class Figures(NamedTuple):
    """One figure of one load, by server: a value for each round."""

    load: str
    name: str
    values: dict[str, list[float]]


def table(figures: Sequence[Figures]) -> str:
    """Return Markdown: medians, and the ratio to the first server within each round."""
    lines = ["| load | figure | server | median | to the first | ends |", "|" + " --- |" * 6]
    for load, name, values in figures:
        first = next(iter(values.values()))
        for server, own in values.items():
            ratios = [mine / theirs for mine, theirs in zip(own, first, strict=True)]
            cells = [load, name, server, f"{statistics.median(own):.4g}"]
            cells += [f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    own, extra = _split(sys.argv[1:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=2.4, help="arrivals per second")
    parser.add_argument("--num-requests", type=int, default=64, help="of offline and poisson")
    parser.add_argument("--only", default="single,prompt,offline,poisson")
    arguments = parser.parse_args(own)
    servers = dict(server.split("=", 1) for server in arguments.servers)
    chosen = {
        name: load
        for name, load in loads(arguments.rate, arguments.num_requests).items()
        if name.split()[0] in arguments.only.split(",")
    }
    figures: dict[tuple[str, str], dict[str, list[float]]] = {}
    num_failed, busy = 0, []
    for number in range(arguments.rounds):
        for name, load in chosen.items():
            order = list(servers)
            for server in order[number % len(order) :] + order[: number % len(order)]:
                busy.append(psutil.cpu_percent(QUIET_S) / 100 * (psutil.cpu_count() or 1))
                found, failed = measure(servers[server], load, extra)
                num_failed += failed
                for figure, value in found.items():
                    by_server = figures.setdefault((name, figure), {each: [] for each in servers})
                    by_server[server].append(value)
    print(table([Figures(*key, values) for key, values in figures.items()]))
    print(
        f"\n{arguments.rounds} rounds; other processes kept {statistics.median(busy):.2f}"
        f" ({min(busy):.2f} to {max(busy):.2f}) of {psutil.cpu_count()} cores busy; "
        f"{num_failed} requests failed"
    )
    raise SystemExit(num_failed > 0)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return what stands before `--` and what stands behind."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:place], arguments[place + 1 :]


if __name__ == "__main__":
    main()
