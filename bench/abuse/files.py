"""Attacks on files and batches."""

from __future__ import annotations

import json
import time
from typing import Any

from bench.abuse.arena import Answer, Arena, Attack, Outcome, Setup, percentile
from bench.abuse.connections import unfinished

NUM_UPLOADS = 100
UPLOAD_BYTES = 8 * 2**20
GIVE_UP_S = 100.0
NUM_LINES = 50_000
BOUNDARY = "one-boundary"


def _form(content: bytes) -> bytes:
    parts = [
        f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
        f"--{BOUNDARY}\r\ncontent-disposition: form-data;"
        ' name="file"; filename="lines.jsonl"\r\n\r\n',
    ]
    return "".join(parts).encode() + content + f"\r\n--{BOUNDARY}--\r\n".encode()


def _upload(arena: Arena, content: bytes) -> bytes:
    form = _form(content)
    head = (
        f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {arena.user_key}\r\n"
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
]
