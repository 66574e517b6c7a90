"""The KV pool of a running server: what /debug/kv says while a stream runs, and its picture."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import matplotlib.font_manager  # noqa: F401 - its cache is there then, the making of which is announced
from support.live_server import LiveServer
from support.processes import wait_for

PROMPT = "Tell me a story about Mira and the brass lantern. " * 6


def _map(server: LiveServer) -> dict[str, Any]:
    response = httpx.get(f"{server.url}/debug/kv", timeout=300.0)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    total = sum(count for _, count in answer["slots"])
    assert total == answer["num_slots"] == sum(answer["counts"].values())
    return answer


def _num_used(answer: dict[str, Any], request_class: str) -> int:
    num_slots: int = answer["classes"][request_class]["num_slots"]
    return num_slots


@contextmanager
def _stream(server: LiveServer, service_tier: str) -> Iterator[None]:
    """A stream that has begun and goes on until the end of the context."""
    body = {
        **{"model": server.model, "prompt": PROMPT, "max_tokens": 6000, "ignore_eos": True},
        **{"service_tier": service_tier, "stream": True},
    }
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300.0) as response:
        lines = response.iter_lines()  # when it is dropped, the connection is closed
        assert next(lines).startswith("data:")
        yield


def test_a_stream_is_on_the_map_and_its_prompt_stays_as_cache(
    server: LiveServer, tmp_path: Path
) -> None:
    picture = tmp_path / "kv.png"
    with _stream(server, "default"), _stream(server, "flex"):
        during = _map(server)
        drawing = subprocess.run(
            [
                *(sys.executable, "-m", "lightserve.cli.main", "kv-map", server.url),
                *("-o", str(picture)),
            ],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert (drawing.returncode, drawing.stdout, drawing.stderr) == (0, "", "")
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    assert during["classes"]["rt"]["num_requests"] == 1
    assert during["classes"]["be"]["num_requests"] == 1
    assert _num_used(during, "rt") > 50
    assert _num_used(during, "be") > 0  # its own tokens; the prompt may be one with the other's
    assert during["mean_run_length"] > 1
    assert 0 < during["num_free_blocks"] < during["num_slots"] // during["block_size"]

    def is_over() -> bool:
        return _num_used(_map(server), "rt") == _num_used(_map(server), "be") == 0

    wait_for(is_over, "the end of both streams")
    after = _map(server)
    assert after["counts"]["cached"] > 50
    assert after["mean_run_length"] == 0
