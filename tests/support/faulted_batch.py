"""Batches on servers that share a store, while processes of theirs are killed or stopped."""

from __future__ import annotations

import json
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import httpx
import psutil

from lightserve.batches.access import prepare, store_at
from lightserve.batches.contents import Store
from lightserve.batches.runner import LEASE_S
from lightserve.errors import StoreError
from support.batch_store import jsonl
from support.live_server import LiveServer
from support.postgres import PostgresServer
from support.processes import PATIENCE_S, wait_for, wait_gone

ENDPOINT = "/v1/completions"
FLAGS = ("--batch-invariant", "--max-restarts=9999", "--http-workers=1")
PROCESSES = ("batches-1", "router-0", "worker-0", "frontend-0", "supervisor", "tree")
"""What may be killed: `supervisor`, whose children end by themselves, or all at once."""
DATABASE, STOP = "database", "stop"
"""Faults besides: the database ends as in a crash; a server is stopped until its lease is over."""
_NOTE_LEASES = {
    "sqlite": """
CREATE TABLE leases (batch INTEGER, line INTEGER);
CREATE TRIGGER note_lease AFTER UPDATE OF state ON lines WHEN NEW.state = 'leased' BEGIN
    INSERT INTO leases VALUES (NEW.batch, NEW.number);
END;
""",
    "postgresql": """
CREATE TABLE leases (batch BIGINT, line BIGINT);
CREATE FUNCTION note_lease() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO leases VALUES (NEW.batch, NEW.number); RETURN NULL; END; $$;
CREATE TRIGGER note_lease AFTER UPDATE OF state ON lines FOR EACH ROW
    WHEN (NEW.state = 'leased') EXECUTE FUNCTION note_lease();
""",
}
"""Counts in the store how often each line is begun."""


def decision_log(run_parent: Path) -> Path:
    """Where a server of such a directory writes what its router decides, if it does."""
    return run_parent / "decisions.jsonl"


def lines_of(num_lines: int, model: str, num_tokens: int = 20) -> list[dict[str, Any]]:
    """Requests whose answers differ, and depend on every token before."""
    return [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": ENDPOINT,
            "body": {
                "model": model,
                "prompt": f"Mira has {number} lanterns and",
                "max_tokens": num_tokens + number % 7,
                "temperature": 1.0,
                "seed": number,
                "ignore_eos": True,
            },
        }
        for number in range(num_lines)
    ]


@dataclass
class Report:
    """What became of a batch."""

    num_lines: int
    faults: dict[str, int] = field(default_factory=dict)
    wall_s: float = 0.0
    num_lost: int = 0
    num_doubled: int = 0
    num_errors: int = 0
    """Lines in its error file."""
    num_changed: int = 0
    """Answers that are not those of the run without faults."""
    num_begun_again: int = 0
    """Leases of lines beyond their first."""
    share_again: float = 0.0
    """Of the tokens, counted as if each line had been computed whole each time: at most so many
    were computed twice."""


