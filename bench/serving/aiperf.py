"""The load client beside aiperf: closed loops of the same size against the same server.

    python -m bench.serving.aiperf --aiperf ~/aiperf/bin/aiperf [--url URL] [--rounds 3]

aiperf is installed into an environment of its own (`pip install aiperf`), since it pins much. Each
round runs aiperf alone, this client alone, and both at once: then they measure one server under
one load, whatever their own CPU time takes from it, and what counts is the stretch in which both
did. Without --url the server is the mock
with known delays. aiperf's "inter token latency" is TPOT here, its "inter chunk latency" ITL.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.serving.load_client import running_mock
from lightserve.loadtest import result
from lightserve.loadtest.client import StreamClient
from lightserve.loadtest.options import ServerOptions
from lightserve.loadtest.prompts import UNIQUE, WORDS, Calibration, PromptMaker, Segment
from lightserve.loadtest.session import calibrate_client

BENCH = Path(__file__).parents[1]
TOKENIZER = BENCH.parent / "lightserve" / "bundled" / "model"
PROMPT_TOKENS, OUTPUT_TOKENS = 256, 100
METRICS = {
    "ttft_ms": "time_to_first_token",
    "tpot_ms": "inter_token_latency",
    "itl_ms": "inter_chunk_latency",
    "e2el_ms": "request_latency",
}
Figures = dict[str, float]


class Comparison:
    """Both clients, ready to be run."""

    def __init__(self, args: argparse.Namespace, url: str, directory: Path) -> None:
        self._args = args
        self._url = url
        self._directory = directory
        self._prompts = directory / "prompts.jsonl"
        asyncio.run(self._write_prompts())

    async def _write_prompts(self) -> None:
        """Write aiperf's prompts: of the length that this client asks for."""
        server = ServerOptions(url=self._url, model="")
        async with StreamClient(server, api_key=None, ca_file=None) as client:
            self._model = await client.first_model()
        server = msgspec.structs.replace(server, model=self._model)
        async with StreamClient(server, api_key=None, ca_file=None) as client:
            calibration: Calibration = await calibrate_client(client)
        assert len(calibration.word_tokens) == len(WORDS)
        maker = PromptMaker(calibration, int(time.time()))
        texts = (maker.text([Segment(UNIQUE, PROMPT_TOKENS)]) for _ in range(self._args.requests))
        self._prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def _aiperf_command(self, output: Path) -> list[str]:
        return [
            self._args.aiperf, "profile", "-m", self._model, "--url", self._url,
            "--endpoint-type", "chat", "--streaming", "--use-legacy-max-tokens",
            "--use-server-token-count", "--tokenizer", str(TOKENIZER), "--ui-type", "none",
            "--input-file", str(self._prompts), "--custom-dataset-type", "single_turn",
            "--concurrency", str(self._args.concurrency), "--osl", str(OUTPUT_TOKENS),
            "--request-count", str(self._args.requests), "--artifact-dir", str(output),
        ]  # fmt: skip

    def aiperf(self) -> Figures:
        """Run aiperf."""
        output = Path(tempfile.mkdtemp(dir=self._directory))
        cpu_s = _timed(self._aiperf_command(output))
        report = json.loads((output / "profile_export_aiperf.json").read_text())
        figures = {f"{name} p50": report[theirs]["p50"] for name, theirs in METRICS.items()}
        figures |= {f"{name} mean": report[theirs]["avg"] for name, theirs in METRICS.items()}
        return figures | {
            "output tokens/s": report["output_token_throughput"]["avg"],
            "requests/s": report["request_throughput"]["avg"],
            "cpu s": cpu_s,
        }

    def _our_command(self, output: Path, *args: str) -> list[str]:
        return [
            sys.executable, str(BENCH / "load_test.py"), "--url", self._url, "--quiet",
            "--concurrency", str(self._args.concurrency), "--warmup", "0",
            "--output", str(output), *args,
            "--prompt-tokens", str(PROMPT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS),
        ]  # fmt: skip

    def ours(self) -> Figures:
        """Run this client."""
        output = Path(tempfile.mkdtemp(dir=self._directory)) / "result.json"
        cpu_s = _timed(self._our_command(output, "--num-requests", str(self._args.requests)))
        summary = result.load(output)[0].classes["rt"]
        spreads = {name: getattr(summary, name) for name in METRICS}
        figures = {f"{name} p50": spread.p50 for name, spread in spreads.items()}
        figures |= {f"{name} mean": spread.mean for name, spread in spreads.items()}
        return figures | {
            "output tokens/s": summary.output_tokens_per_s,
            "requests/s": summary.requests_per_s,
            "cpu s": cpu_s,
        }

    def together(self) -> tuple[Figures, Figures]:
        """Run this client for as long as aiperf runs."""
        output = Path(tempfile.mkdtemp(dir=self._directory))
        args = ("--duration-s", "3600", "--save-requests")
        ours = subprocess.Popen(
            self._our_command(output / "result.json", *args), stdout=subprocess.DEVNULL
        )
        try:
            _timed(self._aiperf_command(output))
            ours.send_signal(signal.SIGINT)
            ours.wait(timeout=60)
        finally:
            ours.kill()
        answers = _aiperf_answers(output / "profile_export.jsonl")
        start_s = min(answer.start_s for answer in answers)
        end_s = max(answer.end_s for answer in answers)
        own = _our_answers(output / "result.json")
        return _of_answers(answers, start_s, end_s), _of_answers(own, start_s, end_s)


