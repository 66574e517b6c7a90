"""Virtual hardware as `--hardware`: a profile, a measured GPU, or a model on GPUs of a kind.

    h200-llama-8b         Llama-3-8B on one H200, as measured there (`MEASURED`)
    h200-llama-8b-eager   the same without recorded graphs of steps with chunks
    MODEL@GPU      opt-13b@a100-80g
    MODEL@GPUxN    qwen2.5-14b@a100-40gx2: tensor parallelism over N of them

Roofline with shares of the peak that make Llama-2-7B on one A100-80G what was fitted to public
profiles of it (`A100_LLAMA2_7B`): each share stands for its kernels, and is taken to be the
same for other shapes. With P parameters of two bytes, L layers of width H, K bytes of KV for a
token, and N ranks:

    floor             2 P / N / (0.70 bandwidth)  + all-reduces of one token
    for each token    2 P / N / (0.67 compute)    + 2 L all-reduces of H numbers
    for each draft    2 V H / N / (0.67 compute)  its logits, of V words, beside that and the floor
    constant          70 us for each layer        + latency of 2 L all-reduces
    context, decode   K / N / (0.78 bandwidth)
    context, prompt   4 H L / N / (0.48 compute)  for each pair of tokens
    encoder, layer    2 E / N / (0.67 compute)    for each patch, E parameters of a layer
    copies            K / N / (25 GB/s)           each rank has a link of its own
    gathering         2 K / N / (0.78 bandwidth)  of what is copied: read and written on the device

An all-reduce over NVLink (a ring) moves 2 (N - 1) / N times the numbers, at 0.7 of 300 GB/s, after
10 us.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple, Protocol, Self

from lightserve.config import ServeConfig
from lightserve.config.fields import flag_name
from lightserve.config.scheduling import AUTO_BATCHED_TOKENS
from lightserve.cost.model import StepModel, StepShape
from lightserve.cost.profile import read_profile, tokens_of_step
from lightserve.errors import ConfigError
from lightserve.messages.common import NO_SIZES, GraphSizes, StepCoefficients
from lightserve.messages.images import EncoderWork

# Hardware of the simulation: how long a step takes, and what copies cost.
#
# `VirtualHardware` is a formula; the default is an A100 with Llama-2-7B, fitted to public operator
# profiles (floor, then linear):
#
#     T = max(9.4 ms, 64.1 us x new tokens + 2.25 ms)
#         + 0.33 us x context of decodes + 3.5 ns x sum of chunk x context
#
# and 21 us for each token whose KV is copied to the host or back (512 KiB at 25 GB/s).


class Hardware(Protocol):
    """The hardware of a simulated worker."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV of a token in all layers."""

    @property
    def num_state_slots(self) -> int:
        """Slots of KV that the state of a sequence takes."""

    @property
    def name(self) -> str:
        """Name that --hardware gave it; empty: none."""

    @property
    def server_budget(self) -> int:
        """Token budget of a step that a server there takes, unless it is told one."""

    @property
    def step_cost(self) -> StepCoefficients | None:
        """Step times that the router is told; None: it learns them from the steps."""

    @property
    def graph_sizes(self) -> GraphSizes:
        """See `WorkerHello`."""

    @property
    def per_token_s(self) -> float:
        """Seconds of a step for each token that it computes, where it computes many."""

    @property
    def spread(self) -> float:
        """Standard deviation of the logarithm of a step's time, of steps of one shape."""

    @property
    def encoder(self) -> EncoderWork | None:
        """The work of the model's encoder of images; None: it has none."""

    @property
    def per_encoder_token_s(self) -> float:
        """See `StepCoefficients`."""

    @property
    def overlaps_copies(self) -> bool:
        """Whether copies that are not waited for run beside the steps."""

    def step_seconds(self, shape: StepShape) -> float:
        """Return the seconds of a step without its copies."""

    def copy_seconds(self, *, num_saved: int = 0, num_loaded: int = 0) -> float:
        """Return the seconds of copies to the host and back."""

    def gather_seconds(self, num_tokens: int) -> float:
        """Return what a step takes longer as it gathers the slots of copies, or scatters them:

        on the device, whether it waits for the copies or they go on beside it.
        """


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
    spread: float = 0.05
    per_draft_s: float = 0.0
    """Seconds of a draft's logits; those of decodes are in the rest."""
    per_gathered_token_s: float = 0.0
    """Seconds of a copy on the device, into one piece or out of it; 0: it is part of the copy."""
    state_bytes: int = 0
    """Bytes of a sequence's state in recurrent layers."""
    encoder: EncoderWork | None = None
    """The work of its encoder of images; None: it has none."""
    per_encoder_token_s: float = 0.0
    name: str = ""
    """Name that --hardware gave it; empty: none."""

    step_cost = None
    graph_sizes = NO_SIZES
    server_budget = AUTO_BATCHED_TOKENS["cuda"]

    def seconds(
        self, num_new: int, *, decode_context: float = 0, chunk_context: float = 0
    ) -> float:
        """Return the seconds of a step that computes so many tokens.

        Contexts are sums: of the decodes' lengths, and over prompt tokens of what each reads.
        """
        dense_s = max(self.floor_s, self.per_new_token_s * num_new + self.constant_s)
        attention_s = self.per_decode_context_s * decode_context
        return dense_s + attention_s + self.per_chunk_context_s * chunk_context

    @property
    def per_token_s(self) -> float:
        """See `Hardware`."""
        return self.per_new_token_s

    @property
    def num_state_slots(self) -> int:
        """See `Hardware`."""
        return -(-self.state_bytes // self.kv_bytes_per_token)

    def step_seconds(self, shape: StepShape) -> float:
        """See `Hardware`."""
        # A token reads itself, too: on average half a token more than pairs count.
        pairs = shape.chunk_pairs + (shape.num_new - shape.num_decodes) / 2
        decode_context = shape.decode_context
        step_s = self.seconds(shape.num_new, decode_context=decode_context, chunk_context=pairs)
        return step_s + self.per_draft_s * shape.num_drafts

    def copy_seconds(self, *, num_saved: int = 0, num_loaded: int = 0) -> float:
        """See `Hardware`."""
        return (num_saved + num_loaded) * self.per_copied_token_s

    def gather_seconds(self, num_tokens: int) -> float:
        """See `Hardware`."""
        return num_tokens * self.per_gathered_token_s


A100_LLAMA2_7B = VirtualHardware(
    floor_s=9.4e-3,
    per_new_token_s=64.1e-6,
    constant_s=2.25e-3,
    per_decode_context_s=0.33e-6,
    per_chunk_context_s=3.5e-9,
    per_copied_token_s=21e-6,
    kv_bytes_per_token=524_288,
    per_draft_s=1.25e-6,
)
"""The default of `lightserve simulate`."""

BYTES = 2
"""Size of a number: weights, KV and activations are bfloat16."""
WEIGHTS_SHARE, COMPUTE_SHARE, KV_SHARE, PAIRS_SHARE = 0.703, 0.674, 0.779, 0.48
"""Shares of the peak rates that reading weights, computing, reading KV and pairs reach."""
LAYER_S = 2.25e-3 / 32
NVLINK_BYTES_PER_S, REDUCE_S = 0.7 * 300e9, 10e-6
LINK_BYTES_PER_S = 25e9
"""To the host and back."""
POOL_SHARE = 0.9
"""Share of a GPU's memory for weights and KV."""


class EncoderShape(NamedTuple):
    """The sizes of an encoder of images that its time depends on."""

    num_params: float
    num_layers: int
    width: int
    num_patches: float
    """Patches for each token of a prompt."""

    @property
    def work(self) -> EncoderWork:
        """The work of its layers: a pair of patches has four FLOPs for each number of the width."""
        pair_share = 2 * self.width * self.num_patches * self.num_layers / self.num_params
        return EncoderWork(self.num_layers, pair_share * COMPUTE_SHARE / PAIRS_SHARE)


class ModelShape(NamedTuple):
    """The sizes of a model that its step times depend on."""

    num_params: float
    num_layers: int
    width: int
    kv_width: int
    """Numbers of a token's keys in one layer, on average; of its values as many."""
    num_words: int
    state_bytes: int = 0
    """Bytes of a sequence's state in recurrent layers, whatever its length."""
    encoder: EncoderShape | None = None
    """Its encoder of images; None: it has none."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV of a token, all layers."""
        return 2 * self.num_layers * self.kv_width * BYTES


class GPU(NamedTuple):
    """Peaks by its data sheet."""

    flops: float
    bytes_per_s: float
    memory_bytes: float


_CLIP = EncoderShape(0.304e9, 24, 1024, num_patches=1.0)
"""ViT-L/14 of images of 336 x 336 pixels, without its last layer's results."""
MODELS = {
    "llama-2-7b": ModelShape(6.74e9, 32, 4096, 4096, 32_000),
    "llama-13b": ModelShape(13.0e9, 40, 5120, 5120, 32_000),
    "opt-13b": ModelShape(12.9e9, 40, 5120, 5120, 50_272),
    "qwen2.5-14b": ModelShape(14.8e9, 48, 5120, 1024, 152_064),
    "qwen2.5-32b": ModelShape(32.8e9, 64, 5120, 1024, 152_064),
    "llama-3-70b": ModelShape(70.6e9, 80, 8192, 1024, 128_256),
    "opt-175b": ModelShape(175e9, 96, 12_288, 12_288, 50_272),
    "llava-1.5-7b": ModelShape(6.74e9, 32, 4096, 4096, 32_064, encoder=_CLIP),
    "llava-1.5-13b": ModelShape(13.0e9, 40, 5120, 5120, 32_064, encoder=_CLIP),
    "qwen-vl-chat": ModelShape(
        7.7e9, 32, 4096, 4096, 151_936, encoder=EncoderShape(1.9e9, 48, 1664, num_patches=4.0)
    ),
    "qwen3.5-0.8b": ModelShape(0.75e9, 24, 1024, 128, 248_320, state_bytes=19_537_920),
}
GPUS = {"a100-40g": GPU(312e12, 1.555e12, 40e9), "a100-80g": GPU(312e12, 2.039e12, 80e9)}
MAX_RANKS = 16


def virtual_gpus(model: ModelShape, gpu: GPU, num_ranks: int) -> VirtualHardware:
    """Return what steps take; see the module."""
    weights = BYTES * model.num_params / num_ranks
    num_reduces = 2 * model.num_layers if num_ranks > 1 else 0
    moved = BYTES * model.width * 2 * (num_ranks - 1) / num_ranks
    per_token_reduce_s = num_reduces * moved / NVLINK_BYTES_PER_S
    latency_s = num_reduces * REDUCE_S
    flops = 2 * model.num_params / num_ranks
    pair_flops = 4 * model.width * model.num_layers / num_ranks
    kv_bytes = model.kv_bytes / num_ranks
    encoder, per_encoder_token_s = model.encoder, 0.0
    if encoder is not None:
        layer_flops = 2 * encoder.num_params / encoder.num_layers / num_ranks
        per_encoder_token_s = encoder.num_patches * layer_flops / (COMPUTE_SHARE * gpu.flops)
    return VirtualHardware(
        floor_s=weights / (WEIGHTS_SHARE * gpu.bytes_per_s) + latency_s + per_token_reduce_s,
        per_new_token_s=flops / (COMPUTE_SHARE * gpu.flops) + per_token_reduce_s,
        constant_s=LAYER_S * model.num_layers + latency_s,
        per_decode_context_s=kv_bytes / (KV_SHARE * gpu.bytes_per_s),
        per_chunk_context_s=pair_flops / (PAIRS_SHARE * gpu.flops),
        per_draft_s=2 * model.num_words * model.width / num_ranks / (COMPUTE_SHARE * gpu.flops),
        per_copied_token_s=kv_bytes / LINK_BYTES_PER_S,
        per_gathered_token_s=2 * kv_bytes / (KV_SHARE * gpu.bytes_per_s),
        kv_bytes_per_token=model.kv_bytes,
        state_bytes=model.state_bytes,
        encoder=None if encoder is None else encoder.work,
        per_encoder_token_s=per_encoder_token_s,
    )


def num_slots(model: ModelShape, gpu: GPU, num_ranks: int) -> int:
    """Return how many tokens have room beside the weights; negative: not even these do."""
    num_params = model.num_params + (model.encoder.num_params if model.encoder else 0.0)
    room = POOL_SHARE * gpu.memory_bytes * num_ranks - BYTES * num_params
    return int(room // model.kv_bytes)


_MEDIAN_OF_NORMAL = NormalDist().inv_cdf(0.75)
"""Median distance from the mean, in standard deviations."""


@dataclass(frozen=True)
class ProfiledHardware:
    """A worker as `lightserve profile` found it; its router knows the profile as a server's does.

    `per_step_s` is what passes between the end of a step and the start of the next one, which
    waits at the worker: no profile has it.
    """

    formula: StepCoefficients
    kv_bytes_per_token: int
    per_step_s: float = 0.0
    launch_s: float = 0.0
    """The least that a step with a chunk takes: what a host needs to launch it kernel by kernel,
    whatever is in it. A router then knows what it fits to steps, as no formula of ours says it."""
    overlaps_copies: bool = False
    spread: float = 0.0
    """Error of the profile on shapes that it was not fitted to."""
    server_budget: int = AUTO_BATCHED_TOKENS["cpu"]
    graph_sizes: GraphSizes = NO_SIZES
    num_state_slots: int = 0
    encoder: EncoderWork | None = None
    """The work of its encoder of images; None: it has none."""
    name: str = "of a profile"

    @classmethod
    def read(cls, path: Path, *, flag: str = "--hardware") -> Self:
        """Read the file of a profile. Raises ConfigError: it is none."""
        try:
            profile = read_profile(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{flag} {str(path)!r} is no profile: {error}") from error
        spread = profile.median_error / _MEDIAN_OF_NORMAL
        budget = tokens_of_step(ServeConfig(), profile.key.device_type, profile.coefficients)
        return cls(
            profile.coefficients,
            profile.kv_bytes_per_token,
            overlaps_copies=profile.key.device_type != "cpu",
            spread=spread,
            server_budget=budget,
            graph_sizes=profile.graph_sizes,
            encoder=profile.encoder,
        )

    @property
    def per_encoder_token_s(self) -> float:
        """See `Hardware`."""
        return self.formula.per_encoder_token_s

    @property
    def step_cost(self) -> StepCoefficients | None:
        """See `Hardware`."""
        return None if self.launch_s else self.formula

    @property
    def per_token_s(self) -> float:
        """See `Hardware`."""
        return self.formula.per_new_s

    def step_seconds(self, shape: StepShape) -> float:
        """See `Hardware`."""
        step_s = StepModel(self.formula, self.graph_sizes).seconds(shape)
        least_s = self.launch_s if shape.has_rows_of_several else 0.0
        return self.per_step_s + max(least_s, step_s)

    def copy_seconds(self, *, num_saved: int = 0, num_loaded: int = 0) -> float:
        """See `Hardware`."""
        cost = self.formula
        return cost.per_saved_token_s * num_saved + cost.per_loaded_token_s * num_loaded

    def gather_seconds(self, num_tokens: int) -> float:
        """Return 0: a profile's copies have it in them."""
        return 0.0


H200_LLAMA_8B = ProfiledHardware(
    StepCoefficients(
        floor_s=4.93e-3,
        knee=110.0,
        per_new_s=19.7e-6,
        per_decode_s=0.0,
        per_chunk_s=53e-6,
        per_decode_context_s=31.5e-9,
        per_chunk_context_s=0.21e-6,
        per_chunk_pair_s=1.66e-9,
        per_saved_token_s=2.78e-6,
        per_loaded_token_s=4.01e-6,
    ),
    kv_bytes_per_token=131_072,
    overlaps_copies=True,
    spread=0.035,
    server_budget=AUTO_BATCHED_TOKENS["cuda"],
    graph_sizes=GraphSizes(
        mixed=(16, 32, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024)
    ),
)
"""Fitted to 1,625 steps of a server there, off by 2.5 % in the median and by 9 % in the 95th
percentile, and to 22 steps that were timed alone (docs/results/gpu.md). A graph of 448 tokens takes
longer than one of 512, and is left out, as workers do. Decodes alone were fitted by their number,
so that they have no sizes here."""
H200_LAUNCH_S, H200_LAUNCH_SPREAD = 20.3e-3, 0.26
"""Launch time of a step with a chunk there, kernel by kernel: 14 to 25 ms were seen, at least
0.44 ms for each of 32 layers. Within that the numbers are chosen so that chats are in time as often
as they were."""
MEASURED = {
    "h200-llama-8b": H200_LLAMA_8B,
    "h200-llama-8b-eager": dataclasses.replace(
        H200_LLAMA_8B, graph_sizes=NO_SIZES, launch_s=H200_LAUNCH_S, spread=H200_LAUNCH_SPREAD
    ),
}


def read_hardware(spec: str, *, flag: str = "--hardware") -> Hardware:
    """Return the hardware of a name, see the module, or of a file that holds a profile.

    Raises:
        ConfigError: it is neither.
    """
    if spec in MEASURED:
        return MEASURED[spec]
    match = re.fullmatch(r"([^@]+)@(.+?)(?:x(\d+))?", spec)
    if match is None or Path(spec).exists():
        return ProfiledHardware.read(Path(spec), flag=flag)
    name, gpu, num_ranks = match[1], match[2], int(match[3] or 1)
    if name not in MODELS or gpu not in GPUS or not 1 <= num_ranks <= MAX_RANKS:
        raise ConfigError(
            f"{flag} must be a profile, {', '.join(MEASURED)}, or MODEL@GPU or MODEL@GPUxN with a"
            f" model of {', '.join(MODELS)}, a GPU of {', '.join(GPUS)} and N of 1 to {MAX_RANKS},"
            f" got {spec!r}"
        )
    if num_slots(MODELS[name], GPUS[gpu], num_ranks) <= 0:
        raise ConfigError(f"{flag} {spec}: the weights do not fit")
    return dataclasses.replace(virtual_gpus(MODELS[name], GPUS[gpu], num_ranks), name=spec)


def check_hardware(serve: ServeConfig, hardware: Hardware) -> None:
    """Check that a server with these options would start with the model of virtual hardware.

    Raises:
        ConfigError: it would not.
    """
    if serve.has_draft_head:
        raise ConfigError(
            "--speculation must not be mtp with virtual hardware, which has no such layer: ngram is"
            " planned alike"
        )
    whose = f"--hardware {hardware.name}"
    check_states(serve, hardware.num_state_slots, whose)


def check_states(serve: ServeConfig, num_state_slots: int, whose: str) -> None:
    """Check that a server with these options would start with a model of so many state slots.

    `whose` says where the model comes from.

    Raises:
        ConfigError: it would not.
    """
    if num_state_slots and serve.block_owner != "two-ended":
        raise ConfigError(
            f"{flag_name('block_owner')} must be two-ended with {whose}, whose model has recurrent"
            f" layers, got {serve.block_owner}"
        )
