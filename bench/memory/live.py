"""Memory too small on real servers, the bundled model on one thread.

    python -m bench.memory.live arms [--rounds 2] [--bursts 4]
        the arms of `bench.memory.arms`: bursts of real-time requests over a closed loop of
        best-effort ones. The targets are three times what real-time requests get without any others
    python -m bench.memory.live rules [--rounds 2] [--requests 100]
        every admission rule: chats that end by themselves, of clients that declare more than they
        will need, fifty at a time

One server after the other, each once per round. Counts are those of /metrics; times depend on what
else the machine does.
"""

from __future__ import annotations

import argparse
import csv
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import numpy as np

from bench.memory.arms import ARMS
from bench.serving.server import Server, load, pinned_server
from bench.table import print_head, print_row
from lightserve.loadtest.result import Run

TARGET_FACTOR = 3.0
BURST_SIZE, BURST_EVERY_S = 16, 2.5
BACKLOG = "concurrency=24 prompt-tokens=200:400 output-tokens=32:128"
ARMS_FLAGS = ("--policy", "priority", "--cache-policy", "off", "--max-kv-tokens", "3000")
RULES = ("risk", "past-future", "conservative", "aggressive", "ema")
RULES_KV_TOKENS, DECLARED_TOKENS, NUM_CLIENTS = 1500, 512, 50
COUNTERS = (
    "num_preemptions_total",
    "preempted_tokens_total",
    "pauses_total",
    "kv_tokens_saved_total",
    "kv_tokens_saved_ahead_total",
    "kv_tokens_loaded_total",
)
_SAMPLE = re.compile(r"^lightserve_(\w+)(?:\{.*\})? (\S+)$", re.MULTILINE)


def counters(server: Server) -> Counter[str]:
    """Return the router's counters over both classes, once they are new."""
    time.sleep(2.5)
    found: Counter[str] = Counter()
    for name, value in _SAMPLE.findall(httpx.get(f"{server.url}/metrics").text):
        if name in COUNTERS:
            found[name] += int(float(value))
    return found


def write_bursts(path: Path, num_bursts: int, seed: int) -> None:
    """Write a trace of bursts of real-time requests."""
    rng = random.Random(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["t", "prompt_tokens", "output_tokens"])
        for number in range(num_bursts * BURST_SIZE):
            at_s = number // BURST_SIZE * BURST_EVERY_S
            writer.writerow([at_s, rng.randint(20, 160), rng.randint(40, 120)])


def arm_flags() -> dict[str, list[str]]:
    """Return the options of each arm; those with checkpoints with copies ahead and one without."""
    flags: dict[str, list[str]] = {}
    for arm, fields in ARMS.items():
        pairs = ((f"--{name.replace('_', '-')}", str(value)) for name, value in fields.items())
        flags[arm] = [part for pair in pairs for part in pair]
        if fields["preemption"] == "checkpoint":
            flags.setdefault(f"{arm}, nothing ahead", list(flags[arm]))
            flags[arm] += ["--clean-ahead-tokens", "-1"]
    return flags


Lines = dict[str, list[tuple[Run, Counter[str]]]]


def measure(
    server_flags: Sequence[str], *args: str, forced: bool = True
) -> tuple[Run, Counter[str]]:
    """Load a server of its own; return what clients saw and what it counted."""
    with pinned_server(server_flags) as server:
        before = counters(server)
        run = load(server, *args, forced=forced)
        return run, counters(server) - before


def arms(rounds: int, num_bursts: int) -> Lines:
    """Measure every arm, real-time requests alone first."""
    flags = arm_flags()
    lines: Lines = {"no best-effort requests": [], **{arm: [] for arm in flags}}
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "bursts.csv"
        write_bursts(trace, num_bursts, 0)
        traffic = ("--trace", str(trace))
        alone, counted = measure([*ARMS_FLAGS, *next(iter(flags.values()))], *traffic)
        lines["no best-effort requests"].append((alone, counted))
        spreads = {"ttft": alone.classes["rt"].ttft_ms, "tpot": alone.classes["rt"].tpot_ms}
        limits = [f"{name}={TARGET_FACTOR * (s.p50 or 0.0):.0f}ms" for name, s in spreads.items()]
        for _ in range(rounds):
            for arm, options in flags.items():
                targets = ("--targets", ",".join(limits), "--be", BACKLOG)
                lines[arm].append(measure([*ARMS_FLAGS, *options], *traffic, *targets))
    print(f"targets: {', '.join(limits)}\n")
    return lines


def rules(rounds: int, num_requests: int) -> Lines:
    """Measure every admission rule."""
    lines: Lines = {rule: [] for rule in RULES}
    clients = min(NUM_CLIENTS, num_requests)
    traffic = ("--concurrency", str(clients), "--num-requests", str(num_requests))
    lengths = ("--prompt-tokens", "20:60", "--output-tokens", str(DECLARED_TOKENS))
    for _ in range(rounds):
        for rule in RULES:
            flags = ["--admission", rule, "--max-kv-tokens", str(RULES_KV_TOKENS)]
            lines[rule].append(measure(flags, *traffic, *lengths, forced=False))
    return lines


def print_table(lines: Mapping[str, Sequence[tuple[Run, Counter[str]]]]) -> None:
    """Print a line per server: means over the rounds."""
    heads = [
        "",
        "finished",
        "attained",
        "TTFT p50 / p99 ms",
        "TPOT p50 ms",
        "tokens/s",
        "BE tokens/s",
    ]
    heads += [name.removesuffix("_total") for name in COUNTERS]
    print_head(*heads)
    for name, rounds in lines.items():
        seen = [run.classes["rt"] for run, _ in rounds]
        be = [run.classes["be"].output_tokens_per_s for run, _ in rounds if "be" in run.classes]
        figures = [
            f"{sum(each.num_completed for each in seen)} of {sum(e.num_arrivals for e in seen)}",
            f"{np.mean([each.attainment or 0.0 for each in seen]):.0%}",
            " / ".join(
                f"{np.mean([getattr(e.ttft_ms, p) for e in seen]):.0f}" for p in ("p50", "p99")
            ),
            f"{np.mean([each.tpot_ms.p50 or 0.0 for each in seen]):.1f}",
            f"{np.mean([each.output_tokens_per_s for each in seen]):.0f}",
            f"{np.mean(be or [0.0]):.0f}",
            *(f"{np.mean([counted[c] for _, counted in rounds]):,.0f}" for c in COUNTERS),
        ]
        print_row(name, *figures)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=("arms", "rules"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--bursts", type=int, default=4)
    parser.add_argument("--requests", type=int, default=100)
    args = parser.parse_args()
    start_s = time.perf_counter()
    is_arms = args.what == "arms"
    print_table(arms(args.rounds, args.bursts) if is_arms else rules(args.rounds, args.requests))
    print(f"\n{time.perf_counter() - start_s:.0f} s")


if __name__ == "__main__":
    main()
