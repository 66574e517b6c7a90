"""A profile on its way: from a file through the workers' hello into the router's predictions."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import msgspec
from support.live_server import live_server
from support.processes import wait_for

from lightserve.config import ServeConfig
from lightserve.cost.profile import SCHEMA_VERSION, StepProfile, save_profile
from lightserve.messages.common import StepCoefficients
from lightserve.worker.profiling import profile_key

FLOOR_S = 3.0


def test_a_profile_is_what_the_first_step_is_predicted_by(run_parent: Path, tmp_path: Path) -> None:
    key = profile_key(ServeConfig())
    key = msgspec.structs.replace(key, num_threads=1)
    path = tmp_path / "profile.json"
    slow = StepCoefficients(FLOOR_S, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    save_profile(StepProfile(SCHEMA_VERSION, "0", "slow", key, slow, 1, 9, 0.0, 0.0), path)
    with live_server(run_parent, "--profile", str(path)) as server:
        body = {"model": server.model, "prompt": "A fox", "max_tokens": 1}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=300.0).is_success
        predicted_s = wait_for(lambda: _predicted_s(server.metrics_url), "a predicted step")
        assert predicted_s == FLOOR_S


def _predicted_s(metrics_url: str) -> float:
    text = httpx.get(metrics_url, timeout=300.0).text
    found = re.search(r"^lightserve_predicted_step_time_seconds_sum\S* (\S+)$", text, re.M)
    assert found is not None
    return float(found[1])
