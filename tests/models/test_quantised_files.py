"""GPTQ, AWQ, FP8 and compressed-tensors checkpoints: what they say, exactness, what is refused."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.grids import choose, more_when_long
from support.model_runs import load_tiny
from support.parity import TokenSequence, schedule
from support.quantised_files import FORMATS, GPTQ, compressed, quantise
from support.tiny_models import TinyModel, find_tiny_model, write_tiny_model
from support.tp_run import Job, run_ranks
from torch import Tensor

from lightserve.config import ServeConfig
from lightserve.errors import ModelLoadError
from lightserve.kernels.cpu.native import NativeKernels
from lightserve.kernels.reference import ReferenceKernels
from lightserve.kernels.select import missing_core
from lightserve.models.base import Part
from lightserve.models.config import load_model_config, resolve_dtype
from lightserve.models.layers.quantized import StoredMethod
from lightserve.models.loader import SafetensorsReader
from lightserve.models.stored_weights import StoredWeight, groups_of
from lightserve.models.weight_files import SINGLE_FILE, check_weights
from lightserve.worker.build import build_runner

MORE_BYTES = 64 << 20
needs_core = pytest.mark.skipif(bool(missing_core()), reason=missing_core())
PLAIN = TinyModel("", "Llama", {"attention_bias": True, "vocab_size": 203})
WIDENED = {"gptq in another order", "fp8 blocks", "fp8 of a tensor", "fp8 of an output"}
"""Formats that the core does not hold."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(PLAIN, tmp_path_factory.mktemp("plain"))


