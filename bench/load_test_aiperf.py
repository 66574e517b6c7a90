"""The load client beside aiperf: closed loops of the same size against the same server.

    python bench/load_test_aiperf.py --aiperf ~/aiperf/bin/aiperf [--url URL] [--rounds 3]

aiperf is installed into an environment of its own (`pip install aiperf`), since it pins much. Each
round runs aiperf alone, this client alone, and both at once: then they measure one server under
one load, whatever else their own CPU time takes from it. Without --url the server is the mock
with known delays. aiperf's "inter token latency" is TPOT here, its "inter chunk latency" ITL.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
from load_test_check import running_mock
from loadtest import result
from loadtest.calibration import WORDS, Calibration
from loadtest.client import StreamClient
from loadtest.options import ServerOptions
from loadtest.prompts import UNIQUE, PromptMaker, Segment
from loadtest.session import calibrate_client

BENCH = Path(__file__).parent
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

    def aiperf(self) -> Figures:
        """Run aiperf."""
        output = Path(tempfile.mkdtemp(dir=self._directory))
        command = [
            self._args.aiperf, "profile", "-m", self._model, "--url", self._url,
            "--endpoint-type", "chat", "--streaming", "--use-legacy-max-tokens",
            "--use-server-token-count", "--tokenizer", str(TOKENIZER), "--ui-type", "none",
            "--input-file", str(self._prompts), "--custom-dataset-type", "single_turn",
            "--concurrency", str(self._args.concurrency), "--osl", str(OUTPUT_TOKENS),
            "--request-count", str(self._args.requests), "--artifact-dir", str(output),
        ]  # fmt: skip
        cpu_s = _timed(command)
        report = json.loads((output / "profile_export_aiperf.json").read_text())
        figures = {f"{name} p50": report[theirs]["p50"] for name, theirs in METRICS.items()}
        figures |= {f"{name} mean": report[theirs]["avg"] for name, theirs in METRICS.items()}
        return figures | {
            "output tokens/s": report["output_token_throughput"]["avg"],
            "requests/s": report["request_throughput"]["avg"],
            "cpu s": cpu_s,
        }

    def ours(self) -> Figures:
        """Run this client."""
        output = Path(tempfile.mkdtemp(dir=self._directory)) / "result.json"
        command = [
            sys.executable, str(BENCH / "load_test.py"), "--url", self._url, "--quiet",
            "--concurrency", str(self._args.concurrency), "--warmup", "0",
            "--num-requests", str(self._args.requests), "--output", str(output),
            "--prompt-tokens", str(PROMPT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS),
        ]  # fmt: skip
        cpu_s = _timed(command)
        summary = result.load(output)[0].classes["rt"]
        spreads = {name: getattr(summary, name) for name in METRICS}
        figures = {f"{name} p50": spread.p50 for name, spread in spreads.items()}
        figures |= {f"{name} mean": spread.mean for name, spread in spreads.items()}
        return figures | {
            "output tokens/s": summary.output_tokens_per_s,
            "requests/s": summary.requests_per_s,
            "cpu s": cpu_s,
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
    args = parser.parse_args()
    start_s = time.monotonic()
    alone: tuple[list[Figures], list[Figures]] = ([], [])
    together: tuple[list[Figures], list[Figures]] = ([], [])
    server = running_mock(0.1, 0.02) if args.url is None else nullcontext(args.url)
    with server as url, tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(2) as pool:
        comparison = Comparison(args, url, Path(directory))
        for _ in range(args.rounds):
            alone[0].append(comparison.aiperf())
            alone[1].append(comparison.ours())
            theirs, ours = pool.submit(comparison.aiperf), pool.submit(comparison.ours)
            together[0].append(theirs.result())
            together[1].append(ours.result())
    report = {"alone": _beside(*alone), "at once": _beside(*together)}
    print(json.dumps(report | {"took_s": round(time.monotonic() - start_s, 1)}, indent=2))


if __name__ == "__main__":
    main()
