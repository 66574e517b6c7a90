"""The workloads on which four papers made their claims, for the simulator."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightserve.cost.model import StepShape
from lightserve.sim import Targets
from lightserve.sim.traffic import TraceLengths, read_trace
from lightserve.sim.virtual_gpus import A100_LLAMA2_7B, GPUS, MODELS, num_slots, virtual_gpus

TRACES = Path(__file__).parents[1] / "traces"
SHAREGPT = str(TRACES / "sharegpt_lengths.csv.gz")
ALPACA = str(TRACES / "alpaca_lengths.csv.gz")


def bros_load(_folder: Path, _seed: int) -> dict[str, Any]:
    """Chats beside batches that come again when they are done, as table II of BROS."""
    return {
        "rt": "poisson:16",
        "rt_lengths": SHAREGPT,
        "be": "batch:256",
        "be_lengths": "uniform:512-1024,32-128",
        "duration_s": 210.0,
        "margin_s": 30.0,
        "capacity_tokens": 60_000,
        "targets": Targets(0.4, 0.2, 0.2),
    }


def chats_load(_folder: Path, _seed: int) -> dict[str, Any]:
    """Chats alone, more than fit at once: BROS's run without best-effort requests, its figure 2."""
    return {
        "rt": "poisson:22",
        "rt_lengths": SHAREGPT,
        "duration_s": 120.0,
        "margin_s": 30.0,
        "capacity_tokens": 60_000,
        "targets": Targets(0.4, 0.2, 0.2),
    }


NUM_DOCUMENTS, NUM_QUESTIONS = 60, 20
ECHO_MARGIN_S = 10.0
BLOCK_TOKENS = 512
PEAK_S, PEAK_RPS = (40.0, 60.0), 10.0
"""When many chats come in `peak_load`, and how many a second."""


def echo_load(
    folder: Path, seed: int, documents: int = NUM_DOCUMENTS, questions: int = NUM_QUESTIONS
) -> dict[str, Any]:
    """Few chats over questions about documents, all there at the start, in random order."""
    asked = _questions(seed, documents, questions)
    return {
        "rt": "poisson:4",
        "rt_lengths": SHAREGPT,
        "be": write(folder / f"documents{seed}.csv", asked),
        "duration_s": 90.0,
        "margin_s": ECHO_MARGIN_S,
        "capacity_tokens": 60_000,
        "targets": Targets(1.0, 0.05, None),
    }


def many_documents_load(folder: Path, seed: int) -> dict[str, Any]:
    """The same of more documents, and fewer questions about each."""
    return echo_load(folder, seed, 200, 10)


