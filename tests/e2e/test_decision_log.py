"""A decision log of a server under mixed traffic: every decision can be repeated."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from click.testing import CliRunner
from support.live_server import LiveServer, live_server
from support.processes import wait_for

from lightserve.cli.decision_logs import replay as replay_command
from lightserve.decisions.records import Decision, MessageReceived
from lightserve.decisions.replaying import DecisionLogReader
from lightserve.messages.frontend_router import Abort, Finish

FLAGS = (
    *("--policy", "unified", "--max-num-seqs", "6", "--max-num-batched-tokens", "48"),
    *("--max-kv-tokens", "450", "--max-model-len", "400", "--ttft-slo-ms", "500"),
    *("--tpot-slo-ms", "50"),
)
NUM_REQUESTS = 50
TEXT = "the fox went into the wood and saw a light far away behind old trees"


def test_a_server_can_be_replayed(run_parent: Path, tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    with live_server(run_parent, *FLAGS, "--decision-log", str(path)) as server:
        with ThreadPoolExecutor(16) as pool:
            statuses = list(pool.map(lambda number: _ask(server, number), range(NUM_REQUESTS)))
        assert set(statuses) == {200}
        # A router reports, and writes what it knows, every second.
        wait_for(lambda: _is_settled(server, path), "the end of aborted ones")
        num_skipped = _metric(server, "requests_skipped_total")
        num_steps = _metric(server, "steps_total")
        assert server.stop() == 0
        assert path.stat().st_mode & 0o777 == 0o600
    records = [line.record for line in DecisionLogReader(path).lines()]
    decisions = [record for record in records if isinstance(record, Decision)]
    assert len(decisions) == num_steps
    assert sum(len(decision.skipped) for decision in decisions) == num_skipped > 0
    messages = [record.message for record in records if isinstance(record, MessageReceived)]
    assert {Abort, Finish} < {type(message) for message in messages}
    result = CliRunner().invoke(
        replay_command, [str(path), "--json"], standalone_mode=False, catch_exceptions=False
    )
    assert result.return_value == 0, result.stdout
    assert json.loads(result.stdout)["num_decisions"] == num_steps


def _ask(server: LiveServer, number: int) -> int:
    """Send a request of some kind; every fifth is given up while it streams."""
    chance = random.Random(number)
    body = {
        "model": server.model,
        "prompt": " ".join(chance.choices(TEXT.split(), k=chance.randint(5, 80))),
        "max_tokens": chance.randint(5, 40),
        "service_tier": "flex" if number % 2 else "default",
        "seed": number,
        "stream": number % 5 == 0,
    }
    if number % 3 == 0:
        body |= {"stop": ["a", "the"], "ignore_eos": True}
    if number % 5:
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300.0)
        return response.status_code
    body |= {"max_tokens": 200, "stop": None, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300.0) as response:
        next(response.iter_bytes())
        return response.status_code


def _is_settled(server: LiveServer, path: Path) -> bool:
    """Whether every request is known, none of them lives, and the file has every step."""
    written = path.read_bytes()
    num_steps = written.count(b'"kind":"decision"')
    return (
        written.count(b'"type":"Submit"') == NUM_REQUESTS
        and _metric(server, "num_requests_running") == 0
        and _metric(server, "num_requests_waiting") == 0
        and _metric(server, "steps_total") == num_steps
    )


def _metric(server: LiveServer, name: str) -> float:
    """Return the sum of a metric's series."""
    text = httpx.get(server.metrics_url, timeout=300.0).text
    values = re.findall(rf"^lightserve_{name}\S* (\S+)$", text, re.M)
    return sum(map(float, values))
