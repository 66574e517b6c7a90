"""Many arrays as one copy: each comes out as it was, at an address that kernels can rely on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from lightserve.worker.device import Array, CudaQueue

TYPES = (np.bool_, np.uint8, np.int32, np.int64, np.float32, np.float64)


class Unpinned(CudaQueue):
    """Without a GPU no memory is page-locked; all else is as on one."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.full(tuple(shape), 99, dtype=dtype)


def random_arrays(seed: int) -> list[Array]:
    rng = np.random.default_rng(seed)
    arrays: list[Array] = []
    for _ in range(int(rng.integers(0, 14))):
        shape = tuple(rng.integers(0, 9, int(rng.integers(1, 3))).tolist())
        dtype = TYPES[int(rng.integers(len(TYPES)))]
        arrays.append(rng.integers(0, 2 if dtype is np.bool_ else 200, shape).astype(dtype))
    return arrays


@pytest.mark.parametrize("seed", range(40))
def test_arrays_come_out_as_they_were(seed: int) -> None:
    arrays = random_arrays(seed)
    tensors = Unpinned().upload(arrays)
    for array, tensor in zip(arrays, tensors, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array)) and tensor.is_contiguous()
        assert tensor.dtype is torch.from_numpy(array).dtype
        assert tensor.storage_offset() * tensor.element_size() % 16 == 0
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) <= 1


def test_what_is_written_later_does_not_change_it() -> None:
    array = np.arange(5)
    (tensor,) = Unpinned().upload([array])
    array[:] = 7
    assert tensor.tolist() == [0, 1, 2, 3, 4]
