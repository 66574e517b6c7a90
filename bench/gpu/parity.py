"""Random small models of every architecture against transformers (contract N3), on the device.

The reference is transformers in float32 on the CPU, teacher-forced on its tokens. Each model runs
alone and with 16 others in the same passes, whole and in chunks; then with an early token changed,
which the comparison has to notice behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from support.model_runs import LENGTHS, NUM_DECODES, LoadedModel, load_tiny
from support.parity import (
    ParityReport,
    TokenSequence,
    compare_all,
    make_sequences,
    schedule,
)
from support.tiny_models import (
    TinyModel,
    find_tiny_model,
    load_reference,
    write_tiny_model,
)
from torch import Tensor

from bench.gpu.context import Bench
from lightserve.kernels.select import make_kernels

CHANGED = 2
"""Position of the token that is changed to see whether the comparison notices."""
TEETH = 3.0
"""Then the largest difference behind it must be so many times the one without."""


@dataclass(frozen=True)
class Scale:
    """What is compared."""

    models: Sequence[str]
    lengths: Sequence[tuple[int, int]]
    """Prompt and output of each sequence, as the tests have them."""
    chunks: Sequence[int | None]
    num_decodes: int
    """Tokens at the end of each sequence that go one at a time."""
    dtypes: Sequence[torch.dtype]


GPU = Scale(
    models=[
        *("llama-mha", "llama-mqa-tied", "llama-head-dim", "llama-llama3", "mistral-window"),
        *("qwen2", "qwen2-yarn-tied-legacy", "qwen3", "qwen3-window-yarn"),
    ],
    lengths=LENGTHS,
    chunks=(None, 37),
    num_decodes=NUM_DECODES,
    dtypes=(torch.float32, torch.bfloat16),
)
REHEARSED = Scale(
    models=["llama-mha"],
    lengths=((6, 4), (3, 4)),
    chunks=(7,),
    num_decodes=1,
    dtypes=(torch.float32,),
)


def run(bench: Bench) -> None:
    """Compare models in every type."""
    scale = REHEARSED if bench.rehearse else GPU
    for name in scale.models:
        for dtype in scale.dtypes:
            with TemporaryDirectory() as directory:
                _compare(bench, find_tiny_model(name), dtype, scale, Path(directory))


def _compare(bench: Bench, tiny: TinyModel, dtype: torch.dtype, scale: Scale, path: Path) -> None:
    write_tiny_model(tiny, path, dtype=dtype)
    sequences = make_sequences(load_reference(path, torch.float32), scale.lengths, seed=0)
    device = bench.machine.device
    kernels = make_kernels("triton", batch_invariant=False, device=device)
    loaded = load_tiny(path, dtype, kernels, device=device)
    report = ParityReport()
    for chunk in scale.chunks:
        for chosen in (sequences[:1], sequences):
            report += _report(loaded, chosen, [one.tokens for one in chosen], scale, chunk)
    damage = _report(
        loaded, sequences[:1], [_changed(sequences[0])], scale, None, skipped=CHANGED + 1
    )
    is_noticed = damage.max_logprob_delta > TEETH * report.max_logprob_delta
    note = (
        f"{report.num_positions} positions, {report.num_excused} excused,"
        f" largest log-probability difference {report.max_logprob_delta:.2g},"
        f" with an early token changed {damage.max_logprob_delta:.2g}"
    )
    name = f"{tiny.name}, {str(dtype).removeprefix('torch.')}: tokens that differ"
    bench.rows.claim(name, report.holds(dtype) and is_noticed, note)


def _report(
    loaded: LoadedModel,
    sequences: Sequence[TokenSequence],
    tokens: Sequence[Tensor],
    scale: Scale,
    chunk: int | None,
    *,
    skipped: int = 0,
) -> ParityReport:
    """Return how the model's logits after `tokens` compare with those of the sequences.

    `skipped` positions at the beginning are left out.
    """
    lengths = [len(one) for one in tokens]
    passes = schedule(lengths, chunk=chunk, num_decodes=scale.num_decodes)
    fed = [
        TokenSequence(ids, sequence.logits) for ids, sequence in zip(tokens, sequences, strict=True)
    ]
    logits = loaded.run(fed, passes)
    assert logits is not None
    kept = [TokenSequence(one.tokens[skipped:], one.logits[skipped:]) for one in sequences]
    return compare_all(kept, [one[skipped:] for one in logits], loaded.dtype)


def _changed(sequence: TokenSequence) -> Tensor:
    """Return the tokens with another one at position CHANGED."""
    tokens = sequence.tokens.clone()
    tokens[CHANGED] = (tokens[CHANGED] + 1) % sequence.logits.shape[1]
    return tokens