def _questions(seed: int, documents: int, questions: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    num_blocks = rng.integers(12, 20, size=documents, endpoint=True)
    first = np.cumsum(num_blocks) - num_blocks
    order = rng.permutation(np.repeat(np.arange(documents), questions))
    return [
        {
            "t": ECHO_MARGIN_S if number else 0.0,  # those before the margin are not counted
            "prompt_tokens": int(BLOCK_TOKENS * num_blocks[n] + rng.integers(16, 64)),
            "output_tokens": int(rng.integers(16, 64)),
            "block_ids_512": f"{first[n]}-{first[n] + num_blocks[n] - 1}",
        }
        for number, n in enumerate(order)
    ]


def peak_load(folder: Path, seed: int) -> dict[str, Any]:
    """The same with a peak of chats for twenty seconds."""
    rng = np.random.default_rng(seed + 1000)
    lengths = TraceLengths(read_trace(Path(SHAREGPT)))
    rows: list[dict[str, Any]] = []
    for time_s in _poisson_with_peak(rng, 3.0, 90.0):
        prompt, output, *_ = lengths.draw(rng)
        rows.append({"t": f"{time_s:.6f}", "prompt_tokens": prompt, "output_tokens": output})
    rows[0]["t"] = "0.0"  # times of a trace are counted from its first row
    load = echo_load(folder, seed)
    del load["rt_lengths"]
    return load | {"rt": write(folder / f"peak{seed}.csv", rows)}


def _poisson_with_peak(rng: np.random.Generator, rps: float, end_s: float) -> Iterator[float]:
    time_s = 0.0
    while (time_s := time_s + rng.exponential(1.0 / PEAK_RPS)) < end_s:
        if PEAK_S[0] <= time_s < PEAK_S[1] or rng.random() < rps / PEAK_RPS:
            yield time_s


LONG_SHARE, LONG_TOKENS = 0.35, (4096, 32_768)
TTFT_SCALE, TBT_S, TBT_SCALE = (2.5, 7.5), 0.1875, (0.75, 1.25)
MIX_RPS, NUM_MIXED = 1.4, 400


def accelgen_load(folder: Path, seed: int) -> dict[str, Any]:
    """Short chats and long documents, each with targets of its own."""
    rng = np.random.default_rng(seed)
    chats = [TraceLengths(read_trace(Path(path))) for path in (ALPACA, SHAREGPT)]
    rows, time_s = [], 0.0
    for _ in range(NUM_MIXED):
        time_s += rng.exponential(1.0 / MIX_RPS)
        prompt, output, *_ = chats[rng.integers(2)].draw(rng)
        if rng.random() < LONG_SHARE:
            prompt = round(np.exp(rng.uniform(*np.log(LONG_TOKENS))))
        idle_s = A100_LLAMA2_7B.step_seconds(StepShape().plus(0, prompt))
        rows.append(
            {
                "t": f"{time_s:.6f}",
                "prompt_tokens": prompt,
                "output_tokens": output,
                "ttft_ms": f"{1e3 * max(TBT_S, idle_s * rng.uniform(*TTFT_SCALE)):.3f}",
                "tpot_ms": f"{1e3 * TBT_S * rng.uniform(*TBT_SCALE):.3f}",
            }
        )
    return {
        "rt": write(folder / f"mix{seed}.csv", rows),
        "duration_s": 240.0,
        "margin_s": 30.0,
        "capacity_tokens": 120_000,
    }


def tight_load(folder: Path, seed: int) -> dict[str, Any]:
    """The same mix where memory is short: room for one of the longest prompts and little else."""
    return accelgen_load(folder, seed) | {"capacity_tokens": 40_000}


def past_future_load(_folder: Path, _seed: int) -> dict[str, Any]:
    """Clients that wait for their answers, long outputs, and memory for some of them."""
    return {
        "rt": "closed:24",
        "rt_lengths": "uniform:32-2048,256-2048",
        "rt_max_tokens": 2048,
        "duration_s": 240.0,
        "margin_s": 60.0,
        "capacity_tokens": 40_000,
        "targets": Targets(10.0, None, 1.5),
    }


def capacity_load(_folder: Path, _seed: int) -> dict[str, Any]:
    """Five minutes of chats at their peak, as Echo's simulator of resources has them."""
    return {
        "rt": "poisson:8",
        "rt_lengths": SHAREGPT,
        "duration_s": 360.0,
        "margin_s": 30.0,
        "targets": Targets(1.0, 0.05, None),
    }


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Write a trace; return where it is."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def bros_14b_load(_folder: Path, _seed: int) -> dict[str, Any]:
    """BROS's chats and batches on its own model and machine: Qwen2.5-14B on two A100-40G."""
    return bros_load(_folder, _seed) | _on("qwen2.5-14b", "a100-40g", 2)


def bros_32b_load(_folder: Path, _seed: int) -> dict[str, Any]:
    """The same with Qwen2.5-32B on four."""
    return bros_load(_folder, _seed) | _on("qwen2.5-32b", "a100-40g", 4)


def _on(model: str, gpu: str, num_ranks: int) -> dict[str, Any]:
    return {
        "hardware": virtual_gpus(MODELS[model], GPUS[gpu], num_ranks),
        "capacity_tokens": num_slots(MODELS[model], GPUS[gpu], num_ranks),
        "rt": "poisson:10",
    }
