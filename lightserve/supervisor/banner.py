"""What `lightserve serve` prints when it is ready: commands that work as printed."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.config import ServeConfig
from lightserve.logs import LineWriter

READY_PREFIX = "lightserve: ready on "

BUNDLED_PROMPT = "Tell me a story about Mira and the brass lantern."
PROMPT = "Write two sentences about the sea."
"""For models that know more than the bundled one's world."""
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Clients do not connect to an address that stands for all of the machine's, but to one of them."""


def print_banner(config: ServeConfig, port: int) -> None:
    """Print URL, curl line and OpenAI-client snippet to standard output; never waits."""
    LineWriter(sys.stdout.fileno()).write(ready_message(config, port))


def ready_message(config: ServeConfig, port: int) -> str:
    """Return what is printed: the greeting of this server."""
    is_bundled = Path(config.model) == BUNDLED_MODEL_DIR
    return banner(
        config.model_name,
        base_url(config.host, port, scheme="https" if config.ssl_certfile else "http"),
        prompt=BUNDLED_PROMPT if is_bundled else PROMPT,
        needs_key=bool(config.api_key_file),
    )


def base_url(host: str, port: int, *, scheme: str = "http") -> str:
    """Return a URL of a server that listens on `host`, for clients on this machine."""
    host = _LOOPBACK.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def banner(model_name: str, url: str, *, prompt: str, needs_key: bool = False) -> str:
    """Return the greeting: a line for programs, then commands for people, which ask `prompt`.

    With `needs_key` the commands take the key from the environment variable OPENAI_API_KEY.
    """
    key_header = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if needs_key else ""
    key_argument = "" if needs_key else ', api_key="none"'
    body = {
        "model": model_name,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 300,
        "stream": True,
    }
    curl = (
        f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key_header}"
        f" -d {shlex.quote(json.dumps(body))}"
    )
    snippet = f"""\
from openai import OpenAI

client = OpenAI(base_url={url + "/v1"!r}{key_argument})
stream = client.chat.completions.create(
    model={model_name!r},
    messages=[{{"role": "user", "content": {prompt!r}}}],
    max_tokens=300,
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()"""
    return f"{READY_PREFIX}{url} (model {model_name})\n\n{curl}\n\n{snippet}\n"
