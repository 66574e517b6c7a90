"""Models with recurrent layers: states at any cut, in slots of the pool, copied and on the host."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.grids import long_but
from support.model_runs import CONTEXT_LEN, LoadedModel, load_tiny
from support.parity import (
    CPU,
    FP32_LOGPROB,
    Chunk,
    TokenSequence,
    compare_all,
    make_sequences,
    run_sequences,
)
from support.tiny_models import MAMBA, TinyModel, find_tiny_model, load_reference, write_tiny_model
from torch import Tensor

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError, ModelLoadError, ProtocolError, StartupError
from lightserve.kernels.interface import Kernels
from lightserve.kernels.reference import ReferenceKernels
from lightserve.kernels.select import make_kernels, missing_core
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.messages.common import TokenSegment, pack_int32
from lightserve.messages.router_worker import (
    NO_COPIES,
    NO_STATE_COPIES,
    AddSequence,
    KVCopies,
    OutputKind,
    PlanRow,
    SlotRange,
    StateCopies,
    StepPlan,
    row_results,
)
from lightserve.models.base import SingleRank, kv_layout
from lightserve.models.config import check_tp, load_model_config
from lightserve.models.decoder import DecoderModel
from lightserve.types import RowId, SamplingParams, StepId
from lightserve.worker.build import build_runner
from lightserve.worker.checks import check_options
from lightserve.worker.device import HostQueue
from lightserve.worker.host_pool import DirectHostPool
from lightserve.worker.memory import KVPool, num_kv_slots
from lightserve.worker.model_runner import ModelRunner

NAMES = (
    *("qwen3.5", "qwen3.5-tied", "qwen3-next", "olmo-hybrid", "lfm2", "lfm2-tied"),
    *("granite-hybrid", "granite-hybrid-rope", "nemotron-h", "falcon-h1"),
)
KINDS = [(name, False) for name in ("reference", "torch")] + [("torch", True)]
if not missing_core():
    KINDS += [("auto", False), ("auto", True)]


def load(name: str, path: Path, kernels: Kernels) -> LoadedModel:
    write_tiny_model(find_tiny_model(name), path)
    return load_tiny(path, torch.float32, kernels)


def sequence(seed: int, length: int) -> TokenSequence:
    tokens = torch.randint(0, 200, (length,), generator=torch.Generator().manual_seed(seed))
    return TokenSequence(tokens, torch.empty(0))


CUT = [
    *((name, *kind) for name in NAMES for kind in KINDS),
    *(("kimi-linear", *kind) for kind in KINDS if not kind[1]),
]


@pytest.mark.parametrize(("name", "kind", "invariant"), long_but(CUT, CUT[::2]))
def test_a_cut_anywhere_changes_nothing(
    name: str, kind: str, invariant: bool, tmp_path: Path
) -> None:
    """Of a short prompt, and some of one longer than the chunks that are computed at once."""
    loaded = load(name, tmp_path, make_kernels(kind, batch_invariant=invariant))
    for length, cuts in ((19, range(1, 19)), (150, (1, 63, 64, 65, 129))):
        own, other = sequence(1, length), sequence(2, 40)
        whole = loaded.run([own], [[Chunk(0, 0, length)]])
        assert whole is not None
        for cut in cuts:
            beside = Chunk(1, 0, min(cut, 40))
            passes = [[beside, Chunk(0, 0, cut)], [Chunk(0, cut, length - cut)]]
            found = loaded.run([own, other], passes)
            assert found is not None
            if invariant:
                assert torch.equal(found[0], whole[0]), (length, cut)
            else:
                assert (found[0] - whole[0]).abs().max() < FP32_LOGPROB, (length, cut)


def test_a_state_is_told_apart(tmp_path: Path) -> None:
    """Otherwise the test above would test nothing: a row that finds another's state."""
    loaded = load("qwen3.5", tmp_path, make_kernels("torch", batch_invariant=False))
    own, other = sequence(1, 19), sequence(2, 19)
    passes = [[Chunk(0, 0, 9), Chunk(1, 0, 9)], [Chunk(0, 9, 10)]]
    driver = loaded.driver([own, other])
    tokens = [own.tokens, other.tokens]
    whole = run_sequences(loaded.driver([own, other]), tokens, passes)
    assert driver._states is not None

    def swap(number: int) -> None:
        if number == 1:
            driver._states.copy_(driver._states.flip(0))

    found = run_sequences(driver, tokens, passes, before_pass=swap)
    assert whole is not None and found is not None
    assert torch.equal(found[0][:9], whole[0][:9])
    assert (found[0][9:] - whole[0][9:]).abs().max() > 0.1


