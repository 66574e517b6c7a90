"""Passes through a model's layers: recorded and run in one call, or one operation at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor

from lightserve.kernels.interface import (
    Kernels,
    NotRecordableError,
    PassInputs,
    RecordingKernels,
)
from lightserve.models.base import KVTensors
from lightserve.models.parallel import TensorParallel

log = logging.getLogger(__name__)


class Passes:
    """Runs a model's layers, recorded where the kernels can."""

    def __init__(
        self,
        kernels: Kernels,
        tp: TensorParallel,
        layers: Callable[[PassInputs, KVTensors], Tensor],
    ) -> None:
        """`layers` does one operation at a time."""
        self._layers = layers
        self._ranks = tp if tp.size > 1 else None
        self._kernels = kernels if isinstance(kernels, RecordingKernels) else None
        self._kv: KVTensors | None = None
        self._recorded: dict[tuple[bool, int], Callable[[PassInputs], Tensor]] = {}
        """By whether all tokens are wanted, and the stride of the table of slots."""

    def run(self, inputs: PassInputs, kv: KVTensors) -> Tensor:
        """Return the hidden states of the wanted tokens, and write the KV of all."""
        if self._kernels is None or not len(inputs.x) or _wants_none(inputs):
            return self._layers(inputs, kv)
        if kv is not self._kv:
            self._kv = kv
            self._recorded.clear()
        key = (inputs.logit_rows is None, inputs.batch.req_to_slot.stride(0))
        recorded = self._recorded.get(key)
        if recorded is None:
            try:
                recorded = self._kernels.record(
                    lambda given: self._layers(given, kv), inputs, self._ranks
                )
            except NotRecordableError as error:
                log.info("layers run one operation at a time, which takes longer: %s", error)
                self._kernels = None
                return self._layers(inputs, kv)
            self._recorded[key] = recorded
        return recorded(inputs)


def _wants_none(inputs: PassInputs) -> bool:
    return inputs.logit_rows is not None and not len(inputs.logit_rows)
