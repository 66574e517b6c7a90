"""Options of the CUDA graphs that decodes run as."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.config.fields import option
from lightserve.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """See the module's docstring."""

    cuda_graphs: str = option(
        "auto",
        "Whether steps of decodes alone run as CUDA graphs, captured at the start: auto (on a GPU"
        " with the kernels triton) or off (slower steps, less memory, a shorter start).",
        choices=("auto", "off"),
    )
    cuda_graph_max_seqs: int = option(
        0,
        "Most sequences of a step that runs as a CUDA graph; 0 takes --max-num-seqs, at most 512.",
        low=0,
    )

    def check_graphs(self, *, device: str, attention_backend: str, max_num_seqs: int) -> None:
        """Refuse options that would have no effect; arguments are other fields' values."""
        if self.cuda_graph_max_seqs and self.cuda_graphs == "off":
            raise ConfigError("--cuda-graph-max-seqs needs --cuda-graphs auto")
        if self.cuda_graph_max_seqs > max_num_seqs:
            raise ConfigError(
                f"--cuda-graph-max-seqs must be at most --max-num-seqs ({max_num_seqs}),"
                f" got {self.cuda_graph_max_seqs}"
            )
        for flag in self.given_graph_flags:
            if device == "cpu":
                raise ConfigError(f"{flag} needs a GPU, got --device cpu")
            if attention_backend in ("torch", "reference"):
                raise ConfigError(
                    f"{flag} needs --attention-backend triton, got {attention_backend!r}"
                )

    @property
    def given_graph_flags(self) -> list[str]:
        """Flags that are not at their defaults, which only CUDA graphs have a use for."""
        flags = []
        if self.cuda_graphs != "auto":
            flags.append("--cuda-graphs")
        if self.cuda_graph_max_seqs:
            flags.append("--cuda-graph-max-seqs")
        return flags
