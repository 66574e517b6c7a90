"""Models split over two and four processes against transformers; the collectives' failures."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from support.model_runs import load_tiny, standard_sequences
from support.parity import compare, compare_all
from support.tiny_models import (
    TINY_MODELS,
    TinyModel,
    find_tiny_model,
    load_reference,
    write_tiny_model,
)
from support.tp_run import Job, run_ranks

from lightserve.errors import StartupError
from lightserve.kernels.reference import ReferenceKernels
from lightserve.models.base import Part, SingleRank, even_part, kv_head_part
from lightserve.models.layers.linear import VocabWeight
from lightserve.models.loader import SafetensorsReader
from lightserve.models.weight_files import LM_HEAD, find_weights
from lightserve.worker import tensor_parallel
from lightserve.worker.tensor_parallel import join_group

FLOAT32_MODELS = (
    "llama-biases-sharded",  # row-parallel biases: rank 0 alone may add them
    "llama-mqa-tied",  # one KV head on two ranks
    "llama-head-dim",  # a vocabulary of 201
    "mistral-window",
    "ministral3",
    "qwen2-window",
    "qwen3-biases-tied",
    "phi3-longrope-part",  # merged tensors
    "granite",
    "olmo2-mqa-biases",  # a norm over the heads of all ranks, of which one key head on two
    "glm-0414",
    "gemma3",
    "seed-oss-biases",  # a bias of the output alone, which rank 0 alone may add
    "gemma4",  # layers of two kinds, and embeddings of their own
    "gemma4-moe",
    "exaone4",
    "qwen2-moe",
    "minimax-m2-all",  # a norm over the heads of all ranks, and experts
    "glm4-moe",
    "llama4",  # each rank attends within chunks, and scales the inputs of its parts of experts
    "mistral4",  # experts in one tensor, of which each rank has a part
    "deepseek-v2",  # one latent vector on every rank
    "gpt-oss",  # biases of experts, which rank 0 alone may add, and sinks of each rank's heads
    "gpt-neox",
    "phi-mqa",  # biases of an output layer over a vocabulary of 201
    "opt-350m",  # embeddings of another size, whole on every rank
    "falcon",  # one group of query heads on two ranks
    "falcon-groups",
    "bloom-6-heads",  # slopes of this rank's heads
    "gpt-bigcode",
    "gemma2",
    "olmo3",
    "qwen3-next",
    "qwen3.5",
    "olmo-hybrid",  # norms over the heads of all ranks, and a state of each rank's heads
    "lfm2",  # each rank's channels of a convolution
    "lfm2-moe",
    "kimi-linear",  # decays of each rank's channels, beside a latent vector on every rank
    "granite-hybrid",
    "granite-hybrid-rope",
    "granite-hybrid-moe",
    "nemotron-h",
    "nemotron-h-biased",
    "nemotron-h-latent",  # products behind experts of each rank's share, whose bias rank 0 adds
    "falcon-h1",
    "falcon-h1-normed",
    "qwen1",  # a merged tensor by its authors' formula, as the others
    "baichuan-7b",
    "baichuan-13b",
    "internlm2",
    "chatglm",
)
BFLOAT16_MODELS = ("mistral-window", "qwen3")


def compare_ranks(names: tuple[str, ...], dtype: torch.dtype, size: int, directory: Path) -> None:
    jobs, expected = [], []
    for name in names:
        path = write_tiny_model(find_tiny_model(name), directory / name, dtype=dtype)
        sequences = standard_sequences(load_reference(path, torch.float32), 6)
        expected.append(sequences)
        jobs.append(
            Job(
                path=str(path),
                dtype=str(dtype).removeprefix("torch."),
                kernels="reference",
                chunk=16,
                tokens=[sequence.tokens for sequence in sequences],
            )
        )
    for name, sequences, actual in zip(
        names, expected, run_ranks(jobs, size, directory), strict=True
    ):
        report = compare_all(sequences, actual, dtype)
        assert report.holds(dtype), (name, report)
        # Teeth: the logits of another position are not accepted.
        shifted = compare(sequences[0].logits[1:], actual[0][:-1], dtype)
        assert not shifted.holds(dtype), name


def test_two_ranks_keep_n3_in_float32(tmp_path: Path) -> None:
    compare_ranks(FLOAT32_MODELS, torch.float32, 2, tmp_path)


@pytest.mark.long
def test_two_ranks_keep_n3_of_the_other_families(tmp_path: Path) -> None:
    known = {find_tiny_model(name).family for name in FLOAT32_MODELS}
    others = {tiny.family: tiny.name for tiny in TINY_MODELS if tiny.family not in known}
    compare_ranks(tuple(others.values()), torch.float32, 2, tmp_path)


@pytest.mark.long
def test_two_ranks_keep_n3_in_bfloat16(tmp_path: Path) -> None:
    compare_ranks(BFLOAT16_MODELS, torch.bfloat16, 2, tmp_path)


@pytest.mark.long
def test_four_ranks_share_two_kv_heads(tmp_path: Path) -> None:
    compare_ranks(("qwen3", "qwen2"), torch.float32, 4, tmp_path)


class Rank(SingleRank):
    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size


@pytest.mark.parametrize(
    ("num_kv_heads", "size", "expected"),
    [
        (8, 1, [(0, 8)]),
        (8, 4, [(0, 2), (2, 2), (4, 2), (6, 2)]),
        (2, 2, [(0, 1), (1, 1)]),
        (2, 4, [(0, 1), (0, 1), (1, 1), (1, 1)]),
        (1, 3, [(0, 1), (0, 1), (0, 1)]),
    ],
)
def test_kv_heads_of_each_rank(
    num_kv_heads: int, size: int, expected: list[tuple[int, int]]
) -> None:
    parts = [kv_head_part(num_kv_heads, Rank(rank, size)) for rank in range(size)]
    assert parts == [Part(*part) for part in expected]
    # The KV head that a rank's query heads read (head // group) is among those it holds.
    num_heads = 24
    for rank, part in enumerate(parts):
        queries = even_part(num_heads, Rank(rank, size))
        group = num_heads // num_kv_heads
        for head in range(queries.start, queries.start + queries.size):
            assert part.start <= head // group < part.start + part.size


def test_a_vocabulary_smaller_than_its_padding(tmp_path: Path) -> None:
    """5 tokens on 4 ranks are 2 + 2 + 1 + 0."""
    tiny = TinyModel("few-tokens", "Llama", {"vocab_size": 5, "num_key_value_heads": 4})
    write_tiny_model(tiny, tmp_path)
    for rank, num_ids in enumerate((2, 2, 1, 0)):
        seen: list[int] = []
        load_tiny(tmp_path, torch.float32, ReferenceKernels(), tp=Rank(rank, 4))
        with SafetensorsReader(
            find_weights(tmp_path),
            dtype=torch.float32,
            device=torch.device("cpu"),
            advance=seen.append,
        ) as reader:
            weight = VocabWeight(reader, Rank(rank, 4), LM_HEAD, vocab_size=5, hidden_size=64)
        assert weight.num_ids == num_ids
        assert seen == [5 * 64 * 4] * min(num_ids, 1)
        assert not weight.tensor[num_ids:].any()


def test_one_rank_needs_no_group(tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert isinstance(join_group(rank=0, size=1, store=str(store), timeout_s=1.0), SingleRank)
    assert not store.exists()


def test_a_missing_peer_is_a_startup_error(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="rank 0 of 2"):
        join_group(rank=0, size=2, store=str(tmp_path / "store"), timeout_s=0.3)


COLLECTIVES = """
import os, sys, time, torch
from pathlib import Path
from lightserve.worker.tensor_parallel import join_group

