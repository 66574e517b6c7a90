"""A batch whose processes are killed, one after the other and all at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from support.batch_store import jsonl
from support.live_server import LiveServer, live_server
from support.processes import wait_for, wait_gone

NUM_LINES = 60
ENDPOINT = "/v1/completions"
FLAGS = (
    *("--batch-invariant", "--max-restarts=99", "--batch-max-in-flight=8"),
    *("--http-workers=1", "--max-num-seqs=8"),
)
EVERYTHING = "supervisor"
FEW = ("batches-1", EVERYTHING)
MANY = (
    *(*FEW, "router-0", "batches-1", "worker-0", "frontend-0"),
    *("router-0", "worker-0", "batches-1", EVERYTHING),
)


class Killed:
    """A server on one store, started again when all of it was killed."""

    def __init__(self, run_parent: Path, store: Path) -> None:
        self._run_parent = run_parent
        self._flags = (*FLAGS, f"--batch-store={store}")
        self._stack = ExitStack()
        self.start()

    def start(self) -> None:
        self.server: LiveServer = self._stack.enter_context(
            live_server(self._run_parent, *self._flags)
        )
        url = f"{self.server.url}/v1"
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=8, timeout=60.0)

    def kill(self, role: str) -> None:
        """Kill a process; the server is whole again when this returns."""
        if role == EVERYTHING:
            pids = self.server.pids()
            self.server.process.kill()
            wait_gone(pids)
            self._stack.close()
            self.start()
            return
        with self.server.healing():
            victim = self.server.tree()[role]
            victim.kill()
            wait_gone([victim.pid])

    def make_batch(self) -> str:
        lines = [
            {
                "custom_id": f"r{number}",
                "method": "POST",
                "url": ENDPOINT,
                "body": {
                    "model": self.server.model,
                    "prompt": f"Mira has {number} lanterns and",
                    "max_tokens": 20 + number % 7,
                    "temperature": 1.0,
                    "seed": number,
                    "ignore_eos": True,
                },
            }
            for number in range(NUM_LINES)
        ]
        file = self.client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
        return self.client.batches.create(
            input_file_id=file.id, endpoint=ENDPOINT, completion_window="1h"
        ).id

    def num_done(self, batch_id: str) -> int:
        counts = self.client.batches.retrieve(batch_id).request_counts
        assert counts is not None
        return counts.completed

    def results(self, batch_id: str) -> dict[str, Any]:
        """Wait for the end; return what each line was answered."""
        wait_for(
            lambda: self.client.batches.retrieve(batch_id).status == "completed", "the batch's end"
        )
        batch = self.client.batches.retrieve(batch_id)
        assert batch.error_file_id is None and batch.output_file_id is not None
        text = self.client.files.content(batch.output_file_id).text
        found = [json.loads(line) for line in text.splitlines()]
        assert [line["custom_id"] for line in found] == [f"r{n}" for n in range(NUM_LINES)]
        return {line["custom_id"]: line["response"]["body"]["choices"] for line in found}

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def killed(run_parent: Path, tmp_path: Path) -> Iterator[Killed]:
    server = Killed(run_parent, tmp_path / "store")
    try:
        yield server
    finally:
        server.close()


@pytest.mark.parametrize("victims", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_each_line_is_answered_once_whatever_is_killed(
    killed: Killed, victims: tuple[str, ...]
) -> None:
    batch = killed.make_batch()
    step = NUM_LINES // (len(victims) + 1)
    for number, victim in enumerate(victims):
        wait_for(lambda least=number * step: killed.num_done(batch) > least, "some lines")
        killed.kill(victim)
    faulted = killed.results(batch)
    assert faulted == killed.results(killed.make_batch())
    families = ("batches", "batch_lines", "batch_results_late_total", "batch_oldest_seconds")
    families += ("batch_forecast_ratio", "batch_leases_lost_total", "batch_store_seconds_count")
    names = [f"\nlightserve_{name}{{" for name in families]
    wait_for(lambda: all(name in killed.server.metrics() for name in names), "metrics of batches")
