"""GGUF files: every type of blocks, whole models, tokenisers, and files that are wrong."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import struct
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from support.gguf_files import (
    Typed,
    gguf_bytes,
    latent_metadata,
    string,
    tensors_of,
    tiny_tokens,
    write_gguf,
)
from support.gguf_models import CONVERTED, MODELS, converted
from support.model_runs import load_tiny, standard_sequences
from support.parity import TokenSequence, compare_all, schedule
from support.tiny_models import TinyModel, load_reference, rope, write_tiny_model

from lightserve.errors import ModelLoadError
from lightserve.frontend.request_options import (
    PLAIN_SAMPLING,
    SamplingDefaults,
    read_sampling_defaults,
)
from lightserve.kernels.cpu.native import NativeKernels
from lightserve.kernels.interface import Kernels
from lightserve.kernels.reference import ReferenceKernels
from lightserve.kernels.select import missing_core
from lightserve.models import gguf_reader
from lightserve.models.base import Part
from lightserve.models.config import load_model_config
from lightserve.models.gguf import GgufFile, read_gguf
from lightserve.models.gguf_config import config_of, one_by_one
from lightserve.models.gguf_model import unpack, unpacked_root
from lightserve.models.layers.attention import frequencies
from lightserve.models.layers.linear import LinearMethod
from lightserve.models.layers.quantized import StoredMethod
from lightserve.models.rope import FREQUENCY_FACTORS, DefaultRope, LinearRope, RopeConfig, YarnRope
from lightserve.models.weight_files import check_weights, quantised_as
from lightserve.tokenization.chat_template import find_chat_template
from lightserve.tokenization.tokenizer import Tokenizer
from lightserve.worker.build import linear_method

MORE_BYTES = 64 << 20


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


HYBRIDS = {
    "granitehybrid-moe": (2 + 2 * 4 + 2) * 3,
    "nemotron_h_moe": 2 * 3 + (2 * 6 + 2 + 2) * 2,
    "lfm2": 4 * 4,
    "falcon-h1": 6 * 3,
    "kimi-linear": 4 * 3 + 3 + 2 + (2 + 2 * 6) * 3,
    "gemma4": 6 * 6 + 1,
    "gemma4-moe": (2 + 2 + 2 * 6) * 6,
}
"""Models whose layers are of several kinds, and how many of their weights stay blocks."""

# Weights and whole models.


def logits_of(file: Path) -> torch.Tensor:
    """Return the logits of 40 tokens by the reference kernels, in two chunks and six decodes."""
    tokens = torch.arange(5, 45)
    loaded = load_tiny(unpack(file), torch.float32, ReferenceKernels())
    passes = schedule([len(tokens)], chunk=20, num_decodes=6)
    logits = loaded.run([TokenSequence(tokens, torch.empty(0))], passes)
    assert logits is not None
    return logits[0]


@pytest.mark.parametrize("name", CONVERTED)
def test_a_model_says_what_it_says_elsewhere(name: str, tmp_path: Path) -> None:
    plain, file = converted(name, tmp_path)
    packed = unpack(file)
    sequences = standard_sequences(load_reference(plain, torch.float32), 4)
    loaded = load_tiny(packed, torch.float32, ReferenceKernels())
    passes = schedule([len(s.tokens) for s in sequences], chunk=16, num_decodes=8)
    logits = loaded.run(sequences, passes)
    assert logits is not None
    report = compare_all(sequences, logits, torch.float32)
    assert report.holds(torch.float32), report
    assert unpack(tmp_path / "model.gguf") == packed, "written once"


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        ("F16", 1e-3),
        ("BF16", 8e-3),
        ("Q8_0", 1e-2),
        ("Q5_0", 0.08),
        ("Q4_0", 0.15),
        ("IQ4_NL", 0.15),
    ],
)
def test_quantised_weights_are_close(kind: str, limit: float, tmp_path: Path) -> None:
    plain = write_tiny_model(MODELS["llama"], tmp_path / "plain")
    packed = unpack(write_gguf(plain, tmp_path / "model.gguf", name="llama", kind=kind))
    ours, theirs = (
        reader(packed),
        reader(unpack(write_gguf(plain, tmp_path / "f.gguf", name="llama"))),
    )
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        shape = theirs.shape(name)
        found, truth = torch.empty(shape), torch.empty(shape)
        ours.read_into(found, name)
        theirs.read_into(truth, name)
        error = float((found - truth).norm() / truth.norm())
        assert 0 < error < limit


@pytest.mark.skipif(bool(missing_core()), reason=missing_core())
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "MXFP4"])
@pytest.mark.parametrize("name", [*MODELS, "gpt-oss-mxfp4", "qwen35", *HYBRIDS])
def test_blocks_of_integers_are_multiplied_as_they_are(
    name: str, kind: str, tmp_path: Path
) -> None:
    packed = unpack(converted(name, tmp_path, kind)[1])
    tokens = torch.arange(7, 67)

    def logits(kernels: Kernels, method: LinearMethod | None) -> torch.Tensor:
        loaded = load_tiny(packed, torch.float32, kernels, method=method)
        passes = schedule([len(tokens)], chunk=20, num_decodes=6)
        results = loaded.run([TokenSequence(tokens, torch.empty(0))], passes)
        assert results is not None
        return results[0]

    kernels = NativeKernels()
    method = linear_method("none", kernels, torch.float32, is_stored=True)
    assert isinstance(method, StoredMethod)
    expected = logits(ReferenceKernels(), None)
    torch.testing.assert_close(logits(kernels, method), expected, rtol=1e-4, atol=1e-4)
    own = {"llama": 4 * 3, "gpt-oss-mxfp4": (2 + 2 * 6) * 3, "qwen35": 4 * 4, **HYBRIDS}
    num_kept = own.get(name, 4 * 2)
    assert method.num_kept == num_kept and not method.num_widened
    config = load_model_config(packed)
    kinds = [kind, "MXFP4"] if name == "gpt-oss-mxfp4" and kind != "MXFP4" else [kind]
    assert quantised_as(packed, config) == f"GGUF, {', '.join(kinds)}"


@pytest.mark.skipif(bool(missing_core()), reason=missing_core())
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_weights_of_hybrids_are_rounded_as_those_of_directories(
    name: str, quantization: str, tmp_path: Path
) -> None:
    plain, file = converted(name, tmp_path)
    tokens, found = torch.arange(7, 47), []
    for path in (plain, unpack(file)):
        kernels = NativeKernels()
        method = linear_method(quantization, kernels, torch.float32, is_stored=False)
        loaded = load_tiny(path, torch.float32, kernels, method=method)
        passes = schedule([len(tokens)], chunk=20, num_decodes=6)
        logits = loaded.run([TokenSequence(tokens, torch.empty(0))], passes)
        assert logits is not None
        found.append(logits[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


class ShapedReader(gguf_reader.GgufReader):
    def shape(self, name: str) -> tuple[int, ...]:
        return self._gguf.tensors[self._files.stored(name)].shape


def reader(path: Path) -> ShapedReader:
    config = load_model_config(path)
    files = check_weights(path, config)
    assert files.gguf is not None
    return ShapedReader(
        files,
        files.gguf,
        rotated_head_dim=config.head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_parts_are_those_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = write_tiny_model(MODELS["llama"], tmp_path / "plain")
    parts = reader(unpack(write_gguf(plain, tmp_path / "model.gguf", name="llama", kind="Q8_0")))
    queries, down = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"
    whole = {name: torch.empty(parts.shape(name)) for name in (queries, down)}
    for name, target in whole.items():
        parts.read_into(target, name)
    monkeypatch.setattr(gguf_reader, "CHUNK_NUMBERS", 200)  # three rows at a time
    heads, columns = torch.empty(32, 64), torch.empty(64, 48)
    parts.read_into(heads, queries, rows=Part(16, 32))
    parts.read_into(columns, down, columns=Part(48, 48))
    assert torch.equal(heads, whole[queries][16:48])
    assert torch.equal(columns, whole[down][:, 48:])


def test_factors_of_frequencies(tmp_path: Path) -> None:
    """Llama 3.1's scaling stands in the file as a factor for each frequency."""
    tiny = TinyModel("", "Llama", rope("default", theta=500.0))
    plain = write_tiny_model(tiny, tmp_path / "plain")
    file = write_gguf(plain, tmp_path / "model.gguf", name="llama")
    gguf = read_gguf(file)
    metadata = dict(gguf.metadata) | tiny_tokens(200)
    tensors = {
        name: (
            t.shape,
            t.kind,
            gguf.data[t.start : t.start + t.row_bytes * max(1, int(np.prod(t.shape[:-1])))],
        )
        for name, t in gguf.tensors.items()
    }
    factors = [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]
    tensors[FREQUENCY_FACTORS] = ((8,), 0, struct.pack("<8f", *factors))
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(gguf_bytes(metadata, tensors))
    config = load_model_config(unpack(changed))
    assert config.rope.short_factors == config.rope.long_factors == tuple(factors)  # type: ignore[union-attr]
    assert config.rope.attention_factor == 1.0  # type: ignore[union-attr]
    metadata["llama.rope.scaling.factor"] = 2.0
    (further := tmp_path / "further.gguf").write_bytes(gguf_bytes(metadata, tensors))
    twice = tuple(2 * factor for factor in factors)
    assert load_model_config(unpack(further)).rope.short_factors == twice  # type: ignore[union-attr]
    metadata["llama.rope.scaling.type"] = "yarn"
    beside = refused(gguf_bytes(metadata, tensors), tmp_path / "yarn.gguf")
    assert "'llama.rope.scaling.type' must not be 'yarn' beside the tensor" in beside
    del metadata["llama.rope.scaling.type"]
    tensors[FREQUENCY_FACTORS] = ((1 << 16,), 0, bytes(4 << 16))
    longer = refused(gguf_bytes(metadata, tensors), tmp_path / "longer.gguf")
    assert f"'{FREQUENCY_FACTORS}' must be a row of 8 in F32, got [65536]" in longer