rank, is_past = int(sys.argv[1]), Path(sys.argv[2] + ".past")
tp = join_group(rank=rank, size=2, store=sys.argv[2], timeout_s=600.0)
assert (tp.rank, tp.size) == (rank, 2)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    x = torch.full((2, 3), rank + 1.0, dtype=dtype)
    gathered = tp.gather(x)
    assert (gathered is None) == (rank == 1)
    if gathered is not None:
        assert gathered.tolist() == [[1.0, 1.0, 1.0, 2.0, 2.0, 2.0]] * 2
    assert tp.all_reduce(x).tolist() == [[3.0] * 3] * 2
assert tp.broadcast(torch.tensor([rank + 5])).tolist() == [5]
if rank == 1:
    while not is_past.exists():  # its peer has all of what went well
        time.sleep(0.01)
    os._exit(0)  # as if killed
is_past.touch()
try:
    tp.all_reduce(torch.ones(3))
except RuntimeError:
    print("raised", flush=True)
os._exit(0)
"""


def test_collectives_and_the_death_of_a_peer(tmp_path: Path) -> None:
    """A dead peer is noticed at once, long before the collective's own time limit of 600 s."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", COLLECTIVES, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=500)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert outputs[0] == "raised\n"


STOPPED_PEER = """
import os, signal, sys, torch
from lightserve.worker.tensor_parallel import join_group

rank = int(sys.argv[1])
print("imported", flush=True)
sys.stdin.readline()  # so that the time limit is not spent on slow imports
tp = join_group(rank=rank, size=2, store=sys.argv[2], timeout_s=6.0)
tp.all_reduce(torch.ones(3))
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    tp.all_reduce(torch.ones(3))
except RuntimeError as error:
    print("raised", flush=True)
os._exit(0)
"""


