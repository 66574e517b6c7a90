"""Attacks on files and batches."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from bench.abuse.arena import (
    ANSWER_WITHIN_S,
    Answer,
    Arena,
    Attack,
    Outcome,
    Setup,
    percentile,
)
from bench.abuse.arena import ask as ask_server
from bench.abuse.connections import unfinished

NUM_UPLOADS = 100
UPLOAD_BYTES = 8 * 2**20
GIVE_UP_S = 100.0
NUM_LINES = 50_000
BOUNDARY = "one-boundary"
NUM_CHECKS = 24
NUM_LARGE_LINES = 4
NUM_IDLE_READERS = 8
IDLE_S = 8.0
MAX_GROWN_MIB = 256
MAX_WAIT_S = 5.0


def _form(content: bytes) -> bytes:
    parts = [
        f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
        f"--{BOUNDARY}\r\ncontent-disposition: form-data;"
        ' name="file"; filename="lines.jsonl"\r\n\r\n',
    ]
    return "".join(parts).encode() + content + f"\r\n--{BOUNDARY}--\r\n".encode()


def _upload(arena: Arena, content: bytes, *, admin: bool = False) -> bytes:
    form = _form(content)
    key = arena.admin_key if admin else arena.user_key
    head = (
        f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
        f"content-type: multipart/form-data; boundary={BOUNDARY}\r\n"
        f"content-length: {len(form)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + form


def _body(answer: Answer) -> Any:
    return json.loads(answer.data[answer.data.index(b"{") :])


def unfinished_uploads(arena: Arena) -> Outcome:
    """Send files without their ends."""
    request = _upload(arena, b" " * UPLOAD_BYTES)
    return unfinished(arena, request, NUM_UPLOADS, give_up_s=GIVE_UP_S)


def longest_batch(arena: Arena) -> Outcome:
    """Make a batch of as many lines as one may have, look at it, and cancel it."""
    body = {"model": arena.model, "prompt": [300, 301], "max_tokens": 2}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    lines = [json.dumps({"custom_id": f"line-{n}", **line}) for n in range(NUM_LINES)]
    file = _body(arena.ask(_upload(arena, "\n".join(lines).encode())))
    wanted = {
        "input_file_id": file["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    start_s = time.monotonic()
    made = arena.ask(arena.post("/v1/batches", wanted))
    seconds = time.monotonic() - start_s
    batch = _body(made)
    time.sleep(5.0)
    seen = _body(arena.ask(arena.get(f"/v1/batches/{batch['id']}")))
    arena.ask(arena.post(f"/v1/batches/{batch['id']}/cancel", {}))
    livez_ms = percentile(arena.seen().livez_ms, 0.99)
    figures = (
        f"{made.status} in {seconds:.1f} s, {seen['request_counts']['completed']} lines in 5 s,"
        f" /livez p99 {livez_ms:.0f} ms"
    )
    return Outcome(figures, met=made.status == 200 and livez_ms <= 100)


def wrong_last_lines(arena: Arena) -> Outcome:
    """Have a file checked again and again that has all lines that may be, and a wrong last one."""
    body = {"model": arena.model, "prompt": [300, 301], "max_tokens": 2}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    lines = [json.dumps({"custom_id": f"{n:>500}", **line}) for n in range(NUM_LINES - 1)]
    file = _body(arena.ask(_upload(arena, "\n".join([*lines, "{}"]).encode())))
    wanted = {"endpoint": "/v1/completions", "completion_window": "24h"}
    hers = _body(arena.ask(_upload(arena, lines[0].encode(), admin=True)))
    request = arena.post("/v1/batches", {**wanted, "input_file_id": file["id"]})
    other = arena.post("/v1/batches", {**wanted, "input_file_id": hers["id"]}, admin=True)
    before = arena.resident_mib()["frontend-0"]

    async def ask(data: bytes, after_s: float = 0.0) -> Answer:
        await asyncio.sleep(after_s)
        return await _ask(arena, data)

    async def run() -> list[Answer]:
        return list(await asyncio.gather(ask(other, 2.0), *map(ask, [request] * NUM_CHECKS)))

    made, *answers = asyncio.run(run())
    grown = arena.seen().peak_mib["frontend-0"] - before
    waited_s = made.end_s - made.start_s
    statuses = sorted({answer.status for answer in answers})
    figures = (
        f"{statuses}, +{grown:.0f} MiB, another key's batch: {made.status} in {waited_s:.1f} s"
    )
    is_met = made.status == 200 and waited_s <= MAX_WAIT_S and grown <= MAX_GROWN_MIB
    return Outcome(figures, met=is_met and set(statuses) <= {400, 429})


async def _ask(arena: Arena, request: bytes) -> Answer:
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            return await ask_server(arena.address, request)
    except TimeoutError:
        now_s = time.monotonic()
        return Answer(now_s - ANSWER_WITHIN_S, end_s=now_s)


def unread_results(arena: Arena) -> Outcome:
    """Have a batch whose results are as large as may be, and ask for them without reading."""
    asked = {"model": arena.model, "n": 16, "echo": True, "logprobs": 20, "max_tokens": 1}
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {**asked, "prompt": [[300 + 8 * number + k] * 700 for k in range(8)]},
        }
        for number in range(NUM_LARGE_LINES)
    ]
    file = _body(arena.ask(_upload(arena, "\n".join(map(json.dumps, lines)).encode())))
    wanted = {"endpoint": "/v1/completions", "completion_window": "24h"}
    batch = _body(arena.ask(arena.post("/v1/batches", {**wanted, "input_file_id": file["id"]})))
    deadline_s = time.monotonic() + ANSWER_WITHIN_S
    while batch["status"] == "in_progress" and time.monotonic() < deadline_s:
        time.sleep(1.0)
        batch = _body(arena.ask(arena.get(f"/v1/batches/{batch['id']}")))
    if batch["output_file_id"] is None:
        return Outcome(f"no results: {batch['status']} {batch['request_counts']}", met=False)
    request = arena.get(f"/v1/files/{batch['output_file_id']}/content")
    size = _body(arena.ask(arena.get(f"/v1/files/{batch['output_file_id']}")))["bytes"]
    before = arena.resident_mib()["frontend-0"]

    async def run() -> int:
        held = [await asyncio.open_connection(*arena.address) for _ in range(NUM_IDLE_READERS)]
        for _, writer in held:
            writer.write(request)
        await asyncio.sleep(IDLE_S)
        reader, writer = await asyncio.open_connection(*arena.address)
        writer.write(request)
        num_bytes = 0
        while data := await reader.read(2**20):
            num_bytes += len(data)
        for _, each in [*held, (reader, writer)]:
            each.transport.abort()
        return num_bytes

    num_read = asyncio.run(run())
    grown = arena.seen().peak_mib["frontend-0"] - before
    peaks = arena.seen().peak_mib.items()
    of_batches = sum(mib for name, mib in peaks if name.startswith("batches"))
    figures = (
        f"{size / 1e6:.0f} MB of results: frontend +{grown:.0f} MiB, batches {of_batches:.0f} MiB"
    )
    return Outcome(figures, met=grown <= MAX_GROWN_MIB and num_read > size)


NUM_REFUSED_LINES, NUM_SMALL_LINES = 4, 20
MAX_KEPT_BYTES = 2**20
OTHERS_WITHIN_S = 60.0


def refused_lines(arena: Arena) -> Outcome:
    """Have a batch of lines whose answers are larger than all that may be kept: always a 429."""
    small = {"model": arena.model, "prompt": [300, 301], "max_tokens": 2}
    large = {**small, "max_tokens": 1000, "ignore_eos": True, "n": 16, "logprobs": 20}

    def make(body: dict[str, Any], count: int, *, admin: bool) -> Any:
        line = {"method": "POST", "url": "/v1/completions", "body": body}
        lines = [json.dumps({"custom_id": str(n), **line}) for n in range(count)]
        file = _body(arena.ask(_upload(arena, "\n".join(lines).encode(), admin=admin)))
        wanted = {"endpoint": "/v1/completions", "completion_window": "24h"}
        wanted["input_file_id"] = file["id"]
        return _body(arena.ask(arena.post("/v1/batches", wanted, admin=admin)))

    status = arena.ask(arena.post("/v1/completions", large)).status
    refused = make(large, NUM_REFUSED_LINES, admin=False)
    time.sleep(5.0)
    start_s, batch = time.monotonic(), make(small, NUM_SMALL_LINES, admin=True)
    while batch["status"] == "in_progress" and time.monotonic() < start_s + OTHERS_WITHIN_S:
        time.sleep(0.5)
        batch = _body(arena.ask(arena.get(f"/v1/batches/{batch['id']}", admin=True)))
    seconds, counts = time.monotonic() - start_s, batch["request_counts"]
    of_refused = _body(arena.ask(arena.get(f"/v1/batches/{refused['id']}")))["request_counts"]
    arena.ask(arena.post(f"/v1/batches/{refused['id']}/cancel", {}))
    figures = (
        f"{counts['completed']} of {NUM_SMALL_LINES} lines of another key after {seconds:.1f} s,"
        f" {of_refused['completed']} of the large ones; one of them alone: {status}"
    )
    is_met = (counts["completed"], of_refused["completed"]) == (NUM_SMALL_LINES, 0)
    is_met = is_met and status == 429
    return Outcome(figures, met=is_met)


STORE = Setup(has_store=True)
FILES = [
    Attack(
        f"{NUM_UPLOADS} uploads of 8 MiB without an end",
        unfinished_uploads,
        before="no files yet",
        bound="+160 MiB, all ended in 100 s",
        setup=STORE,
    ),
    Attack(
        "a batch of 50,000 lines",
        longest_batch,
        before="no batches yet",
        bound="made, /livez p99 <= 100 ms",
        setup=STORE,
    ),
    Attack(
        f"a file of {NUM_LINES - 1:,} lines whose last is wrong, {NUM_CHECKS} times at once",
        wrong_last_lines,
        before="frontend +2,569 MiB",
        bound=f"+{MAX_GROWN_MIB} MiB, another key's batch made in {MAX_WAIT_S:.0f} s",
        setup=STORE,
    ),
    Attack(
        f"{NUM_IDLE_READERS} that do not read the largest results, and one that does",
        unread_results,
        before="frontend +3,153 MiB",
        bound=f"+{MAX_GROWN_MIB} MiB",
        setup=STORE,
    ),
    Attack(
        f"a batch of {NUM_REFUSED_LINES} lines that always get a 429",
        refused_lines,
        before="tried for ever, and all lines of other keys waited",
        bound=f"another key's lines done in {OTHERS_WITHIN_S:.0f} s",
        setup=Setup(("--max-kept-answer-bytes", str(MAX_KEPT_BYTES)), has_store=True),
        has_victim=False,
    ),
]