class Servers:
    """See the module. Ends all that it has started."""

    def __init__(
        self,
        run_parent: Path,
        location: str,
        *,
        num_servers: int = 1,
        postgres: PostgresServer | None = None,
        file_store: str = "",
        environment: Mapping[str, str] = MappingProxyType({}),
        seed: int = 0,
        num_in_flight: int = 8,
        num_tokens: int = 20,
        has_decision_logs: bool = False,
    ) -> None:
        """Start them.

        Args:
            run_parent: for their directories.
            location: of the store.
            num_servers: that share it.
            postgres: whose database it is; None: SQLite's.
            file_store: as --file-store says.
            environment: of their processes.
            seed: of what happens when.
            num_in_flight: lines of a server.
            num_tokens: of a line, which has 0 to 6 more.
            has_decision_logs: whether routers write `decision_log`.
        """
        self._run_parent = run_parent
        self._num_tokens = num_tokens
        self._has_decision_logs = has_decision_logs
        self._location = location
        in_flight = f"--batch-max-in-flight={num_in_flight}", f"--max-num-seqs={num_in_flight}"
        self._flags = (*FLAGS, *in_flight, f"--batch-store={location}")
        if file_store:
            self._flags += (f"--file-store={file_store}",)
        self._environment = environment
        self._postgres = postgres
        self._random = random.Random(seed)
        self._store: Store | None = None
        self._stopped: dict[int, tuple[float, list[psutil.Process]]] = {}
        """Servers that are stopped: until when (monotonic), and their processes."""
        self.went_on: list[tuple[LiveServer, float]] = []
        """Those that were stopped, and when they went on (monotonic)."""
        with prepare(location):
            store = store_at(location)
            store.database.write(_NOTE_LEASES["sqlite" if postgres is None else "postgresql"])
            store.database.close()
        self.servers = [self._started() for _ in range(num_servers)]

    def __enter__(self) -> Self:
        for server in self.servers:
            server.wait_ready()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._store is not None:
            with suppress(StoreError):
                self._store.database.close()
        for server in self.servers:
            if server.process.poll() is None:
                self._end(server, at_once=True)

    def run(self, num_lines: int, faults: Sequence[str] = ()) -> tuple[dict[str, Any], Report]:
        """Have a batch answered, with these faults spread over it; return what its lines got."""
        report = Report(num_lines)
        batch_id, start_s = self.make(num_lines), time.monotonic()
        for number, fault in enumerate(faults):
            least = (number + 1) * num_lines // (len(faults) + 1)
            self._wait(batch_id, least)
            time.sleep(self._random.random() * 0.2)
            wait_for(lambda fault=fault: self._do(fault), fault)  # type: ignore[misc]
            report.faults[fault] = report.faults.get(fault, 0) + 1
        self._wait(batch_id, num_lines)
        report.wall_s = time.monotonic() - start_s
        while self._stopped:
            self._tend()
            time.sleep(0.1)
        return self._results(batch_id, report), report

    # ------------------------------------------------------------------ faults

    def _do(self, fault: str) -> bool:
        """Return whether it could be done: what has just been killed is not there yet."""
        self._tend()
        if fault == DATABASE:
            assert self._postgres is not None
            self._postgres.stop("immediate")
            self._postgres.start()
            return True
        running = [number for number in range(len(self.servers)) if number not in self._stopped]
        if not running or (fault == STOP and len(running) == 1):
            return False
        number = self._random.choice(running)
        server = self.servers[number]
        if fault in ("supervisor", "tree"):
            self._end(server, at_once=fault == "tree")
            self.servers[number] = self._started()
            return True
        if server.process.poll() is not None or (fault not in server.tree() and fault != STOP):
            return False
        if fault == STOP:
            processes = list(server.tree().values())
            for process in processes:
                process.send_signal(signal.SIGSTOP)
            self._stopped[number] = time.monotonic() + LEASE_S + 2.0, processes
        else:
            server.tree()[fault].kill()
        return True

    def _tend(self) -> None:
        """Let servers go on whose time has come, and start those again that gave up."""
        for number, (until_s, processes) in list(self._stopped.items()):
            if time.monotonic() >= until_s:
                self.went_on.append((self.servers[number], time.monotonic()))
                for process in processes:
                    process.send_signal(signal.SIGCONT)
                del self._stopped[number]
        for number, server in enumerate(self.servers):
            if server.process.poll() is not None:  # it lost a process while it started
                server.close()
                self.servers[number] = self._started()

    def _end(self, server: LiveServer, *, at_once: bool) -> None:
        tree = server.tree() if server.process.poll() is None else {}
        pids = [process.pid for process in tree.values()]
        for role, process in tree.items():
            if at_once or role == "supervisor":
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        server.process.wait(PATIENCE_S)
        wait_gone(pids)
        server.close()

    def _started(self) -> LiveServer:
        own = Path(tempfile.mkdtemp(dir=self._run_parent))
        flags = self._flags
        if self._has_decision_logs:
            flags = (*flags, f"--decision-log={decision_log(own)}")
        return LiveServer(flags, own, environment=self._environment)

    # ------------------------------------------------------------------ batches

    def make(self, num_lines: int) -> str:
        """Make a batch; return its id."""
        self._tend()
        server = self.servers[0]
        server.wait_ready()
        data = jsonl(lines_of(num_lines, server.model, self._num_tokens))
        with httpx.Client(base_url=f"{server.url}/v1", timeout=PATIENCE_S) as client:
            files = {"file": ("in.jsonl", data)}
            file = _posted(client, "/files", files=files, data={"purpose": "batch"})
            asked = {
                "input_file_id": file["id"],
                "endpoint": ENDPOINT,
                "completion_window": "7d",
                "x_accept_late": True,
            }
            batch_id: str = _posted(client, "/batches", json=asked)["id"]
        return batch_id

    def _wait(self, batch_id: str, least: int) -> None:
        """Wait until so many of its lines have results."""

        def has_come() -> bool:
            self._tend()
            sql = "SELECT num_done + num_failed FROM batches WHERE id = ?"
            return bool((self.value(sql, batch_id) or 0) >= least)

        wait_for(has_come, f"{least} lines")

    def cancel(self, batch_id: str) -> None:
        """End a batch."""
        url = f"{self.servers[-1].url}/v1/batches/{batch_id}/cancel"
        assert httpx.post(url, timeout=PATIENCE_S).status_code == 200

    def value(self, sql: str, *values: Any) -> Any:
        """The first value; None while the store is away."""
        return (self.row(sql, *values) or (None,))[0]

    def row(self, sql: str, *values: Any) -> tuple[Any, ...] | None:
        """The first row; None: there is none, or the store is away."""
        try:
            if self._store is None:
                self._store = store_at(self._location)
            return self._store.database.row(sql, *values)
        except StoreError:
            self._store = None
            return None

    def _results(self, batch_id: str, report: Report) -> dict[str, Any]:
        server = self.servers[-1]
        server.wait_ready()
        with httpx.Client(base_url=f"{server.url}/v1", timeout=PATIENCE_S) as client:
            batch = wait_for(lambda: _ended(client, batch_id), "its end")
            lines: list[dict[str, Any]] = []
            for name in ("output_file_id", "error_file_id"):
                if batch[name] is not None:
                    text = client.get(f"/files/{batch[name]}/content").text
                    lines += [json.loads(line) for line in text.splitlines()]
            report.num_errors = batch["request_counts"]["failed"]
        times = Counter(line["custom_id"] for line in lines)
        report.num_lost = report.num_lines - len(times)
        report.num_doubled = times.total() - len(times)
        results = {
            line["custom_id"]: line["response"] and line["response"]["body"] for line in lines
        }
        assert self._store is not None
        begun: Counter[str] = Counter()
        for line, num_begun in self._store.database.rows(
            "SELECT line, count(*) FROM leases WHERE batch ="
            " (SELECT number FROM batches WHERE id = ?) GROUP BY line",
            batch_id,
        ):
            begun[f"r{line}"] = num_begun
        tokens = {name: body["usage"]["total_tokens"] for name, body in results.items() if body}
        report.num_begun_again = begun.total() - len(begun)
        again = sum((begun[name] - 1) * num for name, num in tokens.items())
        report.share_again = again / max(1, sum(tokens.values()))
        return {name: body and body["choices"] for name, body in results.items()}


def _posted(client: httpx.Client, route: str, **given: Any) -> dict[str, Any]:
    """The answer; asked again while the store is away."""

    def post() -> httpx.Response | None:
        answer = client.post(route, **given)
        assert answer.status_code in (200, 503), answer.text
        return answer if answer.status_code == 200 else None

    answer: dict[str, Any] = wait_for(post, route).json()
    return answer


def _ended(client: httpx.Client, batch_id: str) -> dict[str, Any] | None:
    batch: dict[str, Any] = client.get(f"/batches/{batch_id}").json()
    return batch if batch.get("status") == "completed" else None
