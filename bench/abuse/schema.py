"""schemathesis over the server's own OpenAPI schema: data that fit it and data that do not."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.abuse.client import QUIET, row
from bench.serving.server import running_server

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,negative_data_rejection"
)
FLAGS = ["--max-model-len", "96", *QUIET]
"""A short context: many cases are valid and generate to its end."""


def command(url: str, *, max_examples: int, seed: int = 1) -> list[str]:
    """Return the call of schemathesis."""
    tool = Path(sys.executable).parent / "schemathesis"
    options = ["--mode", "all", "--checks", CHECKS, "--phases", "examples,coverage,fuzzing"]
    options += ["--max-examples", str(max_examples), "--seed", str(seed), "--no-color"]
    options += ["--continue-on-failure", "--suppress-health-check", "all", "--warnings", "off"]
    options += ["--request-timeout", "60", "--generation-database", "none"]
    return [str(tool), "run", f"{url}/openapi.json", *options]


def num_cases(output: str) -> int:
    """Return how many cases schemathesis says that it generated."""
    match = re.search(r"(\d+) generated", output)
    return int(match[1]) if match else 0


def run(max_examples: int = 200) -> bool:
    """Measure; returns whether there was no server error."""
    print(f"schemathesis, positive and negative, {max_examples} examples per operation at most")
    with running_server(FLAGS) as server:
        with tempfile.TemporaryDirectory() as folder:  # it leaves files where it runs
            done = subprocess.run(
                command(server.url, max_examples=max_examples),
                capture_output=True,
                text=True,
                check=False,
                cwd=folder,
            )
        is_alive = server.process.poll() is None
    row("cases", f"{num_cases(done.stdout)}", "-")
    row("server errors, answers off schema", "0" if done.returncode == 0 else "SOME", "0")
    row("process alive", "yes" if is_alive else "NO", "yes")
    if done.returncode != 0:
        print(done.stdout[-8000:], done.stderr[-2000:])
    return done.returncode == 0 and is_alive and num_cases(done.stdout) > 0
