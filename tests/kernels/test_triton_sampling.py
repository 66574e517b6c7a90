"""The sampling kernels against a walk down the sorted tokens, and against the CPU's sampler.

In Triton's interpreter blocks are made small, so that small vocabularies have several chunks,
more candidates than are kept, and rows whose candidates are not enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from support.grids import every_value, long_but
from support.sampled_rows import History, barred_tokens, extreme_rows, make_batch, upload
from torch import Tensor

from lightserve.kernels.triton import sampling, sampling_adjust, sampling_scan, sampling_search
from lightserve.messages.router_worker import AddSequence
from lightserve.types import RowId, SamplingParams
from lightserve.worker.sampling.device import _adjusted, logprobs_on_device, sample_on_device
from lightserve.worker.sampling.interface import KnownCounts, SamplingBatch, sequence_state, uniform
from lightserve.worker.sampling.sampler import adjust, logprob_tensors, sample_on_host
from lightserve.worker.sampling.table import SamplingTable

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 3, "min_p": 0.5},
    {},
    {"temperature": 1e-9},
    {"temperature": 0.6},
    {"temperature": 2.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 150, "temperature": 2.0},
    {"top_k": 10_000},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.9999, "temperature": 0.6},
    {"top_p": 0.8, "top_k": 7},
    {"top_p": 0.5, "top_k": 140, "temperature": 2.0},
    {"top_p": 0.7, "min_p": 0.1},
    {"top_k": 20, "min_p": 0.02},
]
NUM_SHARES = 64
LOGITS = ["spread", "flat", "ties", "peaked"]


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CHUNK": 256, "GROUP": 8, "CANDIDATES": 64, "TILE": 256}.items():
        monkeypatch.setattr(sampling, name, value)
    monkeypatch.setattr(sampling_adjust, "CHUNK", 256)


def make_logits(kind: str, num_rows: int, vocab_size: int) -> Tensor:
    torch.manual_seed(vocab_size)
    noise = torch.randn(num_rows, vocab_size)
    if kind == "ties":
        return (noise * 2).round() / 2
    return noise * {"spread": 4.0, "flat": 0.1, "peaked": 20.0}[kind]


def by_sorting(row: Tensor, params: SamplingParams, number: float, share: float = 0.0) -> int:
    """Return the token of a uniform number; `share` moves the borders of min-p and top-p."""
    x = row.double().tolist()
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if params.temperature == 0:
        return order[0]
    weights = ((row.double() - row.double().max()) / max(params.temperature, 1e-6)).exp().tolist()
    least = params.min_p * (1 + share)
    order = [token for token in order if weights[token] >= least or token == order[0]]
    if params.top_k or params.top_p < 1:
        order = order[: params.top_k or len(order)]
        total, mass, kept = sum(weights[token] for token in order), 0.0, []
        for token in order:
            if params.top_p < 1 and kept and mass >= (params.top_p + share) * total:
                break
            kept.append(token)
            mass += weights[token]
        order = kept
    else:
        order.sort()
    cumulative = np.cumsum([weights[token] for token in order])
    found = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
    return order[min(found, len(order) - 1)]


def numbers_of(params: Sequence[SamplingParams], batch: SamplingBatch) -> list[float]:
    seeds, choices = [p.seed for p in params], [p.choice for p in params]
    return uniform(seeds, choices, batch.positions.tolist()).tolist()  # type: ignore[no-any-return]


def mistakes(kind: str, vocab_size: int, options: Sequence[dict[str, Any]]) -> list[str]:
    """Return what is wrong with one row of each option: token, what it should have been."""
    params = [SamplingParams(seed=3 * i - 9, choice=i % 2, **o) for i, o in enumerate(options)]
    logits = make_logits(kind, len(params), vocab_size)
    batch = make_batch(params, range(100, 100 + len(params)))
    sampled = sample_on_device(logits, batch)
    assert sampled.is_finite.all()
    found = []
    for row, number in enumerate(numbers_of(params, batch)):
        token = int(sampled.token_ids[row])
        expected = by_sorting(logits[row], params[row], number)
        # Next to a border float32 may fall on its other side.
        near = {
            by_sorting(logits[row], params[row], min(max(number + du, 0.0), 1.0), share)
            for du, share in itertools.product((-2e-6, 0.0, 2e-6), repeat=2)
        }
        if token != expected and token not in near:
            found.append(f"{params[row]}: {token}, not {expected}")
    return found


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize(
    ("kind", "vocab_size"),
    long_but(
        itertools.product(LOGITS, [1, 257, 700]), [("ties", 1), ("spread", 700), ("peaked", 257)]
    ),
)
def test_tokens_are_those_of_a_walk_down_the_sorted_ones(kind: str, vocab_size: int) -> None:
    assert not mistakes(kind, vocab_size, OPTIONS)


def test_tokens_in_chunks_of_their_real_size() -> None:
    assert not mistakes("spread", 9001, [OPTIONS[2], OPTIONS[9], OPTIONS[13]])
    assert not mistakes("ties", 4096, [OPTIONS[2], OPTIONS[15], OPTIONS[6]])


@pytest.mark.usefixtures("_small_blocks")
def test_tokens_are_those_of_the_cpu() -> None:
    """Equal logits aside: their order does not matter there."""
    params = [SamplingParams(seed=i, **options) for i, options in enumerate(OPTIONS)]
    logits, batch = make_logits("spread", len(params), 600), make_batch(params, range(len(params)))
    assert torch.equal(
        sample_on_device(logits, batch).token_ids, sample_on_host(logits, batch).token_ids
    )


@triton.jit
def _uniform_elsewhere(states_ptr, positions_ptr, row):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return sampling_uniform(states_ptr, positions_ptr, row) * 0.99


@triton.jit
def _weights_without_temperature(x, top, temperature):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return tl.exp(x - top)


@triton.jit
def _always_enough(keys_ptr, number, cut, top_k, top_p, everything, weighing, CANDIDATES, TILE):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803, PLR0917
    return number <= CANDIDATES, everything * 0.0


@triton.jit
def _pick_the_last(weights, target, indices, END):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    return tl.max(tl.where(weights > 0.0, indices, 0), axis=0)


sampling_uniform = sampling_search.uniform


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        (sampling_search, "uniform", _uniform_elsewhere),
        (sampling_scan, "weights_of", _weights_without_temperature),
        (sampling_search, "weights_of", _weights_without_temperature),
        (sampling_search, "_are_enough", _always_enough),
        (sampling_scan, "_pick", _pick_the_last),
    ],
)
def test_wrong_kernels_are_found(
    module: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, wrong)
    flat = [{"top_p": 0.9}, {"top_p": 0.6}]
    spread = [{"temperature": 2.0}, {"temperature": 2.0, "top_p": 0.9}] * 4
    assert mistakes("spread", 300, spread) or mistakes("flat", 300, flat)


@triton.jit
def _uniform_kernel(states_ptr, positions_ptr, out_ptr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    row = tl.program_id(0)
    tl.store(out_ptr + row, sampling_scan.uniform(states_ptr, positions_ptr, row))


def test_uniform_numbers_are_those_of_the_cpu_to_the_bit() -> None:
    rng = np.random.default_rng(0)
    edges = [0, 1, -1, 2**63 - 1, -(2**63)]
    seeds = [*edges, *rng.integers(-(2**63), 2**63 - 1, 40).tolist()]
    choices = rng.integers(0, 128, len(seeds)).tolist()
    positions = [0, 2**31, *rng.integers(0, 2**20, len(seeds) - 2).tolist()]
    states = np.array([sequence_state(s, c) for s, c in zip(seeds, choices, strict=True)])
    found = torch.empty(len(seeds), dtype=torch.float64)
    _uniform_kernel[len(seeds),](
        torch.from_numpy(states.view(np.int64)), torch.tensor(positions), found
    )
    assert found.tolist() == uniform(seeds, choices, positions).tolist()


@triton.jit
def _evenly_spaced(states_ptr, positions_ptr, row):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return (tl.load(positions_ptr + row).to(tl.float64) + 0.5) / 64.0


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"top_p": 0.8, "min_p": 0.05}, marks=pytest.mark.long)], ids=str
)
def test_every_token_has_its_share_of_all_numbers(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share of p is an interval of p: of 64 evenly spaced numbers 64 p fall into it, give or
    take the one at its border."""
    for module in (sampling_scan, sampling_search):
        monkeypatch.setattr(module, "uniform", _evenly_spaced)
    logits = make_logits("spread", 1, 300) / 2
    params = SamplingParams(temperature=1.3, **options)
    batch = make_batch([params] * NUM_SHARES, range(NUM_SHARES))
    drawn = sample_on_device(logits.expand(NUM_SHARES, -1), batch).token_ids
    counts = torch.bincount(drawn, minlength=300)
    expected = [by_sorting(logits[0], params, (i + 0.5) / NUM_SHARES) for i in range(NUM_SHARES)]
    assert drawn.tolist() == expected
    if not options:
        weights = (logits[0].double() / 1.3).softmax(-1)
        assert float((counts - NUM_SHARES * weights).abs().max()) <= 1.0


