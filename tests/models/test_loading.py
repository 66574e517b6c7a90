"""Configurations as transformers reads them; tied and extra tensors; what a pass computes."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.grids import choose, more_when_long
from support.model_runs import LoadedModel, load_tiny
from support.own_code_models import ARCHITECTURES
from support.parity import (
    Chunk,
    DirectDriver,
    TokenSequence,
    compare_all,
    make_sequences,
    schedule,
)
from support.tiny_models import TINY_MODELS, TinyModel, find_tiny_model, load_reference
from support.tiny_models import write_tiny_model as write
from transformers.models.bloom import modeling_bloom
from transformers.models.mpt import modeling_mpt

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError, ModelLoadError
from lightserve.kernels.reference import ReferenceKernels
from lightserve.models.base import kv_layout
from lightserve.models.config import load_model_config, resolve_context_len, resolve_dtype
from lightserve.models.layers.attention import RotaryTable, frequencies
from lightserve.models.loader import SafetensorsReader
from lightserve.models.plain_config import as_bfloat16, mpt_slopes, slopes_of
from lightserve.models.recurrent_config import MambaConfig
from lightserve.models.rope import DefaultRope, LinearRope
from lightserve.models.weight_files import (
    EMBEDDING,
    LM_HEAD,
    SINGLE_FILE,
    check_weights,
    expected_tensors,
    find_weights,
)
from lightserve.worker import build

WITHOUT_KV_HEADS = ("GPTNeoX", "OPT", "Bloom", "Mpt", "GPTBigCode")
"""Families that know no such key."""
OF_TRANSFORMERS = [tiny for tiny in TINY_MODELS if tiny.family not in ARCHITECTURES]


@pytest.mark.parametrize("tiny", OF_TRANSFORMERS, ids=lambda tiny: tiny.name)
def test_config_and_names_agree_with_transformers(tiny: TinyModel, tmp_path: Path) -> None:
    write(tiny, tmp_path)
    ours, theirs = load_model_config(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    assert ours.num_layers == theirs.num_hidden_layers
    theirs.allow_global_per_layer_attribute_access = True
    if tiny.family == "Falcon":
        assert ours.num_kv_heads in (1, theirs.num_kv_heads)
    elif ours.latent is not None:
        assert ours.num_kv_heads == 1
    elif tiny.family not in WITHOUT_KV_HEADS:
        assert ours.num_kv_heads == theirs.num_key_value_heads
    head_dim = getattr(theirs, "head_dim", None)
    if ours.latent is not None:
        head_dim = theirs.kv_lora_rank + theirs.qk_rope_head_dim
    assert ours.head_dim == (head_dim or theirs.hidden_size // theirs.num_attention_heads)
    if len(ours.unrotated_layers) < ours.num_layers:
        parameters = theirs.rope_parameters
        assert ours.rope.theta == parameters.get("full_attention", parameters)["rope_theta"]
    keys = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    stated = [getattr(theirs, key) for key in keys if hasattr(theirs, key)]
    assert ours.rms_norm_eps == (stated[0] if stated else 1e-5)
    assert ours.dtype == "float32"
    window = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * ours.num_layers
    assert ours.sliding_windows == tuple(
        window if kind == "sliding_attention" else None for kind in kinds
    )
    files = check_weights(tmp_path, ours)
    assert set(files.file_of) == {files.stored(name) for name in expected_tensors(ours)}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_names_agree_with_published_ones(family: str, tmp_path: Path) -> None:
    write(next(tiny for tiny in TINY_MODELS if tiny.family == family), tmp_path)
    config = load_model_config(tmp_path)
    files = check_weights(tmp_path, config)
    assert set(files.file_of) == {files.stored(name) for name in expected_tensors(config)}


def test_a_file_saved_without_its_output_layer_has_shorter_names(tmp_path: Path) -> None:
    write(find_tiny_model("bloom-6-heads"), tmp_path)
    file = tmp_path / SINGLE_FILE
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(file).items()}
    file.unlink()
    save_file(tensors, file)
    config = load_model_config(tmp_path)
    files = check_weights(tmp_path, config)
    assert files.stored(EMBEDDING) == "word_embeddings.weight"
    assert files.stored("model.layers.1.self_attn.qkv_proj.bias") in tensors


@pytest.mark.parametrize(
    ("prefix", "head_prefix"), [("language_model.", "language_model."), ("model.language_", "")]
)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gemma3", "gemma3_text"),
        ("gemma4-moe", "gemma4_text"),
        ("mistral-full", "mistral"),
        ("ministral3", "ministral3"),
        ("mistral4", "mistral4"),
        ("llama4", "llama4_text"),
    ],
)
def test_the_text_part_of_a_model_that_sees_images(
    name: str, kind: str, prefix: str, head_prefix: str, tmp_path: Path
) -> None:
    tiny = dataclasses.replace(find_tiny_model(name), sharded=False)
    write(tiny, tmp_path)
    alone = load_model_config(tmp_path)
    file = tmp_path / "config.json"
    text = json.loads(file.read_text())
    dtype, architecture = text.pop("dtype"), text.pop("architectures")[0]
    families = ("Gemma3", "Gemma4", "Llama4")
    family = next((name for name in families if name in architecture), "Mistral3")
    whole = f"{family}ForConditionalGeneration"
    values = {"architectures": [whole], "text_config": {**text, "model_type": kind}, "dtype": dtype}
    file.write_text(json.dumps(values))
    assert load_model_config(tmp_path) == alone
    weights = tmp_path / SINGLE_FILE
    tensors = {
        (head_prefix if key == LM_HEAD else prefix) + key: tensor
        for key, tensor in load_file(weights).items()
    }
    weights.unlink()
    save_file({**tensors, "vision_tower.weight": torch.zeros(1)}, weights)
    files = check_weights(tmp_path, alone)
    assert {files.stored(key) for key in expected_tensors(alone)} == set(tensors)
    values["text_config"]["model_type"] = "other"
    file.write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match=f"'text_config.model_type' must be .*'{kind}'"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("name", ["qwen3.5-moe", "glm4-moe", "lfm2-moe"])
def test_experts_may_be_stacked_in_files(name: str, tmp_path: Path) -> None:
    """Each layer's in one tensor, gates before ups: Qwen3.5-MoE is published so.

    LFM2-MoE has names of its own for experts that stand apart.
    """
    tiny = dataclasses.replace(find_tiny_model(name), sharded=False)
    write(tiny, tmp_path)
    sequence = TokenSequence(torch.arange(3, 30), torch.empty(0))
    apart = load_tiny(tmp_path, torch.float32, ReferenceKernels())
    expected = apart.run([sequence], [[Chunk(0, 0, 27)]])
    file = tmp_path / SINGLE_FILE
    tensors = load_file(file)
    moe = apart.config.moe
    assert moe is not None
    for layer in moe.layers:
        prefix = f"model.layers.{layer}.{moe.module}.experts"
        gates, ups, downs = (
            torch.stack(
                [
                    tensors.pop(f"{prefix}.{number}.{part}.weight")
                    for number in range(moe.num_experts)
                ]
            )
            for part in moe.projections
        )
        tensors[f"{prefix}.gate_up_proj"] = torch.cat([gates, ups], dim=1)
        tensors[f"{prefix}.down_proj"] = downs.contiguous()
    save_file(tensors, file)
    found = load_tiny(tmp_path, torch.float32, ReferenceKernels()).run(
        [sequence], [[Chunk(0, 0, 27)]]
    )
    assert expected is not None and found is not None and torch.equal(found[0], expected[0])
    del tensors[f"{prefix}.down_proj"]
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match=r"experts.down_proj' is missing"):
        check_weights(tmp_path, apart.config)


def test_gemma3_that_sees_images_has_sizes_of_its_own(tmp_path: Path) -> None:
    """What its smallest published file says of its text, and what it leaves to transformers."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    values = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    ours, theirs = load_model_config(tmp_path), transformers.Gemma3TextConfig(**text)
    assert ours.vocab_size == theirs.vocab_size and ours.head_dim == theirs.head_dim
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope == LinearRope(theta=1_000_000.0, factor=8.0)
    assert ours.dtype == "bfloat16" and ours.sliding_windows[4:7] == (1024, None, 1024)