ABSENT_SCALINGS: list[tuple[dict[str, Any], RopeConfig]] = [
    ({"scale_linear": 4.0}, LinearRope(theta=500.0, factor=4.0)),
    ({"scaling.factor": 4.0}, LinearRope(theta=500.0, factor=4.0)),
    ({"scaling.factor": 2.0, "scale_linear": 4.0}, LinearRope(theta=500.0, factor=2.0)),
    ({"scaling.factor": 0.0}, DefaultRope(theta=500.0)),
    ({"scaling.type": "linear"}, DefaultRope(theta=500.0)),
    ({"scaling.type": "longrope", "scaling.factor": 2.0}, LinearRope(theta=500.0, factor=2.0)),
    ({"scaling.type": "none", "scaling.factor": 4.0}, DefaultRope(theta=500.0)),
    ({"scaling.type": "none", "scale_linear": 4.0}, DefaultRope(theta=500.0)),
]


@pytest.mark.parametrize(("keys", "expected"), ABSENT_SCALINGS, ids=str)
def test_absent_keys_of_scaled_positions(
    keys: dict[str, Any], expected: RopeConfig, tmp_path: Path
) -> None:
    """Linear by the old key or without a type, as in llama.cpp (to 3e-6 of its logits)."""
    plain = write_tiny_model(MODELS["llama"], tmp_path / "plain")
    gguf = read_gguf(write_gguf(plain, tmp_path / "model.gguf", name="llama"))
    own = {f"llama__rope__{key.replace('.', '__')}": item for key, item in keys.items()}
    file = tmp_path / "scaled.gguf"
    file.write_bytes(rewritten(gguf, llama__rope__freq_base=500.0, **own))
    assert load_model_config(unpack(file)).rope == expected


