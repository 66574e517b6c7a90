"""gpt-oss: experts that a file has stacked in one tensor for each layer.

All else is in the configuration (`gpt_oss_config`): sinks, windows by turns, YaRN, clamped gates.
Source: gpt-oss-120b & gpt-oss-20b Model Card (OpenAI 2025), sections 2.1 to 2.3.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from lightserve.errors import ModelLoadError
from lightserve.models.config import ModelConfig
from lightserve.models.moe_config import Stacked
from lightserve.models.parallel import Part
from lightserve.models.safetensors_reader import SafetensorsReader
from lightserve.models.stored_weights import StoredWeight, fp4_weight
from lightserve.models.weight_copies import is_finite
from lightserve.models.weight_files import BLOCKS, SCALES

_EXPERT = re.compile(
    r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<half>gate|up|down)_proj\.(?P<kind>weight|bias)"
)


class StackedExperts:
    """A reader that gives each expert's parts by names of their own: `experts.3.up_proj.weight`.

    gate_up_proj [experts, inputs, gates and ups by turns]    its bias without inputs
    down_proj    [experts, inputs, outputs]

    In MXFP4 outputs come before groups of inputs.
    """

    def __init__(self, reader: SafetensorsReader, config: ModelConfig) -> None:
        moe = config.moe
        assert moe is not None
        self.dtype, self.device = reader.dtype, reader.device
        self.has = reader.has
        self._reader = reader
        self._is_packed = moe.stacked is Stacked.MXFP4
        hidden, inner = config.hidden_size, moe.intermediate_size
        self._shapes = {"gate_up_proj": (hidden, 2 * inner), "down_proj": (inner, hidden)}
        self._last: tuple[str, int, Tensor] | None = None
        """The last tensor and expert: gates are read first, then ups."""

    def read_into(
        self, target: Tensor, name: str, *, rows: Part | None = None, columns: Part | None = None
    ) -> None:
        """See `WeightReader.read_into`."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            self._reader.read_into(target, name, rows=rows, columns=columns)
            return
        if (stored := self.read_stored(name, rows=rows, columns=columns)) is not None:
            target.copy_(stored.numbers())
            if not is_finite(target):
                place = self._reader.place_of(_stacked(match) + SCALES)
                raise ModelLoadError(f"{place} gives values beyond {self.dtype}")
            return
        whole = _half(self._expert(match), match)
        for dimension, part in enumerate((rows, columns)):
            if part is not None:
                whole = whole.narrow(dimension, part.start, part.size)
        target.copy_(whole)

    def read_stored(
        self, name: str, *, rows: Part | None = None, columns: Part | None = None
    ) -> StoredWeight | None:
        """See `WeightReader.read_stored`."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return self._reader.read_stored(name, rows=rows, columns=columns)
        if not self._is_packed or match["kind"] == "bias":
            return None
        stacked, own = _stacked(match), Part(int(match["number"]), 1)
        blocks, scales = (
            _half(self._reader.read_bytes(stacked + part, rows=own)[0], match)
            for part in (BLOCKS, SCALES)
        )
        if rows is not None:
            blocks, scales = (part.narrow(0, rows.start, rows.size) for part in (blocks, scales))
        weight = _weight(blocks, scales, columns)
        if weight.factors.numel() and not is_finite(weight.factors):
            place = self._reader.place_of(stacked + SCALES)
            raise ModelLoadError(f"{place} has values that are not finite")
        return weight

    def _expert(self, match: re.Match[str]) -> Tensor:
        """Return one expert's part of a plain tensor, outputs before inputs."""
        is_bias, number = match["kind"] == "bias", int(match["number"])
        name = f"{_stacked(match)}_bias" if is_bias else _stacked(match)
        if self._last is None or self._last[:2] != (name, number):
            shape = self._shapes[_stacked(match).rpartition(".")[2]]
            part = torch.empty(1, *shape[is_bias:], dtype=self.dtype, device=self.device)
            self._reader.read_into(part, name, rows=Part(number, 1))
            self._last = (name, number, part[0])
        part = self._last[2]
        return part if is_bias else part.T


def _stacked(match: re.Match[str]) -> str:
    """Return the name of the tensor that an expert's weight is in."""
    return f"{match['experts']}.{'down' if match['half'] == 'down' else 'gate_up'}_proj"


def _half(outputs: Tensor, match: re.Match[str]) -> Tensor:
    """Return gates or ups of what has both by turns."""
    return outputs if match["half"] == "down" else outputs[int(match["half"] == "up") :: 2]


def _weight(blocks: Tensor, scales: Tensor, columns: Part | None) -> StoredWeight:
    """Return a weight [M, K] of blocks uint8 [M, K / 32, 16] and scales uint8 [M, K / 32].

    The lower half of a byte is the first of its two numbers.
    """
    codes = torch.stack([blocks & 0xF, blocks >> 4], dim=-1).flatten(1)
    return fp4_weight(codes, scales, columns or Part(0, codes.shape[1]))
