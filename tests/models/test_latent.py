"""Latent attention: what is kept of a token, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.kernel_grid import LIMITS, ROWS, Poisoned, make_batch, make_inputs, relative_error
from support.tiny_models import find_tiny_model, write_tiny_model

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError, ModelLoadError
from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.cpu.invariant import InvariantKernels
from lightserve.kernels.cpu.native import NativeKernels
from lightserve.kernels.interface import Kernels
from lightserve.kernels.reference import ReferenceKernels
from lightserve.kernels.select import missing_core
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.models.base import kv_layout
from lightserve.models.config import load_model_config
from lightserve.worker.checks import check_options
from lightserve.worker.host_pool import DirectHostPool
from lightserve.worker.memory import KVPool

KERNELS = (
    TorchKernels,
    *(() if missing_core() else (NativeKernels,)),
    TritonKernels,
)
LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "num_experts_per_tok": 6,
    "torch_dtype": "bfloat16",
}
"""DeepSeek-V2-Lite, where it differs from the defaults."""

CPU = torch.device("cpu")


def write_config(path: Path, **changes: object) -> Path:
    (path / "config.json").write_text(json.dumps(LITE | changes))
    return path


def test_a_ninth_of_what_heads_would_take(tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path))
    by_ranks = [kv_layout(config, tp_size=size, dtype="bfloat16") for size in (1, 2)]
    assert [layout.bytes_per_token for layout in by_ranks] == [27 * (512 + 64) * 2] * 2
    heads = 27 * 16 * (128 + 64 + 128) * 2
    assert heads / by_ranks[0].bytes_per_token > 8.8


def test_glm_flash_as_it_is_published(tmp_path: Path) -> None:
    """It stands in the file, and is what transformers takes where the file is silent."""
    stated = {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_attention_heads": 20,
        "num_hidden_layers": 47,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "vocab_size": 154880,
    }
    silent = {
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 4,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "routed_scaling_factor": 1.8,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 256,
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(stated | silent))
    config = load_model_config(tmp_path)
    assert kv_layout(config, tp_size=2, dtype="bfloat16").bytes_per_token == 47 * (512 + 64) * 2
    assert config.moe is not None and config.moe.layers == frozenset(range(1, 47))
    for values in (stated, stated | dict.fromkeys(silent.keys() - {"q_lora_rank"})):
        file.write_text(json.dumps(values))
        assert load_model_config(tmp_path) == config


def test_a_pool_has_each_vector_once_and_copies_are_whole(tmp_path: Path) -> None:
    path = write_tiny_model(find_tiny_model("deepseek-v2"), tmp_path)
    layout = kv_layout(load_model_config(path), tp_size=1, dtype="float32")
    pool = KVPool(layout, 24, torch.device("cpu"))
    assert sum(tensor.nbytes for tensor in pool.tensors) == 25 * layout.bytes_per_token
    for keys, values in zip(pool.k, pool.v, strict=True):
        assert keys.data_ptr() == values.data_ptr() and keys.stride() == values.stride()
        assert (keys.shape[2], values.shape[2]) == (40, 32)
        keys.normal_()
    before = [keys.clone() for keys in pool.k]
    host = DirectHostPool(8, pool)
    places = torch.tensor([3, 17, 5], dtype=torch.int32).numpy().tobytes()
    on_host = torch.tensor([1, 6, 2], dtype=torch.int32).numpy().tobytes()
    copies = SimpleNamespace(slots=places, host_slots=on_host)
    host.save(copies)  # type: ignore[arg-type]
    for keys in pool.k:
        keys[[3, 5, 17]] = 0.0
    host.load(copies)  # type: ignore[arg-type]
    assert all(torch.equal(*pair) for pair in zip(pool.k, before, strict=True))


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_of_fewer_numbers_than_keys(
    implementation: type[Kernels], dtype: torch.dtype
) -> None:
    """In slots from both ends of the pool, where those of no row hold NaN; contexts cut and not."""
    cases = [("mixed", "scattered", 4), ("decodes", "reversed", 4)]
    if implementation is TritonKernels:  # several blocks of heads, one that is not full, chunks
        cases += [("short chunks, long contexts", "reversed", 24), ("decodes", "scattered", 17)]
    for rows, layout, num_heads in cases:
        batch = make_batch(ROWS[rows], layout)
        q, pool, _ = make_inputs(batch, (num_heads, 1, 40), dtype)

        def attend(kernels: Kernels, width: int) -> torch.Tensor:
            values = pool[..., :width]  # noqa: B023
            return kernels.attention(q, pool, values, batch, scale=0.2, sliding_window=None)  # noqa: B023

        with Poisoned():
            found = attend(implementation(), 32)
        assert found.shape == (*q.shape[:2], 32)
        truth = attend(ReferenceKernels(), 32)
        assert relative_error(found, truth) <= LIMITS[dtype]
        # They are those of whole keys, cut off.
        whole = attend(ReferenceKernels(), 40)[..., :32]
        assert relative_error(truth, whole) <= LIMITS[dtype]
        assert relative_error(found.flip(1), truth) > 10 * LIMITS[dtype]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"topk_method": "noaux_tc"}, "topk_method.*greedy' or 'group_limited_greedy"),
        ({"topk_method": "group_limited_greedy"}, "n_group.*is missing"),
        ({"norm_topk_prob": True}, "norm_topk_prob"),
        ({"scoring_func": "sigmoid"}, "scoring_func.*softmax"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"first_k_dense_replace": 27}, "first_k_dense_replace.*below 27"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim.*even"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_variants_that_are_refused(
    changes: dict[str, object], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=complaint):
        load_model_config(write_config(tmp_path, **changes))


def test_kernels_and_types_that_are_refused(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    config, plain = load_model_config(path), ServeConfig(model=str(path))
    check_options(plain, config, TorchKernels(), CPU)
    check_options(plain, config, TritonKernels(), CPU)
    with pytest.raises(ConfigError, match=r"the torch-batch-invariant kernels.*backend torch does"):
        check_options(plain, config, InvariantKernels(), CPU)
    with pytest.raises(ConfigError, match="--kv-dtype int8 does not go with DeepseekV2"):
        check_options(ServeConfig(model=str(path), kv_dtype="int8"), config, TorchKernels(), CPU)
