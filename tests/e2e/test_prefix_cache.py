"""Cached prefixes: found by who computed them, invisible to others, and not seen in the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from support.live_server import live_server

PROMPT = "Once upon a time a fox went to the market. " * 12


def test_a_key_finds_its_own_prefixes_only(run_parent: Path, tmp_path: Path) -> None:
    """Another key is not even told by the time or the usage that a prompt was there."""
    keys = tmp_path / "keys"
    keys.write_text("alice the-key-of-alice\nbob the-key-of-bob-too\n")
    flags = ["--api-key-file", str(keys), "--batch-invariant", "--dtype", "float32"]
    with (
        live_server(run_parent, *flags) as server,
        httpx.Client(base_url=server.url, timeout=300.0) as http,
    ):

        def complete(key: str) -> dict[str, Any]:
            body = {"model": server.model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
            headers = {"authorization": f"Bearer {key}"}
            answer: dict[str, Any] = http.post("/v1/completions", json=body, headers=headers).json()
            return answer

        answers = [
            complete(key) for key in ("the-key-of-alice", "the-key-of-alice", "the-key-of-bob-too")
        ]
        usages = [answer["usage"] for answer in answers]
        num_prompt_tokens = usages[0]["prompt_tokens"]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        assert cached == [0, num_prompt_tokens - 1, 0]
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
