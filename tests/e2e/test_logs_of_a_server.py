"""The log of a real server at debug level: JSON, requests that can be followed, no secrets."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
from support.live_server import live_server
from support.processes import wait_for

SECRET = "xyzzy-plugh"
KEY = "sk-" + "hollowvoice" * 4


def test_a_request_can_be_followed_and_its_words_cannot(run_parent: Path, tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text(f"tester {KEY} admin\n")
    key_file.chmod(0o600)
    flags = ["--log-level=debug", "--log-format=json", f"--api-key-file={key_file}"]
    with live_server(run_parent, *flags) as server:
        body = {
            "model": server.model,
            "messages": [{"role": "user", "content": f"Say {SECRET}."}],
            "user": SECRET,
            "max_tokens": 6,
        }
        headers = {"authorization": f"Bearer {KEY}", "x-request-id": "followed-1"}
        url = f"{server.url}/v1/chat/completions"
        answer = httpx.post(url, json=body, headers=headers, timeout=300.0)
        assert answer.status_code == 200, answer.text
        wrong = {"authorization": f"Bearer {KEY}x"}
        assert (
            httpx.post(f"{url}?{SECRET}", json=body, headers=wrong, timeout=300.0).status_code
            == 401
        )
        metrics = server.metrics(headers)
        wait_for(lambda: "followed-1" in server.stderr, "the request's lines")
        server.stop()
        log = server.stderr
    lines: list[dict[str, Any]] = [json.loads(line) for line in log.splitlines()]
    assert {"supervisor", "frontend-0", "router-0", "worker-0"} <= {x["process"] for x in lines}
    assert not any("uvicorn" in line["logger"] for line in lines)
    assert SECRET not in log
    assert KEY not in log
    for shown in (answer.json()["choices"][0]["message"]["content"].strip(), SECRET, KEY):
        assert shown not in metrics

    mine = [line for line in lines if line.get("request_id") == "followed-1"]
    responses = [line for line in mine if line.get("route") == "/v1/chat/completions"]
    assert [(line["method"], line["status"]) for line in responses] == [("POST", 200)]
    number = next(
        match[1]
        for line in mine
        if (match := re.search(r"is request (\d+) of this frontend", line["message"]))
    )
    of_router = [
        line["message"]
        for line in lines
        if line["process"] == "router-0" and f"request 0/{number}:" in line["message"]
    ]
    assert len(of_router) == 2
    assert "submitted" in of_router[0] and "ends" in of_router[1]