def logits_of(path: Path, kernels: Any, method: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    tokens = torch.arange(7, 67)
    loaded = load_tiny(path, dtype, kernels, method=method)
    passes = schedule([len(tokens)], chunk=20, num_decodes=6)
    results = loaded.run([TokenSequence(tokens, torch.empty(0))], passes)
    assert results is not None
    return results[0].float()


@needs_core
@pytest.mark.parametrize("name", FORMATS)
def test_a_model_is_what_its_integers_say(name: str, plain: Path, tmp_path: Path) -> None:
    path = quantise(plain, tmp_path, name, kept=("layers.1.self_attn.k_proj",))
    truth = logits_of(path / "numbers", ReferenceKernels(), None)
    widened = logits_of(path, ReferenceKernels(), None)
    assert torch.equal(widened, truth), "as numbers they are the same to the bit"
    method = StoredMethod(NativeKernels())
    kept = logits_of(path, NativeKernels(), method)
    torch.testing.assert_close(kept, truth, rtol=1e-4, atol=1e-4)
    # Keys of the second layer are plain, and their product is one with those of others.
    assert (method.num_kept, method.num_widened) == ((0, 8) if name in WIDENED else (7, 1))
    other = logits_of(plain, ReferenceKernels(), None)
    assert (other - truth).abs().max() > 1e-2, "rounding is to be seen"


@needs_core
@pytest.mark.parametrize(
    "family", ["phi3-longrope-part", "glm-0414", "qwen2-moe", "mixtral", "minimax-m2", "exaone4"]
)
def test_merged_turned_and_experts(family: str, tmp_path: Path) -> None:
    """Products that are one tensor, heads that are turned, and experts, as integers too."""
    tiny = replace(find_tiny_model(family), sharded=False)
    source = write_tiny_model(tiny, tmp_path / "plain")
    for name in ("gptq", "awq", "w8a8"):
        path = quantise(source, tmp_path / name, name)
        truth = logits_of(path / "numbers", ReferenceKernels(), None)
        method = StoredMethod(NativeKernels())
        torch.testing.assert_close(
            logits_of(path, NativeKernels(), method), truth, rtol=2e-4, atol=2e-4
        )
        assert method.num_kept and not method.num_widened


@needs_core
@pytest.mark.parametrize("name", FORMATS)
def test_parts_are_those_of_the_whole(name: str, plain: Path, tmp_path: Path) -> None:
    """Of any rank: parts that begin within a word, a group or a block."""
    path = quantise(plain, tmp_path, name)
    config = load_model_config(path)
    files = check_weights(path, config)
    reader = SafetensorsReader(files, dtype=torch.float32, device=torch.device("cpu"))
    module, draw = "model.layers.0.mlp.down_proj.weight", random.Random(1)
    whole = load_file(path / "numbers" / SINGLE_FILE)[module]
    for _ in range(12):
        rows, columns = (
            Part(start, draw.randint(1, size - start))
            for size, start in ((size, draw.randrange(size)) for size in whole.shape)
        )
        expected = whole[
            rows.start : rows.start + rows.size, columns.start : columns.start + columns.size
        ]
        target = torch.empty(rows.size, columns.size)
        reader.read_into(target, module, rows=rows, columns=columns)
        assert torch.equal(target, expected), (rows, columns)
        stored = reader.read_stored(module, rows=rows, columns=columns)
        assert stored is not None and torch.equal(stored.numbers(), expected)
    reader.close()


@needs_core
def test_two_ranks_have_their_parts(plain: Path, tmp_path: Path) -> None:
    names = ("gptq", "gptq one group", "gptq in another order", "awq", "w8a8", "fp8 blocks")
    tokens = torch.arange(7, 67)
    jobs, expected = [], []
    for name in names:
        path = quantise(plain, tmp_path / name, name)
        expected.append(logits_of(path / "numbers", ReferenceKernels(), None))
        job = Job(path=str(path), dtype="float32", kernels="auto", chunk=20, tokens=[tokens])
        jobs.append(job)
    for name, truth, found in zip(names, expected, run_ranks(jobs, 2, tmp_path), strict=True):
        torch.testing.assert_close(found[0].float(), truth, rtol=1e-4, atol=1e-4, msg=name)


@needs_core
def test_a_worker_says_what_became_of_them(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = quantise(plain, tmp_path, "gptq")
    described = json.loads((path / "config.json").read_text()) | {"dtype": "float16"}
    (path / "config.json").write_text(json.dumps(described))
    config = ServeConfig(
        model=str(path), kv_memory="1MiB", max_num_seqs=4, max_num_batched_tokens=64
    )
    with caplog.at_level("INFO"):
        build_runner(config)
    assert (
        "the model is of float16: on a CPU its quantised weights are multiplied in" in caplog.text
    )
    assert "(gptq, 4 bits): 8 products multiply by them as they are, 0 by numbers" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        build_runner(ServeConfig(**(vars(config) | {"attention_backend": "reference"})))
    assert "(gptq, 4 bits) became numbers of bfloat16 when loaded" in caplog.text
    assert resolve_dtype("auto", load_model_config(path), device_type="cuda") == "float16"


@needs_core
def test_factors_that_the_core_has_not_are_widened(plain: Path, tmp_path: Path) -> None:
    """A factor of bfloat16 that no float16 is: nothing is rounded twice."""
    path = quantise(plain, tmp_path, "w4a16")
    tensors = load_file(path / SINGLE_FILE)
    module = "model.layers.0.mlp.down_proj."
    tensors[module + "weight_scale"][0, 0] = 2.0**-30
    save_file(tensors, path / SINGLE_FILE)
    method = StoredMethod(NativeKernels())
    load_tiny(path, torch.float32, NativeKernels(), method=method)
    assert (method.num_kept, method.num_widened) == (7, 1)


# What is refused.

W4 = {"num_bits": 4, "strategy": "group", "group_size": 32}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "'quantization_config.quant_method' is missing"),
    ({"quant_method": "bitsandbytes"}, "names 'bitsandbytes'; supported are gptq, awq, fp8, compr"),
    ({"quant_method": "hqq"}, "names 'hqq'; supported are gptq"),
    ({"quant_method": "eetq"}, "names 'eetq'"),
    (GPTQ | {"group_size": 32, "bits": 3}, "'quantization_config.bits' must be 4 or 8, got 3"),
    (GPTQ | {"group_size": 48}, "must be one of -1, 16, 32, 64, 96, 128, 256, got 48"),
    (GPTQ, "'quantization_config.group_size' is missing"),
    (
        GPTQ | {"group_size": 32, "checkpoint_format": "marlin"},
        "'quantization_config.checkpoint_format' must be 'gptq' or 'gptq_v2', got 'marlin'",
    ),
    (GPTQ | {"group_size": 32, "dynamic": {"x": {}}}, "dynamic' must be empty: modules with"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "must be 'gemm' or 'GEMM', got 'gemv'"),
    ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point' must be true"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "must be 'e4m3' or 'float8_e4m3fn', got 'e5m2'"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "must be two sizes from 1 to 1024"),
    (
        compressed("nvfp4-pack-quantized", W4),
        "must be one of pack-quantized, int-quantized, float-qu",
    ),
    (compressed("marlin-24", W4), "got 'marlin-24'"),
    (compressed("pack-quantized", W4 | {"num_bits": 2}), "weights.num_bits' must be 4 or 8, got 2"),
    (
        compressed("pack-quantized", W4 | {"type": "float"}),
        "weights.type' must be one of int, got 'float'",
    ),
    (
        compressed("int-quantized", {"num_bits": 8, "strategy": "token"}),
        "strategy' must be one of tensor, channel, group, got 'token'",
    ),
    (compressed("pack-quantized", W4) | {"config_groups": {}}, "must have one entry, got 0"),
    (
        compressed("pack-quantized", W4) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config.format' must be 'dense'",
    ),
    (compressed("pack-quantized", W4) | {"quantization_status": "frozen"}, "must be 'compressed'"),
]