@pytest.mark.usefixtures("_small_blocks")
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    params = [SamplingParams(seed=i, **options) for i, options in enumerate(OPTIONS)]
    logits = make_logits("flat", len(params), 500)
    logits[3, 77] = torch.nan
    positions = list(range(50, 50 + len(params)))
    together = sample_on_device(logits, make_batch(params, positions)).token_ids
    for rows in ([13], [18, 0, 3, 12]):
        batch = make_batch([params[r] for r in rows], [positions[r] for r in rows])
        assert torch.equal(sample_on_device(logits[rows], batch).token_ids, together[rows])


# What a GPU computes without a word, infinity minus infinity, numpy warns of.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize(
    ("value", "options"),
    every_value(
        [torch.nan, torch.inf, -torch.inf],
        [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 4}],
    ),
)
def test_rows_without_finite_logits_are_alone(options: dict[str, Any], value: float) -> None:
    changed = {"logit_bias": ((1, 5.0),), **options}
    params = [SamplingParams(**options), SamplingParams(**options), SamplingParams(**changed)]
    history = History([1, 2], 1)
    logits = make_logits("spread", 3, 300)
    clean = sample_on_device(logits, make_batch(params, [1, 2, 3], [None, None, history]))
    assert clean.is_finite.all()
    logits[1:, 270] = value
    sampled = sample_on_device(logits, make_batch(params, [1, 2, 3], [None, None, history]))
    assert sampled.is_finite.tolist() == [True, False, False]
    assert sampled.token_ids.tolist() == [int(clean.token_ids[0]), 0, 0]


