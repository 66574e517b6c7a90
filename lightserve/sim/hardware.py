"""Hardware of the simulation: how long a step takes, and what copies cost.

`VirtualHardware` is a formula; the default is an A100 with Llama-2-7B, fitted to public operator
profiles (floor, then linear):

    T = max(9.4 ms, 64.1 us x new tokens + 2.25 ms)
        + 0.33 us x context of decodes + 3.5 ns x sum of chunk x context

and 21 us for each token whose KV is copied to the host or back (512 KiB at 25 GB/s).
`ProfiledHardware` is what `lightserve profile` measured of a real worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from lightserve.cost.model import StepModel, StepShape
from lightserve.cost.profile import read_profile
from lightserve.errors import ConfigError
from lightserve.messages.common import StepCoefficients


class Hardware(Protocol):
    """What a simulated worker runs on."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all layers."""

    @property
    def step_cost(self) -> StepCoefficients | None:
        """What the router is told of it; None: it learns from the steps."""

    @property
    def overlaps_copies(self) -> bool:
        """Whether copies that are not waited for run beside the steps."""

    def step_seconds(self, shape: StepShape) -> float:
        """Return the seconds of a step without its copies."""

    def copy_seconds(self, *, num_saved: int = 0, num_loaded: int = 0) -> float:
        """Return the seconds of copies to the host and back."""


@dataclass(frozen=True)
class VirtualHardware:
    """Coefficients of the step-time formula, in seconds."""

    floor_s: float
    per_new_token_s: float
    constant_s: float
    per_decode_context_s: float
    per_chunk_context_s: float
    """For each pair of a new prompt token and a token of its context."""
    per_copied_token_s: float
    """To the host or back."""
    kv_bytes_per_token: int
    overlaps_copies: bool = True

    step_cost = None

    def seconds(
        self, num_new: int, *, decode_context: float = 0, chunk_context: float = 0
    ) -> float:
        """Return the seconds of a step.

        Args:
            num_new: tokens computed, of prompts and decodes.
            decode_context: sum of the context lengths of decodes.
            chunk_context: sum over prompt tokens of the context each of them reads.
        """
        dense_s = max(self.floor_s, self.per_new_token_s * num_new + self.constant_s)
        attention_s = self.per_decode_context_s * decode_context
        return dense_s + attention_s + self.per_chunk_context_s * chunk_context

    def step_seconds(self, shape: StepShape) -> float:
        """See `Hardware`."""
        return self.seconds(
            shape.num_new,
            decode_context=shape.decode_context,
            # A token reads itself, too: on average half a token more than pairs count.
            chunk_context=shape.chunk_pairs + (shape.num_new - shape.num_decodes) / 2,
        )

    def copy_seconds(self, *, num_saved: int = 0, num_loaded: int = 0) -> float:
        """See `Hardware`."""
        return (num_saved + num_loaded) * self.per_copied_token_s


A100_LLAMA2_7B = VirtualHardware(
    floor_s=9.4e-3,
    per_new_token_s=64.1e-6,
    constant_s=2.25e-3,
    per_decode_context_s=0.33e-6,
    per_chunk_context_s=3.5e-9,
    per_copied_token_s=21e-6,
    kv_bytes_per_token=524_288,
)
"""The default of `lightserve simulate`."""


@dataclass(frozen=True)
class ProfiledHardware:
    """A worker as `lightserve profile` found it; its router knows the profile as a server's does.

    `per_step_s` is what passes between the end of a step and the start of the next one, which
    waits at the worker: no profile has it.
    """

    step_cost: StepCoefficients
    kv_bytes_per_token: int
    per_step_s: float = 0.0
    overlaps_copies: bool = False

    @classmethod
    def read(cls, path: Path, *, flag: str = "--hardware") -> Self:
        """Read the file of a profile. Raises ConfigError: it is none."""
        try:
            profile = read_profile(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{flag} {str(path)!r} is no profile: {error}") from error
        return cls(profile.coefficients, profile.kv_bytes_per_token)

    def step_seconds(self, shape: StepShape) -> float:
        """See `Hardware`."""
        return self.per_step_s + StepModel(self.step_cost).seconds(shape)

    def copy_seconds(self, *, num_saved: int = 0, num_loaded: int = 0) -> float:
        """See `Hardware`."""
        cost = self.step_cost
        return cost.per_saved_token_s * num_saved + cost.per_loaded_token_s * num_loaded