class Scene(NamedTuple):
    """A runner whose pool is for a few sequences, and its size."""

    runner: ModelRunner
    num_states: int

    def run(self, rows: Sequence[tuple[int, int, int]], **fields: Any) -> dict[int, list[int]]:
        """Run rows (row, first position, number of tokens), which sample behind their prompt."""
        plan = StepPlan(
            step_id=StepId(0),
            sequences=fields.get("sequences", []),
            slot_ranges=fields.get("slot_ranges", []),
            rows=[
                PlanRow(
                    RowId(row),
                    start,
                    count,
                    OutputKind.SAMPLE if start + count >= NUM_PROMPT else OutputKind.NONE,
                )
                for row, start, count in rows
            ],
            saves=fields.get("saves", NO_COPIES),
            loads=fields.get("loads", NO_COPIES),
            state_loads=fields.get("state_loads", NO_STATE_COPIES),
            state_saves=fields.get("state_saves", NO_STATE_COPIES),
        )
        results = row_results(plan, self.runner.execute(plan))
        assert not any(result.error for result in results)
        return {result.row: result.token_ids for result in results}


LENGTH, NUM_PROMPT, NUM_SLOTS = 24, 14, 1200


def make_scene(path: Path, name: str = "qwen3.5") -> Scene:
    kernels = make_kernels("auto", batch_invariant=True)
    loaded = load(name, path, kernels)
    layout = kv_layout(loaded.config, tp_size=1, dtype="float32")
    pool = KVPool(layout, NUM_SLOTS, torch.device("cpu"))
    pool.tensors[0].fill_(torch.nan)
    runner = ModelRunner(
        loaded.model,
        pool,
        SingleRank(),
        host_pool=DirectHostPool(NUM_SLOTS, pool),
        queue=HostQueue(),
        max_num_seqs=4,
    )
    return Scene(runner, layout.num_state_slots)


def added(row: int, tokens: Tensor) -> AddSequence:
    known = [TokenSegment(token_ids=pack_int32(tokens.tolist()))]
    params = SamplingParams(temperature=0.0)
    return AddSequence(RowId(row), known, params, num_prompt_tokens=len(tokens), eos_token_ids=[])


def ranges(row: int, states: np.ndarray[Any, Any], kv: np.ndarray[Any, Any]) -> list[SlotRange]:
    return [
        SlotRange(RowId(row), -len(states), pack_int32(states)),
        SlotRange(RowId(row), 0, pack_int32(kv)),
    ]


