"""What can be known without a GPU of kernels for one.

The reference on tensors that say they are on a GPU: none on the host, none read back. This
needs a build of torch with CUDA: the CPU build cannot index such tensors.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.grids import choose, more_when_long
from support.kernel_grid import SMALL_SHAPES
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException

from lightserve.kernels.check_pair import Pair
from lightserve.kernels.interface import AttentionBatch
from lightserve.kernels.reference import ReferenceKernels
from lightserve.kernels.self_check import _comparisons

CUDA = torch.device("cuda", 0)
ROWS = [(1, 50), (17, 17), (1, 51), (40, 90), (1, 700), (3, 20), (1, 2)]

needs_cuda_build = pytest.mark.skipif(
    torch.version.cuda is None, reason="a build of torch without CUDA"
)


def fake_batch() -> AttentionBatch:
    num_tokens = sum(new for new, _ in ROWS)
    return AttentionBatch(
        positions=torch.empty(num_tokens, dtype=torch.int64, device=CUDA),
        slot_mapping=torch.empty(num_tokens, dtype=torch.int64, device=CUDA),
        req_to_slot=torch.empty(9, 768, dtype=torch.int32, device=CUDA),
        rows=torch.empty(7, dtype=torch.int64, device=CUDA),
        cu_seqlens_q=torch.empty(8, dtype=torch.int32, device=CUDA),
        context_lens=torch.empty(7, dtype=torch.int32, device=CUDA),
        host_rows=tuple(range(1, 8)),
        host_q_lens=tuple(new for new, _ in ROWS),
        host_context_lens=tuple(context for _, context in ROWS),
    )


@needs_cuda_build
@pytest.mark.parametrize("window", [None, 24])
def test_a_layer(window: int | None) -> None:
    kernels = ReferenceKernels()
    with FakeTensorMode():
        batch = fake_batch()
        num_tokens = len(batch.positions)
        x = torch.empty(num_tokens, 96, device=CUDA, dtype=torch.bfloat16)
        pools = [torch.empty(2, 1000, 16, device=CUDA, dtype=x.dtype) for _ in range(2)]
        k_pool, v_pool = (pool.transpose(0, 1) for pool in pools)
        norm = torch.empty(96, device=CUDA, dtype=x.dtype)
        x, residual = kernels.add_rms_norm(x, x.clone(), norm, 1e-5)
        weight = kernels.pack_weight(torch.empty(128, 96, device=CUDA, dtype=x.dtype))
        heads = kernels.linear(x, weight, None).view(num_tokens, 8, 16)
        q, k, v = heads.split([4, 2, 2], dim=1)
        cos = torch.empty(num_tokens, 8, device=CUDA)
        q, k = kernels.rotary(q, k, cos, cos)
        kernels.write_kv(k, v, k_pool, v_pool, batch.slot_mapping)
        out = kernels.attention(q, k_pool, v_pool, batch, scale=0.25, sliding_window=window)
        assert (out.shape, out.dtype, out.device) == ((num_tokens, 4, 16), x.dtype, CUDA)
        assert kernels.silu_and_mul(residual).device == CUDA


@needs_cuda_build
def test_what_would_be_seen() -> None:
    """A tensor on the host among those of the device, or one that the host reads."""
    with FakeTensorMode():
        batch = fake_batch()
        with pytest.raises(DataDependentOutputException):
            batch.context_lens.tolist()
        with pytest.raises(RuntimeError, match="two different devices"):
            batch.positions + torch.arange(len(batch.positions))


@needs_cuda_build
def test_the_check_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it compares is on the device; only the errors are read."""
    monkeypatch.setattr(torch, "Generator", NoGenerator)
    shapes = replace(
        SMALL_SHAPES, sliding_windows=(24, None), qk_norm=True, qkv_bias=True, num_experts=0
    )
    with FakeTensorMode():
        operations = set()
        for comparison in _comparisons(Pair(ReferenceKernels(), shapes, CUDA)):
            assert comparison.result.device == comparison.truth.device == CUDA, comparison
            assert comparison.result.shape == comparison.truth.shape, comparison
            operations.add(comparison.operation)
    assert {"attention", "write_kv", "rotary", "add_rms_norm"} <= operations


class NoGenerator:
    """There is none for a GPU that is not there; nothing is drawn anyhow."""

    def __init__(self, device: torch.device) -> None:
        assert device == CUDA

    def manual_seed(self, seed: int) -> None:
        return None


# What the compiler makes of the kernels that matter most: no GPU, no interpreter. The whole table
# is printed by bench/engine/kernels_offline.py.

ROOT = Path(__file__).parents[2]
KERNELS = sorted((ROOT / "lightserve" / "kernels" / "triton").glob("*.py"))
OLDEST_TRITON = Path(sys.prefix) / "triton-oldest"
"""Where `make test` puts it: see requirements/triton_oldest.in."""


