"""A real server behind keys and TLS: nothing gives a key away, and SIGHUP changes the keys."""

from __future__ import annotations

import signal
import ssl
from pathlib import Path
from typing import Any

import httpx
import psutil
import trustme
from support.live_server import live_server
from support.processes import wait_for

OLD, NEW = "old-secret-of-alice", "new-secret-of-alice"


def test_keys_over_tls_from_start_to_reload(run_parent: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    pem, keys = tmp_path / "server.pem", tmp_path / "keys"
    certificate.private_key_and_cert_chain_pem.write_to_path(str(pem))
    context = ssl.create_default_context()
    authority.configure_trust(context)
    keys.write_text(f"alice {OLD}\n")
    flags = ["--api-key-file", str(keys), "--ssl-certfile", str(pem), "--http-workers", "2"]
    # The server waits for itself with probes, which are open, but not over plain HTTP.
    with (
        live_server(run_parent, *flags, verify=context) as server,
        httpx.Client(base_url=server.url, verify=context, timeout=300.0) as http,
    ):
        assert server.url.startswith("https://127.0.0.1:")
        assert "$OPENAI_API_KEY" in server.stdout

        def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}", "connection": "close"}
            return http.get("/v1/models", headers=headers).status_code

        assert (status(OLD), status(NEW), status("x")) == (200, 401, 401)
        body = {"model": server.model, "prompt": "Once", "max_tokens": 3}
        headers = {"authorization": f"Bearer {OLD}"}
        assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
        keys.write_text("nonsense\n")
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "API keys stay as they were" in server.stderr, "the error")
        assert {status(OLD) for _ in range(8)} == {200}
        keys.write_text(f"alice {NEW}\n")
        server.process.send_signal(signal.SIGHUP)
        # Both frontends, one after the other: requests on fresh connections reach either.
        wait_for(lambda: {status(NEW) for _ in range(8)} == {200}, "the new key")
        wait_for(lambda: {status(OLD) for _ in range(8)} == {401}, "the end of the old key")
        for process in map(psutil.Process, server.pids()):
            assert "secret" not in " ".join(process.cmdline())
        assert server.stop() == 0
        for secret in (OLD, NEW):
            assert secret not in server.stderr + server.stdout
        assert "client=alice" in server.stderr


# Cached prefixes: found by who computed them, invisible to others, and not seen in the text.

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