def copies(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> StateCopies:
    return StateCopies(pack_int32(source), pack_int32(target))


@pytest.mark.skipif(bool(missing_core()), reason=missing_core())
@pytest.mark.parametrize(
    "name",
    ["qwen3.5", "qwen3-next", "lfm2", "olmo-hybrid", "granite-hybrid", "nemotron-h", "falcon-h1"],
)
def test_snapshots_and_pauses_change_no_token(name: str, tmp_path: Path) -> None:
    """A row goes on from a snapshot of another's, and from the host, to the same tokens."""
    scene = make_scene(tmp_path, name)
    run, num = scene.run, scene.num_states
    slots = np.random.default_rng(0).permutation(NUM_SLOTS)
    states = [slots[number * num : (number + 1) * num] for number in range(4)]
    kv = [slots[4 * num + number * LENGTH :][:LENGTH] for number in range(3)]
    tokens = sequence(1, NUM_PROMPT).tokens
    begun = {"sequences": [added(0, tokens)], "slot_ranges": ranges(0, states[0], kv[0])}
    saved = copies(states[0], states[3])
    run([(0, 0, 9)], **begun, state_saves=saved)
    expected = [*run([(0, 9, NUM_PROMPT - 9)])[0]]
    for place in range(NUM_PROMPT, LENGTH - 1):
        expected += run([(0, place, 1)])[0]

    # Another row has the first nine tokens' keys and values, and the snapshot behind them.
    shared = np.concatenate([kv[0][:9], kv[1][9:]])
    begun = {"sequences": [added(1, tokens)], "slot_ranges": ranges(1, states[1], shared)}
    found = [*run([(1, 9, NUM_PROMPT - 9)], **begun, state_loads=copies(states[3], states[1]))[1]]
    for place in range(NUM_PROMPT, NUM_PROMPT + 4):
        found += run([(1, place, 1)])[1]

    # It pauses: state and KV go to the host, others have its slots, and come back elsewhere.
    own = np.concatenate([states[1], shared[: NUM_PROMPT + 4]])
    elsewhere = np.concatenate([states[2], kv[2][: NUM_PROMPT + 4]])
    host = np.arange(len(own))[::-1]
    other = [added(0, sequence(3, 5).tokens)]
    kept = KVCopies(pack_int32(own), pack_int32(host))
    lost = ranges(0, states[1], shared[:5])
    run([(0, 0, 5)], saves=kept, sequences=other, slot_ranges=lost)
    output = torch.tensor(found)
    back = KVCopies(pack_int32(elsewhere), pack_int32(host))
    again = [added(2, torch.cat([tokens, output]))]
    begun = {"sequences": again, "slot_ranges": ranges(2, states[2], kv[2]), "loads": back}
    found += run([(2, NUM_PROMPT + 4, 1)], **begun)[2]
    for place in range(NUM_PROMPT + 5, LENGTH - 1):
        found += run([(2, place, 1)])[2]
    assert found == expected


def test_plans_that_fit_no_state_are_refused(tmp_path: Path) -> None:
    scene = make_scene(tmp_path)
    num = scene.num_states
    with pytest.raises(ProtocolError, match=f"position {-num - 1}, where a state has {num} slots"):
        scene.run([(0, 0, 1)], slot_ranges=[SlotRange(RowId(0), -num - 1, pack_int32([0]))])
    few = np.arange(num - 1)
    with pytest.raises(ProtocolError, match="state_saves"):
        scene.run([(0, 0, 1)], state_saves=copies(few, few + num))


def test_states_take_slots_of_the_pool(tmp_path: Path) -> None:
    """Of all attention layers alike, as few as hold a layer's bytes."""
    path = write_tiny_model(find_tiny_model("qwen3-next"), tmp_path)  # four of five layers
    config = load_model_config(path)
    assert config.recurrent is not None and len(config.kv_layers) == 1
    for tp_size in (1, 2):
        layout = kv_layout(config, tp_size=tp_size, dtype="float32")
        inputs, matrices = (size // tp_size for size in config.recurrent.state_bytes(4))
        assert (inputs, matrices) == (3 * 112 * 4 // tp_size, 4 * 16 * 12 * 4 // tp_size)
        own = layout.bytes_per_token
        each = -(-inputs // own) + -(-matrices // own)
        assert layout.num_state_slots == 4 * each
        taken = [
            (place.kv_layer, slot)
            for layer in layout.state_places()
            for place in layer
            for slot in range(place.first, place.first + place.num_slots)
        ]
        assert len(set(taken)) == len(taken) == 4 * each
    eight_bits = kv_layout(config, tp_size=1, dtype="int8", model_dtype="float32")
    assert (
        eight_bits.num_state_slots > kv_layout(config, tp_size=1, dtype="float32").num_state_slots
    )


def test_bad_choices_are_told_at_the_start(tmp_path: Path) -> None:
    path = write_tiny_model(find_tiny_model("qwen3.5"), tmp_path)
    config = load_model_config(path)
    with pytest.raises(
        ModelLoadError, match="'linear_num_key_heads' is 2, not divisible by --tp 4"
    ):
        check_tp(config, 4)
    layout = kv_layout(config, tp_size=1, dtype="float32")
    num_states, own = layout.num_state_slots, layout.bytes_per_token
    served = ServeConfig(model=str(path), kv_memory=str((num_states + 15) * own))
    complaint = f"would hold {num_states + 15} tokens of {own} bytes, at least {num_states + 16}"
    with pytest.raises(StartupError, match=rf"{complaint} are needed \({num_states} of them"):
        num_kv_slots(served, layout, free_bytes=2**30)
    kernels = make_kernels("torch", batch_invariant=False)
    guessing, cuda = ServeConfig(model=str(path), speculation="ngram"), torch.device("cuda")
    check_options(guessing, config, kernels, CPU)
    check_options(guessing, config, TritonKernels(), cuda)
    with pytest.raises(ConfigError, match="ngram needs kernels that read on the device"):
        check_options(guessing, config, ReferenceKernels(), cuda)
    options = {"block_owner": "exclusive", "preemption": "recompute", "cache_policy": "off"}
    alone = ServeConfig(model=str(path), **options)
    with pytest.raises(ConfigError, match="--block-owner exclusive does not go with"):
        check_options(alone, config, kernels, CPU)


def test_convolutions_alone_are_states(tmp_path: Path) -> None:
    """Three of four layers keep the last two inputs of their channels."""
    path = write_tiny_model(find_tiny_model("lfm2"), tmp_path)
    config = load_model_config(path)
    assert config.kv_layers == (2,) and config.intermediate_size == 96
    layout = kv_layout(config, tp_size=2, dtype="float32")
    assert config.recurrent is not None
    assert config.recurrent.state_bytes(4) == (2 * 64 * 4,)
    assert layout.num_state_slots == 3 * -(-2 * 32 * 4 // layout.bytes_per_token)
    with pytest.raises(ModelLoadError, match="'hidden_size' is 64, not divisible by --tp 3"):
        check_tp(dataclasses.replace(config, num_heads=3, intermediate_size=96), 3)


def test_kimi_linear_as_it_is_published(tmp_path: Path) -> None:
    """Its delta layers by an object of their own, which counts layers from one."""
    path = write_tiny_model(find_tiny_model("kimi-linear"), tmp_path)
    config, file = load_model_config(path), path / "config.json"
    assert config.kv_layers == (2,) and config.recurrent is not None
    values = json.loads(file.read_text())
    for key in ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads"):
        del values[key]
    own = {"full_attn_layers": [3], "kda_layers": [1, 2, 4], "head_dim": 16, "num_heads": 2}
    values["linear_attn_config"] = own | {"short_conv_kernel_size": 4}
    values["first_k_dense_replace"] = 1
    file.write_text(json.dumps(values))
    assert load_model_config(path) == config
    values["linear_attn_config"]["kda_layers"] = [0, 1]
    file.write_text(json.dumps(values))
    complaint = r"'linear_attn_config.kda_layers' must hold layers from 1 to 4, .* got \[0, 1\]"
    with pytest.raises(ModelLoadError, match=complaint):
        load_model_config(path)


class SecondRank(SingleRank):
    rank, size = 1, 2


@pytest.mark.parametrize("name", ["olmo-hybrid", "kimi-linear"])
def test_files_that_transformers_saves_say_the_same(name: str, tmp_path: Path) -> None:
    """With other names of norms and blocks, and the convolution cut into equal parts."""
    tiny, tokens, found = find_tiny_model(name), sequence(1, 30), []
    for is_published in (True, False):
        path = tmp_path / str(is_published)
        write_tiny_model(tiny, path, is_published=is_published)
        loaded = load_tiny(path, torch.float32, make_kernels("torch", batch_invariant=False))
        logits = loaded.run([tokens], [[Chunk(0, 0, 30)]])
        assert logits is not None
        rank = load_tiny(path, torch.float32, ReferenceKernels(), tp=SecondRank()).model
        assert isinstance(rank, DecoderModel)
        found.append((logits[0], rank._layers[0]._attention._convolution))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    names = [set(load_file(tmp_path / str(kind) / "model.safetensors")) for kind in (True, False)]
    assert names[0] != names[1]


def test_kernels_without_latents_are_refused(tmp_path: Path) -> None:
    path = write_tiny_model(find_tiny_model("kimi-linear"), tmp_path)
    config, served = load_model_config(path), ServeConfig(model=str(path))
    check_options(served, config, make_kernels("torch", batch_invariant=False), CPU)
    check_options(served, config, TritonKernels(), CPU)
    with pytest.raises(ConfigError, match="kernels do not go with KimiLinearForCausalLM"):
        check_options(served, config, make_kernels("torch", batch_invariant=True), CPU)


def test_older_files_of_lfm2_say_the_same(tmp_path: Path) -> None:
    path = write_tiny_model(find_tiny_model("lfm2"), tmp_path)
    config, file = load_model_config(path), path / "config.json"
    values = json.loads(file.read_text())
    del values["layer_types"]
    older = {
        "full_attn_idxs": [2],
        "block_ff_dim": values.pop("intermediate_size"),
        "tie_embedding": values.pop("tie_word_embeddings"),
    }
    file.write_text(json.dumps(values | older))
    assert load_model_config(path) == config


def test_granite_4_may_have_no_states(tmp_path: Path) -> None:
    """It may have attention alone, by the name of newer files or of older ones."""
    attention = {**MAMBA, "layer_types": ["full_attention"] * 2, "position_embedding_type": "rope"}
    path = write_tiny_model(TinyModel("no-states", "GraniteMoeHybrid", attention), tmp_path)
    loaded = load_tiny(path, torch.float32, make_kernels("torch", batch_invariant=False))
    sequences = make_sequences(load_reference(path, torch.float32), [(20, 4)], seed=0)
    logits = loaded.run(sequences, [[Chunk(0, 0, 24)]])
    assert logits is not None and compare_all(sequences, logits, torch.float32).holds(torch.float32)
    file = path / "config.json"
    file.write_text(file.read_text().replace("full_attention", "attention"))
    assert load_model_config(path) == loaded.config and loaded.config.recurrent is None


def test_olmo_hybrid_rotates_where_its_file_has_a_base(tmp_path: Path) -> None:
    path = write_tiny_model(find_tiny_model("olmo-hybrid"), tmp_path)
    config, file = load_model_config(path), path / "config.json"
    assert not config.unrotated_layers
    values = json.loads(file.read_text())
    base = values.pop("rope_parameters")["rope_theta"]
    for rope in ({}, {"rope_type": "default"}):
        file.write_text(json.dumps({**values, "rope_theta": base, "rope_scaling": rope or None}))
        assert load_model_config(path) == config
    file.write_text(json.dumps(values))
    assert len(load_model_config(path).unrotated_layers) == config.num_layers


@pytest.mark.parametrize("name", ["lfm2-moe", "olmo-hybrid", "kimi-linear"])
def test_another_runner_is_built(name: str, tmp_path: Path) -> None:
    path = write_tiny_model(find_tiny_model(name), tmp_path)
    runner = build_runner(ServeConfig(model=str(path), max_kv_tokens=4000, max_num_seqs=4))
    assert runner.pool.num_state_slots > 0
    moe = load_model_config(path).moe
    assert moe is None or moe.added == (1e-6 if name == "lfm2-moe" else 1e-20)


def test_groups_that_ranks_do_not_share_are_told_at_the_start(tmp_path: Path) -> None:
    path = write_tiny_model(find_tiny_model("granite-hybrid-rope"), tmp_path)
    config = load_model_config(path)
    check_tp(config, 2)
    with pytest.raises(ModelLoadError, match="'mamba_n_groups' is 2, not divisible by --tp 4"):
        check_tp(config, 4)


@pytest.mark.parametrize("name", ["nemotron-h-moe", "gemma4-moe"])
def test_experts_without_gates_of_silu_are_served_with_graphs(tmp_path: Path, name: str) -> None:
    path = write_tiny_model(find_tiny_model(name), tmp_path)
    check_options(
        ServeConfig(model=str(path)), load_model_config(path), TritonKernels(), torch.device("cuda")
    )


@pytest.mark.parametrize("name", ["falcon-h1", "nemotron-h"])
def test_no_number_of_kv_heads_is_that_of_query_heads(tmp_path: Path, name: str) -> None:
    path = write_tiny_model(find_tiny_model(name), tmp_path)
    file = path / "config.json"
    stated = json.loads(file.read_text()) | {"num_attention_heads": 16, "num_key_value_heads": None}
    file.write_text(json.dumps(stated))
    assert load_model_config(path).num_kv_heads == 16


def test_layers_of_attention_and_states_have_both(tmp_path: Path) -> None:
    config = load_model_config(write_tiny_model(find_tiny_model("falcon-h1"), tmp_path))
    assert config.recurrent is not None and config.kv_layers == (0, 1, 2)
    assert config.recurrent.layers == {0, 1, 2}
    layout = kv_layout(config, tp_size=1, dtype="float32")
    own = layout.bytes_per_token // 3
    inputs, matrices = config.recurrent.state_bytes(4)
    assert layout.num_state_slots == -(-inputs // own) + -(-matrices // own)


def test_a_runner_is_built(tmp_path: Path) -> None:
    path = write_tiny_model(find_tiny_model("qwen3.5-moe"), tmp_path)
    runner = build_runner(
        ServeConfig(model=str(path), max_kv_tokens=4000, max_num_seqs=4, kv_dtype="auto")
    )
    assert runner.pool.num_state_slots > 0
    assert runner.context_len == CONTEXT_LEN