def test_a_peer_that_hangs_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", STOPPED_PEER, str(rank), str(tmp_path / "store")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "imported\n"
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()
        assert ranks[0].communicate(timeout=500)[0] == "raised\n"
        assert ranks[1].poll() is None, "it hangs still"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            for pipe in (rank.stdin, rank.stdout):
                if pipe is not None:
                    pipe.close()


def test_what_a_rank_with_a_gpu_asks_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL for what is on the device, gloo for what is on the host, both on this machine alone."""
    asked: dict[str, object] = {}
    monkeypatch.setattr(
        tensor_parallel.dist,
        "init_process_group",
        lambda backend, **options: asked.update(backend=backend, **options),
    )
    monkeypatch.setattr(tensor_parallel.dist, "new_group", lambda **options: options)
    over: list[object] = []
    for where, name in (
        (tensor_parallel.dist, "all_reduce"),
        (tensor_parallel.dist, "broadcast"),
        (tensor_parallel, "_all_gather"),
    ):
        monkeypatch.setattr(where, name, lambda *args, group, **options: over.append(group))
    monkeypatch.setattr(tensor_parallel.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(tensor_parallel.dist, "get_world_size", lambda: 2)
    for name in ("NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "eth0")
    device = torch.device("cuda", 1)
    tp = join_group(rank=1, size=2, store=str(tmp_path / "store"), timeout_s=30.0, device=device)
    x = torch.zeros(1, 1)

    def all_collectives() -> list[object]:
        over.clear()
        tp.all_reduce(x)
        tp.broadcast(x)
        assert tp.gather(x) is None
        return over

    own = {"timeout": timedelta(seconds=30)}
    assert all_collectives() == [own] * 3, "a communicator of their own"
    with tp.recording():
        assert all_collectives() == [None] * 3, "that of the graphs"
    assert all_collectives() == [own] * 3
    assert asked["backend"] == "cpu:gloo,cuda:nccl"
    assert (asked["rank"], asked["world_size"], asked["device_id"]) == (1, 2, device)
    assert asked["timeout"] == timedelta(seconds=30)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_IB_DISABLE"] == "1"


# Graphs with collectives in them, over two processes.

SIZE, TIMEOUT_S = 2, 600.0


def test_ranks_record_and_replay_together(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(root.parent), str(root))),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "support.tp_graphs"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(SIZE), str(tmp_path / "store")],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        errors = [rank.communicate(timeout=TIMEOUT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * SIZE, "\n".join(errors)
