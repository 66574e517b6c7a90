"""What `lightserve serve` prints when it is ready: commands that work as printed."""

from __future__ import annotations

import json
import shlex
import sys

from lightserve.config import ServeConfig
from lightserve.logs import LineWriter

READY_PREFIX = "lightserve: ready on "

_PROMPT = "Tell me a story about Mira and the brass lantern."


def print_banner(config: ServeConfig, port: int) -> None:
    """Print URL, curl line and OpenAI-client snippet to standard output; never waits."""
    url = base_url(config.host, port, scheme="https" if config.ssl_certfile else "http")
    text = banner(config.model_name, url, needs_key=bool(config.api_key_file))
    LineWriter(sys.stdout.fileno()).write(text)


def base_url(host: str, port: int, *, scheme: str = "http") -> str:
    """Return the server's URL."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def banner(model_name: str, url: str, *, needs_key: bool = False) -> str:
    """Return the greeting; the first line is for programs, the rest for people.

    With `needs_key` the commands take the key from the environment variable OPENAI_API_KEY.
    """
    key_header = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if needs_key else ""
    key_argument = "" if needs_key else ', api_key="none"'
    body = {
        "model": model_name,
        "messages": [{"role": "user", "content": _PROMPT}],
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
    messages=[{{"role": "user", "content": {_PROMPT!r}}}],
    max_tokens=300,
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()"""
    return f"{READY_PREFIX}{url} (model {model_name})\n\n{curl}\n\n{snippet}\n"