def run_compiler(
    module: str,
    options: list[str],
    tmp_path: Path,
    config: pytest.Config,
    triton: Path | None = None,
) -> str:
    """Run a program that compiles kernels; return what it prints.

    In a process of its own: under TRITON_INTERPRET=1 there is nothing to compile. What was compiled
    is kept for the next run, by the contents of all that it was made from. `triton`: the directory
    of another version than the installed one.
    """
    cache = getattr(config, "cache", None)
    kept = tmp_path / "compiled" if cache is None else cache.mkdir("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(path) for path in (triton, ROOT, ROOT / "tests") if path is not None]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(kept)}
    environment |= {"TRITON_DEFAULT_FP_FUSION": "0"}  # kernels say for themselves what they want
    done = subprocess.run(
        [sys.executable, "-m", module, *options],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compiled(
    names: list[str], tmp_path: Path, config: pytest.Config, triton: Path | None = None
) -> list[dict[str, Any]]:
    """Compile the cases of these names for sm_90; return the table's rows."""
    table = tmp_path / "table.json"
    options = ["--capability", "90", "--json", str(table), "--name", *names]
    run_compiler("bench.engine.kernels_offline", options, tmp_path, config, triton)
    rows: list[dict[str, Any]] = json.loads(table.read_text())
    assert all(row["num_local"] == 0 and not row["faults"] for row in rows)
    return rows


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_a_kernel_gives_a_value_in_one_place(path: Path) -> None:
    """Triton 3.6 goes on compiling behind a `return` in an `if` whose condition it knows."""
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef) or not any(
            "jit" in ast.unparse(decorator) for decorator in function.decorator_list
        ):
            continue
        values = [x for x in ast.walk(function) if isinstance(x, ast.Return) and x.value]
        assert all(value is function.body[-1] for value in values), function.name


PRODUCTS = [
    *("int8, 8 rows", "int8 by int8, 512", "int4, 512", "uint8, 8 rows", "fp8 of outputs, 512"),
    *("fp8 in blocks, 8 rows", "fp8 by fp8 of outputs, 8 rows", "fp8 by fp8 in blocks, 512"),
]
EXPERTS = ["A3B, 8", "gpt-oss, 4096", "fp4, 8", "int4, 4096", "int8, 4096", "fp8 by fp8, 8"]


@more_when_long
@pytest.mark.skipif(not OLDEST_TRITON.exists(), reason=f"no {OLDEST_TRITON}: `make test` makes it")
def test_the_oldest_triton(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    few = [f"products of {name}" for name in PRODUCTS] + [f"{name} tokens" for name in EXPERTS]
    names = ["28/4 heads of 128, window", "of 896", "of 64, QK", "of 128256, top-p"]
    names += choose(few, ["products of", "experts", "top-p"])
    rows = compiled(names, tmp_path, pytestconfig, OLDEST_TRITON)
    assert {"_product_kernel", "_features_kernel", "_decode_kernel", "_norm_kernel"} <= {
        row["kernel"] for row in rows
    }


@pytest.mark.parametrize("triton", [None, OLDEST_TRITON], ids=["installed", "oldest"])
def test_launches_take_the_kernels_that_triton_would(
    triton: Path | None, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """With the same arguments, and where anything differs that a kernel is compiled for, another
    one. Triton is asked for each once, and each time for integers below 0 or beyond 63 bits."""
    if triton is not None and not triton.exists():
        pytest.skip(f"no {triton}: `make test` makes it")
    found = json.loads(run_compiler("support.launches", [], tmp_path, pytestconfig, triton))
    assert found["different"] == []
    assert found["num_launches"] > 2000 and found["num_functions"] >= 20
    assert found["num_functions"] <= found["num_of_triton"] < found["num_launches"] / 4
    others = found["others"]
    assert others["device"] == [True] and others["other"] == [True]
    assert others["SIZE"] == [True] and others["IS_LARGE"] == [True]
    assert others["num_warps"] == [True] and others["flag"] == [False]
    aligned, unaligned, bfloat16, parameter = others["x"]
    assert unaligned and bfloat16 and not aligned and not parameter
    assert others["slots"] == [False, True], "what is not specialised on alignment, and its type"
    five, *zero_one_16_48, largest, beyond, odd, unsigned, minus, minus_16 = others["stride"]
    assert all([*zero_one_16_48, beyond, odd, unsigned, minus_16])
    assert not any([five, largest, minus])
    assert found["is_untried_plain"], "a Triton that is not known launches its own way"


def test_what_a_hopper_gpu_gets(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Attention and experts have tensor-core instructions, and nothing spills.

    Where all is tried, so do scans of Falcon-H1's states.
    """
    names = ["28/4 heads of 128, window", "experts of Qwen3", *choose([], ["48 heads, states"])]
    found = compiled(names, tmp_path, pytestconfig)
    rows = [row for row in found if row["case"].startswith("attention")]
    experts = [row for row in found if row["case"].startswith("experts")]
    assert {row["kernel"] for row in experts} == {"_features_kernel", "_outputs_kernel"}
    assert all(row["num_mma"] or row["num_wgmma"] for row in experts), experts
    mixed = {row["kernel"]: row for row in rows if row["case"].endswith("4096")}
    assert set(mixed) == {
        "_plan_kernel", "_prefill_kernel", "_decode_kernel", "_merge_kernel"
    }  # fmt: skip
    assert "_plan_kernel" in {
        row["kernel"] for row in rows if row["case"].endswith("16,384 decodes")
    }
    cut = [row["kernel"] for row in rows if row["case"].endswith(", cut")]
    assert not cut, "contexts that are cut need no kernels of their own"
    prefill = mixed["_prefill_kernel"]
    assert prefill["num_wgmma"] and not prefill["num_mma"] and prefill["num_async_copies"]
    decode = mixed["_decode_kernel"]
    assert decode["num_mma"] and decode["num_async_copies"] and decode["blocks_per_sm"] >= 3


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
