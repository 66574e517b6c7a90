"""Tiny models of many families on the device beside transformers, token by token.

In bfloat16 a router's near-tie may go the other way, after which a token has another expert, and
all behind it another context: no rule on logits tells that from a fault. So models with experts are
compared in bfloat16 with lightserve's own reference in float32, forced to the experts that the
device chose; it must agree with transformers as long as it is not forced, and what the device chose
otherwise must have been a near-tie.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import torch
from support.model_runs import LENGTHS, NUM_DECODES, LoadedModel, load_tiny
from support.parity import (
    CPU,
    ParityReport,
    TokenSequence,
    compare_all,
    make_sequences,
    schedule,
)
from support.tiny_models import TinyModel, find_tiny_model, load_reference, write_tiny_model
from torch import Tensor

from bench.gpu.table import Bench
from lightserve.kernels.reference import ReferenceKernels
from lightserve.kernels.select import make_kernels
from lightserve.models.layers.feed_forward import _Router
from lightserve.models.moe_config import Scoring

CHANGED = 2
"""Position of the token that is changed to see whether the comparison notices."""
TEETH = 3.0
"""Then the largest difference behind it must be so many times the one without."""
NEAR_TIE = 0.1
"""What the device chose otherwise is at most so much worse by the reference, in standard deviations
of a token's scores of all experts."""
PROCESSES = 6
"""Each compiles for one model and type at a time."""


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
        # Those that take longest first.
        *("deepseek-v2", "gpt-oss", "mixtral", "gemma2"),
        *("llama-mha", "llama-mqa-tied", "llama-head-dim", "llama-llama3", "mistral-window"),
        *("qwen2", "qwen2-yarn-tied-legacy", "qwen3", "qwen3-window-yarn", "bloom-6-heads"),
    ],
    lengths=LENGTHS,
    chunks=(None, 37),
    num_decodes=NUM_DECODES,
    dtypes=(torch.float32, torch.bfloat16),
)
REHEARSED = Scale(
    models=["llama-mha", "mixtral"],
    lengths=((6, 4), (3, 4)),
    chunks=(7,),
    num_decodes=1,
    dtypes=(torch.float32, torch.bfloat16),
)


class Compared(NamedTuple):
    """What came of one model in one type."""

    name: str
    is_right: bool
    note: str


class Case(NamedTuple):
    """A model in one type on a device."""

    model: str
    dtype: torch.dtype
    scale: Scale
    device: str


def parity(bench: Bench) -> None:
    """Compare models in every type, several at a time."""
    scale, device = REHEARSED if bench.rehearse else GPU, str(bench.machine.device)
    cases = [Case(name, dtype, scale, device) for name in scale.models for dtype in scale.dtypes]
    if bench.rehearse:
        _report(bench, map(compare_models, cases))
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        PROCESSES, mp_context=spawn, initializer=torch.set_num_threads, initargs=(2,)
    ) as pool:
        _report(bench, pool.map(compare_models, cases))


def _report(bench: Bench, found: Iterator[Compared]) -> None:
    for compared in found:
        bench.rows.claim(compared.name, compared.is_right, compared.note)


def compare_models(case: Case) -> Compared:
    """Compare one model in one type."""
    tiny = find_tiny_model(case.model)
    with TemporaryDirectory() as directory:
        path = Path(directory)
        write_tiny_model(tiny, path, dtype=case.dtype)
        sequences = make_sequences(load_reference(path, torch.float32), case.scale.lengths, seed=0)
        return _compare(tiny, case, path, sequences)


def _compare(tiny: TinyModel, case: Case, path: Path, sequences: list[TokenSequence]) -> Compared:
    dtype, scale, device = case.dtype, case.scale, torch.device(case.device)
    kernels = make_kernels("triton", batch_invariant=False, device=device)
    loaded = load_tiny(path, dtype, kernels, device=device)
    forced = None
    if tiny.chooses_experts and dtype is not torch.float32:
        forced = Forced(path, sequences, scale)
    report = ParityReport()
    expected = sequences[0]
    for chunk in scale.chunks:
        for theirs in (sequences[:1], sequences):
            tokens = [one.tokens for one in theirs]
            with noted_choices() as choices:
                ours = _run(loaded, tokens, scale, chunk)
            truth = theirs if forced is None else forced.sequences(tokens, chunk, choices)
            report += compare_all(truth, ours, dtype)
            expected = truth[0]
    [logits] = _run(loaded, [_changed(sequences[0])], scale, None)
    behind = slice(CHANGED + 1, None)
    kept = TokenSequence(expected.tokens[behind], expected.logits[behind])
    damage = compare_all([kept], [logits[behind]], dtype)
    is_noticed = damage.max_logprob_delta > TEETH * report.max_logprob_delta
    note = (
        f"{report.num_positions} positions, {report.num_excused} excused,"
        f" largest log-probability difference {report.max_logprob_delta:.2g},"
        f" with an early token changed {damage.max_logprob_delta:.2g}"
    )
    is_right = report.holds(dtype) and is_noticed
    if forced is not None:
        is_right = is_right and forced.is_right
        note += f"; {forced.note}"
    name = f"{tiny.name}, {str(dtype).removeprefix('torch.')}: tokens that differ"
    return Compared(name, is_right, note)


