"""Sizes of layers that keep a state in place of keys and values. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, auto

STATE_BYTES = 4
"""Bytes of a number of a state's matrix; a convolution's inputs have the model's type."""


@dataclass(frozen=True, kw_only=True)
class SideBySide:
    """Factors of a layer's parts where attention and a state read one norm (Falcon-H1).

    Source: Zuo et al. 2025, "Falcon-H1", section 2.
    """

    attention: tuple[float, float]
    """Factors of its inputs, and of its results."""
    states: tuple[float, float]
    """Factors of inputs and results of states."""
    parts: tuple[float, ...]
    """Factors of z, and of numbers of heads, inputs, outputs and rates of states."""
    gate: float
    """Factor of the gate of the feed-forward block."""
    block: float
    """Factor of that block's results."""


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(ABC):
    """Layers that keep a state: what all kinds have."""

    layers: frozenset[int]
    """Neither empty nor, without `beside`, all layers."""
    norms: tuple[str, ...] | None = None
    """Names of their norms; None: those of the other layers."""
    beside: SideBySide | None = None
    """Attention that they have as well; None: they have none."""

    @abstractmethod
    def state_bytes(self, number_bytes: int, tp_size: int = 1) -> tuple[int, ...]:
        """Return the bytes of each state tensor of a layer of one of `tp_size` ranks.

        `number_bytes`: of a number of the model's type.
        """

    @abstractmethod
    def tensors(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return name and shape of a layer's own tensors."""

    @abstractmethod
    def divided_sizes(self) -> dict[str, int]:
        """Return the sizes that the number of ranks must divide, by key."""


class Joined(Enum):
    """The products of layers of the delta rule that a file has in one tensor."""

    NONE = auto()
    """Queries, keys, values and z have one each, and so has each part of the convolution."""
    HEADS = auto()
    """Queries, keys and values."""
    GROUPS = auto()
    """All, those of a key head and its value heads side by side."""
    GATES = auto()
    """Queries, keys and values; b and a as in `GROUPS`."""


@dataclass(frozen=True, kw_only=True)
class ConvolutionConfig(RecurrentConfig):
    """Layers that are a short convolution between two gates (LFM2)."""

    channels: int
    width: int
    """Tokens that the convolution sees, at least 2."""
    has_bias: bool

    def state_bytes(self, number_bytes: int, tp_size: int = 1) -> tuple[int, ...]:
        """See `RecurrentConfig.state_bytes`: the last inputs."""
        return ((self.width - 1) * self.channels // tp_size * number_bytes,)

    def tensors(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """See `RecurrentConfig.tensors`."""
        sizes = {"in_proj": 3 * self.channels, "out_proj": hidden_size, "conv": self.channels}
        shapes: dict[str, tuple[int, ...]] = {
            "conv.in_proj.weight": (3 * self.channels, hidden_size),
            "conv.out_proj.weight": (hidden_size, self.channels),
            "conv.conv.weight": (self.channels, 1, self.width),
        }
        if self.has_bias:
            shapes |= {f"conv.{name}.bias": (size,) for name, size in sizes.items()}
        return shapes

    def divided_sizes(self) -> dict[str, int]:
        """See `RecurrentConfig.divided_sizes`."""
        return {"hidden_size": self.channels}


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(RecurrentConfig):
    """Layers of the gated delta rule behind a short convolution (Yang et al. 2024, section 3.4)."""

    num_key_heads: int
    num_value_heads: int
    """A multiple of `num_key_heads`."""
    key_dim: int
    value_dim: int
    width: int
    """Tokens that the convolution sees, at least 2."""
    joined: Joined
    beta_scale: float = 1.0
    """Factor of a token's beta: 2 lets a state's eigenvalues be negative."""
    norm_eps: float | None = None
    """Epsilon of the norm of results; None: that of other norms."""
    stored_channels: tuple[int, ...] | None = None
    """Channels of each of the file's tensors of the convolution; None: see `conv_sizes`."""
    rank: int = 0
    """Rank of the products that give z, and a decay for each channel of keys (Kimi Delta
    Attention); 0: both are one product, and heads have decays."""

    @property
    def key_size(self) -> int:
        """Numbers of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Numbers of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def conv_sizes(self) -> dict[str, int]:
        """Return the channels of each tensor of the convolution, by its name."""
        sizes = self.stored_channels or (self.key_size, self.key_size, self.value_size)
        if self.joined is not Joined.NONE:
            return {"conv1d": self.channels}
        return {f"{name}_conv1d": size for name, size in zip("qkv", sizes, strict=True)}

    def state_bytes(self, number_bytes: int, tp_size: int = 1) -> tuple[int, ...]:
        """See `RecurrentConfig.state_bytes`: inputs, then matrices."""
        inputs = (self.width - 1) * self.channels // tp_size * number_bytes
        matrices = self.num_value_heads // tp_size * self.key_dim * self.value_dim * STATE_BYTES
        return inputs, matrices

    def tensors(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """See `RecurrentConfig.tensors`."""
        heads, hidden = self.num_value_heads, hidden_size
        sizes = {"q": self.key_size, "k": self.key_size, "v": self.value_size}
        linears = {"z": self.value_size, "b": heads, "a": heads}
        if self.joined is Joined.GROUPS:
            linears = {"qkvz": self.channels + self.value_size, "ba": 2 * heads}
        else:
            linears |= sizes if self.joined is Joined.NONE else {"qkv": self.channels}
        if self.joined is Joined.GATES:
            linears = {"qkv": self.channels, "z": self.value_size, "ba": 2 * heads}
        gates: dict[str, tuple[int, ...]] = {"A_log": (heads,), "dt_bias": (heads,)}
        if self.rank:
            linears = {**sizes, "b": heads}
            gates = {"A_log": (1, 1, heads, 1), "dt_bias": (self.key_size,)}
            for name, size in (("f", self.key_size), ("g", self.value_size)):
                gates |= {f"{name}_a_proj.weight": (self.rank, hidden)}
                gates |= {f"{name}_b_proj.weight": (size, self.rank)}
        parts = self.conv_sizes
        return (
            {f"linear_attn.in_proj_{name}.weight": (n, hidden) for name, n in linears.items()}
            | {f"linear_attn.{name}.weight": (n, 1, self.width) for name, n in parts.items()}
            | {f"linear_attn.{name}": shape for name, shape in gates.items()}
            | {
                "linear_attn.norm.weight": (self.value_dim,),
                "linear_attn.out_proj.weight": (hidden, self.value_size),
            }
        )

    def divided_sizes(self) -> dict[str, int]:
        """See `RecurrentConfig.divided_sizes`."""
        return {"linear_num_heads" if self.rank else "linear_num_key_heads": self.num_key_heads}


@dataclass(frozen=True, kw_only=True)
class MambaConfig(RecurrentConfig):
    """Mamba-2 layers (Dao and Gu 2024, "Transformers are SSMs", section 7)."""

    num_heads: int
    head_dim: int
    num_groups: int
    """Heads of a group have inputs and outputs of their states in common; a divisor."""
    state_size: int
    width: int
    """Tokens that the convolution sees, at least 2."""
    has_conv_bias: bool
    has_bias: bool
    """Whether the products before and behind have biases."""
    has_norm: bool = True
    """Whether the results of each group are normalised."""
    keys: tuple[str, str] = ("mamba_n_heads", "mamba_n_groups")
    """Keys of `config.json` that have the numbers of heads and groups."""

    @property
    def inner(self) -> int:
        """Numbers of all heads."""
        return self.num_heads * self.head_dim

    @property
    def group_inner(self) -> int:
        """Numbers of all groups."""
        return self.num_groups * self.state_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: numbers of heads, inputs and outputs of states."""
        return self.inner + 2 * self.group_inner

    def state_bytes(self, number_bytes: int, tp_size: int = 1) -> tuple[int, ...]:
        """See `RecurrentConfig.state_bytes`."""
        groups = max(1, self.num_groups // tp_size)
        channels = self.inner // tp_size + 2 * groups * self.state_size
        matrices = self.inner // tp_size * self.state_size * STATE_BYTES
        return (self.width - 1) * channels * number_bytes, matrices

    def tensors(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """See `RecurrentConfig.tensors`."""
        products = self.inner + self.channels + self.num_heads
        tensors: dict[str, tuple[int, ...]] = {
            "in_proj.weight": (products, hidden_size),
            "conv1d.weight": (self.channels, 1, self.width),
            "out_proj.weight": (hidden_size, self.inner),
        } | dict.fromkeys(("A_log", "dt_bias", "D"), (self.num_heads,))
        if self.has_norm:
            tensors["norm.weight"] = (self.inner,)
        if self.has_conv_bias:
            tensors["conv1d.bias"] = (self.channels,)
        if self.has_bias:
            tensors |= {"in_proj.bias": (products,), "out_proj.bias": (hidden_size,)}
        return {f"mamba.{name}": shape for name, shape in tensors.items()}

    def divided_sizes(self) -> dict[str, int]:
        """See `RecurrentConfig.divided_sizes`; one group is every rank's."""
        heads, groups = self.keys
        shared = {groups: self.num_groups} if self.num_groups > 1 else {}
        return {heads: self.num_heads, **shared}