def changed_rows() -> Iterator[tuple[SamplingParams, History]]:
    rng = np.random.default_rng(1)
    some: list[dict[str, Any]] = [
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.7, "logit_bias": ((2, 3.0), (299, -4.0))},
        {"frequency_penalty": 0.4},
        {"presence_penalty": -1.0, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
        {"allowed_token_ids": tuple(range(5, 90, 3))},
        {"min_tokens": 1000},
        {"min_tokens": 1, "logit_bias": ((7, 9.0),)},
        {"allowed_token_ids": (3,), "min_tokens": 1000, "temperature": 0.0},
        {"bad_words": ((17,), (18, 19)), "frequency_penalty": 0.1},
        {"bad_words": tuple((token,) for token in range(100, 290, 3)), "logit_bias": ((101, 9.0),)},
        {"typical_p": 0.4, "temperature": 0.7, "frequency_penalty": 0.4},
    ]
    for number, options in enumerate(some):
        known = rng.integers(0, 300, 3000 if number == 3 else 5 + 60 * number).tolist()
        ends = [11, 12, 300 - 1][: number % 4]
        yield SamplingParams(seed=number, **options), History(known, len(known) // 2, ends)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("has_constraint", [False, True])
def test_options_change_logits_as_on_the_cpu(has_constraint: bool) -> None:
    params, histories = zip(*changed_rows(), strict=True)
    logits = make_logits("spread", len(params), 300)
    allowed = torch.rand(len(params), 300) < 0.7 if has_constraint else None
    batch = make_batch(params, [0] * len(params), histories, allowed)
    on_host, on_device = adjust(logits, batch), _adjusted(logits, batch)
    torch.testing.assert_close(on_device, on_host, atol=1e-5, rtol=1e-6)
    assert not torch.equal(on_host, logits)
    tokens, expected = sample_on_device(logits, batch), sample_on_host(logits, batch)
    assert torch.equal(tokens.is_finite, expected.is_finite)
    assert torch.equal(tokens.token_ids, expected.token_ids)
    # The test can tell: another count, another range of the prompt.
    fresh = KnownCounts(len(params) + 2, 300, torch.device("cpu"))
    others = replace(batch, positions=batch.positions - 1, known_counts=fresh)
    assert not torch.equal(_adjusted(logits, others), on_device)


class PenaltyScene:
    """Rows of a table whose sequences come, draw, rest and leave; both samplers look at them."""

    def __init__(self) -> None:
        self.table, self.vocab_size = SamplingTable(4), 40
        self.token_ids = torch.full((5, 30), -1, dtype=torch.int32)
        self.lengths = [0] * 4
        self.counts = KnownCounts(4, self.vocab_size, torch.device("cpu"))
        self._rng = np.random.default_rng(0)

    def begin(self, row: int, params: SamplingParams, tokens: Sequence[int], prompt: int) -> None:
        """Put a sequence into a row, whatever is there."""
        self.token_ids[row] = -1
        self.token_ids[row, : len(tokens)] = torch.tensor(tokens)
        self.lengths[row] = len(tokens)
        begun = self.table.update([AddSequence(RowId(row), [], params, prompt, [])])
        assert begun == ([row] if params in PENALTIES else [])
        self.counts.begin(torch.tensor(begun, dtype=torch.int64))

    def known(self, row: int) -> list[int]:
        return self.token_ids[row, : self.lengths[row]].tolist()

    def difference(
        self,
        *rows: int,
        unready: Sequence[int] = (),
        drafts: Mapping[int, tuple[list[int], int]] = MappingProxyType({}),
    ) -> float:
        """Sample rows and return how far the logits are apart; the unready get no token.

        `drafts`: of rows, and how many of them are accepted.
        """
        places = []
        for row in rows:
            own, length = drafts.get(row, ([], 0))[0], self.lengths[row]
            self.token_ids[row, length : length + len(own)] = torch.tensor(own, dtype=torch.int32)
            places += [(RowId(row), length + number) for number in range(len(own) + 1)]
        batch = SamplingBatch(
            self.table.rows([row for row, _ in places], upload),
            torch.tensor([position for _, position in places]),
            self.token_ids,
            known_counts=self.counts,
        )
        logits = torch.from_numpy(self._rng.normal(size=(len(places), self.vocab_size))).float()
        found, expected = _adjusted(logits, batch), adjust(logits, batch)
        assert batch.rows.adjustments is not None
        expected = expected[batch.rows.adjustments.indices]
        for row in rows:
            self.lengths[row] += drafts.get(row, ([], 0))[1]
            self.token_ids[row, self.lengths[row]] = int(self._rng.integers(12))
            self.lengths[row] += row not in unready
        return float((found - expected).abs().max())


PENALTIES = [
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(frequency_penalty=0.4, presence_penalty=-0.3),
    SamplingParams(repetition_penalty=0.8, presence_penalty=0.5),
]


def test_counts_are_kept_and_right_whatever_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the CPU, which counts all known tokens anew in every step."""
    for name, value in {"CHUNK": 64, "COUNT_PARTS": 2, "COUNT_TILE": 4}.items():
        monkeypatch.setattr(sampling_adjust, name, value)
    scene, plain = PenaltyScene(), SamplingParams(logit_bias=((3, 1.0),))
    scene.begin(0, PENALTIES[0], [1, 2, 3, 1, 4], 5)
    scene.begin(1, plain, [5, 6], 2)
    scene.begin(2, PENALTIES[1], [7, 7, 8, 9, 7, 8], 3)
    steps: list[tuple[int, ...]] = [(0, 1, 2), (0, 2), (2,), (2, 0)]
    assert max(scene.difference(*rows) for rows in steps) < 1e-5
    assert scene.difference(0, 2, unready=[0]) < 1e-5
    assert scene.difference(0, 2) < 1e-5, "a token was drawn once more"
    # The first leaves its row to another and comes back in a row of its own, further on.
    known = scene.known(0)
    scene.begin(0, plain, [2, 3], 2)
    assert scene.difference(0, 2) < 1e-5
    scene.begin(3, PENALTIES[0], [*known, 11], 5)
    scene.begin(1, PENALTIES[2], [1, 1, 1], 1)
    assert max(scene.difference(*rows) for rows in [(0, 1, 2, 3), (3, 1)]) < 1e-5
    scene.begin(0, PENALTIES[2], known, 4)
    assert scene.difference(3, 0) < 1e-5
    # Behind drafts, of which none, some and all are accepted.
    drafts = {3: ([3, 3, 9, 3], 0), 0: ([8, 1], 2), 1: ([1], 0)}
    assert scene.difference(0, 1, 2, 3, drafts=drafts) < 1e-5
    assert scene.difference(3, 1, 2, drafts={3: ([5, 5, 6], 1), 2: ([7] * 8, 8)}) < 1e-5
    assert max(scene.difference(*rows) for rows in [(3, 2), (1, 0)]) < 1e-5
    # What is counted is not looked at again: the CPU alone sees a change there.
    scene.token_ids[3, 0] = 39
    assert scene.difference(3) > 0.01


@pytest.mark.usefixtures("_small_blocks")
def test_logits_are_read_in_the_models_type() -> None:
    """Every kernel gives what it gives for a copy in float32; changed rows are float32."""
    changed, histories = zip(*itertools.islice(changed_rows(), 3), strict=True)
    params = [SamplingParams(top_p=0.9), SamplingParams(min_p=0.05), SamplingParams(), *changed]
    logits = make_logits("spread", len(params), 300).bfloat16()
    batch = make_batch(params, range(len(params)), [None, None, None, *histories])
    found, expected = sample_on_device(logits, batch), sample_on_device(logits.float(), batch)
    assert torch.equal(found.token_ids, expected.token_ids) and found.is_finite.all()
    adjusted = _adjusted(logits, batch)
    assert adjusted.dtype is torch.float32
    assert torch.equal(adjusted, _adjusted(logits.float(), batch))
    for one, other in zip(
        logprobs_on_device(logits[:1], found.token_ids[:1], 2),
        logprobs_on_device(logits[:1].float(), found.token_ids[:1], 2),
        strict=True,
    ):
        assert one.dtype is other.dtype and torch.equal(one, other)


@pytest.mark.usefixtures("_small_blocks")
def test_rows_with_nothing_left_are_an_error() -> None:
    params = [SamplingParams(), SamplingParams(top_k=5), SamplingParams(temperature=0.0)]
    allowed = torch.zeros(3, 70, dtype=torch.bool)
    allowed[1, 69] = True
    batch = make_batch(params, [1, 2, 3], [], allowed)
    sampled = sample_on_device(make_logits("spread", 3, 70), batch)
    assert sampled.is_finite.tolist() == [False, True, False]
    assert sampled.token_ids.tolist() == [0, 69, 0]


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize(
    ("num_top", "kind"), every_value([0, 1, 20, 100], ["spread", "ties", "peaked"])
)
def test_logprobs_are_those_of_the_cpu(kind: str, num_top: int) -> None:
    logits = make_logits(kind, 4, 700 if num_top != 100 else 90)
    logits[2, 5] = torch.nan
    token_ids = torch.tensor([0, 5, 9, 80])
    found = logprobs_on_device(logits, token_ids, min(num_top, logits.shape[1]))
    expected = logprob_tensors(logits, token_ids, num_top)
    assert found.is_finite.tolist() == expected.is_finite.tolist() == [True, True, False, True]
    rows = [0, 1, 3]
    assert torch.equal(found.top_token_ids[rows], expected.top_token_ids[rows])
    torch.testing.assert_close(found.token[rows], expected.token[rows], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(found.top[rows], expected.top[rows], atol=1e-5, rtol=1e-6)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("scale", [0.0, 3e4])
def test_every_legal_extreme_gives_a_token_that_is_allowed(scale: float) -> None:
    params, histories = zip(*extreme_rows(16, 257, num_known=20), strict=True)
    torch.manual_seed(1)
    logits = torch.randn(len(params), 257) * scale
    drawn = sample_on_device(logits, make_batch(params, [0] * len(params), histories))
    assert drawn.is_finite.all()
    for row, token_id in enumerate(drawn.token_ids.tolist()):
        barred = barred_tokens(params[row], histories[row], 257)
        assert 0 <= token_id < 257 and token_id not in barred, params[row]
