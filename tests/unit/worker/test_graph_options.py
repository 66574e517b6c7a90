"""Options of CUDA graphs: where nothing has a use for them they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tensor_kernels import TensorKernels

from lightserve.cli.profile import FIELDS
from lightserve.config import ServeConfig
from lightserve.errors import ConfigError
from lightserve.kernels.reference import ReferenceKernels
from lightserve.worker.engine import graph_sizes
from lightserve.worker.graphs import ladder
from lightserve.worker.profiling import profile_key

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cuda_graphs": "on"}, "--cuda-graphs must be one of auto, off"),
        ({"cuda_graphs": "off", "cuda_graph_max_seqs": 8}, "needs --cuda-graphs auto"),
        ({"cuda_graph_max_seqs": 65, "max_num_seqs": 64}, r"at most --max-num-seqs \(64\), got 65"),
        ({"cuda_graphs": "off", "device": "cpu"}, "--cuda-graphs needs a GPU, got --device cpu"),
        ({"cuda_graph_max_seqs": 8, "device": "cpu"}, "--cuda-graph-max-seqs needs a GPU"),
        (
            {"cuda_graphs": "off", "attention_backend": "torch"},
            "--cuda-graphs needs --attention-backend triton, got 'torch'",
        ),
        (
            {"cuda_graph_max_seqs": 8, "attention_backend": "reference"},
            "--cuda-graph-max-seqs needs --attention-backend triton, got 'reference'",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ServeConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({}, ladder(256)),
        ({"max_num_seqs": 3}, (1, 2, 3)),
        ({"max_num_seqs": 512, "max_num_batched_tokens": 512}, ladder(512)),
        ({"max_num_seqs": 900, "max_num_batched_tokens": 900}, ladder(512)),
        (
            {"max_num_seqs": 900, "max_num_batched_tokens": 900, "cuda_graph_max_seqs": 700},
            ladder(700),
        ),
        ({"cuda_graph_max_seqs": 4}, (1, 2, 4)),
        ({"cuda_graphs": "off"}, ()),
    ],
)
def test_sizes_on_a_gpu(fields: dict[str, Any], sizes: tuple[int, ...]) -> None:
    assert graph_sizes(ServeConfig(**fields), TensorKernels(), CUDA) == sizes


@pytest.mark.parametrize(
    ("kernels", "device"), [(ReferenceKernels(), CUDA), (TensorKernels(), CPU)]
)
def test_where_there_can_be_none(kernels: ReferenceKernels, device: torch.device) -> None:
    """What --device auto and --attention-backend auto came to is known in the worker alone."""
    assert graph_sizes(ServeConfig(), kernels, device) == ()
    for fields in ({"cuda_graphs": "off"}, {"cuda_graph_max_seqs": 8}):
        with pytest.raises(
            ConfigError, match=r"--cuda-graph.* needs a GPU and --attention-backend"
        ):
            graph_sizes(ServeConfig(**fields), kernels, device)


def test_profiles_of_steps_with_and_without_graphs_differ() -> None:
    kinds = ({}, {"cuda_graphs": "off"}, {"cuda_graph_max_seqs": 8}, {"cuda_graph_max_seqs": 9})
    keys = [profile_key(ServeConfig(**fields)) for fields in kinds]
    assert len({key.digest for key in keys}) == len(kinds)
    assert {"cuda_graphs", "cuda_graph_max_seqs"} <= set(FIELDS)
