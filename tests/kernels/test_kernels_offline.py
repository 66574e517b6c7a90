"""What the compiler makes of the kernels that matter most: no GPU, no interpreter.

The whole table is printed by bench/engine/kernels_offline.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_attention_as_a_hopper_gpu_gets_it(tmp_path: Path) -> None:
    """In a process of its own: under TRITON_INTERPRET=1 there is nothing to compile."""
    table = tmp_path / "table.json"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment |= {"TRITON_DEFAULT_FP_FUSION": "0"}  # kernels say for themselves what they want
    options = ["--capability", "90", "--json", str(table), "--name", "28/4 heads of 128, window"]
    done = subprocess.run(
        [sys.executable, "-m", "bench.engine.kernels_offline", *options],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(table.read_text())
    mixed = {row["kernel"]: row for row in rows if row["case"].endswith("4096")}
    cut = {row["kernel"]: row for row in rows if row["case"].endswith(", cut")}
    assert set(mixed) == {
        "_schedule_kernel", "_prefill_kernel", "_decode_kernel", "_merge_kernel"
    }  # fmt: skip
    assert "_schedule_kernel" in {
        row["kernel"] for row in rows if row["case"].endswith("16,384 decodes")
    }
    assert set(cut) == {"_prefill_kernel", "_merge_kernel"}
    for prefill in (mixed["_prefill_kernel"], cut["_prefill_kernel"]):
        assert prefill["num_wgmma"] and not prefill["num_mma"] and prefill["num_async_copies"]
    decode = mixed["_decode_kernel"]
    assert decode["num_mma"] and decode["num_async_copies"] and decode["blocks_per_sm"] >= 3
    assert all(row["num_local"] == 0 and not row["faults"] for row in rows)


@pytest.mark.long
def test_a_kernel_that_spills_is_a_fault() -> None:
    """Blocks that do not fit into registers: the table says so."""
    code = """
from bench.engine.kernels_offline import Case, attend, compile_cases
from lightserve.kernels.triton import configs, plan
configs.default_prefill = lambda shape, gpu: configs.PrefillConfig(128, 128, 4, 1)
(line,) = [line for line in compile_cases([Case("", lambda: attend(8, 1, 128))], 90)
           if line.launch.name == "_prefill_kernel"]
assert any("spilled" in fault for fault in line.faults), line
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"PYTHONPATH": str(ROOT)}, cwd=ROOT,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