def test_absent_keys_of_yarn(tmp_path: Path) -> None:
    """The first length is the whole one; the file's growth is a factor of YaRN's own."""
    plain = write_tiny_model(MODELS["llama"], tmp_path / "plain")
    gguf = read_gguf(write_gguf(plain, tmp_path / "model.gguf", name="llama"))
    keys = {"llama__rope__scaling__type": "yarn", "llama__rope__scale_linear": 4.0}
    (file := tmp_path / "old.gguf").write_bytes(rewritten(gguf, **keys))
    found = load_model_config(unpack(file)).rope
    assert isinstance(found, YarnRope)
    assert (found.factor, found.attention_factor) == (4.0, None)
    assert found.original_max_position_embeddings == gguf.integer("llama.context_length")
    keys["llama__rope__scaling__attn_factor"] = 1.25
    (file := tmp_path / "growing.gguf").write_bytes(rewritten(gguf, **keys))
    found = load_model_config(unpack(file)).rope
    assert isinstance(found, YarnRope)
    assert found.attention_factor == pytest.approx(1.25 * (0.1 * math.log(4.0) + 1.0))


def test_what_a_file_of_gpt_oss_does_not_say(tmp_path: Path) -> None:
    """YaRN's bounds are not rounded; a call ends an answer, a message's end does not."""
    plain, _ = converted("gpt-oss", tmp_path)
    marks = ["<|end|>", "<|return|>", "<|call|>"]
    tokens = tiny_tokens(200) | {
        "tokenizer.ggml.tokens": [*(chr(0x100 + number) for number in range(197)), *marks],
        "tokenizer.ggml.token_type": [*[1] * 197, 3, 3, 3],
        "tokenizer.ggml.eos_token_id": 198,
        "tokenizer.ggml.eot_token_id": 197,
        "tokenizer.ggml.pre": "gpt-4o",
    }
    path = unpack(write_gguf(plain, tmp_path / "marks.gguf", name="gpt-oss", tokens=tokens))
    config = load_model_config(path)
    assert isinstance(config.rope, YarnRope) and not config.rope.truncate
    assert config.sliding_windows == (22, None, 22)
    assert Tokenizer(path).eos_token_ids == (198, 199)


def test_a_file_of_gemma_3_without_a_window(tmp_path: Path) -> None:
    _, file = converted("gemma3", tmp_path)
    gguf = read_gguf(file)
    metadata = {k: v for k, v in gguf.metadata.items() if not k.endswith("sliding_window")}
    (bare := tmp_path / "bare.gguf").write_bytes(
        gguf_bytes(metadata | tiny_tokens(200), tensors_of(gguf))
    )
    assert any(load_model_config(unpack(file)).sliding_windows)
    assert not any(load_model_config(unpack(bare)).sliding_windows)


def test_older_files_of_deepseek(tmp_path: Path) -> None:
    """What makes keys and values is one tensor, and no size is the latent's."""
    plain, file = converted("deepseek2", tmp_path)
    gguf = read_gguf(file)
    tensors = tensors_of(gguf)
    for layer in range(3):
        parts = []
        for of in "kv":
            shape, kind, data = tensors.pop(f"blk.{layer}.attn_{of}_b.weight")
            parts.append(np.frombuffer(data, np.float32).reshape(shape))
        whole = np.concatenate([parts[0].swapaxes(1, 2), parts[1]], axis=1)
        whole = whole.reshape(-1, whole.shape[-1])
        tensors[f"blk.{layer}.attn_kv_b.weight"] = (whole.shape, kind, whole.tobytes())
    metadata = {key: item for key, item in gguf.metadata.items() if not key.endswith("_mla")}
    config = json.loads((plain / "config.json").read_text())
    metadata |= tiny_tokens(200) | latent_metadata(config, is_old=True)
    older = tmp_path / "older.gguf"
    older.write_bytes(gguf_bytes(metadata, tensors))
    assert torch.equal(logits_of(file), logits_of(older))


@pytest.mark.parametrize("multiplier", [None, 0.0])
def test_deepseek_s_yarn_without_a_multiplier(multiplier: float | None, tmp_path: Path) -> None:
    """As in llama.cpp: YaRN's own growth g on cos and sin, and g squared on all scores."""
    _, file = converted("deepseek2", tmp_path)
    gguf = read_gguf(file)
    metadata = dict(gguf.metadata) | tiny_tokens(200)
    del metadata[key := "deepseek2.rope.scaling.yarn_log_multiplier"]
    metadata |= {} if multiplier is None else {key: multiplier}
    (bare := tmp_path / "bare.gguf").write_bytes(gguf_bytes(metadata, tensors_of(gguf)))
    config = load_model_config(unpack(bare))
    found, head_dim = config.rope, metadata["deepseek2.attention.key_length_mla"]
    assert isinstance(found, YarnRope) and found.attention_factor is None
    lengths = {"max_position_embeddings": 256, "context_len": 256}
    growth = frequencies(found, head_dim=8, **lengths).scale
    assert growth == pytest.approx(0.1 * math.log(found.factor) + 1) and growth > 1
    assert config.attention_scale == pytest.approx(growth**2 / math.sqrt(head_dim))


