"""What `lightserve serve` prints when it is ready: commands that work as printed."""

from __future__ import annotations

import json
import shlex

from lightserve.config import ServeConfig

READY_PREFIX = "lightserve: ready on "

_PROMPT = "Tell me a story about Mira and the brass lantern."


def print_banner(config: ServeConfig, port: int) -> None:
    """Print URL, curl line and OpenAI-client snippet to standard output."""
    print(banner(config.model_name, base_url(config.host, port)), flush=True)


def base_url(host: str, port: int) -> str:
    """Return the server's URL."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def banner(model_name: str, url: str) -> str:
    """Return the greeting; the first line is for programs, the rest for people."""
    body = {
        "model": model_name,
        "messages": [{"role": "user", "content": _PROMPT}],
        "max_tokens": 300,
        "stream": True,
    }
    curl = (
        f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'"
        f" -d {shlex.quote(json.dumps(body))}"
    )
    snippet = f"""\
from openai import OpenAI

client = OpenAI(base_url={url + "/v1"!r}, api_key="none")
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