def test_llama4_as_it_is_published(tmp_path: Path) -> None:
    """Scout's text says what is here, and is transformers' in what it leaves out."""
    text = {
        "attn_temperature_tuning": 4,
        "max_position_embeddings": 10485760,
        "model_type": "llama4_text",
        "no_rope_layers": [],
        "num_hidden_layers": 48,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 0.5,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
    }
    values = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(values))
    ours = load_model_config(tmp_path)
    theirs = transformers.Llama4TextConfig(**{**text, "attn_temperature_tuning": True})
    assert sorted(ours.unrotated_layers) == [
        i for i, flag in enumerate(theirs.no_rope_layers) if not flag
    ]
    assert ours.attention_chunk == theirs.attention_chunk_size == 8192
    assert ours.query_growth == (theirs.attn_scale, theirs.floor_scale, 1)
    assert ours.moe is not None and ours.moe.layers == frozenset(theirs.moe_layers)
    assert ours.moe.intermediate_size == theirs.intermediate_size
    assert ours.intermediate_size == theirs.intermediate_size_mlp and ours.qk_norm


def test_falcon_h1_as_it_is_published(tmp_path: Path) -> None:
    """Its heads are not hidden_size / num_attention_heads, and factors stand in lists."""
    values = {
        "architectures": ["FalconH1ForCausalLM"],
        "attention_out_multiplier": 0.9375,
        "embedding_multiplier": 5.656854249492381,
        "head_dim": 64,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "key_multiplier": 0.390625,
        "lm_head_multiplier": 0.0390625,
        "mamba_d_head": 64,
        "mamba_d_ssm": 1536,
        "mamba_d_state": 128,
        "mamba_n_heads": 24,
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": False,
        "max_position_embeddings": 16384,
        "mlp_multipliers": [0.8838834764831844, 0.5859375],
        "model_type": "falcon_h1",
        "num_attention_heads": 8,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
        "projectors_bias": False,
        "rope_theta": 100000000000.0,
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        "ssm_out_multiplier": 0.23570226039551587,
        "vocab_size": 32784,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    ours, theirs = load_model_config(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    assert ours.rope == DefaultRope(theta=1e11) and ours.attention_scale == 0.390625 / 8
    assert ours.logits_divisor == 1 / theirs.lm_head_multiplier
    mamba = ours.recurrent
    assert isinstance(mamba, MambaConfig) and mamba.beside is not None
    assert (mamba.head_dim, mamba.num_groups, mamba.width) == (64, 1, theirs.mamba_d_conv)
    assert mamba.beside.parts == tuple(theirs.ssm_multipliers)
    assert (mamba.beside.gate, mamba.beside.block) == tuple(theirs.mlp_multipliers)
    assert mamba.beside.states == (1.25, theirs.ssm_out_multiplier)
    assert mamba.beside.attention == (1.0, theirs.attention_out_multiplier)


def test_minimax_m2_as_it_is_published(tmp_path: Path) -> None:
    """Half of a head is rotated by a key of its own, and the base stands outside."""
    values = {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "attn_type_list": [1, 1],
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "max_position_embeddings": 196608,
        "model_type": "minimax_m2",
        "num_attention_heads": 48,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "float8_e4m3fn",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "tie_word_embeddings": False,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "vocab_size": 200064,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    ours, theirs = load_model_config(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    assert (
        ours.shape_of(0).rotary_dim == 64 == theirs.rope_parameters["partial_rotary_factor"] * 128
    )
    assert (
        ours.rope
        == DefaultRope(theta=5e6)
        == DefaultRope(theta=theirs.rope_parameters["rope_theta"])
    )
    assert ours.weight_format is not None and ours.moe is not None
    assert (ours.moe.num_experts, ours.moe.num_chosen, ours.moe.intermediate_size) == (256, 8, 1536)
    values |= {"rope_theta": ..., "num_experts_per_tok": ..., "num_local_experts": ...}
    stated = {key: value for key, value in values.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    absent = load_model_config(tmp_path)
    assert (absent.rope, absent.moe) == (ours.rope, ours.moe)


def test_baichuan_says_which_it_is_by_its_keys(tmp_path: Path) -> None:
    write(find_tiny_model("baichuan-13b"), tmp_path)
    first = load_model_config(tmp_path)
    assert first.alibi_slopes is not None and not first.has_normalised_head
    assert first.max_position_embeddings == 256
    file = tmp_path / "config.json"
    values = {**json.loads(file.read_text()), "vocab_size": 125_696}
    file.write_text(json.dumps(values))
    assert load_model_config(tmp_path).has_normalised_head
    file.write_text(json.dumps({**values, "max_position_embeddings": 128, "vocab_size": 64_000}))
    seven = load_model_config(tmp_path)
    assert seven.alibi_slopes is None and not seven.has_normalised_head


def test_qwen1_is_served_up_to_the_length_of_its_training(tmp_path: Path) -> None:
    write(find_tiny_model("qwen1"), tmp_path)  # its file allows 512 positions
    assert load_model_config(tmp_path).max_context_len == 256


def test_slopes_are_those_of_transformers() -> None:
    for num_heads in range(1, 130):
        bloom = modeling_bloom._get_alibi_slopes(num_heads, torch.device("cpu"))
        torch.testing.assert_close(torch.tensor(slopes_of(num_heads)), bloom)
        mpt = modeling_mpt.build_mpt_alibi_tensor(num_heads, 2)[:, 0, 0]
        torch.testing.assert_close(-torch.tensor(mpt_slopes(num_heads, 8.0)), mpt)
        rounded = torch.tensor([as_bfloat16(slope) for slope in slopes_of(num_heads)])
        assert torch.equal(rounded, torch.tensor(slopes_of(num_heads)).bfloat16().float())
    assert mpt_slopes(4, 16.0) == (2.0**-4, 2.0**-8, 2.0**-12, 2.0**-16)


def test_windows_follow_max_window_layers_without_layer_types(tmp_path: Path) -> None:
    write(find_tiny_model("qwen2-window"), tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    del values["layer_types"]
    file.write_text(json.dumps(values))
    assert load_model_config(tmp_path).sliding_windows == (None, 20, 20)


def test_absent_types(tmp_path: Path) -> None:
    write(find_tiny_model("llama-mha"), tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    del values["dtype"]
    file.write_text(json.dumps(values))
    config = load_model_config(tmp_path)
    assert config.dtype is None
    assert resolve_dtype("auto", config, device_type="cpu") == "float32"
    assert resolve_dtype("auto", config, device_type="cuda") == "bfloat16"


@pytest.mark.parametrize(
    ("requested", "batch_invariant", "expected"),
    [
        ("auto", False, "bfloat16"),
        ("auto", True, "float32"),
        ("float16", False, "float16"),
        ("float32", True, "float32"),
    ],
)
def test_resolved_dtype(
    requested: str, batch_invariant: bool, expected: str, tmp_path: Path
) -> None:
    write(find_tiny_model("llama-mha"), tmp_path, dtype=torch.bfloat16)
    config = load_model_config(tmp_path)
    found = resolve_dtype(requested, config, device_type="cpu", batch_invariant=batch_invariant)
    assert found == expected


@pytest.mark.parametrize(
    ("own", "requested", "expected", "said"),
    [
        (torch.float32, "auto", "bfloat16", "is of float32"),
        (None, "auto", "bfloat16", "names no dtype"),
        (torch.float32, "float32", "float32", ""),
        (None, "float32", "float32", ""),
        (torch.float16, "auto", "float16", ""),
        (torch.bfloat16, "auto", "bfloat16", ""),
    ],
)
def test_dtype_on_a_gpu(  # noqa: PLR0917
    own: torch.dtype | None,
    requested: str,
    expected: str,
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """float32 only where it is asked for, and what else is taken is said by the first rank."""
    write(find_tiny_model("llama-mha"), tmp_path, dtype=own or torch.float32)
    if own is None:
        file = tmp_path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "dtype": None}))
    config = ServeConfig(model=str(tmp_path), dtype=requested)
    model_config, gpu = load_model_config(tmp_path), torch.device("cuda", 0)
    for is_said in (False, True):
        assert not caplog.messages
        assert build._dtype(config, model_config, gpu, is_said=is_said) == expected
    assert len(caplog.messages) == bool(said)
    assert said in caplog.text
    cpu = build._dtype(config, model_config, torch.device("cpu"), is_said=True)
    assert cpu == (model_config.dtype or "float32" if requested == "auto" else requested)
    assert len(caplog.messages) == bool(said)


@pytest.mark.parametrize(("tp_size", "heads"), [(1, 2), (2, 1), (4, 1)])
def test_kv_layout_counts_the_bytes_of_a_token(tp_size: int, heads: int, tmp_path: Path) -> None:
    write(find_tiny_model("qwen3"), tmp_path)  # 3 layers, 2 KV heads of 32
    layout = kv_layout(load_model_config(tmp_path), tp_size=tp_size, dtype="bfloat16")
    assert len(layout.groups) == 1
    assert layout.groups[0].num_kv_heads == heads
    assert layout.bytes_per_token == 3 * 2 * heads * 32 * 2
    layout = kv_layout(load_model_config(tmp_path), tp_size=tp_size, dtype="int8")
    assert layout.bytes_per_token == 3 * 2 * heads * (32 + 4)


def test_configuration_and_checks_need_no_torch() -> None:
    modules = "config, weight_files"
    code = (
        f"from lightserve.models import {modules}; import sys;"
        " sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def run_tied(path: Path) -> torch.Tensor:
    loaded = load_tiny(path, torch.float32, ReferenceKernels())
    return run_tokens(loaded, torch.arange(40) % 200)


def run_tokens(loaded: LoadedModel, tokens: torch.Tensor) -> torch.Tensor:
    driver = DirectDriver(
        loaded.model,
        num_kv_heads=loaded.num_kv_heads,
        dtype=loaded.dtype,
        lengths=[len(tokens)],
    )
    logits = driver.run_pass([tokens], [Chunk(0, 0, len(tokens))])
    assert logits is not None
    return logits[0]


def test_tied_weights_in_every_form(tmp_path: Path) -> None:
    """The embedding alone, the head alone, both equal, both different: as transformers."""
    write(find_tiny_model("llama-mqa-tied"), tmp_path)
    file = tmp_path / SINGLE_FILE
    tensors = load_file(file)
    assert LM_HEAD not in tensors
    embedding = tensors[EMBEDDING]
    expected = run_tied(tmp_path)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.full((8,), torch.nan)}

    save_file(tensors | extra | {LM_HEAD: embedding.clone()}, file)
    assert torch.equal(run_tied(tmp_path), expected)

    head_only = {name: tensor for name, tensor in tensors.items() if name != EMBEDDING}
    save_file(head_only | {LM_HEAD: embedding}, file, metadata={"format": "pt"})
    assert torch.equal(run_tied(tmp_path), expected)

    save_file(tensors | {LM_HEAD: embedding * 2}, file, metadata={"format": "pt"})
    doubled = run_tied(tmp_path)
    torch.testing.assert_close(doubled, expected * 2)
    reference = load_reference(tmp_path, torch.float32)
    with torch.inference_mode():
        theirs = reference(torch.arange(40)[None]).logits[0]
    torch.testing.assert_close(doubled, theirs, atol=1e-4, rtol=0)


def test_progress_counts_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(find_tiny_model("qwen3-biases-tied"), tmp_path)
    config, seen = load_model_config(tmp_path), list[int]()
    shapes = expected_tensors(config)
    with SafetensorsReader(
        find_weights(tmp_path),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        advance=seen.append,
    ) as reader:
        for name, shape in shapes.items():
            reader.read_into(torch.empty(shape, dtype=torch.bfloat16), name)
    assert seen == [2 * math.prod(shape) for shape in shapes.values()]
    with caplog.at_level("INFO", logger="lightserve.progress"):
        load_tiny(tmp_path, torch.bfloat16, ReferenceKernels())
    assert [line.split(":")[0] for line in caplog.messages] == ["loading weights"] * 2


def test_logits_only_where_wanted(tmp_path: Path) -> None:
    """Unwanted rows cost no logits, but their KV is written all the same."""
    write(find_tiny_model("qwen3"), tmp_path)
    loaded = load_tiny(tmp_path, torch.float32, ReferenceKernels())
    tokens = torch.arange(50)
    whole = run_tokens(loaded, tokens)
    driver = DirectDriver(
        loaded.model, num_kv_heads=loaded.num_kv_heads, dtype=torch.float32, lengths=[50]
    )
    with torch.inference_mode():
        none = forward(driver, loaded, tokens, Chunk(0, 0, 30), torch.empty(0, dtype=torch.int64))
        some = forward(driver, loaded, tokens, Chunk(0, 30, 20), torch.tensor([19, 4, 4]))
    assert none.shape == (0, 200)
    assert none.dtype == some.dtype == torch.float32
    torch.testing.assert_close(some, whole[[49, 34, 34]], atol=1e-5, rtol=0)


def forward(
    driver: DirectDriver,
    loaded: LoadedModel,
    tokens: torch.Tensor,
    chunk: Chunk,
    logit_rows: torch.Tensor,
) -> torch.Tensor:
    ids = tokens[chunk.start : chunk.start + chunk.num_tokens]
    logits = loaded.model.forward(ids, driver.batch([chunk]), driver.pool, logit_rows)
    assert logits is not None
    return logits


def test_float16_is_close_to_transformers(tmp_path: Path) -> None:
    write(find_tiny_model("llama-llama3"), tmp_path, dtype=torch.float16)
    loaded = load_tiny(tmp_path, torch.float16, ReferenceKernels())
    sequences = make_sequences(load_reference(tmp_path, torch.float16), [(60, 8)], seed=0)
    logits = loaded.run(sequences, schedule([68], chunk=None, num_decodes=8))
    assert logits is not None
    report = compare_all(sequences, logits, torch.float16)
    assert report.max_logprob_delta < 0.03, report
    assert report.num_different <= 1, report


# Rotary tables against transformers', bit for bit, over every kind and many parameters.

MAX_LEN = 128

factors = st.floats(1.0, 40.0)
common = {"rope_theta": st.sampled_from([500.0, 10_000.0, 1e6])}
original = {"original_max_position_embeddings": st.sampled_from([16, 64, 4096])}
KINDS = st.one_of(
    st.fixed_dictionaries({"rope_type": st.just("default"), **common}),
    st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": factors, **common}),
    st.fixed_dictionaries({"rope_type": st.just("dynamic"), "factor": factors, **common}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "factor": factors,
            "low_freq_factor": st.floats(0.5, 2.0),
            "high_freq_factor": st.floats(2.5, 8.0),
            **common,
            **original,
        }
    ),
    st.fixed_dictionaries(
        {"rope_type": st.just("yarn"), "factor": factors, **common, **original},
        optional={
            "attention_factor": st.floats(0.5, 2.0),
            "mscale": st.floats(0.1, 2.0),
            "mscale_all_dim": st.floats(0.1, 2.0),
            "beta_fast": st.floats(8.0, 64.0),
            "beta_slow": st.floats(0.5, 4.0),
            "truncate": st.booleans(),
        },
    ),
)


def write_config(path: Path, rope: dict[str, Any], head_dim: int, *, legacy: bool) -> Path:
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 10,
        "hidden_size": 4 * head_dim,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": MAX_LEN,
    }
    if legacy:
        inner = {key: value for key, value in rope.items() if key != "rope_theta"}
        values |= {"rope_theta": rope["rope_theta"], "rope_scaling": inner}
    else:
        values["rope_parameters"] = rope
    (path / "config.json").write_text(json.dumps(values))
    return path


def our_table(path: Path, *, context_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    config = load_model_config(path)
    found = frequencies(
        config.rope,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        context_len=context_len,
    )
    table = RotaryTable(found, context_len=context_len, device=torch.device("cpu"))
    return table.select(torch.arange(context_len))


def their_table(path: Path, *, context_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    config = transformers.AutoConfig.from_pretrained(path)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(context_len)[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half], sin[0, :, :half]


@more_when_long
@settings(max_examples=choose(40, 120), deadline=None, suppress_health_check=list(HealthCheck))
@given(rope=KINDS, head_dim=st.sampled_from([8, 20, 64, 128]), legacy=st.booleans())
def test_tables_equal_transformers(
    rope: dict[str, Any], head_dim: int, legacy: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write_config(tmp_path_factory.mktemp("rope"), rope, head_dim, legacy=legacy)
    ours, theirs = our_table(path, context_len=MAX_LEN), their_table(path, context_len=MAX_LEN)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=2e-6)


def test_dynamic_beyond_the_trained_length_has_one_base(tmp_path: Path) -> None:
    """A longer served context gives, everywhere, what transformers gives at that length."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    path = write_config(tmp_path, rope, 64, legacy=False)
    long = 2 * MAX_LEN
    ours, theirs = our_table(path, context_len=long), their_table(path, context_len=long)
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=2e-6)
    assert not torch.allclose(ours[0][:MAX_LEN], our_table(path, context_len=MAX_LEN)[0])


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default"}, MAX_LEN),
        ({"rope_type": "linear", "factor": 4.0}, 4 * MAX_LEN),
        ({"rope_type": "dynamic", "factor": 2.0}, 2 * MAX_LEN),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": MAX_LEN},
            4 * MAX_LEN,
        ),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
            MAX_LEN,
        ),
    ],
)
def test_longest_context_that_may_be_asked_for(
    rope: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    path = write_config(tmp_path, {"rope_theta": 10_000.0, **rope}, 8, legacy=False)
    config = load_model_config(path)
    assert config.max_context_len == expected
    assert resolve_context_len(0, config) == MAX_LEN
    assert resolve_context_len(expected, config) == expected
    with pytest.raises(ConfigError, match=f"at most the model's {expected}, got {expected + 1}"):
        resolve_context_len(expected + 1, config)