@pytest.mark.parametrize(("config", "complaint"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_config_json_may_not_say(
    config: dict[str, Any], complaint: str, plain: Path, tmp_path: Path
) -> None:
    described = json.loads((plain / "config.json").read_text())
    described["quantization_config"] = config
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ModelLoadError) as caught:
        load_model_config(tmp_path)
    message = str(caught.value)
    assert complaint in message and message.startswith(f"{tmp_path / 'config.json'}: key")


Change = Callable[[dict[str, Tensor]], Any]
Q = "model.layers.0.self_attn.q_proj."
BAD_TENSORS: list[tuple[str, Change, str]] = [
    ("gptq", lambda t: t.pop(Q + "qweight"), "q_proj.qweight' is missing"),
    ("gptq", lambda t: t.pop(Q + "scales"), "q_proj.weight' is missing"),
    ("gptq", lambda t: t.pop(Q + "qzeros"), "q_proj.qzeros' is missing"),
    ("gptq in another order", lambda t: t.pop(Q + "g_idx"), "q_proj.g_idx' is missing"),
    (
        "gptq",
        lambda t: t.update({Q + "qweight": t[Q + "qweight"][1:].clone()}),
        "has shape [7, 64], config.json implies [8, 64]",
    ),
    (
        "gptq",
        lambda t: t.update({Q + "qweight": t[Q + "qweight"].long()}),
        "q_proj.qweight' has type I64, not one of I32",
    ),
    (
        "gptq",
        lambda t: t.update({Q + "scales": t[Q + "scales"][:1].clone()}),
        "q_proj.scales' has shape [1, 64], config.json implies [2, 64]",
    ),
    (
        "fp8 blocks",
        lambda t: t.update({Q + "weight": t[Q + "weight"].float()}),
        "q_proj.weight' has type F32, not one of F8_E4M3",
    ),
    (
        "fp8 blocks",
        lambda t: t.update({Q + "weight_scale_inv": torch.ones(1)}),
        "has shape [1], config.json implies [2, 2]",
    ),
    (
        "w8a8",
        lambda t: t.update({Q + "weight": t[Q + "weight"].to(torch.uint8)}),
        "q_proj.weight' has type U8, not one of I8",
    ),
]


@pytest.mark.parametrize(
    ("name", "change", "complaint"), BAD_TENSORS, ids=[text for *_, text in BAD_TENSORS]
)
def test_tensors_that_are_wrong_are_seen_before_anything_starts(
    name: str, change: Change, complaint: str, plain: Path, tmp_path: Path
) -> None:
    path = quantise(plain, tmp_path, name)
    check_weights(path, load_model_config(path))
    tensors = load_file(path / SINGLE_FILE)
    change(tensors)
    save_file(tensors, path / SINGLE_FILE)
    with pytest.raises(ModelLoadError) as caught:
        check_weights(path, load_model_config(path))
    assert complaint in str(caught.value) and str(path) in str(caught.value)


BAD_VALUES: list[tuple[str, Change, str]] = [
    (
        "gptq in another order",
        lambda t: t[Q + "g_idx"].__setitem__(5, 2),
        "q_proj.g_idx names a group that there is not",
    ),
    (
        "gptq in another order",
        lambda t: t[Q + "g_idx"].__setitem__(5, -1),
        "q_proj.g_idx names a group that there is not",
    ),
    (
        "gptq",
        lambda t: t[Q + "scales"].__setitem__((0, 3), torch.inf),
        "q_proj.scales' has values that are not finite, such as inf",
    ),
    (
        "fp8 blocks",
        lambda t: t[Q + "weight"].view(torch.uint8).__setitem__((0, 3), 0x7F),
        "q_proj.weight' has values that are not finite in torch.float32",
    ),
]


@needs_core
@pytest.mark.parametrize(("name", "change", "complaint"), BAD_VALUES, ids=range(len(BAD_VALUES)))
def test_values_that_are_wrong(
    name: str, change: Change, complaint: str, plain: Path, tmp_path: Path
) -> None:
    path = quantise(plain, tmp_path, name)
    tensors = load_file(path / SINGLE_FILE)
    change(tensors)
    save_file(tensors, path / SINGLE_FILE)
    for kernels, method in (
        (ReferenceKernels(), None),
        (NativeKernels(), StoredMethod(NativeKernels())),
    ):
        with pytest.raises(ModelLoadError) as caught:
            load_tiny(path, torch.float32, kernels, method=method)
        assert complaint in str(caught.value) and str(path) in str(caught.value)


@more_when_long
def test_fuzzed_checkpoints(plain: Path, tmp_path: Path) -> None:
    """Files cut off, with bytes and words of the configuration changed: one error, or a model."""
    draw, num_refused = random.Random(7), 0
    words: list[Any] = [None, True, -1, 0, 7, 2**40, 1.5, "", "gptq", "awq", [], {}, [128, 128]]
    num_tries = choose(12, 200)
    quantised = [quantise(plain, tmp_path / name, name) for name in FORMATS]
    for path in quantised:
        whole = (path / SINGLE_FILE).read_bytes()
        described = json.loads((path / "config.json").read_text())
        header = int.from_bytes(whole[:8], "little") + 8
        tracemalloc.start()
        for number in range(num_tries):
            data, config = bytearray(whole), json.loads(json.dumps(described))
            match number % 4:
                case 0:
                    del data[draw.randrange(len(data)) :]
                case 1:
                    for _ in range(draw.choice((1, 1, 4))):
                        data[draw.randrange(header)] = draw.randrange(256)
                case 2:
                    own = config["quantization_config"]
                    own[draw.choice(list(own))] = draw.choice(words)
                case 3:
                    for _ in range(8):
                        data[draw.randrange(header, len(data))] = draw.choice((0, 0x7F, 0xFF))
            (path / SINGLE_FILE).write_bytes(data)
            (path / "config.json").write_text(json.dumps(config))
            try:
                load_tiny(path, torch.float32, ReferenceKernels())
            except ModelLoadError as error:
                num_refused += 1
                assert "\n" not in str(error)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < len(whole) + MORE_BYTES
    assert num_refused > num_tries * len(FORMATS) // 4


@pytest.mark.parametrize(("first_input", "size"), [(0, 128), (64, 64), (32, 32), (96, 32)])
def test_groups_that_begin_before_a_part_are_cut_where_all_of_it_can_begin(
    first_input: int, size: int
) -> None:
    values = torch.randint(0, 16, (4, 256), dtype=torch.uint8)
    factors = torch.tensor([[1.0, 0.5, 0.25]]).repeat(4, 1)
    part = StoredWeight(values, factors, None, 4, 128, first_input)
    groups = groups_of([part])
    assert groups is not None and groups.group_size == size
    places = torch.arange(256) // size
    assert torch.equal(groups.integers * groups.factors[:, places], part.numbers())