def _run(
    loaded: LoadedModel, tokens: Sequence[Tensor], scale: Scale, chunk: int | None
) -> list[Tensor]:
    """Return the model's logits after each token of some sequences."""
    logits: list[Tensor] | None
    passes = schedule([len(one) for one in tokens], chunk=chunk, num_decodes=scale.num_decodes)
    fed = [TokenSequence(one, torch.empty(0)) for one in tokens]
    logits = loaded.run(fed, passes)
    assert logits is not None
    return logits


def _changed(sequence: TokenSequence) -> Tensor:
    """Return the tokens with another one at position CHANGED."""
    tokens: Tensor = sequence.tokens.clone()
    tokens[CHANGED] = (tokens[CHANGED] + 1) % sequence.logits.shape[1]
    return tokens


# Experts: what was chosen, and the reference that has to choose the same.


@contextmanager
def noted_choices() -> Iterator[list[Tensor]]:
    """Note the experts that routers choose, int64 [T, num_chosen] for each layer of each pass."""
    noted: list[Tensor] = []
    choose = _Router.__call__

    def call(router: _Router, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen, weights = choose(router, x)
        noted.append(chosen.cpu().long())
        return chosen, weights

    with mock.patch.object(_Router, "__call__", call):
        yield noted


@dataclass
class Forced:
    """Lightserve's reference in float32, on the host."""

    path: Path
    theirs: list[TokenSequence]
    """What transformers says."""
    scale: Scale
    unforced: ParityReport = field(default_factory=ParityReport)
    num_choices: int = 0
    num_others: int = 0
    """Choices of the device that the reference would not have made."""
    worst: float = 0.0
    """Of these, see NEAR_TIE."""

    def __post_init__(self) -> None:
        """Load it, and compare it with transformers."""
        kernels = make_kernels("reference", batch_invariant=False, device=CPU)
        self._loaded = load_tiny(self.path, torch.float32, kernels)
        logits = _run(self._loaded, [one.tokens for one in self.theirs], self.scale, None)
        self.unforced = compare_all(self.theirs, logits, torch.float32)

    @property
    def is_right(self) -> bool:
        """Whether it agrees with transformers, and was forced in near-ties alone."""
        return self.unforced.holds(torch.float32) and self.worst <= NEAR_TIE

    @property
    def note(self) -> str:
        """Say it."""
        return (
            f"{self.num_others} of {self.num_choices} experts chosen otherwise, at most"
            f" {self.worst:.2g} deviations worse; the forced reference without force is off from"
            f" transformers by {self.unforced.max_logprob_delta:.2g}"
        )

    def sequences(
        self, tokens: Sequence[Tensor], chunk: int | None, choices: Sequence[Tensor]
    ) -> list[TokenSequence]:
        """Return what it says where its routers have to choose as the device's did."""
        left = iter(choices)

        def call(router: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            forced = next(left)
            products = router._weight.apply(x, dtype=torch.float32)
            if router._moe.scoring is Scoring.CHOSEN:
                ranks = products
                weights = products.gather(-1, forced).softmax(-1)
            else:
                ranks = products  # in the order of scores
                if router._bias is not None:
                    scores = (
                        products.sigmoid() if router._choice.is_sigmoid else products.softmax(-1)
                    )
                    ranks = scores + router._bias
                first = torch.zeros_like(products).scatter_(-1, forced, 2.0)  # scores are below 1
                choose = ReferenceKernels().choose_experts
                forced, weights = choose(products, first, router._choice)
            self._note(ranks, forced)
            return forced, weights

        with mock.patch.object(_Router, "__call__", call):
            logits = _run(self._loaded, tokens, self.scale, chunk)
        assert next(left, None) is None
        return [TokenSequence(*pair) for pair in zip(tokens, logits, strict=True)]

    def _note(self, ranks: Tensor, forced: Tensor) -> None:
        """Note how much worse than its own choice the forced one is."""
        own = ranks.topk(forced.shape[1], dim=-1).indices
        is_other = (forced[:, :, None] != own[:, None, :]).all(-1)
        self.num_choices += forced.numel()
        self.num_others += int(is_other.sum())
        worst_own = ranks.gather(-1, own).amin(-1)
        worst_forced = ranks.gather(-1, forced).amin(-1)
        gaps = (worst_own - worst_forced) / ranks.std(-1)
        self.worst = max(self.worst, float(gaps.max()))