class Answer(NamedTuple):
    """A completed request, on the time of day in seconds."""

    start_s: float
    end_s: float
    ttft_ms: float
    num_tokens: int


def _aiperf_answers(path: Path) -> list[Answer]:
    answers = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        start_s = row["metadata"]["request_start_ns"] / 1e9
        metrics = {name: metric["value"] for name, metric in row["metrics"].items()}
        end_s = start_s + metrics["request_latency"] / 1e3
        tokens = int(metrics["output_sequence_length"])
        answers.append(Answer(start_s, end_s, metrics["time_to_first_token"], tokens))
    return answers


def _our_answers(path: Path) -> list[Answer]:
    run = result.load(path)[0]
    zero_s = datetime.fromisoformat(run.started_at).timestamp()
    return [
        Answer(
            zero_s + row.intended_s,
            zero_s + row.end_s,
            (row.first_s - row.intended_s) * 1e3,
            row.output_tokens,
        )
        for row in run.requests
        if row.error is None and row.first_s and row.end_s and row.output_tokens
    ]


def _of_answers(answers: list[Answer], start_s: float, end_s: float) -> Figures:
    """Latencies of requests wholly inside; throughput has the inner share of the others too."""
    shares = [
        max(0.0, min(end_s, each.end_s) - max(start_s, each.start_s)) / (each.end_s - each.start_s)
        for each in answers
    ]
    tokens = sum(share * each.num_tokens for share, each in zip(shares, answers, strict=True))
    window_s = end_s - start_s
    answers = [each for each in answers if start_s <= each.start_s and each.end_s <= end_s]
    ttft = [answer.ttft_ms for answer in answers]
    e2el = [(answer.end_s - answer.start_s) * 1e3 for answer in answers]
    tpot = [
        (latency - answer.ttft_ms) / (answer.num_tokens - 1)
        for answer, latency in zip(answers, e2el, strict=True)
        if answer.num_tokens > 1
    ]
    samples = {"ttft_ms": ttft, "tpot_ms": tpot, "e2el_ms": e2el}
    figures = {f"{name} p50": statistics.median(values) for name, values in samples.items()}
    figures |= {f"{name} mean": statistics.fmean(values) for name, values in samples.items()}
    return figures | {
        "output tokens/s": tokens / window_s,
        "requests/s": sum(shares) / window_s,
    }


def _timed(command: list[str]) -> float:
    """Run a command; return the CPU time of it and its children in seconds."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{command[:2]} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def _beside(aiperf: list[Figures], ours: list[Figures]) -> dict[str, Any]:
    """Return medians over the rounds, and how far this client's are from aiperf's."""
    rows = {}
    for name in ours[0]:
        theirs, own = (statistics.median(each[name] for each in runs) for runs in (aiperf, ours))
        rows[name] = {
            "aiperf": round(theirs, 3),
            "ours": round(own, 3),
            "difference_pct": round(100 * (own / theirs - 1), 2),
        }
    return rows


def main() -> None:
    """Print one JSON document: alone, and both at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aiperf", required=True, help="aiperf's executable")
    parser.add_argument("--url", help="a running server; default: the mock")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only-together", action="store_true", help="leave out each alone")
    args = parser.parse_args()
    start_s = time.monotonic()
    alone: tuple[list[Figures], list[Figures]] = ([], [])
    together: tuple[list[Figures], list[Figures]] = ([], [])
    server = running_mock(0.1, 0.02) if args.url is None else nullcontext(args.url)
    with server as url, tempfile.TemporaryDirectory() as directory:
        comparison = Comparison(args, url, Path(directory))
        for _ in range(args.rounds):
            if not args.only_together:
                alone[0].append(comparison.aiperf())
                alone[1].append(comparison.ours())
            for figures, runs in zip(comparison.together(), together, strict=True):
                runs.append(figures)
    report: dict[str, Any] = {"at once": _beside(*together)}
    if not args.only_together:
        report["alone"] = _beside(*alone)
    print(json.dumps(report | {"took_s": round(time.monotonic() - start_s, 1)}, indent=2))


if __name__ == "__main__":
    main()