@pytest.mark.skipif(bool(missing_core()), reason=missing_core())
def test_exponents_that_are_no_number(tmp_path: Path) -> None:
    _, file = converted("gpt-oss-mxfp4", tmp_path)
    gguf = read_gguf(file)
    tensors = tensors_of(gguf)
    name = "blk.1.ffn_up_exps.weight"
    shape, kind, data = tensors[name]
    tensors[name] = (shape, kind, b"\xff" + data[1:])
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(gguf_bytes(dict(gguf.metadata) | tiny_tokens(200), tensors))
    kept = linear_method("none", NativeKernels(), torch.float32, is_stored=True)
    for method in (None, kept):
        with pytest.raises(ModelLoadError, match=f"'{name}' has values that are not finite"):
            load_tiny(unpack(bad), torch.float32, NativeKernels(), method=method)


# Files that are wrong.


def refused(data: bytes, file: Path) -> str:
    file.write_bytes(data)
    before = set(unpacked_root().glob("*"))
    with pytest.raises(ModelLoadError) as caught:
        unpack(file)
    message = str(caught.value)
    assert set(unpacked_root().glob("*")) == before, "nothing of it stays"
    assert str(file) in message and "\n" not in message
    return message


def head(num_tensors: int, num_keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


@pytest.mark.parametrize(
    ("name", "key", "item", "complaint"),
    [
        ("olmo3", "olmo2.attention.sliding_window_pattern", [1, 0], "must have 5 entries, got 2"),
        ("gpt-oss", "gpt-oss.attention.sliding_window", "128", "must be an integer"),
        ("deepseek2", "deepseek2.expert_gating_func", 3, "must be 1 (softmax) or 2 (sigmoid)"),
        ("deepseek2", "deepseek2.expert_weights_norm", True, "must be false where weights are"),
        ("deepseek2", "deepseek2.nextn_predict_layers", 3, "must be below 3, got 3"),
        ("deepseek2", "deepseek2.rope.dimension_count", 32, "must be below 32, got 32"),
        ("deepseek2", "deepseek2.rope.scaling.yarn_log_multiplier", "no", "must be a number"),
        ("deepseek2", "deepseek2.rope.scaling.attn_factor", 0.5, "must be 1"),
        ("deepseek2", "deepseek2.attention.temperature_scale", 0.1, "is not supported"),
        ("qwen35", "qwen35.ssm.inner_size", 193, "must be a multiple of 6, got 193"),
        ("qwen35", "qwen35.attention.recurrent_layers", [1, 0], "must have 4 entries, got 2"),
        ("qwen35", "qwen35.nextn_predict_layers", 4, "must be below 4, got 4"),
        ("llama4", "llama4.attention.sliding_window", 0, "must not be 0: models without chunks"),
        ("minimax-m2", "minimax-m2.expert_gating_func", 1, "must be 2 (sigmoid)"),
        ("minimax-m2", "minimax-m2.expert_feed_forward_length", 0, "must be at least 1, got 0"),
        ("glm4", "glm4.attention.key_length", 0, "length' must be at least 1, got 0"),
        ("phi2", "phi2.embedding_length", 3, "length' must be at least 4, got 3"),
        ("gemma3", "gemma3.attention.sliding_window_pattern", 0, "must be at least 1, got 0"),
        ("qwen3moe", "qwen3moe.expert_count", 4097, "must be between 1 and 4096, got 4097"),
        ("deepseek2", "deepseek2.expert_group_count", 0, "_count' must be between 1 and "),
        (
            "qwen3",
            "qwen3.attention.layer_norm_rms_epsilon",
            -1.0,
            "words of config.json: key 'rms_",
        ),
        ("chatglm", "chatglm.rope.dimension_count", 16, "must be half a head's 16, got 16"),
        ("mpt", "mpt.attention.clamp_kqv", 6.0, "'mpt.attention.clamp_kqv' must be 0"),
        ("granite", "granite.rope.scaling.finetuned", False, "must be true: models without rotary"),
        ("mpt", "mpt.feed_forward_length", 250, "must be a multiple of 64, got 250"),
        ("nemotron_h", "nemotron_h.ssm.inner_size", 100, "must be a multiple of 8, got 100"),
        ("granitehybrid", "granitehybrid.ssm.inner_size", 96, "'mamba_expand' must be an integer"),
        ("granitehybrid", "granitehybrid.ssm.group_count", 3, "'mamba_n_groups' must divide"),
        ("granitehybrid", "granitehybrid.attention.head_count_kv", [0, 2], "must be 3 integers"),
        ("granitehybrid", "granitehybrid.attention.head_count_kv", [2, 1, 0], "other than 0, got "),
        ("granitehybrid", "granitehybrid.attention.head_count_kv", [0, -2, 0], "at least 0"),
        ("granitehybrid", "granitehybrid.attention.head_count_kv", [0, 0, 0], "between 1 and 4"),
        (
            "granitehybrid-moe",
            "granitehybrid.expert_shared_feed_forward_length",
            0,
            "must be at least 1, got 0",
        ),
        ("nemotron_h", "nemotron_h.feed_forward_length", [0] * 5, "no layer of mlp or moe"),
        ("nemotron_h", "nemotron_h.feed_forward_length", [0.5] * 5, "must be 5 integers"),
        ("nemotron_h_moe", "nemotron_h_moe.expert_used_count", [2] * 5, "must be an integer"),
        ("nemotron_h_moe", "nemotron_h_moe.expert_shared_count", 2, "'n_shared_experts' must be 1"),
        ("nemotron_h_moe", "nemotron_h_moe.expert_group_used_count", 4, "between 1 and 3, got 4"),
        ("lfm2", "lfm2.attention.head_count_kv", [2, 2, 2, 2], "no layers of conv"),
        ("lfm2", "lfm2.attention.sliding_window", 8, "must be between 0 and 0, got 8"),
        ("lfm2", "lfm2.decision.block_count", 1, "must be between 0 and 0, got 1"),
        ("lfm2", "lfm2.embedding_length_out", 128, "must be between 0 and 0, got 128"),
        ("lfm2", "lfm2.attention.causal", False, "must be true"),
        ("lfm2", "lfm2.shortconv.l_cache", 1, "'conv_L_cache' must be between 2 and 16, got 1"),
        ("lfm2moe", "lfm2moe.expert_gating_func", 1, "must be 2 (sigmoid)"),
        ("gemma4", "gemma4.attention.sliding_window_pattern", [1] * 6, "false for the last layer"),
        ("gemma4", "gemma4.attention.sliding_window", 0, "must be at least 1, got 0"),
        ("gemma4", "gemma4.attention.head_count_kv", [2, 1, 2, 2, 2, 2], "one number for all lay"),
        ("gemma4", "gemma4.attention.value_length_swa", 64, "must be that of keys, 32, got 64"),
        ("gemma4", "gemma4.attention.value_length", 32, "must be that of keys, 64, got 32"),
        ("gemma4", "gemma4.rope.dimension_count_swa", 16, "must be that of keys, 32, got 16"),
        ("gemma4", "gemma4.rope.dimension_count", 32, "must be that of keys, 64, got 32"),
        ("gemma4", "gemma4.rope.scaling.factor", 2.0, "'gemma4.rope.scaling.factor' must be 1"),
        ("gemma4", "gemma4.rope.scale_linear", 2.0, "'gemma4.rope.scale_linear' must be 1"),
        ("gemma4", "gemma4.attention.shared_kv_layers", 6, "must be between 0 and 5, got 6"),
        ("gemma4", "gemma4.feed_forward_length", [96, 192] * 3, "or twice it in the last 3 layers"),
        ("gemma4", "gemma4.embedding_length_per_layer_input", "8", "must be an integer"),
        ("gemma4-moe", "gemma4.expert_used_count", 7, "must be between 1 and 6, got 7"),
        ("kimi-linear", "kimi-linear.expert_gating_func", 1, "must be 2 (sigmoid)"),
        ("kimi-linear", "kimi-linear.moe_latent_size", 32, "must be between 0 and 0, got 32"),
        ("kimi-linear", "kimi-linear.attn_res.block_size", 2, "must be between 0 and 0, got 2"),
        ("kimi-linear", "kimi-linear.attention.head_count_kv", [1] * 4, "no layers of linear_att"),
        ("kimi-linear", "kimi-linear.kda.head_dim", 0, "must be at least 1, got 0"),
        ("falcon-h1", "falcon-h1.ssm.inner_size", 100, "must be a multiple of 8, got 100"),
        ("falcon-h1", "falcon-h1.ssm.group_count", 3, "'mamba_n_groups' must divide"),
        ("lfm2moe", "lfm2moe.leading_dense_block_count", 3, "must be between 0 and 2, got 3"),
    ],
)
def test_what_single_families_refuse(
    name: str, key: str, item: Any, complaint: str, tmp_path: Path
) -> None:
    _, file = converted(name, tmp_path)
    gguf = read_gguf(file)
    metadata = dict(gguf.metadata) | tiny_tokens(200) | {key: item}
    assert complaint in refused(gguf_bytes(metadata, tensors_of(gguf)), tmp_path / "bad.gguf")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("qwen35", {"block_count": 5, "attention.recurrent_layers": [1, 1, 1, 0, 0]}),
        (
            "nemotron_h_moe",
            {
                "block_count": 6,
                "attention.head_count_kv": [0, 0, 2, 0, 0, 2],
                "feed_forward_length": [0, 32, 0, 32, 0, 32],
            },
        ),
    ],
)
def test_layers_that_guess_are_left_out(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    _, file = converted(name, tmp_path)
    expected, gguf = load_model_config(unpack(file)), read_gguf(file)
    more = {f"{name}.{key}": item for key, item in {"nextn_predict_layers": 1, **more}.items()}
    metadata = dict(gguf.metadata) | tiny_tokens(200) | more
    file.write_bytes(gguf_bytes(metadata, tensors_of(gguf)))
    assert load_model_config(unpack(file)) == expected


@pytest.mark.parametrize(
    ("name", "tensor", "complaint"),
    [
        ("gemma4", "rope_freqs.weight", "'rope_freqs.weight' is missing"),
        ("kimi-linear", "blk.2.attn_gate.weight", "'attn_gate.weight' are not supported"),
    ],
)
def test_tensors_that_a_file_must_have_or_not(
    name: str, tensor: str, complaint: str, tmp_path: Path
) -> None:
    gguf = read_gguf(converted(name, tmp_path)[1])
    tensors = tensors_of(gguf)
    if tensors.pop(tensor, None) is None:
        tensors[tensor] = tensors["output_norm.weight"]
    metadata = dict(gguf.metadata) | tiny_tokens(200)
    assert complaint in refused(gguf_bytes(metadata, tensors), tmp_path / "bad.gguf")


def test_shapes_that_quantised_files_of_kimi_linear_have(tmp_path: Path) -> None:
    """llama.cpp's tools leave out dimensions of one at the end, which ours are at the front."""
    _, file = converted("kimi-linear", tmp_path)
    gguf = read_gguf(file)
    tensors = tensors_of(gguf)
    for name, (shape, kind, data) in tensors.items():
        if len(shape) == 4:
            first = next(n for n, size in enumerate(shape) if size > 1)
            tensors[name] = (shape[first:], kind, data)
    assert len(tensors["blk.0.ssm_a"][0]) == 2 and len(tensors["blk.0.ssm_conv1d_q.weight"][0]) == 3
    less = tmp_path / "less.gguf"
    less.write_bytes(gguf_bytes(dict(gguf.metadata) | tiny_tokens(200), tensors))
    assert torch.equal(logits_of(file), logits_of(less))


def test_what_files_of_gemma_4_do_not_say(tmp_path: Path) -> None:
    """llama.cpp's own numbers: a cap of logits, which 0 is none of, and a base for windows."""
    gguf = read_gguf(converted("gemma4", tmp_path)[1])
    metadata = dict(gguf.metadata)
    for key in ("final_logit_softcapping", "rope.freq_base_swa", "attention.shared_kv_layers"):
        del metadata[f"gemma4.{key}"]
    metadata["gemma4.feed_forward_length"] = 96
    found = config_of(dataclasses.replace(gguf, metadata=metadata))
    assert found["final_logit_softcapping"] == 30.0 and found["num_kv_shared_layers"] == 0
    assert found["rope_parameters"]["sliding_attention"]["rope_theta"] == 10_000.0
    metadata["gemma4.final_logit_softcapping"] = 0.0
    found = config_of(dataclasses.replace(gguf, metadata=metadata))
    assert found["final_logit_softcapping"] is None


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"block_count": 1 << 31}, "between 1 and 4096, got 2147483648"),
        (
            {"attention.head_count_kv": np.zeros(1 << 22)},
            "must be 4 integers of at least 0, got 41",
        ),
    ],
)
def test_numbers_of_layers_beyond_all_bounds(
    more: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    """They are refused before a list is made of them."""
    _, file = converted("lfm2", tmp_path)
    gguf = read_gguf(file)
    metadata = dict(gguf.metadata) | tiny_tokens(200) | {"lfm2.attention.head_count_kv": 2}
    data = gguf_bytes(metadata | {f"lfm2.{k}": item for k, item in more.items()}, tensors_of(gguf))
    tracemalloc.start()
    found = refused(data, tmp_path / "bad.gguf")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert complaint in found
    assert peak < 16 << 20


def test_the_key_of_epsilon_that_nemotron_s_files_may_have_alone(tmp_path: Path) -> None:
    _, file = converted("nemotron_h", tmp_path)
    expected, gguf = load_model_config(unpack(file)), read_gguf(file)
    metadata = dict(gguf.metadata) | tiny_tokens(200)
    del metadata["nemotron_h.attention.layer_norm_rms_epsilon"]
    metadata["nemotron_h.attention.layer_norm_epsilon"] = 0.25
    file.write_bytes(gguf_bytes(metadata, tensors_of(gguf)))
    assert load_model_config(unpack(file)) == dataclasses.replace(expected, rms_norm_eps=0.25)
    del metadata["nemotron_h.attention.layer_norm_epsilon"]
    complaint = refused(gguf_bytes(metadata, tensors_of(gguf)), tmp_path / "bad.gguf")
    assert "'nemotron_h.attention.layer_norm_epsilon' is missing" in complaint


HUGE = 2**63
BAD_FILES: list[tuple[bytes, str]] = [
    (b"", "not a GGUF file"),
    (b"GGU", "beyond its end"),
    (b"GGML" + b"\0" * 40, "does not begin with GGUF"),
    (head(0, 0, version=1), "has version 1"),
    (struct.pack(">4sI", b"GGUF", 3) + b"\0" * 16, "has version 50331648"),
    (head(HUGE, 0), "tensors and 0 keys, at most"),
    (head(0, HUGE), "0 tensors and"),
    (head(0, 1) + struct.pack("<Q", HUGE), "has a name of"),
    (head(0, 1) + string("k"), "beyond its end"),
    (head(0, 1) + string(b"\xff") + b"\0" * 8, "a name is not UTF-8"),
    (head(0, 1) + string("k") + struct.pack("<I", 99), "'k' has the unknown type 99"),
    (head(0, 1) + string("k") + struct.pack("<IQ", 8, HUGE), "bytes of strings"),
    (head(0, 1) + string("k") + struct.pack("<IQ", 8, 1000), "beyond its end"),
    (head(0, 1) + string("k") + struct.pack("<IIQ", 9, 8, 1 << 40), "strings, at most"),
    (head(0, 1) + string("k") + struct.pack("<IIQ", 9, 8, 1 << 20), "beyond its end"),
    (head(0, 1) + string("k") + struct.pack("<IIQ", 9, 4, 1 << 62), "beyond its end"),
    (head(0, 1) + string("k") + struct.pack("<IIQ", 9, 9, 1), "array of the type 9"),
    (head(0, 2) + 2 * (string("k") + struct.pack("<I?", 7, True)), "the key 'k' twice"),
    (gguf_bytes({"general.alignment": 33}, {}), "'general.alignment' must be a power of two"),
    (gguf_bytes({"general.alignment": Typed(10, b"\xff" * 8)}, {}), "must be a power of two"),
    (head(1, 0) + string("t") + struct.pack("<I", 9), "has 9 dimensions"),
    (gguf_bytes({}, {"t": ((4, 0), 0, b"")}), "has the sizes"),
    (gguf_bytes({}, {"t": ((1 << 40, 1 << 40), 0, b"")}), "has the sizes"),
    (gguf_bytes({}, {"t": ((4, 33), 8, b"")}), "no whole blocks of Q8_0"),
    (gguf_bytes({}, {"t": ((4, 32), 0, b"short")}), "beyond the end"),
    (gguf_bytes({}, {}), "'general.architecture' is missing"),
    (
        gguf_bytes({"general.architecture": "mamba"}, {}),
        "supported in GGUF are llama, qwen2, qwen3",
    ),
]


@pytest.mark.parametrize(("data", "complaint"), BAD_FILES, ids=[text for _, text in BAD_FILES])
def test_bad_files(data: bytes, complaint: str, tmp_path: Path) -> None:
    assert complaint in refused(data, tmp_path / "bad.gguf")


def rewritten(gguf: GgufFile, **changes: Any) -> bytes:
    """Return a file with other metadata (`__` for a dot); `...` removes a key."""
    metadata: dict[str, Any] = dict(gguf.metadata) | tiny_tokens(201)
    for name, item in changes.items():
        metadata[name.replace("__", ".")] = item
    metadata = {key: item for key, item in metadata.items() if item is not ...}
    tensors = {
        name: (
            t.shape,
            t.kind,
            gguf.data[t.start : t.start + t.row_bytes * max(1, int(np.prod(t.shape[:-1])))],
        )
        for name, t in gguf.tensors.items()
    }
    return gguf_bytes(metadata, tensors)


def test_how_a_file_recommends_to_sample(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As llama.cpp reads it; what has no like here is named."""
    plain = write_tiny_model(MODELS["llama"], tmp_path / "plain")
    gguf = read_gguf(write_gguf(plain, tmp_path / "model.gguf", name="llama"))
    keys = {"temp": 0.25, "top_k": 20, "top_p": 0.5, "min_p": 0.125, "penalty_repeat": 1.25}
    said = {f"general__sampling__{key}": item for key, item in keys.items()}
    said |= {"general__sampling__mirostat": 2, "tokenizer__ggml__suppress_tokens": [5, 201, 7]}
    (tmp_path / "said.gguf").write_bytes(rewritten(gguf, **said))
    found = read_sampling_defaults(unpack(tmp_path / "said.gguf"), vocab_size=201)
    given: dict[str, Any] = {"temperature": 0.25, "top_k": 20, "top_p": 0.5, "min_p": 0.125}
    given |= {"repetition_penalty": 1.25, "logit_bias": ((5, -100.0), (7, -100.0))}
    assert found == SamplingDefaults(params=structs.replace(PLAIN_SAMPLING, **given))
    assert "mirostat is not taken" in caplog.text
    (tmp_path / "silent.gguf").write_bytes(rewritten(gguf))
    silent = read_sampling_defaults(unpack(tmp_path / "silent.gguf"), vocab_size=201)
    assert silent == SamplingDefaults()


@pytest.mark.parametrize("item", [0.0, ...])
def test_scales_of_granite_that_a_file_does_not_say(item: Any, tmp_path: Path) -> None:
    """llama.cpp: without scales, or with 0, those of any other model."""
    _, file = converted("granite", tmp_path)
    gguf = read_gguf(file)
    keys = ("embedding_scale", "residual_scale", "attention.scale")
    metadata = dict(gguf.metadata) | tiny_tokens(200)
    metadata |= {f"granite.{key}": item for key in keys}
    kept = {key: value for key, value in metadata.items() if value is not ...}
    found = config_of(dataclasses.replace(gguf, metadata=kept))
    size = gguf.metadata["granite.attention.key_length"]
    assert isinstance(size, int)
    assert found["attention_multiplier"] == size**-0.5
    assert (found["embedding_multiplier"], found["residual_multiplier"]) == (1.0, 1.0)


def test_named_chat_templates(tmp_path: Path) -> None:
    plain = write_tiny_model(MODELS["llama"], tmp_path / "plain")
    gguf = read_gguf(write_gguf(plain, tmp_path / "model.gguf", name="llama"))
    tools = {"tokenizer__chat_template__tool_use": "T", "tokenizer__chat_template__rag": "R"}
    (tmp_path / "named.gguf").write_bytes(rewritten(gguf, tokenizer__chat_template="D", **tools))
    source = find_chat_template(unpack(tmp_path / "named.gguf"))
    assert source is not None
    assert (source.text, source.tool_use) == ("D", "T")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"llama__block_count": ...}, "'llama.block_count' is missing"),
        ({"llama__block_count": "3"}, "must be an integer"),
        ({"llama__expert_count": 8}, "'llama.expert_used_count' is missing"),
        ({"llama__attention__head_count": 0}, "must be at least 1"),
        ({"llama__rope__dimension_count": 8}, "must be that of keys, 16, got 8"),
        ({"llama__rope__scaling__type": "spiral"}, "must be none, linear, yarn or longrope"),
        ({"llama__rope__scaling__factor": 0.5}, "must be 0 or at least 1, got 0.5"),
        ({"llama__rope__scale_linear": 0.25}, "must be 0 or at least 1, got 0.25"),
        ({"llama__rope__scaling__attn_factor": 1.5}, "must be 1 without YaRN"),
        ({"tokenizer__ggml__model": "bert"}, "must be gpt2, llama or gemma4"),
        ({"tokenizer__ggml__pre": "klingon"}, "must be one of llama-bpe, qwen2"),
        ({"tokenizer__ggml__tokens": ["a"] * 202}, "has 202 tokens for the embedding"),
        ({"tokenizer__ggml__token_type": [1]}, "must have 201 entries"),
        ({"tokenizer__ggml__merges": ["a b"]}, "not of known tokens"),
        ({"tokenizer__ggml__eos_token_id": 201}, "must be below 201, got 201"),
        ({"tokenizer__chat_template": 7}, "must be a string"),
        ({"general__sampling__temp": 3.0}, "'general.sampling.temp' must be from 0 to 2, got 3"),
        ({"general__sampling__top_p": "1"}, "'general.sampling.top_p' must be a number"),
        ({"tokenizer__ggml__suppress_tokens": 7}, "must be an array of numbers"),
    ],
    ids=str,
)
def test_bad_metadata(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    plain = write_tiny_model(MODELS["llama"], tmp_path / "plain")
    gguf = read_gguf(write_gguf(plain, tmp_path / "model.gguf", name="llama"))
    assert complaint in refused(rewritten(gguf, **changes), tmp_path / "bad.gguf")


def test_a_type_that_is_not_supported(tmp_path: Path) -> None:
    plain = write_tiny_model(MODELS["llama"], tmp_path / "plain")
    data = write_gguf(plain, tmp_path / "model.gguf", name="llama").read_bytes()
    place = data.index(b"blk.0.ffn_down.weight") + len("blk.0.ffn_down.weight") + 4 + 16
    (tmp_path / "other.gguf").write_bytes(data[:place] + struct.pack("<I", 16) + data[place + 4 :])
    path = unpack(tmp_path / "other.gguf")
    with pytest.raises(ModelLoadError) as caught:
        check_weights(path, load_model_config(path))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'other.gguf'}: "), "not what stands for it in the cache"
    assert "ffn_down.weight' has GGUF's type 16, not one of F32, F16" in message


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is served without it, from a directory that goes with the process."""
    plain = write_tiny_model(MODELS["llama"], tmp_path / "plain")
    file = write_gguf(plain, tmp_path / "model.gguf", name="llama")
    (tmp_path / "no-directory").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no-directory"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = unpack(file)
    assert made.parent == tmp_path
    assert "XDG_CACHE_HOME" in caplog.text
    config = load_model_config(made)
    assert set(check_weights(made, config).file_of.values()) == {file}
    made.chmod(0o755)  # as a directory of others would be: the link is not followed
    with pytest.raises(ModelLoadError, match="leads out of the model directory"):
        check_weights(made, config)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no-directory"))
    with pytest.raises(ModelLoadError, match=r"XDG_CACHE_HOME names.*TMPDIR names") as caught:
        unpack(file)
    assert str(caught.value).startswith(f"{file}: ")


def test_more_experts_than_any_model_has(tmp_path: Path) -> None:
    name = "blk.0.ffn_up_exps.weight"
    for kind, data in ((0, bytes(4 * 5000)), (99, b"")):
        file = tmp_path / f"{kind}.gguf"
        tensors = {name: ((5000, 1, 1), kind, data)}
        file.write_bytes(gguf_bytes({"general.architecture": "qwen3moe"}, tensors))
        with pytest.raises(ModelLoadError, match=f"'{name}' has 5000 experts, at most 4096"):
            one_by_one(read_gguf(file))


def test_links_out_of_other_directories_are_refused(tmp_path: Path) -> None:
    plain = write_tiny_model(MODELS["llama"], tmp_path / "plain")
    packed = unpack(write_gguf(plain, tmp_path / "model.gguf", name="llama"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((packed / "config.json").read_text())
    (other / "model.gguf").symlink_to(tmp_path / "model.gguf")
    with pytest.raises(ModelLoadError, match="leads out of the model directory"):
        check_weights(other, load_model_config(other))


def test_fuzzed_files(tmp_path: Path) -> None:
    """Cut off, and with bytes changed: one error or a model, in bounded memory."""
    plain = write_tiny_model(MODELS["qwen2"], tmp_path / "plain")
    whole = write_gguf(plain, tmp_path / "model.gguf", name="qwen2", kind="Q4_0").read_bytes()
    first_tensor = whole.index(b"token_embd.weight")
    file, draw = tmp_path / "fuzzed.gguf", random.Random(5)
    num_refused = 0
    tracemalloc.start()
    for number in range(600):
        data = bytearray(whole)
        if number % 3 == 0:
            del data[draw.randrange(len(data)) :]
        else:
            for _ in range(draw.choice((1, 1, 2, 8))):
                place = draw.randrange(min(len(data), first_tensor + 2000))
                data[place] = draw.choice((0, 1, 8, 9, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        file.write_bytes(data)
        try:
            path = unpack(file)
            json.loads((path / "tokenizer.json").read_text())
            check_weights(path, load_model_config(path))
        except ModelLoadError as error:
            num_refused += 1
            assert "\n" not in str(error)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_refused > 200
    assert peak < len(whole) + MORE_BYTES
