"""What a GPU would be told to do, without one; see `support.device_steps`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent.parent
KERNELS = {
    "_decode_kernel",
    "_prefill_kernel",
    "_add_rms_norm_kernel",
    "_move_kernel",
    "_rows_kernel",
    "adjust_kernel",
    "draw_kernel",
    "draw_top_kernel",
    "logprobs_kernel",
}
"""Some of every part of a step."""


@pytest.fixture(scope="module")
def found() -> Any:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{TESTS.parent}:{TESTS}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "support.device_steps"],
        capture_output=True,
        env=environment,
        timeout=600,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_steps_are_on_the_device_and_wait_for_nothing(found: Any) -> None:
    """Real plans with every option, copies and constraints; a fault of either kind is seen."""
    steps = found["fake"]
    assert steps["num_plans"] > 80
    assert set(steps["kernels"]) >= KERNELS
    assert steps["waited"] == "in finish"
    assert steps["launch_s"] > 0.0  # the router is told
    # What torch calls it in one version and in another.
    mixed = {"FakeTensorDeviceMismatchError", "RuntimeError"}
    assert steps["faults"].pop("a tensor on the host") in mixed
    assert steps["faults"] == {
        "a value is read": "DataDependentOutputException",
        "a size is read": "DynamicOutputShapeException",
        "a kernel's argument on the host": "RuntimeError",
    }


def test_nothing_is_compiled_after_the_start(found: Any) -> None:
    assert found["variants"]["late"] == {"small": [], "large": []}
    assert found["variants"]["num_late_if_cold"] > 10
