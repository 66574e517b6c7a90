"""schemathesis over the running server's own schema; bench/abuse schema is the long version."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from support.live_server import LiveServer

TOOL = Path(sys.executable).parent / "schemathesis"
MAX_EXAMPLES = "8"
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,negative_data_rejection"
)
"""No 5xx; every answer is one that the schema names; what does not fit the schema is refused."""


def test_no_data_makes_the_server_fail(server: LiveServer, tmp_path: Path) -> None:
    """Data that fit the schema and data that do not: no 5xx, and the schema is true."""
    done = subprocess.run(
        [
            *[str(TOOL), "run", f"{server.url}/openapi.json", "--checks", CHECKS],
            *["--mode", "all", "--phases", "coverage,fuzzing", "--max-examples", MAX_EXAMPLES],
            *["--seed", "1", "--suppress-health-check", "all", "--generation-database", "none"],
            *["--request-timeout", "300", "--no-color", "--warnings", "off"],
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    generated = re.search(r"(\d+) generated", done.stdout)
    assert generated is not None, done.stdout[-2000:]
    assert int(generated[1]) >= 20
    assert server.is_ready()
